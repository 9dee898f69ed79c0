"""Text-only requests go first: large bodies pause while such a request waits for its first token.

Reading a body of 100 MB keeps the ingress, HAProxy and the client at work for as long as it takes. A text,
which needs very little of each of them, would wait for a core at every hop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import TypeVar

T = TypeVar("T")

LARGE_BODY_BYTES = 2**20  # a smaller body has arrived before it could pause
_MAX_PAUSE_S = 0.25  # at a time: a request that waits longer does not wait for a core


class Precedence:
    """Precedence among the requests of one event loop."""

    def __init__(self) -> None:
        self._num_holders = 0
        self._is_free = asyncio.Event()
        self._is_free.set()

    @contextmanager
    def hold_priority(self) -> Iterator[None]:
        """Large bodies pause until the block ends."""
        self._num_holders += 1
        self._is_free.clear()
        try:
            yield
        finally:
            self._num_holders -= 1
            if not self._num_holders:
                self._is_free.set()

    async def until_first(self, deltas: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """Yields the same deltas. It holds priority until the first one."""
        async with aclosing(deltas):
            with self.hold_priority():
                first = await anext(deltas, None)
            if first is None:
                return
            yield first
            async for delta in deltas:
                yield delta

    def throttle(self, clock: Callable[[], float] = time.monotonic) -> Throttle:
        """The throttle of one body, whose reading begins now."""
        return Throttle(self._is_free, clock)


class Throttle:
    """Pauses the reading of one body.

    Its pauses take no longer in total than the reading did, so that no number of texts can stop a body.
    """

    def __init__(self, is_free: asyncio.Event, clock: Callable[[], float]) -> None:
        self._is_free = is_free
        self._clock = clock
        self._resumed = clock()
        self._credit_s = 0.0  # reading time less pauses, at most _MAX_PAUSE_S

    async def pause(self, num_bytes: int) -> None:
        """Returns when no request holds priority, or the credit is used up. `num_bytes`: read so far."""
        start = self._clock()
        self._credit_s = min(self._credit_s + start - self._resumed, _MAX_PAUSE_S)
        if num_bytes > LARGE_BODY_BYTES and not self._is_free.is_set() and self._credit_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._credit_s):
                    await self._is_free.wait()
        self._resumed = self._clock()
        self._credit_s -= self._resumed - start
