"""Measures the cost of timings and traces, off and on, in one run.

    python -m scripts.bench_tracing [-n 60]

Runs two shipped servers side by side; one sends traces to a collector in this process. Both get the same two
requests in turn, a short text and a new 224 px image: plain, with `timings`, and traced. Prints milliseconds
to the end, CPU milliseconds of all replicas, and the share of the client's time that `timings_ms` accounts
for. Also prints the cost of the hooks of one request with an image when tracing is off, and the cost of
exporting a span, which happens later in a thread.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from deployments.runtime import tracing
from deployments.types import CallHeader
from scripts.bench_latency import Body, image_request, text_request
from tests.support.cluster import ServeConfig, Server, free_ports, read
from tests.support.collector import Collector, listening

WARM_UP = 5
STAGES = ("Ingress", "Tokenizer", "MediaLoader", "EmbeddingLoader", "MMPreprocessor", "Model")
HOOKS = {"span": 2, "call": 4, "served": 3, "traced": 3}  # of one image: see docs/life-of-a-request.md
_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=60)
    args = parser.parse_args()
    (port,) = free_ports(1)
    collector = Collector(f"http://127.0.0.1:{port}")

    def trace(config: ServeConfig) -> None:
        config["applications"][0]["args"]["otlp_endpoint"] = collector.url

    with (
        tempfile.TemporaryDirectory() as folder,
        listening(collector, port),
        Server.start(Path(folder)) as plain,
        Server.start(Path(folder), trace) as traced,
    ):
        for name, make in (("short text", text_request), ("224 px image", image_request)):
            print(f"{name}, median of {args.n}:")
            times: dict[str, list[float]] = defaultdict(list)
            cpu: dict[str, float] = defaultdict(float)
            accounted = []
            for seed in range(args.n + WARM_UP):
                ways = {
                    "off": (plain, make(3 * seed)),
                    "timings": (plain, make(3 * seed + 1) | {"timings": True}),
                    "traces": (traced, make(3 * seed + 2)),
                }
                for way, (server, body) in ways.items():
                    before = cpu_ms(server)
                    ms, answer = send(server, body)
                    if seed >= WARM_UP:
                        accounted += [answer["timings_ms"]["total"] / ms] if way == "timings" else []
                        times[way].append(ms)
                        cpu[way] += cpu_ms(server) - before
            base = statistics.median(times["off"])
            for way, column in times.items():
                median = statistics.median(column)
                ratio, each = median / base, cpu[way] / args.n
                print(f"    {way:<8} {median:6.1f} ms ({ratio:.3f}x), {each:6.1f} ms of CPU")
            print(f"    timings_ms account for {statistics.median(accounted):.1%} of the client's wait")
        print(
            f"spans: {len(collector.spans)}, a request: {len(collector.spans) / 2 / (args.n + WARM_UP):.1f}"
        )
        print(f"exporting: {export_us(collector):.0f} us of CPU a span")
    print(f"hooks of a request with an image where tracing is off: {hooks_us():.1f} us")


def send(server: Server, body: Body) -> tuple[float, Body]:
    target = urlsplit(server.url)
    connection = http.client.HTTPConnection(target.hostname or "", target.port)
    start = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    response = connection.getresponse()
    data = response.read()
    ms = (time.perf_counter() - start) * 1000
    assert response.status == 200, data
    return ms, json.loads(data)


def cpu_ms(server: Server) -> float:
    stats = (read(f"/proc/{pid}/stat").rpartition(")")[2].split() for s in STAGES for pid in pids(server, s))
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) * _TICK_MS


_pids: dict[tuple[str, str], list[int]] = {}


def pids(server: Server, stage: str) -> list[int]:
    key = (server.mark, stage)
    if key not in _pids:
        _pids[key] = server.replicas(stage)
    return _pids[key]


def export_us(collector: Collector) -> float:
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("bench")
    attributes: dict[str, str | int] = {
        "param": "messages[0].content[0]",
        "modality": "image",
        "num_bytes": 1,
        "num_tokens": 1,
    }
    for _ in range(512):
        tracer.start_span("item", attributes=attributes).end()
    exporter = tracing._exporter(collector.url)
    start = time.thread_time()
    exporter.export(kept.get_finished_spans())
    return (time.thread_time() - start) / 512 * 1e6


def hooks_us() -> float:
    """Each against the same without it."""
    loops = 20_000

    async def nothing() -> None:
        pass

    def span() -> None:
        with tracing.span("item", param="messages[0].content[0]", modality="image"):
            pass

    def call() -> None:
        with tracing.calling("MediaLoader") as trace:
            CallHeader(1.0, "", trace)

    traced, plain = tracing.traced("decode")(int), int
    with tracing.calling("MediaLoader") as carrier:
        pass

    async def served() -> None:
        with tracing.serving("MediaLoader", carrier) as set_sizes:
            set_sizes(None)

    async def awaited(what: Callable[[], Awaitable[object]]) -> float:
        start = time.perf_counter()
        for _ in range(loops):
            await what()
        return (time.perf_counter() - start) / loops * 1e6

    def timed(what: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(loops):
            what()
        return (time.perf_counter() - start) / loops * 1e6

    each = {
        "span": timed(span),
        "call": timed(call),
        "served": asyncio.run(awaited(served)) - asyncio.run(awaited(nothing)),
        "traced": timed(traced) - timed(plain),
    }
    print("    " + ", ".join(f"{name} {us:.2f} us" for name, us in each.items()))
    return sum(each[name] * count for name, count in HOOKS.items())


if __name__ == "__main__":
    main()
