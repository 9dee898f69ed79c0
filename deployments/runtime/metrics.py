"""Every metric of Headrace: its name, its meaning, and its values in this process.

A request makes dozens of observations, and each is cheaper in a plain dict than in Ray's metric objects. So
the values are kept here, and a thread passes changed ones to Ray once a second; Prometheus scrapes Ray's
metrics. A histogram is passed as one counter for each bucket: with Ray's own histograms, the node's agent
would repeat every observation, one by one, at the middle of its bucket.

docs/metrics.md and the Grafana dashboard are made from this file (scripts/make_dashboard.py).

Metrics are written, and never read back as program state.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ray import serve
from ray.serve import metrics as ray_metrics
from ray.serve.exceptions import RayServeException

from deployments.types import Activity

logger = logging.getLogger("ray.serve")

PREFIX = "headrace_"
PERIOD_S = 1.0

# From a hop between processes to the deadline of a request.
LATENCY_BUCKETS_S = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
)

ALL: list[Metric] = []


class Sample(NamedTuple):
    """One time series as it is passed to Ray."""

    name: str
    tags: tuple[tuple[str, str], ...]
    value: float


class Metric:
    """Values by their tags. One thread records them, another reads them."""

    kind = ""

    def __init__(self, name: str, unit: str, help: str, *tags: str) -> None:
        self.name = PREFIX + name
        self.unit = unit
        self.help = help
        self.tags = tags
        self._values: dict[tuple[str, ...], float] = {}
        ALL.append(self)

    def samples(self) -> Iterator[Sample]:
        for values, value in self.items():
            yield Sample(self.name, tuple(zip(self.tags, values, strict=True)), value)

    def value(self, *tags: str) -> float:
        return self._values.get(tags, 0.0)

    def items(self) -> list[tuple[tuple[str, ...], float]]:
        """Returns all tags with their values."""
        return list(self._values.items())


class Counter(Metric):
    kind = "counter"

    def add(self, amount: float, *tags: str) -> None:
        self._values[tags] = self._values.get(tags, 0.0) + amount

    def set_total(self, total: float, *tags: str) -> None:
        """Sets a total that is counted elsewhere."""
        self._values[tags] = total


class Gauge(Metric):
    kind = "gauge"

    def set(self, value: float, *tags: str) -> None:
        self._values[tags] = value

    def add(self, amount: float, *tags: str) -> None:
        self._values[tags] = self._values.get(tags, 0.0) + amount


class Histogram(Metric):
    kind = "histogram"
    buckets = LATENCY_BUCKETS_S

    def __init__(self, name: str, unit: str, help: str, *tags: str) -> None:
        super().__init__(name, unit, help, *tags)
        self._counts: dict[tuple[str, ...], list[int]] = {}

    def observe(self, value: float, *tags: str, count: int = 1) -> None:
        counts = self._counts.get(tags)
        if counts is None:
            self._values[tags] = 0.0  # set before the counts: the reading thread takes both
            counts = self._counts[tags] = [0] * (len(self.buckets) + 1)
        counts[bisect_left(self.buckets, value)] += count
        self._values[tags] += value * count

    def samples(self) -> Iterator[Sample]:
        """Yields the sum, and for each bucket the number of values up to its bound `le`."""
        for values, counts in list(self._counts.items()):
            tags = tuple(zip(self.tags, values, strict=True))
            yield Sample(f"{self.name}_sum", tags, self._values[values])
            total = 0
            for bound, count in zip([*map("{:g}".format, self.buckets), "+Inf"], counts, strict=True):
                total += count
                yield Sample(f"{self.name}_bucket", (*tags, ("le", bound)), total)


# Calls, as the ingress sees them.
CALLS_OPEN = Gauge("calls_open", "calls", "Calls to a stage that have not ended", "stage", "modality")
CALL_QUEUE = Histogram(
    "call_queue_seconds", "s", "Time of a call without the work: waiting and transport", "stage", "modality"
)
CALL_SERVICE = Histogram(
    "call_service_seconds", "s", "Time that a stage worked on a call", "stage", "modality"
)
CALL_BYTES_IN = Counter(
    "call_bytes_in", "bytes", "Media and embeddings that entered a stage", "stage", "modality"
)
CALL_BYTES_OUT = Counter("call_bytes_out", "bytes", "Arrays that left a stage", "stage", "modality")
CALL_ERRORS = Counter(
    "call_errors", "calls", "Calls that failed, by the class of the error", "stage", "modality", "kind"
)
CALL_RETRIES = Counter("call_retries", "calls", "Calls that were retried, by the reason", "stage", "kind")
CALL_CANCELLATIONS = Counter("call_cancellations", "calls", "Calls that were cancelled", "stage", "modality")

# Requests, as the ingress sees them.
REQUEST_SECONDS = Histogram(
    "request_seconds",
    "s",
    "From a request's headers to the end of its answer. outcome: the status, or `cancelled`",
    "endpoint",
    "outcome",
)
INTAKE_SECONDS = Histogram("intake_seconds", "s", "Reading and parsing a body", "endpoint")
BODY_BYTES = Counter("body_bytes", "bytes", "Bodies that were read", "endpoint")
BYTES_IN_FLIGHT = Gauge("bytes_in_flight", "bytes", "Bodies that are being read or loaded now")
LOOP_LAG = Gauge("loop_lag_seconds", "s", "Worst delay of the ingress's event loop in the last 15 s")
FIRST_TOKEN = Histogram("first_token_seconds", "s", "From a request's headers to its first token")
INTER_TOKEN = Histogram("inter_token_seconds", "s", "Between two tokens of an answer")
PREPARING = Gauge("preparing", "calls", "Bodies and calls that requests wait for before the model", "stage")
STARVATION = Counter(
    "starvation_seconds", "s", "Time in which the engine had room while requests waited in a stage", "stage"
)

# Each replica of a stage.
QUEUED = Gauge(
    "queued", "items", "Items that wait for a thread, or sequences that wait for the engine", "stage"
)
IN_FLIGHT = Gauge("in_flight", "items", "Items being worked on, or sequences that are running", "stage")
CACHE_HITS = Counter("cache_hits", "items", "Found in the cache; `prefix`: in tokens", "cache")
CACHE_MISSES = Counter("cache_misses", "items", "Not found in the cache; `prefix`: in tokens", "cache")
CACHE_JOINS = Counter("cache_joins", "items", "Not in the cache, but being made for another request", "cache")
CACHE_EVICTIONS = Counter("cache_evictions", "items", "Removed to make room", "cache")
CACHE_BYTES = Gauge("cache_bytes", "bytes", "Held now", "cache")

ENGINE_CAPACITY = Gauge("engine_capacity", "sequences", "Sequences that can run at once")
ENGINE_KV_TOKENS = Gauge("engine_kv_tokens", "tokens", "Tokens that fit into the KV cache")
ENGINE_KV_USED = Gauge("engine_kv_tokens_used", "tokens", "Tokens of running sequences in the KV cache")
ENGINE_STEPS = Counter("engine_steps", "steps", "Runs of the language model")
ENGINE_PROMPT_TOKENS = Counter("engine_prompt_tokens", "tokens", "Prompt tokens, cached ones included")
ENGINE_TOKENS = Counter("engine_generated_tokens", "tokens", "Generated tokens")
ENGINE_PREEMPTIONS = Counter("engine_preemptions", "sequences", "Preempted because the KV cache was full")


def report_activity(activity: Iterable[Activity]) -> None:
    for part in activity:
        QUEUED.set(part.queued, part.name)
        IN_FLIGHT.set(part.in_flight, part.name)


def report_cache(
    cache: str, *, hits: int, misses: int, joins: int = 0, evictions: int = 0, num_bytes: int | None = None
) -> None:
    CACHE_HITS.set_total(hits, cache)
    CACHE_MISSES.set_total(misses, cache)
    CACHE_JOINS.set_total(joins, cache)
    CACHE_EVICTIONS.set_total(evictions, cache)
    if num_bytes is not None:
        CACHE_BYTES.set(num_bytes, cache)


def publish(collect: Callable[[], None] = lambda: None) -> None:
    """Starts a thread that passes this process's values to Ray. Does nothing outside of a replica.

    The thread calls `collect` first, which records values that are counted elsewhere.
    """
    try:
        serve.get_replica_context()
    except RayServeException:
        return
    threading.Thread(target=_publish, args=(collect,), name="metrics", daemon=True).start()


def _publish(collect: Callable[[], None]) -> None:
    publisher, failed = Publisher(ALL), False
    while True:
        try:
            collect()
            publisher.push()
        except Exception:  # a server without metrics is better than none
            if not failed:
                logger.exception("metrics could not be published")
            failed = True
        time.sleep(PERIOD_S)


class Publisher:
    """Passes values to Ray's metrics, which it makes at their first value."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)
        self._made: dict[str, Any] = {}
        self._pushed: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def push(self) -> None:
        for metric in self._metrics:
            for sample in metric.samples():
                self._push(metric, sample)

    def _push(self, metric: Metric, sample: Sample) -> None:
        key = (sample.name, sample.tags)
        pushed = self._pushed.get(key)
        is_gauge = isinstance(metric, Gauge)
        if sample.value == pushed and not is_gauge:  # Ray drops a gauge that is not set for a while
            return
        self._pushed[key] = sample.value
        made = self._made.get(sample.name)
        if made is None:
            cls = ray_metrics.Gauge if is_gauge else ray_metrics.Counter
            made = cls(sample.name, metric.help, tuple(name for name, _ in sample.tags))
            self._made[sample.name] = made
        if is_gauge:
            made.set(sample.value, dict(sample.tags))
        else:
            # Not `inc`, which refuses 0: without an initial 0 Prometheus would miss the first increase.
            made._record(sample.value - (pushed or 0.0), dict(sample.tags))
