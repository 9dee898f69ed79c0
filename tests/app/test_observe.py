"""What the ingress counts of requests and calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from app import observe
from app.observe import GENERATES, RequestTimes, calling
from deployments.errors import InvalidMedia
from deployments.runtime.metrics import (
    CALL_CANCELLATIONS,
    CALL_ERRORS,
    CALLS_OPEN,
    FIRST_TOKEN,
    INTER_TOKEN,
    PREPARING,
    REQUEST_SECONDS,
)
from deployments.types import Delta

START = {"type": "http.response.start", "status": 200}
END = {"type": "http.response.body", "body": b"", "more_body": False}
MORE = {"type": "http.response.body", "body": b"x", "more_body": True}

App = Callable[[Any, Any, Any], Awaitable[None]]


async def outcome(app: App, path: str = GENERATES) -> list[str]:
    """How requests to the app ended, as counted."""

    def counts() -> dict[str, int]:
        samples = [s for s in REQUEST_SECONDS.samples() if ("le", "+Inf") in s.tags]
        return {dict(s.tags)["outcome"]: int(s.value) for s in samples if dict(s.tags)["endpoint"] == path}

    async def send(_: object) -> None: ...

    before = counts()
    with contextlib.suppress(ZeroDivisionError, asyncio.CancelledError):
        await RequestTimes(app)({"type": "http", "path": path}, None, send)  # type: ignore[arg-type]
    return [name for name, count in counts().items() if count > before.get(name, 0)]


async def test_a_request_ends_with_its_status() -> None:
    async def answers(_: object, __: object, send: Any) -> None:
        await send(START | {"status": 422})
        await send(END)

    assert await outcome(answers) == ["422"]
    assert await outcome(answers, "/v1/models") == []


async def test_a_stream_may_end_with_an_error() -> None:
    async def breaks(_: object, __: object, send: Any) -> None:
        await send(START)
        await send(MORE)
        observe.stream_failed(503)
        await send(END)

    assert await outcome(breaks) == ["503"]


async def test_a_bug_is_a_500() -> None:
    async def fails(*_: object) -> None:
        raise ZeroDivisionError

    assert await outcome(fails) == ["500"]


async def test_who_leaves_has_cancelled() -> None:
    async def is_cancelled(*_: object) -> None:
        raise asyncio.CancelledError

    async def just_stops(_: object, __: object, send: Any) -> None:
        await send(START)
        await send(MORE)

    assert await outcome(is_cancelled) == ["cancelled"]
    assert await outcome(just_stops) == ["cancelled"]


@pytest.mark.parametrize(("path", "counts"), [(GENERATES, 1), (f"{GENERATES}/render", 0)])
async def test_only_what_goes_to_the_model_can_starve_it(path: str, counts: int) -> None:
    inside: list[tuple[float, float]] = []

    async def calls(*_: object) -> None:
        with calling("MediaLoader", "image"):
            inside.append((CALLS_OPEN.value("MediaLoader", "image"), PREPARING.value("load")))

    await outcome(calls, path)
    assert inside == [(1, counts)]
    assert (CALLS_OPEN.value("MediaLoader", "image"), PREPARING.value("load")) == (0, 0)


def test_a_call_fails_by_the_class_of_its_error() -> None:
    before = CALL_ERRORS.value("MediaLoader", "image", "InvalidMedia")
    with pytest.raises(InvalidMedia), calling("MediaLoader", "image"):
        raise InvalidMedia("broken")
    assert CALL_ERRORS.value("MediaLoader", "image", "InvalidMedia") == before + 1


def test_a_cancelled_call_is_no_error() -> None:
    before = CALL_CANCELLATIONS.value("Model", "text")
    with pytest.raises(asyncio.CancelledError), calling("Model", "text"):
        raise asyncio.CancelledError
    assert CALL_CANCELLATIONS.value("Model", "text") == before + 1


async def test_tokens_that_come_together_share_the_time() -> None:
    async def answers(_: object, __: object, send: Any) -> None:
        times = observe.TokenTimes()
        for token_ids in ([1], [2, 3, 4], []):
            times.saw(Delta(token_ids))

    first, between = FIRST_TOKEN.count(), INTER_TOKEN.count()
    await outcome(answers)
    assert (FIRST_TOKEN.count() - first, INTER_TOKEN.count() - between) == (1, 3)


async def test_a_request_counts_from_its_head_on() -> None:
    """Also what it waited before the application was asked."""

    async def app(scope: object, receive: object, send: Any) -> None:
        await send(START)
        await send(END)

    async def send(_: object) -> None: ...

    waited = SimpleNamespace(arrival=time.perf_counter() - 100)
    before = REQUEST_SECONDS.value(GENERATES, "200")
    scope = {"type": "http", "path": GENERATES, "headrace.gate": waited}
    await RequestTimes(app)(scope, None, send)  # type: ignore[arg-type]
    assert REQUEST_SECONDS.value(GENERATES, "200") - before >= 100
