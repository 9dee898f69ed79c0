"""Back-pressure from the intake to the client.

Serve takes a body from uvicorn as fast as it comes and queues it, without a bound, for the application. This
ASGI middleware stands between the two: it receives no further while more than AHEAD_BYTES are queued. uvicorn
then stops reading the socket, and the client has to wait.

An answer that comes before the end of its request's body closes the connection, and would be lost with it:
most clients read only when they have sent everything. So after such an answer what comes is thrown away for a
while, and the connection is closed then.

It also drops headers that are not ASCII: Serve reads some of them as UTF-8, and an `x-request-id` that is
none would end in a bare 500 before the application. One that is long would be in every line of every stage's
log; Serve then makes up another.

`app/http/middleware.py` installs it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

AHEAD_BYTES = 2**20
LINGER_S = 30.0  # that a client may go on sending after its answer
LINGER_IDLE_S = 5.0  # and this long nothing
MAX_REQUEST_ID = 512  # characters

_KEY = "headrace.gate"


def taken(scope: Mapping[str, Any], num_bytes: int) -> None:
    """The application took so many bytes of the request's body from the queue. From any thread."""
    if gate := scope.get(_KEY):
        gate.taken(num_bytes)


def arrival(scope: Mapping[str, Any]) -> float | None:
    """When the head of the request was read, by `time.perf_counter`."""
    gate = scope.get(_KEY)
    return gate.arrival if gate else None


class GateMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["headers"] = [(name, value) for name, value in scope["headers"] if _may_pass(name, value)]
        scope[_KEY] = gate = _Gate(receive, send)
        await self._app(scope, gate.receive, gate.send)
        await gate.linger()


def _may_pass(name: bytes, value: bytes) -> bool:
    return value.isascii() and (name != b"x-request-id" or len(value) <= MAX_REQUEST_ID)


class _Gate:
    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._is_whole = False  # the request has come, or its client has left
        self._lingers = False  # the answer was sent before that
        self._loop = asyncio.get_running_loop()
        self._is_open = asyncio.Event()
        self._queued = 0
        self.arrival = time.perf_counter()
        self._move(0)

    async def receive(self) -> Message:
        await self._is_open.wait()
        message = await self._next()
        self._move(len(message.get("body", b"")))
        return message

    async def _next(self) -> Message:
        message = await self._receive()
        self._is_whole = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if is_last and not self._is_whole:
            self._lingers = True
            message = {**message, "more_body": True}
        await self._send(message)

    async def linger(self) -> None:
        if not self._lingers:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while not self._is_whole:
                    async with asyncio.timeout(LINGER_IDLE_S):
                        await self._next()
        await self._send({"type": "http.response.body"})

    def taken(self, num_bytes: int) -> None:
        self._loop.call_soon_threadsafe(self._move, -num_bytes)

    def _move(self, num_bytes: int) -> None:
        self._queued += num_bytes
        if self._queued <= AHEAD_BYTES:
            self._is_open.set()
        else:
            self._is_open.clear()
