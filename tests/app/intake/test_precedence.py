"""Large bodies pause for text-only requests, and for a limited time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

import pytest

from app.intake.body import read_body
from app.intake.precedence import LARGE_BODY_BYTES, Precedence
from tests.support.tasks import started

CHUNK = 2**16
LARGE = 32  # chunks


async def body(num_chunks: int) -> AsyncGenerator[bytes]:
    yield b'{"a":"'
    for _ in range(num_chunks):
        yield b"x" * CHUNK
    yield b'"}'


def after_an_hour() -> Callable[[], float]:
    """The clock of a body that was read for an hour before its first pause."""
    times = iter([0.0])
    return lambda: next(times, 3600.0)


async def test_a_large_body_pauses_until_a_text_has_its_first_token() -> None:
    precedence, token = Precedence(), asyncio.Event()

    async def answer() -> AsyncGenerator[str]:
        await token.wait()
        yield "a"
        await asyncio.Event().wait()

    text = precedence.until_first(answer())
    first = await started(anext(text))
    throttle = precedence.throttle(after_an_hour())
    pausing = asyncio.Event()
    resumed_after_token: list[bool] = []

    async def pause(num_bytes: int) -> None:
        if num_bytes <= LARGE_BODY_BYTES:
            return
        pausing.set()
        await throttle.pause(num_bytes)
        resumed_after_token.append(token.is_set())

    large = asyncio.create_task(read_body(body(LARGE), max_bytes=2**22, pause=pause))
    small = await read_body(body(1), max_bytes=2**22, pause=precedence.throttle(after_an_hour()).pause)
    assert small.num_bytes == CHUNK + 8
    await pausing.wait()
    token.set()
    assert await first == "a"  # and the answer goes on
    assert (await large).num_bytes == LARGE * CHUNK + 8
    assert resumed_after_token
    assert all(resumed_after_token)
    await text.aclose()


async def test_endless_texts_do_not_stop_a_body() -> None:
    precedence = Precedence()
    with precedence.hold_priority():
        async with asyncio.timeout(20):
            await read_body(body(LARGE), max_bytes=2**22, pause=precedence.throttle().pause)


async def test_pauses_take_no_longer_than_the_reading_did() -> None:
    precedence, now = Precedence(), 0.0
    with precedence.hold_priority():
        throttle = precedence.throttle(lambda: now)
        now = 0.05  # spent on reading
        pausing = await started(throttle.pause(LARGE_BODY_BYTES + 1))
        assert not pausing.done()
        now = 0.1  # the end of a pause that takes all of the credit
        async with asyncio.timeout(20):
            await pausing
        async with asyncio.timeout(0):  # raises if the throttle waits
            await throttle.pause(LARGE_BODY_BYTES + 1)


async def test_one_pause_is_short_however_long_the_reading_took() -> None:
    precedence = Precedence()
    with precedence.hold_priority():
        async with asyncio.timeout(20):
            await precedence.throttle(after_an_hour()).pause(LARGE_BODY_BYTES + 1)


async def test_a_text_that_fails_or_is_cancelled_gives_its_priority_up() -> None:
    precedence = Precedence()

    async def fails() -> AsyncGenerator[str]:
        raise ValueError("broken")
        yield ""

    async def waits() -> AsyncGenerator[str]:
        await asyncio.Event().wait()
        yield ""

    with pytest.raises(ValueError, match="broken"):
        await anext(precedence.until_first(fails()))
    cancelled = await started(anext(precedence.until_first(waits())))
    cancelled.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await cancelled
    async with asyncio.timeout(0):  # raises if the throttle waits
        await precedence.throttle(after_an_hour()).pause(LARGE_BODY_BYTES + 1)
