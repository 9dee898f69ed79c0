"""A sized pool for CPU-heavy work, at a scheduling priority below that of the event loops."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from ray.serve.context import _get_serve_request_context

from deployments.runtime.memory import clear_frames

P = ParamSpec("P")
T = TypeVar("T")


def lower_priority(niceness: int) -> None:
    # Linux keeps niceness per thread: only the pool's threads step back, the loop's does not.
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))


def _timed(
    function: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[T, float]:
    # No closure: what a closure captured stays as long as the traceback of an error.
    start = time.perf_counter()
    result = function(*args, **kwargs)
    return result, (time.perf_counter() - start) * 1000


class WorkPool:
    """Runs functions in `threads` threads at `niceness`; what has not begun yet can be cancelled.

    Requests have turns: one of twenty items that came first lets another's single item in after its next one.
    """

    def __init__(self, threads: int, niceness: int = 19) -> None:
        self._threads = threads
        self._open = 0  # calls of `run`
        self._waiting = _Turns()
        self._executor = ThreadPoolExecutor(
            threads, thread_name_prefix="work", initializer=lower_priority, initargs=(niceness,)
        )

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
        """The function's result and the milliseconds it ran, waiting for a thread not counted."""
        job = _Job(contextvars.copy_context(), partial(_timed, function, args, kwargs))
        self._waiting.put(_get_serve_request_context().request_id, job)
        self._executor.submit(self._run_next)
        self._open += 1
        try:
            result: tuple[T, float] = await asyncio.wrap_future(job.future)
            return result
        finally:
            self._open -= 1

    @property
    def in_flight(self) -> int:
        return min(self._open, self._threads)

    @property
    def queued(self) -> int:
        """Calls that wait for a thread."""
        return self._open - self.in_flight

    def shutdown(self) -> None:
        """Nobody waits for what has not begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for job in self._waiting.clear():
            job.future.cancel()

    def _run_next(self) -> None:
        self._waiting.take().run()


class _Job:
    def __init__(self, context: contextvars.Context, function: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._context = context
        self._function = function

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._context.run(self._function))
        except BaseException as error:  # noqa: BLE001  # it is raised where the result is awaited
            clear_frames(error)  # the work's variables go with the work
            self.future.set_exception(error)
            del self  # else the future, its error and this frame would keep each other, and the arguments


class _Turns:
    """Jobs in the order in which they came within a request, and in turn between requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Job]] = {}  # the next request first

    def put(self, request_id: str, job: _Job) -> None:
        with self._lock:
            self._waiting.setdefault(request_id, deque()).append(job)

    def take(self) -> _Job:
        with self._lock:
            request_id = next(iter(self._waiting))
            jobs = self._waiting.pop(request_id)
            job = jobs.popleft()
            if jobs:
                self._waiting[request_id] = jobs  # behind all others
            return job

    def clear(self) -> list[_Job]:
        with self._lock:
            jobs = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
            return jobs
