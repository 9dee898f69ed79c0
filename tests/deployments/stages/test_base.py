"""The base of stages and the endpoint decorator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from deployments.errors import InvalidMedia, StageTimeout
from deployments.runtime.call_record import current_call
from deployments.runtime.pool import WorkPool
from deployments.stages.base import Stage, StageConfig, endpoint, pool_activity, stream_endpoint
from deployments.types import Activity, CallHeader, Delta, MediaSource, Modality, Payload


class Echo(Stage):
    def __init__(self) -> None:
        super().__init__(StageConfig())
        self._pool = WorkPool(1)
        self.ready()

    @endpoint
    async def echo(self, value: int) -> int:
        return await self._pool.run(abs, value)

    @endpoint
    async def param(self) -> str:
        return current_call().param

    @endpoint
    async def fail(self, error: Exception) -> None:
        raise error

    @endpoint
    async def hang(self, source: MediaSource) -> None:
        await asyncio.Event().wait()

    @stream_endpoint
    async def count(self, limit: int) -> AsyncGenerator[Delta]:
        for number in range(limit):
            yield Delta([number])

    def _activity(self) -> list[Activity]:
        return pool_activity(self, self._pool)


class Renamed(Echo):
    """A subclass in a test is still the same stage."""


async def test_a_reply_has_the_value_and_the_time_in_the_pool() -> None:
    stage = Echo()
    reply = await stage.echo(CallHeader(), -3)
    assert reply.value == 3
    assert reply.service_ms > 0
    assert reply.fetch_ms == 0
    assert [part.done for part in await stage.activity()] == [1]


async def test_a_stage_is_named_by_its_class() -> None:
    assert (Echo.name, Renamed.name) == ("Echo", "Echo")
    assert [part.name for part in await Renamed().activity()] == ["Echo"]


async def test_calls_at_once_keep_their_own_param() -> None:
    stage = Echo()
    replies = await asyncio.gather(*(stage.param(CallHeader(param=str(i))) for i in range(3)))
    assert [reply.value for reply in replies] == ["0", "1", "2"]


async def test_an_error_gets_the_param_of_its_call_unless_it_has_one() -> None:
    header = CallHeader(param="messages[0].content[1]")
    with pytest.raises(InvalidMedia) as caught:
        await Echo().fail(header, InvalidMedia("broken"))
    assert caught.value.param == "messages[0].content[1]"
    with pytest.raises(InvalidMedia) as caught:
        await Echo().fail(header, InvalidMedia("broken", "messages[2]"))
    assert caught.value.param == "messages[2]"


async def test_a_passed_deadline_names_the_stage_and_releases_the_buffers() -> None:
    source = MediaSource(Modality.IMAGE, "data", payloads=[Payload(1, inline=b"x")])
    with pytest.raises(StageTimeout, match="deadline passed in Echo") as caught:
        await Echo().hang(CallHeader(timeout_s=0.01, param="messages[0]"), source)
    assert caught.value.param == "messages[0]"
    assert source.payloads == []


async def test_a_timeout_of_the_method_itself_is_not_the_deadline() -> None:
    with pytest.raises(TimeoutError, match="a socket"):
        await Echo().fail(CallHeader(timeout_s=30), TimeoutError("a socket"))


async def test_a_stream_counts_as_done_when_it_ends() -> None:
    stage = Echo()
    deltas = [delta.token_ids async for delta in stage.count(CallHeader(), 2)]
    assert deltas == [[0], [1]]
    assert [part.done for part in await stage.activity()] == [1]
