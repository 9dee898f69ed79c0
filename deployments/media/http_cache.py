"""Which responses may be kept, for how long they answer unasked, and the memory that holds them.

Pure: no sockets. A shared cache in the terms of RFC 9111: it answers every client, so what is meant for one
is not kept. Nothing is guessed: what says nothing about its freshness is asked for each time, and not even
kept if the host gave no validator to ask with.
"""

from __future__ import annotations

import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

# A signed URL is a credential. It ends when the host says so, and the next one for the same file is another.
_CREDENTIAL = re.compile(
    r"[?&](?:x-(?:amz|goog|oss|cos)-(?:signature|credential|security-token)|q-signature|signature|sig|hmac"
    r"|(?:access_?|auth_?|id_)?token|jwt|authorization|auth|api_?key|key-pair-id)=",
    re.IGNORECASE,
)
_DIRECTIVE = re.compile(r'([^\s,="]+)(?:\s*=\s*(?:"([^"]*)"|([^\s,"]*)))?')
_LIFETIMES = ("s-maxage", "max-age")  # the first that is there counts: s-maxage is meant for shared caches
_VALIDATORS = {"etag": "If-None-Match", "last-modified": "If-Modified-Since"}
_FRESHNESS = ("cache-control", "expires", "pragma", "vary")

Headers = Mapping[str, str]  # names in lower case; the values of a repeated one joined by commas


@dataclass(frozen=True, slots=True)
class Entry:
    body: bytes  # decompressed
    headers: Headers  # those that validate it or say how long it stays fresh
    fresh_until: float  # seconds since the epoch

    @property
    def conditions(self) -> dict[str, str]:
        """Request headers that make the host answer 304 if this is still its content."""
        return {ask: self.headers[name] for name, ask in _VALIDATORS.items() if name in self.headers}


class HttpCache:
    """Bodies by URL, at most `max_bytes` with keys and headers; what was used longest ago goes first."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._max_bytes = max_bytes
        self._clock = clock  # seconds since the epoch: hosts name points in time
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self.hits = 0  # answered without asking the host
        self.misses = 0  # the host had to be asked
        self.revalidated = 0  # of the misses: the host said that nothing changed
        self.evictions = 0
        self.bytes = 0

    def now(self) -> float:
        return self._clock()

    def find(self, url: str) -> tuple[Entry | None, bool]:
        """What is kept of the URL, and whether it is fresh; if not, its `conditions` are to be asked."""
        entry = self._entries.get(url)
        if entry:
            self._entries.move_to_end(url)
        is_fresh = entry is not None and self.now() < entry.fresh_until
        self.hits += is_fresh
        self.misses += not is_fresh
        return entry, is_fresh

    def store(self, url: str, body: bytes, headers: Headers, asked_at: float) -> None:
        """Keeps a 200's body, if its headers let it and it is no more than a quarter of all."""
        self._drop(url)
        kept = {name: value for name, value in headers.items() if _matters(name, value)}
        entry = Entry(body, kept, _fresh_until(headers, asked_at))
        useful = entry.conditions or self.now() < entry.fresh_until
        if useful and _may_store(url, headers) and _num_bytes(url, entry) * 4 <= self._max_bytes:
            self._keep(url, entry)

    def renew(self, url: str, entry: Entry, headers: Headers, asked_at: float) -> None:
        """The host answered 304 with `headers` to the entry's conditions."""
        self.revalidated += 1
        if self._entries.get(url) is entry:  # else someone else has just been told something newer
            # The validators stay: they are those of the body that is here.
            said = {name: headers[name] for name in ("age", "date", *_FRESHNESS) if name in headers}
            self.store(url, entry.body, {**entry.headers, **said}, asked_at)

    def clear(self) -> None:
        self._entries.clear()
        self.bytes = 0

    def _keep(self, url: str, entry: Entry) -> None:
        self._entries[url] = entry
        self.bytes += _num_bytes(url, entry)
        while self.bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))
            self.evictions += 1

    def _drop(self, url: str) -> None:
        if entry := self._entries.pop(url, None):
            self.bytes -= _num_bytes(url, entry)


def _num_bytes(url: str, entry: Entry) -> int:
    return len(entry.body) + len(url) + sum(len(k) + len(v) for k, v in entry.headers.items())


def _matters(name: str, value: str) -> bool:
    if name in _VALIDATORS:  # what cannot be sent back is none
        return value != "" and value.isascii() and value.isprintable()
    return name in _FRESHNESS


def _may_store(url: str, headers: Headers) -> bool:
    # Every other Vary is kept: what it names is the same in all requests of the fetcher.
    varies = "*" in headers.get("vary", "")
    return not (varies or {"no-store", "private"} & _directives(headers).keys() or _CREDENTIAL.search(url))


def _fresh_until(headers: Headers, asked_at: float) -> float:
    """Counted from when the request was sent, so that the time it took is part of the age."""
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
    """Cache-Control; of directives that stand there twice the strictest, which here is the shortest time."""
    text = headers.get("cache-control")
    if text is None:  # HTTP/1.0's way to say no-cache, which Cache-Control overrides
        text = headers.get("pragma", "")
    found: dict[str, str] = {}
    for name, quoted, plain in _DIRECTIVE.findall(text.lower()):
        value = quoted or plain
        found[name] = min(found.get(name, value), value, key=_seconds)
    return found


def _seconds(text: str) -> int:
    """0 for what is no number: stale. Ten digits are centuries; int() refuses thousands of them."""
    return int(text[:10]) if text.isascii() and text.isdecimal() else 0


def _date(text: str | None) -> float | None:
    try:
        return datetime.strptime(text or "", "%a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
