"""Tests the fetcher against real servers on loopback, which the policy must allow."""

from __future__ import annotations

import asyncio
import gzip
import socket
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from multidict import CIMultiDict

from deployments.errors import FetchFailed, FetchRefused, MediaTooLarge, StageTimeout
from deployments.media.fetch import Fetcher
from deployments.media.urls import UrlPolicy
from tests.support.hostile_urls import targets
from tests.support.media_hosts import Handler, SilentHost, answer, raw_serving, serving

LOOPBACK = UrlPolicy.of([], ["127.0.0.0/8"])
MIB = 1 << 20


@asynccontextmanager
async def fetching(policy: UrlPolicy = LOOPBACK, **options: Any) -> AsyncIterator[Fetcher]:
    fetcher = Fetcher(policy, retry_pause_s=0.0, **options)
    try:
        yield fetcher
    finally:
        await fetcher.close()


def redirect(location: Callable[[web.Request], str], status: int = 302) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, headers={"Location": location(request)})

    return handler


async def test_the_body_arrives_with_any_content_type() -> None:
    body = bytes(range(256)) * 4096
    for headers in ({"Content-Type": "text/html"}, {}):
        async with serving(answer(body, headers=headers)) as host, fetching() as fetcher:
            assert (await fetcher.fetch(host.url(), MIB, 5)).body(MIB) == body


async def test_the_url_is_sent_byte_for_byte_with_a_user_agent_and_no_cookies() -> None:
    path = "/a%2Fb/../%7e/%41?q=%20+&sig=a%2Bb%3D&empty&a=1;b"
    async with serving(answer(headers={"Set-Cookie": "a=b"})) as host, fetching() as fetcher:
        await fetcher.fetch(host.url(path + "#fragment"), MIB, 5)
        await fetcher.fetch(host.url(path), MIB, 5)
        for request in host.requests:
            assert request.raw_path == path
            assert "Headrace" in request.headers["User-Agent"]
            assert "Cookie" not in request.headers


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 451])
async def test_a_4xx_is_refused_without_a_retry(status: int) -> None:
    async with serving(answer(b"<html>", status=status)) as host, fetching() as fetcher:
        with pytest.raises(FetchRefused, match=f"The media host answered {status}"):
            await fetcher.fetch(host.url(), MIB, 5)
        assert len(host.requests) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 599])
async def test_transient_statuses_are_retried_once(status: int) -> None:
    async with serving(answer(status=status)) as host, fetching() as fetcher:
        with pytest.raises(FetchFailed, match=f"The media host answered {status}"):
            await fetcher.fetch(host.url(), MIB, 5)
        assert len(host.requests) == 2


async def test_a_retry_can_succeed() -> None:
    statuses = iter([503, 200])

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=next(statuses), body=b"late")

    async with serving(handler) as host, fetching() as fetcher:
        assert (await fetcher.fetch(host.url(), MIB, 5)).body(MIB) == b"late"


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"", id="closed"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort", id="cut short"),
        pytest.param(b"SSH-2.0-OpenSSH\r\n\r\n", id="not http"),
        pytest.param(b"HTTP/1.1 2x0\r\n\r\n", id="bad status"),
    ],
)
async def test_a_broken_host_is_retried_once(said: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)

    async with raw_serving(talk) as (port, connections), fetching() as fetcher:
        with pytest.raises(FetchFailed, match="broke the connection or does not speak HTTP"):
            await fetcher.fetch(f"http://127.0.0.1:{port}/", MIB, 5)
        assert len(connections) in (2, 4)  # aiohttp itself retries if nothing came back


async def test_an_unreachable_host_fails() -> None:
    async with serving(answer()) as host:
        closed = host.url()
    async with fetching() as fetcher:
        with pytest.raises(FetchFailed, match="cannot be reached"):
            await fetcher.fetch(closed, MIB, 5)


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (socket.EAI_NONAME, FetchRefused, "name is unknown. Check the URL"),
        (socket.EAI_NODATA, FetchRefused, "name is unknown. Check the URL"),
        (socket.EAI_AGAIN, FetchFailed, "name cannot be resolved"),
        (socket.EAI_FAIL, FetchFailed, "name cannot be resolved"),
    ],
)
async def test_an_unresolvable_name_fails_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception], message: str
) -> None:
    async def getaddrinfo(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(code, "the resolver's own text")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    async with fetching() as fetcher:
        with pytest.raises(error, match=message):
            await fetcher.fetch("http://no-such-host.invalid/", MIB, 5)


async def test_a_host_without_tls_fails() -> None:
    async with serving(answer()) as host, fetching() as fetcher:
        with pytest.raises(FetchFailed, match="TLS"):
            await fetcher.fetch(host.url().replace("http:", "https:"), MIB, 5)


async def test_a_silent_host_times_out() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(handler) as host, fetching() as fetcher:
        with pytest.raises(StageTimeout, match=r"did not deliver within 0\.05 s"):
            await fetcher.fetch(host.url(), MIB, 0.05)


@pytest.mark.parametrize("has_length", [True, False], ids=["content length", "chunked"])
async def test_the_byte_cap_stops_the_stream(has_length: bool) -> None:
    stopped = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if has_length:
            response.content_length = 1 << 40
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 65536)
        except (ConnectionError, asyncio.CancelledError):
            stopped.set()
            raise

    async with serving(handler) as host, fetching() as fetcher:
        with pytest.raises(MediaTooLarge, match=f"larger than the limit of {MIB} bytes"):
            await fetcher.fetch(host.url(), MIB, 5)
        await asyncio.wait_for(stopped.wait(), 5)


async def test_the_byte_cap_is_exact() -> None:
    async with serving(answer(b"12345")) as host, fetching() as fetcher:
        assert (await fetcher.fetch(host.url(), 5, 5)).body(5) == b"12345"
        with pytest.raises(MediaTooLarge):
            await fetcher.fetch(host.url(), 4, 5)


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(b"media")),
        ("X-GZIP", gzip.compress(b"me") + gzip.compress(b"dia")),
        ("deflate", zlib.compress(b"media")),
        ("deflate", raw_deflate(b"media")),
        ("identity", b"media"),
    ],
)
async def test_compressed_bodies_are_read(encoding: str, body: bytes) -> None:
    async with serving(answer(body, headers={"Content-Encoding": encoding})) as host, fetching() as fetcher:
        assert (await fetcher.fetch(host.url(), MIB, 5)).body(MIB) == b"media"


@pytest.mark.parametrize(
    ("encoding", "body", "error", "message"),
    [
        ("gzip", gzip.compress(bytes(64 * MIB)), MediaTooLarge, "decompresses to over 1048576 bytes"),
        ("gzip", gzip.compress(bytes(MIB)) + gzip.compress(b"x"), MediaTooLarge, "decompresses to over"),
        ("deflate", zlib.compress(bytes(64 * MIB)), MediaTooLarge, "decompresses to over"),
        ("gzip", gzip.compress(b"media")[:-9], FetchFailed, "cut short"),
        ("gzip", b"not gzip", FetchFailed, "damaged"),
        ("deflate", b"\x78\x9cnot zlib", FetchFailed, "damaged"),
        ("br", b"\x0b\x02\x80media\x03", FetchFailed, "compression that was not asked for"),
    ],
)
async def test_compressed_bodies_are_bounded_and_checked(
    encoding: str, body: bytes, error: type[Exception], message: str
) -> None:
    async with serving(answer(body, headers={"Content-Encoding": encoding})) as host, fetching() as fetcher:
        fetched = await fetcher.fetch(host.url(), MIB, 5)
        with pytest.raises(error, match=message):
            fetched.body(MIB)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    "location", ["/there", "there", "?there", "//127.0.0.1:{port}/there", "{self}/there"]
)
async def test_redirects_are_followed(status: int, location: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if "there" in request.raw_path:
            return web.Response(body=b"media")
        port = request.url.port
        there = location.format(port=port, self=f"http://127.0.0.1:{port}")
        return web.Response(status=status, headers={"Location": there})

    async with serving(handler) as host, fetching() as fetcher:
        assert (await fetcher.fetch(host.url("/here"), MIB, 5)).body(MIB) == b"media"
        assert [request.method for request in host.requests] == ["GET", "GET"]


async def test_redirects_are_bounded() -> None:
    async with serving(redirect(lambda request: request.raw_path + "x")) as host:
        async with fetching(max_redirects=3) as fetcher:
            with pytest.raises(FetchRefused, match="redirects more than 3 times"):
                await fetcher.fetch(host.url(), MIB, 5)
        assert len(host.requests) == 4


async def test_a_redirect_without_a_location_and_an_unasked_304_fail() -> None:
    async with fetching() as fetcher:
        async with serving(answer(status=302)) as host:
            with pytest.raises(FetchFailed, match="redirect without a Location"):
                await fetcher.fetch(host.url(), MIB, 5)
        async with serving(answer(status=304)) as host:
            with pytest.raises(FetchFailed, match="answered 304"):
                await fetcher.fetch(host.url(), MIB, 5)


async def test_no_hostile_spelling_makes_a_connection() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise AssertionError("reached")

    async with raw_serving(talk) as (port, connections), fetching(UrlPolicy()) as fetcher:
        table = targets(port)
        assert len(table) > 120
        for url in table:
            with pytest.raises((FetchRefused, FetchFailed)) as failed:
                await fetcher.fetch(url, MIB, 5)
            # A failing resolver is the only other acceptable reason.
            assert isinstance(failed.value, FetchRefused) or "cannot be resolved" in failed.value.message, url
        assert connections == []


async def test_redirects_to_refused_urls_are_refused() -> None:
    """The first host is allowed. It redirects to a refused URL, directly or after a hop on itself."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise AssertionError("reached")

    only_host = UrlPolicy.of([], ["127.0.0.9/32"])
    async with raw_serving(talk) as (port, connections), fetching(only_host) as fetcher:
        remaining = iter(targets(port))
        target = ""

        async def handler(request: web.Request) -> web.StreamResponse:
            location = "/hop" if request.raw_path == "/x" else target
            return web.Response(status=307, headers={"Location": location})

        runner = web.ServerRunner(web.Server(handler, access_log=None), shutdown_timeout=0.1)  # type: ignore[arg-type]
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.9", 0)
        await site.start()
        start = f"http://127.0.0.9:{runner.addresses[0][1]}"
        for target in remaining:
            if not target.isprintable() or not target.isascii() or len(target) > 4000:
                continue  # cannot stand in a header
            for path in ("/x", "/y"):
                try:
                    await fetcher.fetch(start + path, MIB, 5)
                except (FetchRefused, FetchFailed):
                    continue
                raise AssertionError(target)
        assert connections == []
        await runner.cleanup()


async def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolves to something else every time (DNS rebinding) is resolved once per connection."""
    answers = iter(["127.0.0.1", "10.0.0.1"])

    async def getaddrinfo(host: str, port: int, **options: Any) -> list[Any]:
        return [(2, 1, 6, "", (next(answers), port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    async with serving(answer(headers={"Connection": "close"})) as host, fetching() as fetcher:
        url = f"http://rebind.example:{host.port}/"
        assert (await fetcher.fetch(url, MIB, 5)).body(MIB) == b"media"
        assert host.requests[0].headers["Host"] == f"rebind.example:{host.port}"
        with pytest.raises(FetchRefused, match="a private address"):
            await fetcher.fetch(url, MIB, 5)


async def test_cancelling_closes_the_connection() -> None:
    host = SilentHost()
    async with raw_serving(host.talk) as (port, _), fetching() as fetcher:
        fetch = asyncio.create_task(fetcher.fetch(f"http://127.0.0.1:{port}/", MIB, 5))
        await host.arrived.wait()
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        await asyncio.wait_for(host.gone.wait(), 5)


async def test_connections_to_one_host_are_bounded() -> None:
    at_once, most, go = 0, 0, asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        if at_once == 2:
            go.set()
        await go.wait()
        at_once -= 1
        return web.Response(body=b"x")

    async with serving(handler) as host, fetching(connections_per_host=2) as fetcher:
        await asyncio.gather(*(fetcher.fetch(host.url(), MIB, 5) for _ in range(6)))
        assert most == 2


CONDITIONS = {"If-None-Match": '"1"'}


async def test_a_304_to_conditions_is_not_modified() -> None:
    async with serving(answer(b"", status=304, headers={"ETag": '"1"'})) as host, fetching() as fetcher:
        fetched = await fetcher.fetch(host.url(), MIB, 5, CONDITIONS)
        assert host.requests[0].headers["If-None-Match"] == '"1"'
        assert fetched.not_modified
        assert not fetched.cacheable
        assert fetched.headers["etag"] == '"1"'


async def test_only_the_urls_own_content_is_cacheable() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.raw_path == "/here":
            return web.Response(status=301, headers={"Location": "/there"})
        return web.Response(body=b"x", status=206 if request.raw_path == "/part" else 200)

    async with serving(handler) as host, fetching() as fetcher:
        paths = ["/there", "/here", "/part"]
        fetched = [await fetcher.fetch(host.url(path), MIB, 5) for path in paths]
        assert [each.cacheable for each in fetched] == [True, False, False]


async def test_conditions_are_sent_on_the_first_hop_only() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.raw_path == "/here":
            return web.Response(status=302, headers={"Location": "/there"})
        return web.Response(status=304)

    async with serving(handler) as host, fetching() as fetcher:
        with pytest.raises(FetchFailed, match="answered 304"):
            await fetcher.fetch(host.url("/here"), MIB, 5, CONDITIONS)
        assert ["If-None-Match" in request.headers for request in host.requests] == [True, False]


async def test_repeated_headers_are_joined() -> None:
    headers = CIMultiDict([("Cache-Control", "max-age=5"), ("CACHE-CONTROL", "no-store")])
    async with serving(answer(headers=headers)) as host, fetching() as fetcher:
        fetched = await fetcher.fetch(host.url(), MIB, 5)
        assert fetched.headers["cache-control"] == "max-age=5, no-store"
