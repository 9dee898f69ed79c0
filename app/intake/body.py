"""Reads a request's body: long strings leave for the object store while the rest still arrives.

No step on the event loop takes long, whatever the client sends. See `app.intake.scanner` for how.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from app.intake.long_string import SEGMENT_BYTES, Segment
from app.intake.scanner import LONG_STRING_BYTES, Body, Scanner
from deployments.errors import Overloaded, RequestTimeout, RequestTooLarge
from deployments.runtime.memory import collect_soon
from deployments.runtime.metrics import BYTES_IN_FLIGHT
from deployments.runtime.payload import pack_pieces

IDLE_TIMEOUT_S = 20.0
_MAX_UPLOADS = 2  # segments of one body on their way to the object store; with more, the client must wait


class InFlight:
    """Limits the bytes of all bodies together that are being read or loaded."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Counts one body. Yields a function that takes its bytes so far and may raise Overloaded."""
        held = 0

        def hold(num_bytes: int) -> None:
            nonlocal held
            self.check(num_bytes - held)
            self._add(num_bytes - held)
            held = num_bytes

        try:
            yield hold
        finally:
            self._add(-held)
            if held >= SEGMENT_BYTES and self.num_bytes == 0:
                collect_soon()

    def _add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        BYTES_IN_FLIGHT.set(self.num_bytes)

    def check(self, more: int) -> None:
        if self.num_bytes + more > self._max_bytes:
            raise Overloaded("The server is at its limit for request bodies in memory. Try again later.")


class _Uploads:
    """Segments of one body on their way to the object store, oldest first."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []

    def start(self, pieces: list[bytes]) -> Segment:
        segment = Segment(sum(map(len, pieces)), asyncio.create_task(pack_pieces(pieces)))
        self._segments.append(segment)
        return segment

    async def wait(self, max_pending: int) -> None:
        """Waits until at most `max_pending` segments are on their way."""
        while len(self._segments) > max_pending:
            await self._segments[0].payload
            del self._segments[0]

    async def cancel(self) -> None:
        tasks = [segment.payload for segment in self._segments]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _uploads() -> AsyncIterator[_Uploads]:
    """All segments have arrived when the block ends. If it fails, those on their way are cancelled."""
    uploads = _Uploads()
    try:
        yield uploads
        await uploads.wait(0)
    except BaseException:
        await uploads.cancel()
        raise


async def read_body(
    chunks: AsyncIterable[bytes],
    *,
    max_bytes: int,
    threshold: int = LONG_STRING_BYTES,
    timeout_s: float = math.inf,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
    hold: Callable[[int], None] = lambda num_bytes: None,
    pause: Callable[[int], Awaitable[None]] | None = None,
) -> Body:
    """Reads a body to its end. An error of `chunks`, such as a disconnect, passes through.

    `timeout_s` is for the whole body, `idle_timeout_s` for each chunk. `hold` gets the number of bytes so far
    before a chunk is kept, that chunk included; it may raise. `pause` gets it afterwards, and the next chunk
    is read when it returns.

    Raises RequestTooLarge with the chunk that passes `max_bytes`, RequestTimeout, and InvalidRequest as soon
    as the body cannot become valid JSON within the bounds of the scanner.
    """
    async with _uploads() as uploads:
        scanner = Scanner(uploads.start, threshold)
        async for chunk in _in_time(chunks, timeout_s, idle_timeout_s):
            if scanner.num_bytes + len(chunk) > max_bytes:
                raise RequestTooLarge(
                    f"The body is over the limit of {max_bytes} bytes. Send less, or send URLs."
                )
            hold(scanner.num_bytes + len(chunk))
            for _ in scanner.feed(chunk):
                # A queue that is never empty never suspends: without this a fast client would own the loop.
                await asyncio.sleep(0)
            if pause:
                await pause(scanner.num_bytes)
            await uploads.wait(_MAX_UPLOADS)
        return scanner.finish()


async def _in_time(
    chunks: AsyncIterable[bytes], timeout_s: float, idle_timeout_s: float
) -> AsyncIterator[bytes]:
    clock = asyncio.get_running_loop().time
    end = clock() + timeout_s
    reader = aiter(chunks)
    try:
        while True:
            async with asyncio.timeout_at(min(end, clock() + idle_timeout_s)):
                chunk = await anext(reader)
            yield chunk
    except StopAsyncIteration:
        return
    except TimeoutError:
        raise RequestTimeout(
            f"The body did not arrive within {timeout_s:g} s, or nothing of it for {idle_timeout_s:g} s."
            " Send it faster, or send less."
        ) from None
