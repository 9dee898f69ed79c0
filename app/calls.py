"""Calls to stages: whoever starts one ends it.

Cancelling an awaiting task does not cancel a Serve call, only `response.cancel()` does; so every call of the
product goes through here. Foreign errors become ServingErrors here and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from app.observe import calling
from deployments.errors import Overloaded, ServingError, StageTimeout, StageUnavailable
from deployments.runtime import tracing
from deployments.runtime.memory import collect_soon
from deployments.runtime.metrics import CALL_QUEUE, CALL_RETRIES, CALL_SERVICE

T = TypeVar("T")
TEXT = "text"  # the modality of calls about no item
_TOLD_S = 1  # a replica that does not answer holds nobody up for longer
_LATE_S = 0.1  # after the deadline: a reader that waits has been told by then
logger = logging.getLogger("ray.serve")


class Deadline:
    """One per request: the clock that all its times are read from; every stage gets what is left of it."""

    def __init__(self, timeout_s: float, came: float | None = None) -> None:
        """`came`: when the request did, by `time.perf_counter`; None: now, from when the deadline counts."""
        self.timeout_s = timeout_s
        self._came = time.perf_counter() if came is None else came
        self._at = time.monotonic() + timeout_s

    def ms(self) -> float:
        """Since the request came."""
        return (time.perf_counter() - self._came) * 1000

    def left_s(self) -> float:
        return max(0.0, self._at - time.monotonic())

    def passed(self, stage: str) -> StageTimeout:
        return StageTimeout(
            f"The request was still in {stage} when its {self.timeout_s:g} s were over."
            " Send less, or try again later."
        )


class Broken(StageUnavailable):
    """A call that may succeed when it is made again. It stays in this process."""

    def __init__(self, message: str, stage: str = "") -> None:
        super().__init__(message)
        self.stage = stage


class ReplicaDied(Broken):
    """The replica that worked on the call is gone; the call may be tried again elsewhere."""


class ObjectLost(Broken):
    """An array that the call refers to went with the process that held it."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one call: `service` at work in the stage, `fetch` waiting for the item's host, `queue`
    all else (waiting, transport). Together they are the whole call; `start` is since the request came.
    """

    start: float
    queue: float
    service: float
    fetch: float = 0.0

    @classmethod
    def of(cls, start: float, end: float, service_ms: float, fetch_ms: float = 0.0) -> Timing:
        """Who joined work that was under way waited for the last part of it only."""
        wall = end - start
        service = min(service_ms, wall)
        fetch = min(fetch_ms, wall - service)
        return cls(start, wall - service - fetch, service, fetch)

    @property
    def end(self) -> float:
        return self.start + self.queue + self.fetch + self.service

    def split(self, service_ms: float) -> tuple[Timing, Timing]:
        """Of a call that did two things: the first of them for `service_ms`, which also waited for both."""
        first = replace(self, service=min(self.service, service_ms))
        return first, Timing(first.end, 0.0, self.service - first.service)

    def and_then(self, more: Timing) -> Timing:
        """Of two calls, one after the other, for one thing."""
        gap = more.start - self.end
        return Timing(
            self.start, self.queue + gap + more.queue, self.service + more.service, self.fetch + more.fetch
        )

    def to_json(self) -> dict[str, float]:
        fetch = {"fetch": self.fetch} if self.fetch else {}
        told = {"start": self.start, "queue": self.queue, **fetch, "service": self.service}
        return {name: round(ms, 3) for name, ms in told.items()}


def without_gaps(start: float, timings: Iterable[Timing]) -> list[Timing]:
    """What passed between calls, in this process or with one that failed, was waiting for the next one."""
    closed = []
    for timing in timings:
        closed.append(replace(timing, start=start, queue=timing.queue + timing.start - start))
        start = timing.end
    return closed


async def call(
    method: Any, *args: Any, stage: str, deadline: Deadline, modality: str = TEXT
) -> tuple[Any, Timing]:
    """The stage's record, which tells its `service_ms` (and `fetch_ms`), and where the time went.

    Raises the stage's own ServingError, StageTimeout, Overloaded, ReplicaDied or ObjectLost.
    """
    start = deadline.ms()
    with calling(stage, modality), tracing.calling(stage) as context:
        response = method.remote(*args, **context)
        with _translated(response, stage, deadline):
            async with asyncio.timeout(deadline.left_s()):
                record = await _awaited(response)
    timing = Timing.of(start, deadline.ms(), record.service_ms, getattr(record, "fetch_ms", 0.0))
    CALL_QUEUE.observe(timing.queue / 1000, stage, modality)
    CALL_SERVICE.observe((timing.fetch + timing.service) / 1000, stage, modality)
    return record, timing


async def stream(
    method: Any, *args: Any, stage: str, deadline: Deadline, modality: str = TEXT
) -> AsyncGenerator[Any]:
    """The stage's stream of Delta; leaving it early, for whatever reason, ends it there too, and so does the
    deadline while nobody reads.
    """
    start, queue_ms = deadline.ms(), None
    with calling(stage, modality), tracing.calling(stage) as context:
        responses = method.remote(*args, **context)
        late = asyncio.get_running_loop().call_later(deadline.left_s() + _LATE_S, responses.cancel)
        try:
            with _translated(responses, stage, deadline):
                while True:
                    if not deadline.left_s():
                        raise TimeoutError
                    async with asyncio.timeout(deadline.left_s()):
                        delta = await _awaited(anext(responses, None))
                    if delta is None:
                        return
                    if queue_ms is None:
                        queue_ms = delta.queue_ms
                    yield delta
        finally:
            late.cancel()
            if queue_ms is not None:
                CALL_QUEUE.observe(queue_ms / 1000, stage, modality)
                CALL_SERVICE.observe((deadline.ms() - start - queue_ms) / 1000, stage, modality)


async def tell_all(handle: Any, method: str, *args: Any) -> None:
    """To every replica that can be reached: what helps when it arrives and is not missed when it does not."""
    with suppress(TimeoutError, DeploymentUnavailableError):
        await handle.broadcast(method, *args).results_async(timeout_s=_TOLD_S, return_exceptions=True)


async def retry_once(
    attempt: Callable[[], Awaitable[T]], again: Callable[[], Awaitable[T]] | None = None, *, on: type[Broken]
) -> T:
    """One retry of an idempotent call, by another way if there is one."""
    try:
        return await attempt()
    except on as error:
        logger.warning("%s Trying once more.", error.message)
        CALL_RETRIES.add(1, error.stage, type(error).__name__)
        return await (again or attempt)()


async def gather_or_cancel(coroutines: Iterable[Awaitable[T]]) -> list[T]:
    """`asyncio.gather`, but nothing runs on after it.

    When one fails, the others are cancelled and awaited; what is raised is the earliest real failure in the
    order of the arguments, whichever came first in time.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        settled = await asyncio.gather(*tasks, return_exceptions=True)
        for result in settled:
            if isinstance(result, Exception):
                raise result from None
        raise


async def _awaited(result: Awaitable[T]) -> T:
    """Serve tells the cancellation of the waiting task as a cancelled request; asyncio must see its own."""
    try:
        return await result
    except TaskCancelledError:
        task = asyncio.current_task()
        if task and task.cancelling():
            raise asyncio.CancelledError from None
        raise


@contextmanager
def _translated(response: Any, stage: str, deadline: Deadline) -> Iterator[None]:
    """Ends the call on any exit but a good one, and speaks of it in our own errors."""
    try:
        yield
    except BaseException as error:
        response.cancel()
        collect_soon()  # Serve keeps the call with its arguments in a cycle
        if isinstance(error, TimeoutError):
            raise deadline.passed(stage) from None
        if isinstance(error, _FOREIGN):
            raise _mapped(error, stage) from error
        raise


_FOREIGN = (RayError, BackPressureError, DeploymentUnavailableError, grpc.RpcError)


def _mapped(error: Exception, stage: str) -> Exception:
    """By reference, errors arrive wrapped in RayTaskError; the cause may itself be one of Ray's."""
    cause = error
    while isinstance(cause, RayTaskError) and isinstance(cause.cause, Exception):
        cause = cause.cause
    match cause:
        case ServingError():
            return cause
        case BackPressureError():
            return Overloaded(f"Too many requests are waiting for {stage}. Try again later.")
        case ObjectLostError():
            return ObjectLost(f"{stage} lost an input of the request. Try again.", stage)
        case RayActorError() | DeploymentUnavailableError():
            return ReplicaDied(f"A replica of {stage} ended during the request. Try again.", stage)
        case grpc.aio.AioRpcError() if cause.code() == grpc.StatusCode.UNAVAILABLE:
            return ReplicaDied(f"A replica of {stage} ended during the request. Try again.", stage)
        case TaskCancelledError():
            return StageUnavailable(f"{stage} was stopped during the request. Try again.")
        case _:
            told = isinstance(error, RayTaskError)  # with its traceback, by the stage itself
            logger.error("%s failed", stage, exc_info=None if told else error)
            return ServingError(f"{stage} failed on this request; the server's log says why.")
