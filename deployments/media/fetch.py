"""Fetching media from the web: bounded in bytes, time, redirects and in where it may go."""

from __future__ import annotations

import asyncio
import io
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import urljoin

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from deployments.errors import FetchFailed, FetchRefused, MediaTooLarge, StageTimeout
from deployments.media.urls import UrlPolicy

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TRY_AGAIN = frozenset({408, 429})  # and 5xx: the host may do better a moment later
_UNKNOWN_NAME = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})  # not: the resolver itself fails
_HEADERS = {
    "User-Agent": "Headrace (media fetcher)",  # many hosts answer 403 to none
    "Accept": "*/*",
    "Accept-Encoding": "identity",  # media are compressed already; what comes gzipped all the same is read
}
_GZIP_OR_ZLIB = 47  # zlib's window bits for both, told apart by their headers
_SLICE = 256 * 1024  # bytes in and out of one step of decompression
_RAW_DEFLATE = -15  # what some servers send as "deflate"


@dataclass(frozen=True, slots=True)
class Fetched:
    """A response as it came; `not_modified` ones have no body."""

    chunks: list[bytes]
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case, values joined by commas
    status: int = HTTPStatus.OK
    redirected: bool = False

    @property
    def not_modified(self) -> bool:
        return self.status == HTTPStatus.NOT_MODIFIED

    @property
    def cacheable(self) -> bool:
        """Whether this is the URL's own content, whole: where a redirect leads may change any time."""
        return self.status == HTTPStatus.OK and not self.redirected

    def body(self, max_bytes: int) -> bytes:
        """Joined and, if need be, decompressed: blocking work for a thread.

        Raises MediaTooLarge before more than `max_bytes` are made, FetchFailed for a damaged body.
        """
        joined = b"".join(self.chunks)
        encoding = self.headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            return _decompress(joined, encoding, max_bytes)
        if len(joined) > max_bytes:  # kept from a fetch with another limit
            raise _too_large(max_bytes)
        return joined


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

    async def fetch(
        self, url: str, max_bytes: int, timeout_s: float, conditions: Mapping[str, str] | None = None
    ) -> Fetched:
        """The body behind an http(s) URL, redirects followed.

        With `conditions` (If-None-Match, If-Modified-Since) the host may answer that it is not modified.

        Raises FetchRefused (policy, unknown name, or the host said 4xx), FetchFailed (unreachable, 5xx,
        broken), StageTimeout after `timeout_s`, and MediaTooLarge with the chunk that passes `max_bytes`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._follow(url, max_bytes, conditions)
                except _Transient:
                    await asyncio.sleep(self._retry_pause_s)
                    return await self._follow(url, max_bytes, conditions)
        except _Transient as error:
            raise FetchFailed(str(error)) from error
        except TimeoutError:
            raise StageTimeout(f"The media host did not deliver within {timeout_s:.3g} s.") from None

    async def _follow(self, url: str, max_bytes: int, conditions: Mapping[str, str] | None) -> Fetched:
        for hop in range(self._max_redirects + 1):
            url = self._policy.check_url(url)
            asked = conditions if hop == 0 else None  # they are about the first URL's content
            async with self._get(url, asked) as response:
                if asked and response.status == HTTPStatus.NOT_MODIFIED:
                    return Fetched([], _joined(response), response.status)
                if response.status not in _REDIRECTS:
                    _check_status(response.status)
                    chunks = await _read(response, max_bytes)
                    return Fetched(chunks, _joined(response), response.status, redirected=hop > 0)
                location = response.headers.get("Location")
                if not location:
                    raise FetchFailed("The media host answered with a redirect that leads nowhere.")
                url = _join(url, location)
        raise FetchRefused(
            f"The media URL redirects more than {self._max_redirects} times. Use the final URL."
        )

    @asynccontextmanager
    async def _get(
        self, url: str, conditions: Mapping[str, str] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request to one host; aiohttp's errors become ours here."""
        try:
            async with self._session.get(
                URL(url, encoded=True), headers=conditions, allow_redirects=False
            ) as response:
                yield response
        except (aiohttp.InvalidURL, UnicodeError):
            raise FetchRefused("The media URL is not valid.") from None
        except aiohttp.ClientConnectorDNSError as error:
            if error.errno in _UNKNOWN_NAME:
                raise FetchRefused("The media host's name is not known. Check the URL.") from None
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


def _joined(response: aiohttp.ClientResponse) -> dict[str, str]:
    headers = response.headers
    return {name.lower(): ", ".join(headers.getall(name)) for name in headers}


def _too_large(max_bytes: int) -> MediaTooLarge:
    return MediaTooLarge(f"The media URL's content is over the limit of {max_bytes} bytes.")


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> list[bytes]:
    if (response.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    chunks, num_bytes = [], 0
    async for chunk in response.content.iter_any():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return chunks


def _decompress(data: bytes, encoding: str, max_bytes: int) -> bytes:
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise FetchFailed("The media host sent a compression that was not asked for.")
    is_deflate = encoding == "deflate"
    is_raw = is_deflate and data[:1] and data[0] & 0x0F != 8  # a zlib header begins with method 8
    wbits = _RAW_DEFLATE if is_raw else _GZIP_OR_ZLIB
    # Not a list: joined at the end, all would be held twice.
    inflate, inflated = zlib.decompressobj(wbits), io.BytesIO()
    try:
        for start in range(0, len(data), _SLICE):
            rest = data[start : start + _SLICE]
            while rest:
                if inflate.eof:
                    if is_deflate:
                        break  # trailing bytes mean nothing there
                    inflate = zlib.decompressobj(wbits)  # gzip files may stand one after the other
                piece = inflate.decompress(rest, _SLICE)
                if inflated.tell() + len(piece) > max_bytes:
                    raise MediaTooLarge(f"The media URL's content decompresses to over {max_bytes} bytes.")
                inflated.write(piece)
                rest = inflate.unconsumed_tail or inflate.unused_data
    except zlib.error:
        raise FetchFailed("The media host sent a compressed body that is damaged.") from None
    if data and not inflate.eof:
        raise FetchFailed("The media host sent a compressed body that is cut short.")
    return inflated.getvalue()
