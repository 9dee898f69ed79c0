"""Which bodies wait for which requests, and for how long at most."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator

import pytest

from app.intake.body import read_body
from app.intake.precedence import Precedence, Way

CHUNK = 2**16
LARGE = 32  # chunks


async def body(num_chunks: int) -> AsyncGenerator[bytes]:
    yield b'{"a":"'
    for _ in range(num_chunks):
        yield b"x" * CHUNK
    yield b'"}'


@contextlib.contextmanager
def patient(precedence: Precedence) -> Iterator[Way]:
    """Of a body that was read for an hour."""
    times = iter([0.0])
    with precedence.way(clock=lambda: next(times, 3600.0)) as way:
        yield way


async def turns() -> None:
    for _ in range(500):
        await asyncio.sleep(0)


async def test_a_large_body_waits_until_a_text_has_its_first_token() -> None:
    precedence, token = Precedence(), asyncio.Event()

    async def answer() -> AsyncGenerator[str]:
        await token.wait()
        yield "a"
        await asyncio.Event().wait()

    text = precedence.until_first(answer())
    first = asyncio.ensure_future(anext(text))
    await asyncio.sleep(0)
    with patient(precedence) as way:
        large = asyncio.create_task(read_body(body(LARGE), max_bytes=2**22, give_way=way.give))
        small = await read_body(body(1), max_bytes=2**22, give_way=way.give)
        assert small.num_bytes == CHUNK + 8
        await turns()
        assert not large.done()
        token.set()
        assert await first == "a"  # and the answer goes on
        assert (await large).num_bytes == LARGE * CHUNK + 8
    await text.aclose()


async def test_texts_without_an_end_do_not_stop_a_body() -> None:
    precedence = Precedence()
    with precedence.claim(), precedence.way() as way:
        async with asyncio.timeout(20):
            await read_body(body(LARGE), max_bytes=2**22, give_way=way.give)


async def test_who_fails_or_leaves_is_waited_for_no_more() -> None:
    precedence = Precedence()

    async def fails() -> AsyncGenerator[str]:
        raise ValueError("broken")
        yield ""

    async def waits() -> AsyncGenerator[str]:
        await asyncio.Event().wait()
        yield ""

    with pytest.raises(ValueError, match="broken"):
        await anext(precedence.until_first(fails()))
    left = asyncio.ensure_future(anext(precedence.until_first(waits())))
    await asyncio.sleep(0)
    left.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await left
    async with asyncio.timeout(20):
        with patient(precedence) as way:
            await way.give(0)


MIB = 2**20


class Bodies:
    """Of 100 MiB each, and the clock that they are read by."""

    def __init__(self, precedence: Precedence, stack: contextlib.ExitStack) -> None:
        self.now = 0.0
        self._new = lambda: stack.enter_context(precedence.way(100 * MIB, lambda: self.now))

    async def read(self, mib: int) -> Way:
        """A body of which so many came, and nobody is before it."""
        way = self._new()
        await way.give(mib * MIB)
        return way

    async def waiting(self, mib: int) -> asyncio.Task[None]:
        """That of another one to have its turn."""
        task = asyncio.create_task(self._new().give(mib * MIB))
        await turns()
        assert not task.done()
        return task


async def test_of_bodies_the_one_that_is_nearest_to_its_end_is_read_alone() -> None:
    with contextlib.ExitStack() as stack:
        bodies = Bodies(Precedence(), stack)
        first = await bodies.read(50)
        second, third = await bodies.waiting(40), await bodies.waiting(30)
        await first.give(60 * MIB)  # it has precedence, and goes on
        await bodies.read(99)
        await turns()
        assert not second.done()
        assert not third.done()
    async with asyncio.timeout(20):
        await asyncio.gather(second, third)


async def test_a_body_that_does_not_come_on_is_not_waited_for() -> None:
    with contextlib.ExitStack() as stack:
        bodies = Bodies(Precedence(), stack)
        await bodies.read(50)
        second = await bodies.waiting(40)
        bodies.now = 1.0
        async with asyncio.timeout(20):
            await second


async def test_a_body_whose_client_is_slower_than_its_reading_is_not_waited_for() -> None:
    with contextlib.ExitStack() as stack:
        bodies = Bodies(Precedence(), stack)
        first = await bodies.read(50)
        await first.give(50 * MIB + 16 * 1024)
        second = await bodies.read(40)
        await second.give(41 * MIB)


async def test_bodies_without_an_end_do_not_stop_another() -> None:
    with contextlib.ExitStack() as stack:
        bodies = Bodies(Precedence(), stack)
        first = await bodies.read(1)
        second = await bodies.waiting(0)
        async with asyncio.timeout(20):
            read = 1
            while not second.done():
                bodies.now += 0.009
                read += 1
                await first.give(read * MIB)
                await asyncio.sleep(0)
        assert bodies.now > 1
