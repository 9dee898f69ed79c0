"""Back-pressure from the intake to the client.

Serve takes a body from uvicorn as fast as it comes and queues it, without a bound, for the loop that runs the
application. This ASGI middleware stands between the two, on uvicorn's loop: it receives no further while more
than AHEAD_BYTES are queued. uvicorn then stops reading the socket, and the client has to wait.

It also drops headers that are not ASCII: Serve reads some of them as UTF-8, and an `x-request-id` that is
none would end in a bare 500 before the application.

`serve_config.yaml` installs it, through Serve's RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

AHEAD_BYTES = 2**20

_KEY = "headrace.gate"


def middlewares() -> list[Middleware]:
    return [Middleware(GateMiddleware)]


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
        if scope["type"] == "http":
            scope["headers"] = [pair for pair in scope["headers"] if pair[1].isascii()]
            scope[_KEY] = gate = _Gate(receive)
            receive = gate.receive
        await self._app(scope, receive, send)


class _Gate:
    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._is_open = asyncio.Event()
        self._queued = 0
        self.arrival = time.perf_counter()
        self._move(0)

    async def receive(self) -> Message:
        await self._is_open.wait()
        message = await self._receive()
        self._move(len(message.get("body", b"")))
        return message

    def taken(self, num_bytes: int) -> None:
        self._loop.call_soon_threadsafe(self._move, -num_bytes)

    def _move(self, num_bytes: int) -> None:
        self._queued += num_bytes
        if self._queued <= AHEAD_BYTES:
            self._is_open.set()
        else:
            self._is_open.clear()
