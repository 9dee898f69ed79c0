"""One piece of work for any number of concurrent callers that want the same."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0


class SingleFlight(Generic[T]):
    """Not a cache: a result is gone as soon as those who waited for it have it."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight[T]] = {}
        self.joins = 0  # calls that found the work under way

    def __contains__(self, key: Hashable) -> bool:
        """Whether somebody works on it."""
        return key in self._flights

    async def run(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work()`, shared by all who call with an equal key meanwhile.

        Whoever is cancelled leaves the others alone; the work itself is cancelled, and over, when the last
        waiter is.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(work()))
            flight.task.add_done_callback(_read)  # it may fail when the last waiter has just left
        else:
            self.joins += 1
        flight.waiters += 1
        try:
            await asyncio.wait([flight.task])
        finally:
            flight.waiters -= 1
            if flight.waiters == 0:
                if self._flights.get(key) is flight:
                    del self._flights[key]
                if not flight.task.done():
                    flight.task.cancel()
        if error := flight.task.exception():
            raise copy.copy(error) from error  # each its own: who catches it may write to it
        return flight.task.result()


def _read(task: asyncio.Task[Any]) -> None:
    """Of an error that nobody reads asyncio would print the traceback."""
    if not task.cancelled():
        task.exception()
