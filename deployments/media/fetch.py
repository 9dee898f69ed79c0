"""Fetches media from the web, with limits on bytes, time, redirects and addresses."""

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
_TRY_AGAIN = frozenset({408, 429})  # and 5xx: a retry may succeed
_UNKNOWN_NAME = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})  # not for failures of the resolver itself
_HEADERS = {
    "User-Agent": "Headrace (media fetcher)",  # many hosts answer 403 without one
    "Accept": "*/*",
    "Accept-Encoding": "identity",  # media are compressed already; gzip and deflate are accepted all the same
}
_GZIP_OR_ZLIB = 47  # window bits with which zlib detects either header
_SLICE = 256 * 1024  # bytes in and out of one decompression step
_RAW_DEFLATE = -15  # some servers send this as "deflate"


@dataclass(frozen=True, slots=True)
class Fetched:
    """A response as it arrived. One that is `not_modified` has no body."""

    chunks: list[bytes]
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case, values joined by commas
    status: int = HTTPStatus.OK
    redirected: bool = False

    @property
    def not_modified(self) -> bool:
        return self.status == HTTPStatus.NOT_MODIFIED

    @property
    def cacheable(self) -> bool:
        """True for the URL's own complete content. The target of a redirect may change at any time."""
        return self.status == HTTPStatus.OK and not self.redirected

    def body(self, max_bytes: int) -> bytes:
        """Returns the chunks joined and, if needed, decompressed; blocking work for a thread.

        Raises MediaTooLarge before it decompresses more than `max_bytes`, and FetchFailed for a damaged body.
        """
        joined = b"".join(self.chunks)
        encoding = self.headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            return _decompress(joined, encoding, max_bytes)
        if len(joined) > max_bytes:  # cached by a fetch with another limit
            raise _too_large(max_bytes)
        return joined


class Fetcher:
    """One connection pool for all requests of a process. Create and use it on one event loop."""

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
        # Without a DNS cache each connection resolves again and goes to the addresses just checked.
        connector = aiohttp.TCPConnector(
            resolver=_CheckedResolver(policy), use_dns_cache=False, limit_per_host=connections_per_host
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),  # no state passes from one request to the next
            auto_decompress=False,  # Fetched.body decompresses with a limit
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def close(self) -> None:
        await self._session.close()

    async def fetch(
        self, url: str, max_bytes: int, timeout_s: float, conditions: Mapping[str, str] | None = None
    ) -> Fetched:
        """Returns the response to a GET of an http(s) URL, after redirects and up to one retry.

        With `conditions` (If-None-Match, If-Modified-Since) the host may answer that it is not modified.

        Raises FetchRefused (policy, unknown name, or 4xx), FetchFailed (unreachable, 5xx, or broken),
        StageTimeout after `timeout_s`, and MediaTooLarge at the chunk that exceeds `max_bytes`.
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
            raise StageTimeout(
                f"The media host did not deliver within {timeout_s:.3g} s. Try again later."
            ) from None

    async def _follow(self, url: str, max_bytes: int, conditions: Mapping[str, str] | None) -> Fetched:
        for hop in range(self._max_redirects + 1):
            url = self._policy.check_url(url)
            asked = conditions if hop == 0 else None  # they describe the first URL's content
            async with self._get(url, asked) as response:
                if asked and response.status == HTTPStatus.NOT_MODIFIED:
                    return Fetched([], _joined(response), response.status)
                if response.status not in _REDIRECTS:
                    _check_status(response.status)
                    chunks = await _read(response, max_bytes)
                    return Fetched(chunks, _joined(response), response.status, redirected=hop > 0)
                location = response.headers.get("Location")
                if not location:
                    raise FetchFailed("The media host sent a redirect without a Location. Use the final URL.")
                url = _join(url, location)
        raise FetchRefused(
            f"The media URL redirects more than {self._max_redirects} times. Use the final URL."
        )

    @asynccontextmanager
    async def _get(
        self, url: str, conditions: Mapping[str, str] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends one request to one host, and maps aiohttp's errors to ours."""
        try:
            async with self._session.get(
                URL(url, encoded=True), headers=conditions, allow_redirects=False
            ) as response:
                yield response
        except (aiohttp.InvalidURL, UnicodeError):
            raise FetchRefused("The media URL is not valid. Correct it.") from None
        except aiohttp.ClientConnectorDNSError as error:
            if error.errno in _UNKNOWN_NAME:
                raise FetchRefused("The media host's name is unknown. Check the URL.") from None
            raise _Transient("The media host's name cannot be resolved. Try again later.") from error
        except (aiohttp.ClientSSLError, aiohttp.ServerFingerprintMismatch, ssl.SSLError) as error:
            raise FetchFailed(
                "The media host's TLS certificate or handshake is not valid. Use another host."
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise _Transient("The media host cannot be reached. Try again later.") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Transient(
                "The media host broke the connection or does not speak HTTP. Check the URL."
            ) from error


class _Transient(Exception):
    """A failure after which a retry may succeed."""


class _CheckedResolver(AbstractResolver):
    """Resolves names for the connector, which only connects to addresses that this resolver returns."""

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
        raise FetchRefused("The media URL redirects to an invalid URL. Use the final URL.") from None


def _check_status(status: int) -> None:
    if 200 <= status < 300:
        return
    reason = _reason(status)
    if status >= 500 or status in _TRY_AGAIN:
        raise _Transient(f"The media host answered {reason}. Try again later.")
    if status >= 400:
        raise FetchRefused(f"The media host answered {reason}. Check the URL, or send the data inline.")
    raise FetchFailed(f"The media host answered {reason}. Check the URL.")


def _reason(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def _joined(response: aiohttp.ClientResponse) -> dict[str, str]:
    headers = response.headers
    return {name.lower(): ", ".join(headers.getall(name)) for name in headers}


def _too_large(max_bytes: int) -> MediaTooLarge:
    return MediaTooLarge(
        f"The media URL's content is larger than the limit of {max_bytes} bytes. Send a smaller file."
    )


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
        raise FetchFailed("The media host sent a compression that was not asked for. Use another URL.")
    is_deflate = encoding == "deflate"
    is_raw = is_deflate and data[:1] and data[0] & 0x0F != 8  # a zlib header begins with method 8
    wbits = _RAW_DEFLATE if is_raw else _GZIP_OR_ZLIB
    # A buffer and not a list, because joining a list would hold all bytes twice.
    inflate, inflated = zlib.decompressobj(wbits), io.BytesIO()
    try:
        for start in range(0, len(data), _SLICE):
            rest = data[start : start + _SLICE]
            while rest:
                if inflate.eof:
                    if is_deflate:
                        break  # trailing bytes have no meaning in deflate
                    inflate = zlib.decompressobj(wbits)  # gzip members may follow each other
                piece = inflate.decompress(rest, _SLICE)
                if inflated.tell() + len(piece) > max_bytes:
                    raise MediaTooLarge(
                        f"The media URL's content decompresses to over {max_bytes} bytes. Send a smaller one."
                    )
                inflated.write(piece)
                rest = inflate.unconsumed_tail or inflate.unused_data
    except zlib.error:
        raise FetchFailed("The media host sent a damaged compressed body. Send the data inline.") from None
    if data and not inflate.eof:
        raise FetchFailed("The media host sent a compressed body that is cut short. Try again later.")
    return inflated.getvalue()
