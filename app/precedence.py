"""Texts go first: large bodies are not read on while one is on its way to its first token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import TypeVar

T = TypeVar("T")

_GIVEN_S = 0.05  # what a body may wait beyond the time for which it was read
_AT_ONCE_S = 0.25  # at most in one piece: longer waits of a text are for something else


class Precedence:
    """Of the requests on one event loop.

    Reading a body of 100 MB keeps the ingress, HAProxy and the client at work for as long as they may, and a
    text, which asks very little of each of them, would wait for a core at every hop.
    """

    def __init__(self) -> None:
        self._claims = 0
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

    def way(self, clock: Callable[[], float] = time.monotonic) -> Way:
        return Way(self._nobody, clock)


class Way:
    """One body's. It waits for about as long as it was read at most, so that no number of texts stops it."""

    def __init__(self, nobody: asyncio.Event, clock: Callable[[], float]) -> None:
        self._nobody = nobody
        self._clock = clock
        self._at = clock()
        self._credit_s = _GIVEN_S

    async def give(self) -> None:
        """Returns when nobody has precedence."""
        stopped = self._clock()
        self._credit_s = min(self._credit_s + stopped - self._at, _AT_ONCE_S)
        if not self._nobody.is_set() and self._credit_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._credit_s):
                    await self._nobody.wait()
        self._at = self._clock()
        self._credit_s -= self._at - stopped
