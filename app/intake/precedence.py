"""Who goes first. Large bodies are not read on while a text is on its way to its first token; of large bodies
the one that is nearest to its end is read alone.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import TypeVar

T = TypeVar("T")

_GIVEN_S = 0.05  # what a body may wait beyond the time for which it was read
_AT_ONCE_S = 0.25  # at most in one piece: longer waits of a text are for something else

# A body whose client or network is the slower one is waited for by no other: its chunks are small, or late.
_BACKED_UP = 96 * 1024  # bytes of a chunk that waited to be read; HAProxy hands over up to 128 KiB at once
_MOVING_S = 0.01
_LOOK_S = 0.004  # so often looks the one that is next
_PATIENCE_S = 2.0  # that a body waits for others in all, so that no number of them stops it


class Precedence:
    """Of the requests on one event loop.

    Reading a body of 100 MB keeps the ingress, HAProxy and the client at work for as long as they may, and a
    text, which asks very little of each of them, would wait for a core at every hop.

    Bodies that are read side by side, each as fast as it can be, would all be there when the last one is. One
    after the other, the first is loaded while the second is read, and none is there any later.
    """

    def __init__(self) -> None:
        self._claims = 0
        self._bodies: set[Way] = set()
        self._nobody = asyncio.Event()
        self._nobody.set()

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Meanwhile others give way."""
        self._claims += 1
        self._nobody.clear()
        try:
            yield
        finally:
            self._claims -= 1
            if not self._claims:
                self._nobody.set()

    async def until_first(self, deltas: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """The same deltas; the first of them is waited for with a claim."""
        async with aclosing(deltas):
            with self.claim():
                first = await anext(deltas, None)
            if first is None:
                return
            yield first
            async for delta in deltas:
                yield delta

    @contextmanager
    def way(self, num_bytes: float = math.inf, clock: Callable[[], float] = time.monotonic) -> Iterator[Way]:
        """For a body of so many bytes, while it is read."""
        way = Way(self._nobody, self._bodies, num_bytes, clock)
        try:
            yield way
        finally:
            self._bodies.discard(way)


class Way:
    """One body's. It waits for texts for about as long as it was read at most, so that no number of them
    stops it.
    """

    def __init__(
        self, nobody: asyncio.Event, bodies: set[Way], num_bytes: float, clock: Callable[[], float]
    ) -> None:
        self._nobody = nobody
        self._bodies = bodies
        self._num_bytes = num_bytes
        self._clock = clock
        self._read = 0
        self._at = clock()  # of its last chunk
        self._is_backed_up = False
        self._waits = False
        self._credit_s = _GIVEN_S
        self._patience_s = _PATIENCE_S

    async def give(self, num_read: int) -> None:
        """Returns when nobody has precedence; `num_read`: bytes of the body so far."""
        stopped = self._clock()
        self._bodies.add(self)
        self._is_backed_up = num_read - self._read >= _BACKED_UP
        self._read = num_read
        self._credit_s = min(self._credit_s + stopped - self._at, _AT_ONCE_S)
        self._waits = True
        try:
            await self._give_to_bodies()
            await self._give_to_texts()
        finally:
            self._waits = False
            self._at = self._clock()

    async def _give_to_bodies(self) -> None:
        start = self._clock()
        end = start + self._patience_s
        while (place := self._place()) and self._clock() < end:  # noqa: ASYNC110  # time decides
            await asyncio.sleep(_LOOK_S * place)
        self._patience_s -= self._clock() - start

    async def _give_to_texts(self) -> None:
        start = self._clock()
        if not self._nobody.is_set() and self._credit_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._credit_s):
                    await self._nobody.wait()
        self._credit_s -= self._clock() - start

    def _place(self) -> int:
        """In the line: 0 is the one that is read. Who has none would not be read faster if others waited."""
        now, left = self._clock(), self._num_bytes - self._read
        nearer = [other for other in self._bodies if other._num_bytes - other._read < left]
        moving = [other for other in nearer if other._waits or now - other._at < _MOVING_S]
        return sum(other._is_backed_up for other in moving)
