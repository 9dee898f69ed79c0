"""Measures the benefit of caches, uuids and affinity, with two replicas of each media stage.

    python -m scripts.bench_cache

Starts servers of its own. One run prints how often a URL is fetched and processed when many clients ask for
it at once, the time of a repeated request and of one that names its image by uuid, and the cache hit rate of
two replicas with and without affinity.
"""

from __future__ import annotations

import base64
import io
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.cluster import MediaServer, ServeConfig, Server, media_server
from tests.support.requests import chat, media

RENDER = "/v1/chat/completions/render"
AT_ONCE = 32
REPEATS = 15
IMAGES = 24
ROUNDS = 3
SIZE = (4000, 3000)


def main() -> None:
    print(f"{AT_ONCE} requests at once for one URL")
    with running() as server, media_server() as remote:
        one_url(server, remote)
        print(f"\nA 12 MP JPEG again, medians of {REPEATS}, each new image against itself")
        again(server)
        print(f"\nTwo replicas of each stage: {IMAGES} images, each asked for {ROUNDS} times after its first")
        print(f"  by affinity  {hit_rate(server):.0%} found")
    with running(affinity=False) as server:
        print(f"  at random    {hit_rate(server):.0%} found")


@contextmanager
def running(affinity: bool = True) -> Iterator[Server]:
    def change(config: ServeConfig) -> None:
        for deployment in config["applications"][0]["deployments"]:
            if deployment["name"] in ("MediaLoader", "MMPreprocessor"):
                deployment["num_replicas"] = 2
                deployment["ray_actor_options"] = {"num_cpus": 0.2}  # so that all fit on two cores
                if not affinity:
                    deployment["request_router_config"] = {
                        "request_router_class": "ray.serve._private.request_router:"
                        "PowerOfTwoChoicesRequestRouter"
                    }

    with tempfile.TemporaryDirectory() as folder, Server.start(Path(folder), change) as server:
        yield server


def one_url(server: Server, remote: MediaServer) -> None:
    remote.content = {"/photo.jpg": jpeg(0)}
    everyone = threading.Barrier(AT_ONCE)

    def ask(i: int) -> dict[str, Any]:
        everyone.wait()
        return render(server, media("image", f"{remote.url}/photo.jpg"), f"question {i}")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        items = list(pool.map(ask, range(AT_ONCE)))
    logs = [
        file.read_text() for file in (server.logs / "serve").glob("replica_headrace_MMPreprocessor_*.log")
    ]
    processed = sum(log.count("preprocessed image") for log in logs)
    assert len({item["digest"] for item in items}) == 1
    print(f"  fetched {len(remote.asked)} times, processed {processed} times")


def again(server: Server) -> None:
    first, repeated, named = [], [], []
    for i in range(REPEATS):
        uuid = f"photo-{i}"
        part: dict[str, object] = {**media("image", data_uri(jpeg(1 + i))), "uuid": uuid}
        alone: dict[str, object] = {"type": "image_url", "image_url": None, "uuid": uuid}
        first.append(timed(lambda: render(server, part)))  # noqa: B023  # it runs here and now
        repeated.append(timed(lambda: render(server, part)))  # noqa: B023
        named.append(timed(lambda: render(server, alone)))  # noqa: B023
    new = statistics.median(first)
    for name, times in (("new", first), ("again", repeated), ("by uuid alone", named)):
        ms = statistics.median(times)
        print(f"  {name:14} {ms:7.1f} ms, {1 - ms / new:4.0%} saved")


def hit_rate(server: Server) -> float:
    parts = [media("image", data_uri(jpeg(1000 + i, (320, 240)))) for i in range(IMAGES)]
    for part in parts:
        render(server, part)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda part: render(server, part)["cached"], parts * ROUNDS))
    return found.count(True) / len(found)


def render(server: Server, part: dict[str, object], text: str = "what?") -> dict[str, Any]:
    answer = server.post(RENDER, chat(part, text))
    assert answer.status == 200, answer.body
    (item,) = answer.body["items"]
    return dict(item)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1000


def jpeg(seed: int, size: tuple[int, int] = SIZE) -> bytes:
    """Smooth, so that it is quickly made, and of another colour for each seed."""
    colours = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(colours).resize(size).save(buffer, "jpeg")
    return buffer.getvalue()


def data_uri(content: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"


if __name__ == "__main__":
    main()
