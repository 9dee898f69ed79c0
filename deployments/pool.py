"""A sized pool for CPU-heavy work, at a scheduling priority below that of the event loops."""

from __future__ import annotations

import asyncio
import contextvars
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def _lower_priority(niceness: int) -> None:
    # Linux keeps niceness per thread: only the pool's threads step back, the loop's does not.
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))


class WorkPool:
    """Runs functions in `threads` threads at `niceness`; what has not begun yet can be cancelled."""

    def __init__(self, threads: int, niceness: int = 19) -> None:
        self._executor = ThreadPoolExecutor(
            threads, thread_name_prefix="work", initializer=_lower_priority, initargs=(niceness,)
        )

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
        """The function's result and the milliseconds it ran, waiting for a thread not counted."""

        def timed() -> tuple[T, float]:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            return result, (time.perf_counter() - start) * 1000

        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, contextvars.copy_context().run, timed)

    def shutdown(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
