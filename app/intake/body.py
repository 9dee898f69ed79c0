"""A request's body into small JSON, long strings beside it: no step on the event loop is ever long.

A base64 image or tensor is one huge JSON string. Parsing it stops every request of the process for as long
as it takes, in a thread too, since parsers keep the GIL. So the body is scanned as it arrives: a string of
more than `threshold` bytes is cut out and becomes a `LongString`, pieces of the body as they came; what stays
in its place is a short token. The rest is a small JSON document, parsed and validated in the usual way.
Of a very long string the pieces leave for the object store, a segment at a time, while the rest still comes.

The scanner decides only where strings begin and end, in bounded steps; it validates the content of those that
it cuts out. Everything else is left to the parser, whose errors are told at their place in the client's body.
Of equal keys in one object the last one counts, as in Python's `json`.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import orjson

from deployments.errors import InvalidRequest, Overloaded, RequestTimeout, RequestTooLarge
from deployments.runtime.memory import collect_soon
from deployments.runtime.metrics import BYTES_IN_FLIGHT
from deployments.runtime.payload import pack_pieces
from deployments.types import Payload

LONG_STRING_BYTES = 64 * 1024
MAX_DOCUMENT_BYTES = 16 * 1024 * 1024  # what is left without the long strings
MAX_VALUES = 100_000  # in the document; to parse so many takes some ten milliseconds
MAX_DEPTH = 64
MAX_LONG_STRINGS = 4096
IDLE_TIMEOUT_S = 20.0
SEGMENT_BYTES = 8 * 1024 * 1024  # of a string that leave together; one that has less does not leave

_SLICE = 256 * 1024  # bytes of a step that takes a fixed number of passes at memory speed; uvicorn's chunk
_CAREFUL = 16 * 1024  # bytes of a step whose cost depends on the content: all quotes, all escapes
_PIECE = 32 * 1024  # pieces of a long string that are smaller are joined on the way
_LARGE_BYTES = 2**20  # smaller ones are there before they could give way
_PUTS = 2  # segments of one body on their way to the object store; more, and its client must wait

# Text and complete strings; stops at the quote of a string that is still open.
_TEXT = re.compile(rb'(?:[^"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
# The inside of a string; stops at its closing quote or at an escape that is cut short.
_INSIDE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
# The same, with \uXXXX and surrogate pairs kept whole; stops at what is none as well.
_HIGH, _LOW = rb"u[dD][89abAB][0-9a-fA-F]{2}", rb"u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = rb"\\(?:[^u]|(?!" + _HIGH + rb")u[0-9a-fA-F]{4}|" + _HIGH + rb"\\" + _LOW + rb")"
_INSIDE_WHOLE = re.compile(rb'[^"\\]*+(?:' + _ESCAPE + rb'[^"\\]*+)*+', re.DOTALL)
# An escape that more bytes may complete.
_CUT_ESCAPE = re.compile(rb"\\(?:u[0-9a-fA-F]{0,3}|" + _HIGH + rb"(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?\Z")
# A UTF-8 sequence that more bytes may complete.
_CUT_CHARACTER = re.compile(rb"(?:[\xc0-\xff]|[\xe0-\xff][\x80-\xbf]|[\xf0-\xff][\x80-\xbf]{2})\Z")
# A backslash that begins an escape for certain, and is no part of one before it: a place to cut.
_CALM = re.compile(rb"[^\\]{12,}(?=\\)")
_COLON = re.compile(rb"[ \t\r\n]*:")
_LONGEST_ESCAPE = 12  # bytes of a surrogate pair

_NESTING = np.zeros(256, np.int8)
_NESTING[list(b"[{")] = 1
_NESTING[list(b"]}")] = -1


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Pieces of a long string that are in the object store, or on their way."""

    num_bytes: int
    payload: asyncio.Task[Payload]

    @classmethod
    def put(cls, pieces: list[bytes]) -> Segment:
        return cls(sum(map(len, pieces)), asyncio.create_task(pack_pieces(pieces)))

    def __len__(self) -> int:
        return self.num_bytes


Put = Callable[[list[bytes]], Segment]


@dataclass(frozen=True, slots=True)
class LongString:
    """The content of one JSON string: UTF-8, without escapes, in pieces. `len` is in bytes.

    The first piece and all of a string of up to SEGMENT_BYTES are bytes.
    """

    pieces: tuple[bytes | Segment, ...]

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def head(self, num_bytes: int) -> bytes:
        """Of the first piece at most, if the string has segments."""
        return b"".join(_first(self.pieces, num_bytes))

    def tail(self, start: int) -> LongString:
        """What follows the first `start` bytes; copies nothing but a part of one piece."""
        pieces = list(self.pieces)
        while pieces and start >= len(pieces[0]):
            start -= len(pieces.pop(0))
        if pieces and start:
            first = pieces[0]
            assert isinstance(first, bytes)
            pieces[0] = first[start:]
        return LongString(tuple(pieces))

    def join(self) -> bytes:
        """One copy, of a string without segments. It gives the GIL up while it copies, but takes its time."""
        pieces = [piece for piece in self.pieces if isinstance(piece, bytes)]
        assert len(pieces) == len(self.pieces)
        return b"".join(pieces)  # gives the GIL up for `bytes` only, not for views: hence the pieces' type

    async def pack(self) -> list[Payload]:
        """For a stage, which gets it by `unpack_pieces`."""
        payloads: list[Payload] = []
        for kind, group in groupby(self.pieces, type):
            if kind is bytes:
                payloads.append(await pack_pieces([p for p in group if isinstance(p, bytes)]))
            else:
                payloads += [await p.payload for p in group if isinstance(p, Segment)]
        return payloads


def _first(pieces: tuple[bytes | Segment, ...], num_bytes: int) -> Iterator[bytes]:
    for piece in pieces:
        if num_bytes <= 0 or not isinstance(piece, bytes):
            return
        yield piece[:num_bytes]
        num_bytes -= len(piece)


@dataclass(frozen=True, slots=True)
class Body:
    """A request's body, read but not yet parsed."""

    document: bytes  # JSON in which every long string is replaced by its token
    strings: Mapping[str, LongString]  # token -> content; no client can guess a token
    num_bytes: int  # as sent
    cuts: tuple[tuple[int, int], ...] = ()  # after each token: offset in the document, offset in the body


class InFlight:
    """Bounds the bytes of all bodies together that are being read or loaded."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """One body's. Tell it how many bytes it has so far; it raises Overloaded where they are too many."""
        held = 0

        def hold(num_bytes: int) -> None:
            nonlocal held
            self.check(num_bytes - held)
            self._add(num_bytes - held)
            held = num_bytes

        try:
            yield hold
        finally:
            self._add(-held)
            if held >= SEGMENT_BYTES and self.num_bytes == 0:
                collect_soon()

    def _add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        BYTES_IN_FLIGHT.set(self.num_bytes)

    def check(self, more: int) -> None:
        if self.num_bytes + more > self._max_bytes:
            raise Overloaded("The bodies of other requests take all the memory for them. Try again later.")


async def read_body(
    chunks: AsyncIterable[bytes],
    *,
    max_bytes: int,
    threshold: int = LONG_STRING_BYTES,
    timeout_s: float = math.inf,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
    hold: Callable[[int], None] = lambda num_bytes: None,
    give_way: Callable[[int], Awaitable[None]] | None = None,
) -> Body:
    """Reads to the end; whatever `chunks` raises, e.g. on a disconnect, passes through.

    `timeout_s` is for the whole body, `idle_timeout_s` for each chunk. Before a chunk is kept, `hold` is told
    how many bytes of the body there will be then; it may raise. A body that proves large awaits `give_way`
    between its chunks, with the bytes so far.

    Raises RequestTooLarge with the chunk that passes `max_bytes`, RequestTimeout, and InvalidRequest as soon
    as the body cannot become valid JSON within the bounds of this module.
    """
    puts: deque[Segment] = deque()

    def put(pieces: list[bytes]) -> Segment:
        puts.append(Segment.put(pieces))
        return puts[-1]

    scanner = Scanner(threshold, put)
    async for chunk in _in_time(chunks, timeout_s, idle_timeout_s):
        if scanner.num_bytes + len(chunk) > max_bytes:
            raise RequestTooLarge(f"The body is over the limit of {max_bytes} bytes.")
        hold(scanner.num_bytes + len(chunk))
        for _ in scanner.feed(chunk):
            # A queue that is never empty never suspends: without this a fast client owns the loop.
            await asyncio.sleep(0)
        if give_way and scanner.num_bytes > _LARGE_BYTES:
            await give_way(scanner.num_bytes)
        while len(puts) > _PUTS:
            await puts.popleft().payload
    return scanner.finish()


async def _in_time(
    chunks: AsyncIterable[bytes], timeout_s: float, idle_timeout_s: float
) -> AsyncIterator[bytes]:
    clock = asyncio.get_running_loop().time
    end = clock() + timeout_s
    reader = aiter(chunks)
    try:
        while True:
            async with asyncio.timeout_at(min(end, clock() + idle_timeout_s)):
                chunk = await anext(reader)
            yield chunk
    except StopAsyncIteration:
        return
    except TimeoutError:
        raise RequestTimeout(
            f"The body did not arrive within {timeout_s:g} s, or nothing of it for {idle_timeout_s:g} s."
        ) from None


def parse(body: Body) -> dict[str, Any]:
    """The document as an object. Raises InvalidRequest, also for NaN and numbers beyond a double."""
    if not body.document.strip():
        raise InvalidRequest("The body is empty; send a JSON object.")
    try:
        value = orjson.loads(body.document)
    except orjson.JSONDecodeError as error:
        raise _syntax_error(body, error) from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return value


class Scanner:
    """Follows the strings of a JSON text that comes in chunks, cut anywhere.

    `put` begins to put SEGMENT_BYTES of a long string into the object store.
    """

    def __init__(self, threshold: int = LONG_STRING_BYTES, put: Put = Segment.put) -> None:
        self._threshold = threshold
        self._put = put
        # No string that begins and ends within one careful step is longer than the threshold.
        self._careful = min(_CAREFUL, threshold + 2)
        self._nonce = secrets.token_hex(16)
        self._document = bytearray()
        self._strings: dict[str, LongString] = {}
        self._cuts: list[tuple[int, int]] = []
        self._start: int | None = None  # the open string's content begins here in the document
        self._long: _Growing | None = None  # the open string, once it is long
        self._depth = 0
        self._num_values = 0
        self._data = b""  # scanned up to _pos
        self._pos = 0
        self._base = 0  # offset of _data in the body

    @property
    def num_bytes(self) -> int:
        return self._base + len(self._data)

    def feed(self, chunk: bytes) -> Iterator[None]:
        """Scans the chunk; yields after every bounded step. Raises InvalidRequest, RequestTooLarge."""
        for start in range(0, len(chunk), _SLICE):
            self._base += self._pos
            # Nothing is left over as a rule, and then a chunk of up to a slice is not copied.
            self._data = self._data[self._pos :] + chunk[start : start + _SLICE]
            self._pos = 0
            while self._pos < len(self._data) and self._step():
                yield

    def finish(self) -> Body:
        if self._long is not None:
            raise self._error("unterminated string starting", self._long.start - 1)
        self._document += self._data[self._pos :]
        for token_end, _ in self._cuts:
            if _COLON.match(self._document, token_end):
                raise InvalidRequest(f"A key of a JSON object is longer than {self._threshold} bytes.")
        return Body(bytes(self._document), self._strings, self.num_bytes, tuple(self._cuts))

    def _step(self) -> bool:
        """False if nothing can be done before more bytes come."""
        if self._long is not None:
            return self._scan_long(self._long)
        before = self._pos
        if self._start is not None:
            self._scan_short(self._start)
        else:
            self._scan_text()
        if len(self._document) > MAX_DOCUMENT_BYTES:
            raise RequestTooLarge(f"The body without its long strings is over {MAX_DOCUMENT_BYTES} bytes.")
        return self._pos != before or self._long is not None

    def _scan_text(self) -> None:
        limit = min(len(self._data), self._pos + self._careful)
        text = self._data[self._pos : _end(_TEXT, self._data, self._pos, limit)]
        self._document += text
        self._pos += len(text)
        self._check_bounds(_STRING.sub(b"", text))
        if self._pos < limit:
            self._document += b'"'
            self._pos += 1
            self._start = len(self._document)

    def _scan_short(self, start: int) -> None:
        limit = min(len(self._data), self._pos + self._careful)
        stop = _end(_INSIDE, self._data, self._pos, limit)
        self._document += self._data[self._pos : stop]
        self._pos = stop
        if len(self._document) - start > self._threshold:
            self._move_out(start)
        elif stop < limit and self._data[stop] == ord('"'):
            self._document += b'"'
            self._pos += 1
            self._start = None

    def _move_out(self, start: int) -> None:
        """The open string has become long: what it has so far is scanned again, as a long one."""
        if len(self._strings) == MAX_LONG_STRINGS:
            raise InvalidRequest(f"The body has more than {MAX_LONG_STRINGS} long strings.")
        content = bytes(self._document[start:])
        del self._document[start:]
        self._start = None
        self._base += self._pos - len(content)
        self._data = content + self._data[self._pos :]
        self._pos = 0
        self._long = _Growing(self._base, self._put)

    def _scan_long(self, long: _Growing) -> bool:
        stop = self._end_of_content()
        closed = stop < len(self._data) and self._data[stop] == ord('"')
        if stop > self._pos:
            long.add(self._content(stop))
        elif not closed:
            return False
        self._pos = stop
        if closed:
            self._close(long)
        return True

    def _close(self, long: _Growing) -> None:
        self._pos += 1
        token = f"long-string-{self._nonce}-{len(self._strings)}"
        self._document += token.encode() + b'"'
        self._cuts.append((len(self._document), self._base + self._pos))
        self._strings[token] = long.finish()
        self._long = None

    def _end_of_content(self) -> int:
        """As far as the open string goes in the data, with no escape and no character cut in two."""
        data, pos = self._data, self._pos
        quote = data.find(b'"', pos)
        stop = len(data) if quote < 0 else quote
        window = max(pos, stop - 8 * _LONGEST_ESCAPE)
        if data.find(b"\\", window, stop) < 0:
            return stop if quote >= 0 else _whole_characters(data, pos, stop)
        calm = _CALM.search(data, window, stop)
        return calm.end() if calm else self._end_by_regex()

    def _end_by_regex(self) -> int:
        data, pos = self._data, self._pos
        limit = min(len(data), pos + _CAREFUL)
        stop = _end(_INSIDE_WHOLE, data, pos, limit)
        if stop == limit:
            return _whole_characters(data, pos, stop)
        if data[stop] == ord("\\") and not _CUT_ESCAPE.match(data, stop, limit):
            raise self._error("invalid escape in a string", self._base + stop)
        return stop

    def _content(self, stop: int) -> bytes:
        """The next bytes of a long string, validated and without escapes."""
        view = memoryview(self._data)[self._pos : stop]
        values = np.frombuffer(view, np.uint8)
        if values.min() >= 0x20 and values.max() < 0x80 and self._data.find(b"\\", self._pos, stop) < 0:
            return self._data[self._pos : stop]  # no copy if it is all of the data
        quoted = b"".join((b'"', view, b'"'))
        try:
            content: str = orjson.loads(quoted)
        except orjson.JSONDecodeError as error:
            reason, where = _located(quoted, error)
            raise self._error(reason, self._base + self._pos + where - 1) from None
        return content.encode()

    def _check_bounds(self, structure: bytes) -> None:
        """`structure`: the document's text without strings."""
        self._num_values += structure.count(b",") + structure.count(b"[") + structure.count(b"{")
        if self._num_values > MAX_VALUES:
            raise InvalidRequest(f"The body has more than {MAX_VALUES} JSON values.")
        if structure:
            depths = self._depth + _NESTING[np.frombuffer(structure, np.uint8)].cumsum(dtype=np.int32)
            self._depth = int(depths[-1])
            if depths.max() > MAX_DEPTH:
                raise InvalidRequest(f"The body is nested deeper than {MAX_DEPTH} levels.")

    def _error(self, reason: str, offset: int) -> InvalidRequest:
        return _json_error(reason, self._document, self._cuts, len(self._document), offset)


@dataclass(slots=True)
class _Growing:
    """A long string as it arrives. A client that sends byte by byte must not cost an object per byte."""

    start: int  # offset in the body
    put: Put
    pieces: list[bytes | Segment] = field(default_factory=list)
    small: bytearray = field(default_factory=bytearray)
    waiting: list[bytes] = field(default_factory=list)  # pieces after the first, up to a segment
    num_waiting: int = 0  # their bytes

    def add(self, piece: bytes) -> None:
        if len(piece) < _PIECE:
            self.small += piece
            if len(self.small) >= _PIECE:
                self._flush()
        else:
            self._flush()
            self._append(piece)

    def _flush(self) -> None:
        if self.small:
            self._append(bytes(self.small))
            self.small.clear()

    def _append(self, piece: bytes) -> None:
        if not self.pieces:
            self.pieces.append(piece)  # stays: it tells what the string is
            return
        self.waiting.append(piece)
        self.num_waiting += len(piece)
        if self.num_waiting >= SEGMENT_BYTES:
            self.pieces.append(self.put(self.waiting))
            self.waiting, self.num_waiting = [], 0

    def finish(self) -> LongString:
        self._flush()
        return LongString((*self.pieces, *self.waiting))


def _end(pattern: re.Pattern[bytes], data: bytes, pos: int, limit: int) -> int:
    match = pattern.match(data, pos, limit)
    assert match is not None  # the patterns match the empty string
    return match.end()


def _whole_characters(data: bytes, pos: int, stop: int) -> int:
    cut = _CUT_CHARACTER.search(data, max(pos, stop - 3), stop)
    return cut.start() if cut else stop


def _syntax_error(body: Body, error: orjson.JSONDecodeError) -> InvalidRequest:
    reason, offset = _located(body.document, error)
    return _json_error(reason, body.document, body.cuts, offset, _body_offset(body.cuts, offset))


def _located(data: bytes, error: orjson.JSONDecodeError) -> tuple[str, int]:
    """What is wrong, and at which byte of the data: the parser counts characters, or says 0."""
    try:
        return error.msg, len(data.decode()[: error.pos].encode())
    except UnicodeDecodeError as bad:
        return "invalid UTF-8", bad.start


def _json_error(
    reason: str, document: bytes | bytearray, cuts: Sequence[tuple[int, int]], at: int, offset: int
) -> InvalidRequest:
    """`at`: place in the document, for the line; `offset`: place in the client's body."""
    line = document.count(b"\n", 0, at) + 1  # no line ends within a string
    column = offset - _body_offset(cuts, document.rfind(b"\n", 0, at))
    return InvalidRequest(
        f"The body is not valid JSON: {reason} at line {line} column {column} (byte {offset})."
    )


def _body_offset(cuts: Sequence[tuple[int, int]], offset: int) -> int:
    before = bisect_right(cuts, offset, key=itemgetter(0))
    token_end, body_end = cuts[before - 1] if before else (0, 0)
    return body_end + offset - token_end
