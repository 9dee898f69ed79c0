"""Measures the cost of recording metrics: requests with and without it, alternating, in one process and run.

    python -m scripts.bench_overhead [-n 200]

The stages run in Serve's local mode, where a request costs less than between processes. The printed share is
therefore higher than in a server. Also prints the cost of passing the metrics to Ray once a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import statistics
import time
from collections.abc import Iterator
from unittest import mock

import httpx
import ray
from starlette.types import Receive, Scope, Send

from app import observe
from app.config import AppConfig
from app.http import request_times
from app.stages import Timing
from deployments.runtime import metrics
from deployments.types import Delta
from scripts.bench_latency import image_request, text_request
from tests.support.local_graph import LocalGraph  # the tests' server without a cluster

PATH = "/v1/chat/completions"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=200, help="pairs of a request with and one without")
    args = parser.parse_args()
    asyncio.run(compare(args.n))
    recording()
    hand_over()


async def compare(n: int) -> None:
    """Pairs are as short as can be: what else the machine does changes within seconds."""
    async with await LocalGraph(AppConfig()).client() as client:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        for name, make in (("short text", text_request), ("224 px image", image_request)):
            for seed in range(10):
                await seconds_for(client, make(seed))
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for pair in range(1, n + 1):
                for on in (True, False) if pair % 2 else (False, True):
                    with contextlib.nullcontext() if on else off():
                        seconds[on].append(await seconds_for(client, make(1000 * pair + on)))
            pairs = [a / b - 1 for a, b in zip(seconds[True], seconds[False], strict=True)]
            low, share, high = (100 * value for value in statistics.quantiles(pairs, n=4))
            with_ms, without_ms = (1000 * statistics.median(seconds[on]) for on in (True, False))
            print(
                f"{name}: {with_ms:.2f} ms of CPU a request with metrics, {without_ms:.2f} without;"
                f" median of {n} pairs {share:+.2f} %, half of them from {low:+.1f} to {high:+.1f} %",
                flush=True,
            )


async def seconds_for(client: httpx.AsyncClient, body: dict[str, object]) -> float:
    """CPU seconds of the process."""
    start = time.process_time()
    response = await client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return time.process_time() - start


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Nothing is counted, and nothing is asked whether to count."""

    def nothing(*_: object, **__: object) -> None: ...

    async def passes(self: request_times.RequestTimes, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    with contextlib.ExitStack() as stack:
        for cls, method in (
            (metrics.Counter, "add"),
            (metrics.Gauge, "add"),
            (metrics.Gauge, "set"),
            (metrics.Histogram, "observe"),
            (observe.TokenTimes, "observe"),
        ):
            stack.enter_context(mock.patch.object(cls, method, nothing))
        stack.enter_context(mock.patch.object(request_times.RequestTimes, "__call__", passes))
        unobserved = {"__enter__": lambda call: call, "__exit__": lambda *_: None}
        for method in unobserved:
            stack.enter_context(mock.patch.object(observe.ObservedCall, method, unobserved[method]))
        yield


def recording() -> None:
    """Measures only the recording of a text request: the engine's CPU time varies by more than that."""

    traffic = observe.Traffic()

    def request() -> None:
        with observe.intake():
            observe.body(1000)
        for stage in ("Tokenizer", "Model"):
            with observe.ObservedCall(traffic, stage, "text") as call:
                call.timing = Timing(0, 10, 10)
        times = observe.TokenTimes()
        for _ in range(32):
            times.observe(Delta([1]))

    def seconds(n: int = 1000) -> float:
        start = time.process_time()
        for _ in range(n):
            request()
        return (time.process_time() - start) / n

    request_record = observe.CurrentRequest(traffic, observe.GENERATES, time.perf_counter())
    observe.CURRENT_REQUEST.set(request_record)
    microseconds = 1e6 * min(seconds() for _ in range(10))
    print(f"recording a text request of 32 tokens: {microseconds:.0f} us of CPU")


def hand_over() -> None:
    """All series change within a second, as in a server that is asked for everything at once."""
    ray.init(num_cpus=1, log_to_driver=False)
    publisher = metrics.Publisher(metrics.ALL)
    publisher.push()
    series = sum(len(list(metric.samples())) for metric in metrics.ALL)
    times = []
    for _ in range(20):
        for metric in metrics.ALL:
            if isinstance(metric, metrics.Histogram):
                for tags, _ in metric.items():
                    metric.observe(0.0001, *tags)
            else:
                for tags, value in metric.items():
                    metric._values[tags] = value + 1
        start = time.process_time()
        publisher.push()
        times.append(time.process_time() - start)
    ray.shutdown()
    ms = 1000 * statistics.median(times)
    print(f"handing over {series} series, all of them changed: {ms:.2f} ms, once a second")


if __name__ == "__main__":
    main()
