"""The base of all stages, and the decorator of their endpoints.

A stage is a plain class. Its constructor loads what it needs and then calls `self.ready()`; its endpoints are
the methods that the ingress calls. `endpoint` puts around each of them what every call needs:

    deadline ─ span ─ log context ─ [the method] ─ reply with times ─ counters
                                         │ on an error: param, release of buffers
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import wraps
from typing import ClassVar, Concatenate, ParamSpec, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from deployments.errors import ServingError, StageTimeout
from deployments.runtime import tracing
from deployments.runtime.call_record import begin_call
from deployments.runtime.logs import set_up_logs
from deployments.runtime.memory import freeze_start_up, release_on_error
from deployments.runtime.metrics import publish, report_activity, report_cache
from deployments.runtime.pool import WorkPool
from deployments.types import Activity, CallHeader, Delta, Reply

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="Stage")


class StageConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    otlp_endpoint: str = Field(default="", description="Set by the top-level `otlp_endpoint`.")


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters of one cache since the replica started, in entries unless said otherwise."""

    hits: int
    misses: int
    evictions: int = 0
    joins: int = 0  # not in the cache, but another request was already making the same
    num_bytes: int | None = None  # held now; None: not measured


class CheckpointConfig(StageConfig):
    """Settings of a stage that reads the checkpoint. The top-level `model` and `chat_template` fill them."""

    model: str = Field(default="tiny-omni", description="Set by the top-level `model`.")
    chat_template: str = Field(default="", description="Set by the top-level `chat_template`.")


class Stage(ABC):
    """One replica of a stage. Subclasses name themselves: class name = stage name = deployment name."""

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if Stage in cls.__bases__:
            cls.name = cls.__name__

    def __init__(self, config: StageConfig) -> None:
        set_up_logs()
        tracing.start(config.otlp_endpoint, self.name)
        self.calls_done = 0

    def ready(self) -> None:
        """Ends the constructor: starts publishing metrics, and exempts start-up objects from collection."""
        publish(self._report)
        freeze_start_up()

    async def describe(self) -> object:
        """Returns what the ingress must know of this stage, once the replica is up."""
        return None

    async def activity(self) -> list[Activity]:
        """Returns a snapshot for each part of the stage, in the order of a request's way."""
        return self._activity()

    async def reset_cache(self) -> None:
        """Forgets all cached media; stages without such a cache do nothing."""
        return

    @abstractmethod
    def _activity(self) -> list[Activity]: ...

    def _caches(self) -> dict[str, CacheStats]:
        """Returns the counters of each cache, by its name in the metrics."""
        return {}

    def _report(self) -> None:
        report_activity(self._activity())
        for name, stats in self._caches().items():
            report_cache(
                name,
                hits=stats.hits,
                misses=stats.misses,
                joins=stats.joins,
                evictions=stats.evictions,
                num_bytes=stats.num_bytes,
            )


def pool_activity(stage: Stage, pool: WorkPool, cache: CacheStats | None = None) -> list[Activity]:
    """Returns the activity of a stage whose work is all done in one pool."""
    hits, misses = (cache.hits, cache.misses) if cache else (0, 0)
    return [Activity(stage.name, pool.queued, pool.in_flight, stage.calls_done, hits, misses)]


def endpoint(
    method: Callable[Concatenate[S, P], Awaitable[T]],
) -> Callable[Concatenate[S, CallHeader, P], Awaitable[Reply[T]]]:
    """Makes a method callable by the ingress: it then takes a CallHeader first and returns a Reply.

    The call raises the method's own errors with `param` set, and StageTimeout after `header.timeout_s`.
    """

    @wraps(method)
    async def serve(self: S, header: CallHeader, /, *args: P.args, **kwargs: P.kwargs) -> Reply[T]:
        record = begin_call(header.param)
        with tracing.serving(self.name, header.trace) as set_attributes, release_on_error(*args):
            deadline = asyncio.timeout(header.timeout_s)
            try:
                async with deadline:
                    value = await method(self, *args, **kwargs)
            except TimeoutError:
                if not deadline.expired():  # the method's own, and so a fault of the server
                    raise
                raise StageTimeout(
                    f"The request's deadline passed in {self.name}. Send less, or try again later.",
                    header.param or None,
                ) from None
            except ServingError as error:
                error.param = error.param or header.param or None
                raise
            self.calls_done += 1
            set_attributes(value)
            return Reply(value, record.service_ms, record.fetch_ms)

    return serve


def stream_endpoint(
    method: Callable[Concatenate[S, P], AsyncGenerator[Delta]],
) -> Callable[Concatenate[S, CallHeader, P], AsyncGenerator[Delta]]:
    """Makes an async generator of deltas callable by the ingress: it then takes a CallHeader first.

    The caller keeps the deadline: it cancels the stream when the deadline has passed.
    """

    @wraps(method)
    async def serve(
        self: S, header: CallHeader, /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncGenerator[Delta]:
        begin_call(header.param)
        # The span is not made the current one: a generator may go on in another context than it began in.
        with tracing.serving_stream(self.name, header.trace) as span, release_on_error(*args):
            try:
                async with aclosing(method(self, *args, **kwargs)) as deltas:
                    async for delta in deltas:
                        span.observe(delta)
                        yield delta
            finally:
                self.calls_done += 1

    return serve
