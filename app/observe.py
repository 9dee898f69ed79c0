"""Records what the ingress sees of requests and calls: as plain counts, from which `app.watch` draws
conclusions, and as metrics (`deployments.runtime.metrics`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType

from app.stages import Timing
from deployments.errors import ServingError
from deployments.runtime.metrics import (
    BODY_BYTES,
    CALL_BYTES_IN,
    CALL_BYTES_OUT,
    CALL_CANCELLATIONS,
    CALL_ERRORS,
    CALL_QUEUE,
    CALL_SERVICE,
    CALLS_OPEN,
    FIRST_TOKEN,
    INTAKE_SECONDS,
    INTER_TOKEN,
    PREPARING,
)
from deployments.types import Delta

GENERATES = "/v1/chat/completions"
INGRESS = "Ingress"  # the name of the intake among the stages


class Traffic:
    """Counts of one ingress replica: what is open at this moment."""

    def __init__(self) -> None:
        self.open_calls: Counter[tuple[str, str]] = Counter()  # by stage and modality
        self.preparing: Counter[str] = Counter()  # by stage: bodies and calls of requests that will generate
        self.bodies_read = 0

    def calls_to(self, stage: str) -> int:
        return sum(count for (name, _), count in self.open_calls.items() if name == stage)

    def report(self) -> None:
        """Sets the gauges."""
        for (stage, modality), count in list(self.open_calls.items()):
            CALLS_OPEN.set(count, stage, modality)
        for stage, count in list(self.preparing.items()):
            PREPARING.set(count, stage)


@dataclass(slots=True)
class CurrentRequest:
    """The request that is being answered."""

    traffic: Traffic
    endpoint: str
    started: float
    status: int | None = None  # of the answer, or of the error that ended its stream
    complete: bool = False

    @property
    def outcome(self) -> str:
        return str(self.status) if self.complete else "cancelled"

    @property
    def generates(self) -> bool:
        return self.endpoint == GENERATES


CURRENT_REQUEST: ContextVar[CurrentRequest | None] = ContextVar("request", default=None)


def stream_failed(status: int) -> None:
    """Records that a stream that began with 200 ended with an error."""
    if request := CURRENT_REQUEST.get():
        request.status = status


@contextmanager
def intake() -> Iterator[None]:
    """Records the reading of a body."""
    request = CURRENT_REQUEST.get()
    if request is None:
        yield
        return
    start = time.perf_counter()
    preparing = request.traffic.preparing
    preparing[INGRESS] += request.generates
    try:
        yield
    finally:
        preparing[INGRESS] -= request.generates
    request.traffic.bodies_read += 1
    INTAKE_SECONDS.observe(time.perf_counter() - start, request.endpoint)


def body(num_bytes: int) -> None:
    if request := CURRENT_REQUEST.get():
        BODY_BYTES.add(num_bytes, request.endpoint)


class ObservedCall:
    """Records one call of a stage. A context manager; `contextlib`'s would cost several times as much.

    `timing` and the bytes are set while the call is open, and recorded when it ends.
    """

    __slots__ = ("_modality", "_prepares", "_stage", "_traffic", "bytes_in", "bytes_out", "timing")

    def __init__(self, traffic: Traffic, stage: str, modality: str) -> None:
        self._traffic, self._stage, self._modality = traffic, stage, modality
        request = CURRENT_REQUEST.get()
        self._prepares = request is not None and request.generates and stage != "Model"
        self.timing: Timing | None = None
        self.bytes_in = self.bytes_out = 0  # media and embeddings in, arrays out

    def __enter__(self) -> ObservedCall:
        self._traffic.open_calls[self._stage, self._modality] += 1
        self._traffic.preparing[self._stage] += self._prepares
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._traffic.open_calls[self._stage, self._modality] -= 1
        self._traffic.preparing[self._stage] -= self._prepares
        if self.timing:
            CALL_QUEUE.observe(self.timing.queue / 1000, self._stage, self._modality)
            service_s = (self.timing.fetch + self.timing.service) / 1000
            CALL_SERVICE.observe(service_s, self._stage, self._modality)
        if self.bytes_in or self.bytes_out:
            CALL_BYTES_IN.add(self.bytes_in, self._stage, self._modality)
            CALL_BYTES_OUT.add(self.bytes_out, self._stage, self._modality)
        if isinstance(error, asyncio.CancelledError):
            CALL_CANCELLATIONS.add(1, self._stage, self._modality)
        elif isinstance(error, ServingError):
            CALL_ERRORS.add(1, self._stage, self._modality, type(error).__name__)


class TokenTimes:
    """Records the times between the tokens of one request's answers."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}  # by answer: when its last token came

    def observe(self, delta: Delta) -> None:
        now = time.perf_counter()
        request = CURRENT_REQUEST.get()
        if not self._last and request:
            FIRST_TOKEN.observe(now - request.started)
        before = self._last.get(delta.index)
        count = len(delta.token_ids)
        if before is not None and count:
            INTER_TOKEN.observe((now - before) / count, count=count)
        self._last[delta.index] = now
