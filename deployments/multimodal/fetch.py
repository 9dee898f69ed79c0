"""Fetching media from the web: bounded in bytes, time, redirects and in where it may go."""

from __future__ import annotations

import asyncio
import socket
import ssl
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urljoin

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from deployments.errors import FetchFailed, FetchRefused, MediaTooLarge, StageTimeout
from deployments.multimodal.urls import UrlPolicy

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TRY_AGAIN = frozenset({408, 429})  # and 5xx: the host may do better a moment later
_HEADERS = {
    "User-Agent": "Headrace (media fetcher)",  # many hosts answer 403 to none
    "Accept": "*/*",
    "Accept-Encoding": "identity",  # media are compressed already; what comes gzipped all the same is read
}
_GZIP_OR_ZLIB = 47  # zlib's window bits for both, told apart by their headers
_RAW_DEFLATE = -15  # what some servers send as "deflate"


@dataclass(frozen=True, slots=True)
class Fetched:
    """A response's body as it came."""

    chunks: list[bytes]
    encoding: str  # Content-Encoding, lower case; "" for none

    def body(self, max_bytes: int) -> bytes:
        """Joined and, if need be, decompressed: blocking work for a thread.

        Raises MediaTooLarge before more than `max_bytes` are made, FetchFailed for a damaged body.
        """
        joined = b"".join(self.chunks)
        if self.encoding in ("", "identity"):
            return joined
        return _decompress(joined, self.encoding, max_bytes)


class Fetcher:
    """One connection pool over all requests of a process. Create and use it on one event loop."""

    def __init__(
        self,
        policy: UrlPolicy,
        *,
        max_redirects: int = 5,
        connections_per_host: int = 8,
        retry_pause_s: float = 0.1,
    ) -> None:
        self._policy = policy
        self._max_redirects = max_redirects
        self._retry_pause_s = retry_pause_s
        # Without a cache each new connection is resolved and checked anew, and goes to what was checked.
        connector = aiohttp.TCPConnector(
            resolver=_CheckedResolver(policy), use_dns_cache=False, limit_per_host=connections_per_host
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),  # nothing passes from one request to the next
            auto_decompress=False,  # bombs are defused in Fetched.body
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def close(self) -> None:
        await self._session.close()

    async def fetch(self, url: str, max_bytes: int, timeout_s: float) -> Fetched:
        """The body behind an http(s) URL, redirects followed.

        Raises FetchRefused (policy, or the host said 4xx), FetchFailed (unreachable, 5xx, broken),
        StageTimeout after `timeout_s`, and MediaTooLarge with the chunk that passes `max_bytes`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._follow(url, max_bytes)
                except _Transient:
                    await asyncio.sleep(self._retry_pause_s)
                    return await self._follow(url, max_bytes)
        except _Transient as error:
            raise FetchFailed(str(error)) from error
        except TimeoutError:
            raise StageTimeout(f"The media host did not deliver within {timeout_s:.3g} s.") from None

    async def _follow(self, url: str, max_bytes: int) -> Fetched:
        for _ in range(self._max_redirects + 1):
            url = self._policy.check_url(url)
            async with self._get(url) as response:
                if response.status not in _REDIRECTS:
                    _check_status(response.status)
                    return await _read(response, max_bytes)
                location = response.headers.get("Location")
                if not location:
                    raise FetchFailed("The media host answered with a redirect that leads nowhere.")
                url = _join(url, location)
        raise FetchRefused(
            f"The media URL redirects more than {self._max_redirects} times. Use the final URL."
        )

    @asynccontextmanager
    async def _get(self, url: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request to one host; aiohttp's errors become ours here."""
        try:
            async with self._session.get(URL(url, encoded=True), allow_redirects=False) as response:
                yield response
        except (aiohttp.InvalidURL, UnicodeError):
            raise FetchRefused("The media URL is not valid.") from None
        except aiohttp.ClientConnectorDNSError as error:
            raise _Transient("The media host's name cannot be resolved.") from error
        except (aiohttp.ClientSSLError, aiohttp.ServerFingerprintMismatch, ssl.SSLError) as error:
            raise FetchFailed("The media host's TLS certificate or handshake is not valid.") from error
        except aiohttp.ClientConnectorError as error:
            raise _Transient("The media host cannot be reached.") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Transient("The media host broke the connection or does not speak HTTP.") from error


class _Transient(Exception):
    """A failure that a second try may not meet."""


class _CheckedResolver(AbstractResolver):
    """Resolves names for the connector, which dials what it is given: refused addresses are never given."""

    def __init__(self, policy: UrlPolicy) -> None:
        self._policy = policy

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
        )
        results = []
        for family, _, proto, _, address in found:
            dialled = str(address[0])
            self._policy.check_address(dialled)
            results.append(
                ResolveResult(
                    hostname=host,
                    host=dialled,
                    port=port,
                    family=family,
                    proto=proto,
                    flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                )
            )
        return results

    async def close(self) -> None:
        pass


def _join(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise FetchRefused("The media URL redirects to what is no valid URL.") from None


def _check_status(status: int) -> None:
    if 200 <= status < 300:
        return
    reason = _reason(status)
    if status >= 500 or status in _TRY_AGAIN:
        raise _Transient(f"The media host answered {reason}.")
    if status >= 400:
        raise FetchRefused(f"The media host answered {reason}. Check the URL, or send the data inline.")
    raise FetchFailed(f"The media host answered {reason}.")


def _reason(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> Fetched:
    too_large = MediaTooLarge(f"The media URL's content is over the limit of {max_bytes} bytes.")
    if (response.content_length or 0) > max_bytes:
        raise too_large
    chunks, num_bytes = [], 0
    async for chunk in response.content.iter_any():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise too_large
        chunks.append(chunk)
    return Fetched(chunks, response.headers.get("Content-Encoding", "").strip().lower())


def _decompress(data: bytes, encoding: str, max_bytes: int) -> bytes:
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise FetchFailed("The media host sent a compression that was not asked for.")
    pieces, num_bytes = [], 0
    try:
        while data:
            raw = encoding == "deflate" and data[0] & 0x0F != 8  # a zlib header begins with method 8
            inflate = zlib.decompressobj(_RAW_DEFLATE if raw else _GZIP_OR_ZLIB)
            piece = inflate.decompress(data, max_bytes - num_bytes + 1)
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise MediaTooLarge(f"The media URL's content decompresses to over {max_bytes} bytes.")
            if not inflate.eof:
                raise FetchFailed("The media host sent a compressed body that is cut short.")
            pieces.append(piece)
            data = inflate.unused_data if encoding != "deflate" else b""
    except zlib.error:
        raise FetchFailed("The media host sent a compressed body that is damaged.") from None
    return b"".join(pieces)
