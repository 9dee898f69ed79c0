"""Back-pressure from the intake to the client.

Serve takes a body from uvicorn as fast as it comes and queues it without a limit. This ASGI middleware stands
between the two: it receives no further while more than AHEAD_BYTES are queued. Then uvicorn stops reading the
socket, and the client has to wait.

Most clients read only when they have sent everything. An answer before the end of its request's body closes
the connection and would be lost. So after such an answer the gate discards the rest of the body for a while,
and closes the connection then.

It also drops headers that would end in a bare 500 before the application: Serve reads some of them as UTF-8.
So a header must be ASCII. A long `x-request-id` is dropped too, since it would be in every log line of every
stage; Serve then makes one up.

`app/http/middleware.py` installs it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

AHEAD_BYTES = 2**20
LINGER_S = 30.0  # for which the rest of a body is discarded after the answer
LINGER_IDLE_S = 5.0  # without a byte of it
MAX_REQUEST_ID = 512  # characters

_KEY = "headrace.gate"


def taken(scope: Mapping[str, object], num_bytes: int) -> None:
    """Reports that the application took bytes of the body from the queue. Safe in any thread."""
    if gate := _gate(scope):
        gate.taken(num_bytes)


def arrival(scope: Mapping[str, object]) -> float | None:
    """When the headers of the request arrived, by `time.perf_counter`."""
    gate = _gate(scope)
    return gate.arrival if gate else None


def _gate(scope: Mapping[str, object]) -> _Gate | None:
    gate = scope.get(_KEY)
    return gate if isinstance(gate, _Gate) else None


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
        self._is_whole = False  # all of the request has arrived, or the client has left
        self._lingers = False  # the answer was complete before the request
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
