"""A cache of HTTP responses in memory, with the rules of RFC 9111 for how long each may be used.

It is a shared cache: it serves every client, so private responses are not kept. It does not guess a lifetime:
a response without explicit freshness is revalidated each time, and not kept if the host gave no validator.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from deployments.runtime.lru_cache import CountingLRUCache

# A signed URL is a credential that the host may revoke. The next one for the same file differs anyway.
_CREDENTIAL = re.compile(
    r"[?&](?:x-(?:amz|goog|oss|cos)-(?:signature|credential|security-token)|q-signature|signature|sig|hmac"
    r"|(?:access_?|auth_?|id_)?token|jwt|authorization|auth|api_?key|key-pair-id)=",
    re.IGNORECASE,
)
_DIRECTIVE = re.compile(r'([^\s,="]+)(?:\s*=\s*(?:"([^"]*)"|([^\s,"]*)))?')
_LIFETIMES = ("s-maxage", "max-age")  # the first one present counts: s-maxage is for shared caches
_VALIDATORS = {"etag": "If-None-Match", "last-modified": "If-Modified-Since"}
_FRESHNESS = ("cache-control", "expires", "pragma", "vary")

Headers = Mapping[str, str]  # names in lower case; values of a repeated header joined by commas


@dataclass(frozen=True, slots=True)
class Entry:
    url: str
    body: bytes  # decompressed
    headers: Headers  # only those that validate the body or limit its freshness
    fresh_until: float  # seconds since the epoch

    @property
    def conditions(self) -> dict[str, str]:
        """Request headers that make the host answer 304 if its content has not changed."""
        return {ask: self.headers[name] for name, ask in _VALIDATORS.items() if name in self.headers}

    @property
    def num_bytes(self) -> int:
        headers = sum(len(name) + len(value) for name, value in self.headers.items())
        return len(self.url) + len(self.body) + headers


class HttpCache:
    """Keeps up to `max_bytes` of response bodies, URLs and headers. Evicts the least recently used."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        # A response over a quarter of the cache would evict too many others.
        self._entries: CountingLRUCache[str, Entry] = CountingLRUCache(
            max_bytes, lambda entry: entry.num_bytes, max_value_size=max_bytes // 4
        )
        self.now = clock  # seconds since the epoch, because hosts give points in time
        self.hits = 0  # the entry was fresh
        self.misses = 0  # the host has to be asked, for the body or for a 304

    @property
    def num_bytes(self) -> int:
        return int(self._entries.currsize)

    @property
    def evictions(self) -> int:
        return self._entries.evictions

    def find(self, url: str) -> tuple[Entry | None, bool]:
        """Returns the entry, and True if it is fresh. The `conditions` of a stale entry can renew it."""
        entry = self._entries.get(url)
        is_fresh = entry is not None and self.now() < entry.fresh_until
        self.hits += is_fresh
        self.misses += not is_fresh
        return entry, is_fresh

    def store(self, url: str, body: bytes, headers: Headers, asked_at: float) -> None:
        """Keeps the body of a 200 if its headers permit that and it is at most a quarter of the cache."""
        kept = {name: value for name, value in headers.items() if _matters(name, value)}
        entry = Entry(url, body, kept, _fresh_until(headers, asked_at))
        is_useful = entry.conditions or self.now() < entry.fresh_until
        if is_useful and _may_store(url, headers):
            self._entries.store(url, entry)
        else:
            self._entries.pop(url, None)

    def renew(self, url: str, entry: Entry, headers: Headers, asked_at: float) -> None:
        """Applies the `headers` of a 304, the host's answer to the entry's conditions."""
        if self._entries.get(url) is entry:  # else another request has stored a newer one
            # The old validators stay, because they belong to the body that is kept.
            said = {name: headers[name] for name in ("age", "date", *_FRESHNESS) if name in headers}
            self.store(url, entry.body, {**entry.headers, **said}, asked_at)

    def clear(self) -> None:
        self._entries.clear()


def _matters(name: str, value: str) -> bool:
    if name in _VALIDATORS:  # a value that cannot be sent back is ignored
        return value != "" and value.isascii() and value.isprintable()
    return name in _FRESHNESS


def _may_store(url: str, headers: Headers) -> bool:
    # Any other Vary is no obstacle: the fetcher sends the same headers in all requests.
    varies = "*" in headers.get("vary", "")
    return not (varies or {"no-store", "private"} & _directives(headers).keys() or _CREDENTIAL.search(url))


def _fresh_until(headers: Headers, asked_at: float) -> float:
    """Returns a time in seconds since the epoch. The age counts from the sending of the request."""
    directives = _directives(headers)
    if "no-cache" in directives:
        return -math.inf
    date = _date(headers.get("date"))
    age: float = _seconds(headers.get("age", "").partition(",")[0].strip())
    if date is not None:
        age = max(age, asked_at - date)
    for name in _LIFETIMES:
        if name in directives:
            return asked_at - age + _seconds(directives[name])
    expires = _date(headers.get("expires"))  # anything else, such as "0", is in the past
    if expires is None:
        return -math.inf
    return asked_at - age + expires - (asked_at if date is None else date)


def _directives(headers: Headers) -> dict[str, str]:
    """Returns the Cache-Control directives. Of a repeated directive the shortest time counts."""
    text = headers.get("cache-control")
    if text is None:  # HTTP/1.0's form of no-cache, which Cache-Control overrides
        text = headers.get("pragma", "")
    found: dict[str, str] = {}
    for name, quoted, plain in _DIRECTIVE.findall(text.lower()):
        value = quoted or plain
        found[name] = min(found.get(name, value), value, key=_seconds)
    return found


def _seconds(text: str) -> int:
    """Returns 0, which means stale, for anything but a number. Ten digits suffice for centuries."""
    return int(text[:10]) if text.isascii() and text.isdecimal() else 0


def _date(text: str | None) -> float | None:
    try:
        return datetime.strptime(text or "", "%a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
