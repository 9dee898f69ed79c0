"""Shares one piece of work between concurrent callers that want the same result."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0


class SingleFlight(Generic[T]):
    """Runs work once for all concurrent callers with an equal key. It is not a cache: no result is kept."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight[T]] = {}
        self.joins = 0  # calls that found the work in flight

    def __contains__(self, key: Hashable) -> bool:
        """True while the work for this key is in flight."""
        return key in self._flights

    async def run(self, key: Hashable, work: Callable[[], Coroutine[object, None, T]]) -> T:
        """Returns the result of `work()`, shared with all callers of an equal key that come meanwhile.

        A cancelled caller does not affect the others. The work is cancelled with its last caller.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(work()))
            flight.task.add_done_callback(_mark_as_read)  # it may fail after its last caller has left
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
            # A copy for each caller: raising one exception object in several tasks would mix their
            # tracebacks, and a caller that sets `param` on it would set it for the others too.
            raise copy.copy(error) from error
        return flight.task.result()


def _mark_as_read(task: asyncio.Task[T]) -> None:
    """asyncio logs the traceback of an exception that was never retrieved."""
    if not task.cancelled():
        task.exception()
