"""The gate between uvicorn's `receive` and the unbounded queue of Ray Serve."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.http import gate
from app.http.gate import AHEAD_BYTES, GateMiddleware

CHUNK = b"x" * (256 * 1024)


class Body:
    """Chunks without an end, as uvicorn hands them out."""

    def __init__(self) -> None:
        self.num_bytes = 0

    async def receive(self) -> Message:
        self.num_bytes += len(CHUNK)
        assert self.num_bytes < 10 * AHEAD_BYTES, "the gate does not close"
        return {"type": "http.request", "body": CHUNK, "more_body": True}


async def receive_all(receive: Receive) -> None:
    """Receives as fast as Serve does, until the gate makes it wait.

    The loop can only cancel a task that waits, so a limit of 0 s ends the first wait.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            while True:
                await receive()


async def receives_nothing() -> Message:
    raise AssertionError


async def sends_nothing(_: Message) -> None:
    raise AssertionError


async def test_no_more_is_received_than_the_application_takes() -> None:
    body = Body()

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await receive_all(receive)
        assert body.num_bytes == AHEAD_BYTES + len(CHUNK)
        await asyncio.to_thread(gate.taken, scope, 2 * len(CHUNK))  # the application's loop is another one
        await receive_all(receive)

    await GateMiddleware(application)({"type": "http", "headers": []}, body.receive, sends_nothing)
    assert body.num_bytes == AHEAD_BYTES + 3 * len(CHUNK)


async def test_requests_do_not_share_a_gate() -> None:
    bodies = [Body(), Body()]

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await receive_all(receive)

    middleware = GateMiddleware(application)
    for body in bodies:
        await middleware({"type": "http", "headers": []}, body.receive, sends_nothing)
    assert [body.num_bytes for body in bodies] == [AHEAD_BYTES + len(CHUNK)] * 2


async def test_other_connections_pass() -> None:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        received.append(await receive())

    async def receive() -> Message:
        return message

    message, received = {"type": "lifespan.startup"}, list[Message]()
    await GateMiddleware(application)({"type": "lifespan"}, receive, sends_nothing)
    assert received == [message]


def test_without_the_middleware_nothing_is_counted() -> None:
    gate.taken({"type": "http"}, 5)


async def test_headers_that_serve_cannot_read_or_would_log_at_length_are_dropped() -> None:
    seen: list[tuple[bytes, bytes]] = []
    longest = (b"x-request-id", b"a" * 512)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(scope["headers"])

    headers = [
        (b"x-request-id", b"\xff\xfea"),
        (b"accept", b"*/*"),
        (b"x-request-id", b"a" * 513),
        longest,
        (b"authorization", b"a" * 513),
    ]
    await GateMiddleware(application)({"type": "http", "headers": headers}, receives_nothing, sends_nothing)
    assert seen == [(b"accept", b"*/*"), longest, (b"authorization", b"a" * 513)]


ANSWER: list[Message] = [
    {"type": "http.response.start", "status": 413},
    {"type": "http.response.body", "body": b"no"},
]


async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
    for message in ANSWER:
        await send(message)


async def talk(receive: Receive) -> list[tuple[bytes, bool]]:
    """Returns how an answer is sent that comes before its request's body: bytes, and `more_body`."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await GateMiddleware(refuses)({"type": "http", "headers": []}, receive, send)
    return [(message.get("body", b""), message.get("more_body", False)) for message in sent[1:]]


async def test_an_early_answer_is_sent_at_once_and_ended_when_the_body_has_come() -> None:
    rest = iter([(CHUNK, True), (CHUNK, True), (CHUNK, False)])

    async def receive() -> Message:
        body, more = next(rest)
        return {"type": "http.request", "body": body, "more_body": more}

    assert await talk(receive) == [(b"no", True), (b"", False)]
    assert next(rest, None) is None


async def test_an_early_answer_is_ended_when_the_client_has_left() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    assert await talk(receive) == [(b"no", True), (b"", False)]


async def test_a_client_that_sends_nothing_more_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "LINGER_IDLE_S", 0.01)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    assert await talk(receive) == [(b"no", True), (b"", False)]


async def test_lingering_ends_before_an_endless_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "LINGER_S", 0.01)

    async def receive() -> Message:
        await asyncio.sleep(0)  # gives way to the loop, which ends the lingering
        return {"type": "http.request", "body": CHUNK, "more_body": True}

    assert await talk(receive) == [(b"no", True), (b"", False)]


async def test_an_answer_to_a_whole_request_is_left_as_it_is() -> None:
    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await refuses(scope, receive, send)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await GateMiddleware(answers)({"type": "http", "headers": []}, receive, send)
    assert sent == ANSWER
