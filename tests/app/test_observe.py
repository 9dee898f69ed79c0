"""Counts of requests and calls in the ingress."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from app import observe
from app.http import gate
from app.http.request_times import RequestTimes
from app.observe import GENERATES, ObservedCall, Traffic
from app.stages import Timing
from deployments.errors import InvalidMedia
from deployments.runtime.metrics import (
    CALL_CANCELLATIONS,
    CALL_ERRORS,
    CALL_QUEUE,
    CALL_SERVICE,
    CALLS_OPEN,
    FIRST_TOKEN,
    INTER_TOKEN,
    PREPARING,
    REQUEST_SECONDS,
    Histogram,
)
from deployments.types import Delta

START = {"type": "http.response.start", "status": 200}
END = {"type": "http.response.body", "body": b"", "more_body": False}
MORE = {"type": "http.response.body", "body": b"x", "more_body": True}

App = Callable[[Any, Any, Any], Awaitable[None]]


def count(histogram: Histogram) -> int:
    return int(sum(s.value for s in histogram.samples() if ("le", "+Inf") in s.tags))


async def outcome(app: App, path: str = GENERATES, traffic: Traffic | None = None) -> list[str]:
    """Returns the outcomes that were counted for requests to the app."""

    def counts() -> dict[str, int]:
        samples = [s for s in REQUEST_SECONDS.samples() if ("le", "+Inf") in s.tags]
        return {dict(s.tags)["outcome"]: int(s.value) for s in samples if dict(s.tags)["endpoint"] == path}

    async def send(_: object) -> None: ...

    before = counts()
    with contextlib.suppress(ZeroDivisionError, asyncio.CancelledError):
        await RequestTimes(app, traffic or Traffic())({"type": "http", "path": path}, None, send)  # type: ignore[arg-type]
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


async def test_a_client_that_leaves_has_cancelled() -> None:
    async def is_cancelled(*_: object) -> None:
        raise asyncio.CancelledError

    async def just_stops(_: object, __: object, send: Any) -> None:
        await send(START)
        await send(MORE)

    assert await outcome(is_cancelled) == ["cancelled"]
    assert await outcome(just_stops) == ["cancelled"]


@pytest.mark.parametrize(("path", "counts"), [(GENERATES, 1), (f"{GENERATES}/render", 0)])
async def test_only_requests_that_will_generate_can_starve_the_model(path: str, counts: int) -> None:
    traffic, inside = Traffic(), []

    async def calls(*_: object) -> None:
        with ObservedCall(traffic, "MediaLoader", "image"):
            inside.append((traffic.calls_to("MediaLoader"), traffic.preparing["MediaLoader"]))
            traffic.report()
            gauges = CALLS_OPEN.value("MediaLoader", "image"), PREPARING.value("MediaLoader")
            assert gauges == (1, counts)

    await outcome(calls, path, traffic)
    assert inside == [(1, counts)]
    assert (traffic.calls_to("MediaLoader"), traffic.preparing["MediaLoader"]) == (0, 0)
    traffic.report()
    assert (CALLS_OPEN.value("MediaLoader", "image"), PREPARING.value("MediaLoader")) == (0, 0)


async def test_a_call_of_the_model_is_not_preparation() -> None:
    traffic = Traffic()

    async def calls(*_: object) -> None:
        with ObservedCall(traffic, "Model", "text"):
            assert (traffic.calls_to("Model"), traffic.preparing["Model"]) == (1, 0)

    await outcome(calls, traffic=traffic)


def test_a_body_is_preparation_while_it_is_read() -> None:
    traffic = Traffic()
    token = observe.CURRENT_REQUEST.set(observe.CurrentRequest(traffic, GENERATES, 0.0))
    try:
        with observe.intake():
            assert (traffic.preparing["Ingress"], traffic.bodies_read) == (1, 0)
        assert (traffic.preparing["Ingress"], traffic.bodies_read) == (0, 1)
        with pytest.raises(InvalidMedia), observe.intake():
            raise InvalidMedia("broken")
        assert (traffic.preparing["Ingress"], traffic.bodies_read) == (0, 1)
    finally:
        observe.CURRENT_REQUEST.reset(token)


def test_a_call_records_its_times() -> None:
    before = count(CALL_QUEUE), CALL_SERVICE.value("Tokenizer", "text")
    with ObservedCall(Traffic(), "Tokenizer", "text") as call:
        call.timing = Timing(start=0, queue=1, service=2000, fetch=1000)
    assert count(CALL_QUEUE) == before[0] + 1
    assert CALL_SERVICE.value("Tokenizer", "text") == pytest.approx(before[1] + 3)


def test_a_failed_call_is_counted_by_the_class_of_its_error() -> None:
    before = CALL_ERRORS.value("MediaLoader", "image", "InvalidMedia")
    with pytest.raises(InvalidMedia), ObservedCall(Traffic(), "MediaLoader", "image"):
        raise InvalidMedia("broken")
    assert CALL_ERRORS.value("MediaLoader", "image", "InvalidMedia") == before + 1


def test_a_cancelled_call_is_not_an_error() -> None:
    before = CALL_CANCELLATIONS.value("Model", "text")
    with pytest.raises(asyncio.CancelledError), ObservedCall(Traffic(), "Model", "text"):
        raise asyncio.CancelledError
    assert CALL_CANCELLATIONS.value("Model", "text") == before + 1


async def test_tokens_that_come_together_share_the_time() -> None:
    async def answers(_: object, __: object, send: Any) -> None:
        times = observe.TokenTimes()
        for token_ids in ([1], [2, 3, 4], []):
            times.observe(Delta(token_ids))

    first, between = count(FIRST_TOKEN), count(INTER_TOKEN)
    await outcome(answers)
    assert (count(FIRST_TOKEN) - first, count(INTER_TOKEN) - between) == (1, 3)


async def test_the_time_of_a_request_starts_with_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait before the application is called is included."""

    async def app(scope: object, receive: object, send: Any) -> None:
        await send(START)
        await send(END)

    async def send(_: object) -> None: ...

    monkeypatch.setattr(gate, "arrival", lambda scope: time.perf_counter() - 100)
    before = REQUEST_SECONDS.value(GENERATES, "200")
    scope = {"type": "http", "path": GENERATES}
    await RequestTimes(app, Traffic())(scope, None, send)  # type: ignore[arg-type]
    assert REQUEST_SECONDS.value(GENERATES, "200") - before >= 100
