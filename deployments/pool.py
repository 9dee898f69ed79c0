"""A sized pool for CPU-heavy work, at a scheduling priority below that of the event loops."""

from __future__ import annotations

import asyncio
import contextvars
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def _lower_priority(niceness: int) -> None:
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
    """Runs functions in `threads` threads at `niceness`; what has not begun yet can be cancelled."""

    def __init__(self, threads: int, niceness: int = 19) -> None:
        self._executor = ThreadPoolExecutor(
            threads, thread_name_prefix="work", initializer=_lower_priority, initargs=(niceness,)
        )

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
        """The function's result and the milliseconds it ran, waiting for a thread not counted."""
        context = contextvars.copy_context()
        call = partial(context.run, _timed, function, args, kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def shutdown(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
