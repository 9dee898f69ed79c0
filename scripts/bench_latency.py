"""Measures the latency of small requests on a warm, idle server, by stage.

    python -m scripts.bench_latency [--url http://127.0.0.1:8000] [-n 50]

Sends a short text and a 224 px image `n` times each, one after the other over one connection. Prints time to
first token, time to the end and, from `render`, the milliseconds that each stage worked (`service`) and that
the request waited for the stage or travelled (`queue`). Every image is new, so that no cache answers.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import statistics
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

WARM_UP = 5
MAX_TOKENS = 32
Body = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("-n", type=int, default=50)
    args = parser.parse_args()
    target = urlsplit(args.url)
    connection = http.client.HTTPConnection(target.hostname or "127.0.0.1", target.port)
    for name, make in (("short text", text_request), ("224 px image", image_request)):
        report(name, connection, make, args.n)


def report(name: str, connection: http.client.HTTPConnection, make: Callable[[int], Body], n: int) -> None:
    answers = [answer(connection, make(seed)) for seed in range(n + WARM_UP)][WARM_UP:]
    renders = [render(connection, make(1000 + seed)) for seed in range(n + WARM_UP)][WARM_UP:]
    first, last, tokens = (statistics.median(column) for column in zip(*answers, strict=True))
    print(f"{name}: first token {first:.1f} ms, end {last:.1f} ms ({tokens:.0f} chunks), median of {n}")
    for stage in renders[0]:
        queue, service = (statistics.median(render[stage][kind] for render in renders) for kind in (0, 1))
        print(f"    {stage:<12} queue {queue:6.2f} ms   service {service:6.2f} ms")


def text_request(seed: int) -> Body:
    return {"messages": [{"role": "user", "content": f"hello {seed}"}], "max_tokens": MAX_TOKENS}


def image_request(seed: int) -> Body:
    """Noise, so that the JPEG has the size of a photo's."""
    pixels = np.random.default_rng(seed).integers(0, 256, (28, 28, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((224, 224)).save(buffer, "jpeg", quality=90)
    url = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what do you see?"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": MAX_TOKENS}


def answer(connection: http.client.HTTPConnection, body: Body) -> tuple[float, float, int]:
    """Milliseconds to the first text and to the end, and how many chunks of text came."""
    start = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body | {"stream": True}))
    response = connection.getresponse()
    first, chunks = 0.0, 0
    while line := response.readline():
        if b'"content":' in line and b'"content":""' not in line:
            first = first or time.perf_counter() - start
            chunks += 1
    return first * 1000, (time.perf_counter() - start) * 1000, chunks


def render(connection: http.client.HTTPConnection, body: Body) -> dict[str, tuple[float, float]]:
    """Queue and service of each stage; of the whole request, the client's view and the server's."""
    start = time.perf_counter()
    connection.request("POST", "/v1/chat/completions/render", json.dumps(body))
    body = json.loads(connection.getresponse().read())
    wall = (time.perf_counter() - start) * 1000
    times = body["timings_ms"]
    stages = {"tokenize": times["tokenize"]}
    for item in body["items"]:
        stages |= item["timings_ms"]
    columns = {stage: (t["queue"], t["service"]) for stage, t in stages.items()}
    return {"intake": (0.0, times["intake"]), **columns, "render": (wall - times["total"], times["total"])}


if __name__ == "__main__":
    main()
