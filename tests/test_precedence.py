"""Which bodies wait for which requests, and for how long at most."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from app.intake import read_body
from app.precedence import Precedence, Way

CHUNK = 2**16
LARGE = 32  # chunks


async def body(num_chunks: int) -> AsyncGenerator[bytes]:
    yield b'{"a":"'
    for _ in range(num_chunks):
        yield b"x" * CHUNK
    yield b'"}'


def patient(precedence: Precedence) -> Way:
    """Of a body that was read for an hour."""
    times = iter([0.0])
    return precedence.way(lambda: next(times, 3600.0))


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
    give = patient(precedence).give
    large = asyncio.create_task(read_body(body(LARGE), max_bytes=2**22, give_way=give))
    small = await read_body(body(1), max_bytes=2**22, give_way=give)
    assert small.num_bytes == CHUNK + 8
    await turns()
    assert not large.done()
    token.set()
    assert await first == "a"  # and the answer goes on
    assert (await large).num_bytes == LARGE * CHUNK + 8
    await text.aclose()


async def test_texts_without_an_end_do_not_stop_a_body() -> None:
    precedence = Precedence()
    with precedence.claim():
        way = precedence.way()
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
        await patient(precedence).give()
