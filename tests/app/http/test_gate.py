"""As it stands in the ingress: uvicorn's `receive` before it, Serve's unbounded queue behind."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from app.http import gate
from app.http.gate import AHEAD_BYTES, GateMiddleware

CHUNK = b"x" * (256 * 1024)


class Body:
    """Chunks without an end, as uvicorn hands them out."""

    def __init__(self) -> None:
        self.num_bytes = 0

    async def receive(self) -> dict[str, Any]:
        self.num_bytes += len(CHUNK)
        return {"type": "http.request", "body": CHUNK, "more_body": True}


class Serve:
    """Takes what comes, as fast as it comes."""

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {}
        self.queue: deque[dict[str, Any]] = deque()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        while True:
            self.queue.append(await receive())


async def settled() -> None:
    """Every task has come as far as it can; nothing here waits for anything but the loop."""
    for _ in range(50):
        await asyncio.sleep(0)


async def never(_: object) -> None:
    raise AssertionError


async def test_no_more_is_received_than_the_application_takes() -> None:
    body, serve = Body(), Serve()
    task = asyncio.create_task(GateMiddleware(serve)({"type": "http", "headers": []}, body.receive, never))
    await settled()
    assert AHEAD_BYTES < body.num_bytes <= AHEAD_BYTES + len(CHUNK)
    before = body.num_bytes
    await asyncio.to_thread(gate.taken, serve.scope, 2 * len(CHUNK))  # the application's loop is another one
    await settled()
    assert body.num_bytes == before + 2 * len(CHUNK)
    task.cancel()


async def test_requests_do_not_share_a_gate() -> None:
    bodies = [Body(), Body()]
    middleware = GateMiddleware(Serve())
    tasks = [
        asyncio.create_task(middleware({"type": "http", "headers": []}, b.receive, never)) for b in bodies
    ]
    await settled()
    assert {body.num_bytes for body in bodies} == {AHEAD_BYTES + len(CHUNK)}
    for task in tasks:
        task.cancel()


async def test_other_connections_pass() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        assert await receive() == "as it is"

    async def receive() -> Any:
        return "as it is"

    await GateMiddleware(application)({"type": "lifespan"}, receive, never)


def test_without_the_middleware_nothing_is_counted() -> None:
    gate.taken({"type": "http"}, 5)


async def test_headers_that_serve_cannot_read_or_would_log_at_length_are_dropped() -> None:
    seen: list[tuple[bytes, bytes]] = []
    longest = (b"x-request-id", b"a" * 512)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])

    headers = [
        (b"x-request-id", b"\xff\xfea"),
        (b"accept", b"*/*"),
        (b"x-request-id", b"a" * 513),
        longest,
        (b"authorization", b"a" * 513),
    ]
    await GateMiddleware(application)({"type": "http", "headers": headers}, never, never)
    assert seen == [(b"accept", b"*/*"), longest, (b"authorization", b"a" * 513)]


ANSWER = [{"type": "http.response.start", "status": 413}, {"type": "http.response.body", "body": b"no"}]


async def refuses(scope: Any, receive: Any, send: Any) -> None:
    for message in ANSWER:
        await send(message)


async def talk(receive: Any) -> list[tuple[bytes, bool]]:
    """What an answer that comes before its request's body is sent as: bytes, and whether more will come."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await GateMiddleware(refuses)({"type": "http", "headers": []}, receive, send)
    return [(message.get("body", b""), message.get("more_body", False)) for message in sent[1:]]


async def test_an_early_answer_is_sent_at_once_and_ended_when_the_body_has_come() -> None:
    rest = iter([(CHUNK, True), (CHUNK, True), (CHUNK, False)])

    async def receive() -> dict[str, Any]:
        body, more = next(rest)
        return {"type": "http.request", "body": body, "more_body": more}

    assert await talk(receive) == [(b"no", True), (b"", False)]
    assert next(rest, None) is None


async def test_an_early_answer_is_ended_when_the_client_has_left() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    assert await talk(receive) == [(b"no", True), (b"", False)]


async def test_a_client_that_sends_nothing_more_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "LINGER_IDLE_S", 0.01)

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    assert await talk(receive) == [(b"no", True), (b"", False)]


async def test_a_body_without_an_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "LINGER_S", 0.01)
    body = Body()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return await body.receive()

    assert await talk(receive) == [(b"no", True), (b"", False)]


async def test_an_answer_to_a_whole_request_is_left_as_it_is() -> None:
    async def answers(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await refuses(scope, receive, send)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    sent: list[object] = []

    async def send(message: object) -> None:
        sent.append(message)

    await GateMiddleware(answers)({"type": "http", "headers": []}, receive, send)
    assert sent == ANSWER
