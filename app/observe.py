"""Records what the ingress sees of requests and calls as metrics (`deployments.runtime.metrics`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http import gate
from deployments.errors import ServingError
from deployments.runtime.metrics import (
    BODY_BYTES,
    CALL_CANCELLATIONS,
    CALL_ERRORS,
    CALLS_OPEN,
    FIRST_TOKEN,
    INTAKE_SECONDS,
    INTER_TOKEN,
    PREPARING,
    REQUEST_SECONDS,
)
from deployments.types import Delta

GENERATES = "/v1/chat/completions"
ENDPOINTS = frozenset({GENERATES, f"{GENERATES}/render", "/tokenize", "/detokenize"})

# Stages that prepare requests -> the steps that requests wait in there.
STEPS = {
    "Tokenizer": "tokenize",
    "MediaLoader": "load",
    "EmbeddingLoader": "embeddings",
    "MMPreprocessor": "preprocess",
}
INTAKE = "intake"


@dataclass(slots=True)
class _Seen:
    """One request."""

    endpoint: str
    started: float
    status: int | None = None  # of the answer, or of the error that a stream ended with
    complete: bool = False

    @property
    def outcome(self) -> str:
        return str(self.status) if self.complete else "cancelled"


_SEEN: ContextVar[_Seen | None] = ContextVar("seen", default=None)


class RequestTimes:
    """ASGI middleware: how long each request took, and how it ended.

    An answer that does not tell where its time went, e.g. an error, has the whole of it in `Server-Timing`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else None
        if path not in ENDPOINTS:
            await self._app(scope, receive, send)
            return
        seen = _Seen(path, gate.arrival(scope) or time.perf_counter())
        _SEEN.set(seen)

        async def send_seen(message: Message) -> None:
            if message["type"] == "http.response.start":
                total_ms = (time.perf_counter() - seen.started) * 1000
                message.setdefault("headers", [])
                MutableHeaders(scope=message).setdefault("Server-Timing", f"total;dur={total_ms:.1f}")
            await send(message)
            if message["type"] == "http.response.start":
                seen.status = message["status"]
            elif not message.get("more_body", False):
                seen.complete = True

        try:
            await self._app(scope, receive, send_seen)
        except Exception:  # it becomes an answer further out
            seen.status, seen.complete = ServingError.status, True
            raise
        finally:
            REQUEST_SECONDS.observe(time.perf_counter() - seen.started, seen.endpoint, seen.outcome)


def stream_failed(status: int) -> None:
    """The request's stream ends with an error, although it began well."""
    if seen := _SEEN.get():
        seen.status = status


@contextmanager
def intake() -> Iterator[None]:
    """A body is being read."""
    start = time.perf_counter()
    seen = _SEEN.get()
    with step(INTAKE):
        yield
    if seen:
        INTAKE_SECONDS.observe(time.perf_counter() - start, seen.endpoint)


def body(num_bytes: int) -> None:
    if seen := _SEEN.get():
        BODY_BYTES.add(num_bytes, seen.endpoint)


class step:  # a context manager; contextlib's cost several times as much
    """A request waits in a step of its preparation. It counts only if it goes on to the model."""

    __slots__ = ("_counts", "_name")

    def __init__(self, name: str) -> None:
        seen = _SEEN.get()
        self._name = name
        self._counts = seen is not None and seen.endpoint == GENERATES

    def __enter__(self) -> None:
        if self._counts:
            PREPARING.add(1, self._name)

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._counts:
            PREPARING.add(-1, self._name)


class calling:
    """A call to a stage is open, of a request's item or text."""

    __slots__ = ("_modality", "_stage", "_step")

    def __init__(self, stage: str, modality: str) -> None:
        self._stage, self._modality = stage, modality
        self._step = step(STEPS[stage]) if stage in STEPS else None

    def __enter__(self) -> None:
        CALLS_OPEN.add(1, self._stage, self._modality)
        if self._step:
            self._step.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        CALLS_OPEN.add(-1, self._stage, self._modality)
        if self._step:
            self._step.__exit__(kind, error, traceback)
        if isinstance(error, asyncio.CancelledError):
            CALL_CANCELLATIONS.add(1, self._stage, self._modality)
        elif isinstance(error, ServingError):
            CALL_ERRORS.add(1, self._stage, self._modality, type(error).__name__)


class TokenTimes:
    """Of one request's answers."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}  # answer -> when its last token came

    def saw(self, delta: Delta) -> None:
        now = time.perf_counter()
        seen = _SEEN.get()
        if not self._last and seen:
            FIRST_TOKEN.observe(now - seen.started)
        before = self._last.get(delta.index)
        count = len(delta.token_ids)
        if before is not None and count:
            INTER_TOKEN.observe((now - before) / count, count=count)
        self._last[delta.index] = now
