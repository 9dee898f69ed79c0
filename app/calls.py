"""Calls to stages: whoever starts one ends it.

Cancelling an awaiting task does not cancel a Serve call, only `response.cancel()` does; so every call of the
product goes through here. Foreign errors become ServingErrors here and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from app.observe import calling
from deployments.errors import Overloaded, ServingError, StageTimeout, StageUnavailable
from deployments.metrics import CALL_QUEUE, CALL_RETRIES, CALL_SERVICE

T = TypeVar("T")
TEXT = "text"  # the modality of calls about no item
logger = logging.getLogger("ray.serve")


class Deadline:
    """One per request; every stage gets what is left of it."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

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


class InputLost(Broken):
    """An array that the call refers to went with the process that held it."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one call: `service` at work in the stage, `queue` all else (waiting, transport)."""

    queue: float
    service: float

    @classmethod
    def of(cls, wall_ms: float, service_ms: float) -> Timing:
        return cls(round(max(0.0, wall_ms - service_ms), 3), round(service_ms, 3))


async def call(
    method: Any, *args: Any, stage: str, deadline: Deadline, modality: str = TEXT
) -> tuple[Any, Timing]:
    """The stage's record (which tells its `service_ms`) and where the time went.

    Raises the stage's own ServingError, StageTimeout, Overloaded, ReplicaDied or InputLost.
    """
    start = time.perf_counter()
    response = method.remote(*args)
    with calling(stage, modality), _translated(response, stage, deadline):
        async with asyncio.timeout(deadline.left_s()):
            record = await _awaited(response)
    timing = Timing.of((time.perf_counter() - start) * 1000, record.service_ms)
    CALL_QUEUE.observe(timing.queue / 1000, stage, modality)
    CALL_SERVICE.observe(timing.service / 1000, stage, modality)
    return record, timing


async def stream(
    method: Any, *args: Any, stage: str, deadline: Deadline, modality: str = TEXT
) -> AsyncGenerator[Any]:
    """The stage's stream of Delta; leaving it early, for whatever reason, ends it there too."""
    start, queue_s = time.perf_counter(), None
    responses = method.remote(*args)
    try:
        with calling(stage, modality), _translated(responses, stage, deadline):
            while True:
                async with asyncio.timeout(deadline.left_s()):
                    delta = await _awaited(anext(responses, None))
                if delta is None:
                    return
                if queue_s is None:
                    queue_s = delta.queue_ms / 1000
                yield delta
    finally:
        if queue_s is not None:
            CALL_QUEUE.observe(queue_s, stage, modality)
            CALL_SERVICE.observe(time.perf_counter() - start - queue_s, stage, modality)


async def once_more(attempt: Callable[[], Awaitable[T]], *, on: type[Broken]) -> T:
    """One retry of an idempotent call."""
    try:
        return await attempt()
    except on as error:
        logger.warning("%s Trying once more.", error.message)
        CALL_RETRIES.add(1, error.stage, type(error).__name__)
        return await attempt()


async def gather_all(coroutines: Iterable[Awaitable[T]]) -> list[T]:
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
            return InputLost(f"{stage} lost an input of the request. Try again.", stage)
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
