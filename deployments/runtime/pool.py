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

from deployments.runtime.call_record import current_call
from deployments.runtime.memory import clear_frames

P = ParamSpec("P")
T = TypeVar("T")


def lower_priority(niceness: int) -> None:
    # Linux keeps niceness per thread: this lowers the pool's threads and not the event loop's.
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))


def _timed(function: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, object]) -> T:
    # Not a closure: the variables that a closure captured live as long as the traceback of an error.
    start = time.perf_counter()
    try:
        return function(*args, **kwargs)
    finally:
        current_call().service_ms += (time.perf_counter() - start) * 1000


class WorkPool:
    """Runs functions in `threads` threads at `niceness`. A job that has not begun can be cancelled.

    Requests take turns: after each job of a request with twenty items, a job of another request comes next.
    """

    def __init__(self, threads: int, niceness: int = 19) -> None:
        self._threads = threads
        self._open = 0  # calls of `run`
        self._waiting = _Turns()
        self._executor = ThreadPoolExecutor(
            threads, thread_name_prefix="work", initializer=lower_priority, initargs=(niceness,)
        )

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns the function's result, and adds the time it ran to the current call's `service_ms`."""
        job = _Job(contextvars.copy_context(), partial(_timed, function, args, kwargs))
        self._waiting.put(_get_serve_request_context().request_id, job)
        self._executor.submit(self._run_next)
        self._open += 1
        try:
            result: T = await asyncio.wrap_future(job.future)
            return result
        finally:
            self._open -= 1

    @property
    def in_flight(self) -> int:
        return min(self._open, self._threads)

    @property
    def queued(self) -> int:
        """Jobs that wait for a thread."""
        return self._open - self.in_flight

    def shutdown(self) -> None:
        """Cancels the jobs that have not begun; returns at once."""
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
        except BaseException as error:  # noqa: BLE001  # raised again where the result is awaited
            clear_frames(error)  # frees the job's variables
            self.future.set_exception(error)
            del self  # breaks the cycle of future, error and this frame, which would keep the arguments


class _Turns:
    """A queue of jobs: first in, first out within a request, round-robin between requests."""

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
                self._waiting[request_id] = jobs  # now the last
            return job

    def clear(self) -> list[_Job]:
        with self._lock:
            jobs = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
            return jobs
