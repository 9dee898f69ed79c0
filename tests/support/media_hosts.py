"""Media hosts on loopback, in the event loop of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Host:
    """A media host: its address and the requests that it got."""

    def __init__(self) -> None:
        self.requests: list[web.Request] = []
        self.port = 0

    def url(self, path: str = "/x") -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[Host]:
    host = Host()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request, web.BaseRequest)
        host.requests.append(request)  # type: ignore[arg-type]
        return await handler(request)  # type: ignore[arg-type]

    runner = web.ServerRunner(web.Server(handle, access_log=None), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host.port = runner.addresses[0][1]
    try:
        yield host
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw_serving(talk: Talk) -> AsyncIterator[tuple[int, list[int]]]:
    """A host that talks over a bare socket. Yields its port and a list that grows with each connection."""
    connections: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        try:
            await talk(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], connections


class SilentHost:
    """Never answers; sets an event when a client has sent its request, and one when it has left."""

    def __init__(self) -> None:
        self.arrived, self.gone = asyncio.Event(), asyncio.Event()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.arrived.set()
        assert await reader.read() == b""
        self.gone.set()


def answer(body: bytes = b"media", **options: Any) -> Handler:
    """Returns a handler that gives every request the same response."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, **options)

    return handler
