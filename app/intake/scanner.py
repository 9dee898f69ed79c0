"""A streaming scanner of JSON text that cuts long strings out of it.

A base64 image or tensor is one huge JSON string. A parser would keep the GIL, and with it all requests of the
process, for as long as it reads that string, in a thread too. So the body is scanned while it arrives. Each
string of more than `threshold` bytes becomes a `LongString`, and a short token takes its place. The rest is a
small JSON document for an ordinary parser.

An example with a threshold of 8 bytes, and a body that arrives in two chunks:

    {"name": "cat", "url": "data:imag      outside a string: copy everything up to `"url": "` to the document;
                                           inside a short string: copy `data:imag` too. It has more than 8
                                           bytes now, so move it from the document to a LongString
    e/png;base64,QUJD", "n": 1}            inside a long string: add `e/png;base64,QUJD`. At its closing quote
                                           write the token to the document, then go on outside

    document  {"name": "cat", "url": "long-string-<nonce>-0", "n": 1}
    strings   {"long-string-<nonce>-0": LongString(data:image/png;base64,QUJD)}
    cuts      ((offset in the document, offset in the body) right after the token,)

So the scanner is in one of three states: outside a string, inside a short string, inside a long string. It
decides only where strings begin and end, and validates the content of long ones, in bounded steps. The
parser does the rest. `cuts` translate the parser's offsets into offsets in the client's body.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import orjson

from app.intake.long_string import SEGMENT_BYTES, LongString, Segment
from deployments.errors import InvalidRequest, RequestTooLarge

LONG_STRING_BYTES = 64 * 1024
MAX_DOCUMENT_BYTES = 16 * 1024 * 1024  # without the long strings
MAX_VALUES = 100_000  # in the document; parsing them takes about ten milliseconds
MAX_DEPTH = 64
MAX_LONG_STRINGS = 4096

_SLICE = 256 * 1024  # bytes of a step that makes a fixed number of passes at memory speed; uvicorn's chunk
_REGEX_STEP = 16 * 1024  # bytes of a step by a regular expression, whose time depends on the content
_PIECE = 32 * 1024  # smaller pieces of a long string are joined as they come

Upload = Callable[[list[bytes]], Segment]  # begins to put pieces into the object store

# Text and complete strings; stops at the quote of a string that is still open.
_OUTSIDE = re.compile(rb'(?:[^"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
# The inside of a string; stops at its closing quote, or at an escape of which only a part is there.
_CONTENT = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
# The same, but it never splits \uXXXX or a surrogate pair; it stops at an invalid escape too.
_HIGH, _LOW = rb"u[dD][89abAB][0-9a-fA-F]{2}", rb"u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = rb"\\(?:[^u]|(?!" + _HIGH + rb")u[0-9a-fA-F]{4}|" + _HIGH + rb"\\" + _LOW + rb")"
_VALID_CONTENT = re.compile(rb'[^"\\]*+(?:' + _ESCAPE + rb'[^"\\]*+)*+', re.DOTALL)
# An escape that more bytes may complete.
_PARTIAL_ESCAPE = re.compile(rb"\\(?:u[0-9a-fA-F]{0,3}|" + _HIGH + rb"(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?\Z")
# A UTF-8 sequence that more bytes may complete.
_PARTIAL_CHARACTER = re.compile(rb"(?:[\xc0-\xff]|[\xe0-\xff][\x80-\xbf]|[\xf0-\xff][\x80-\xbf]{2})\Z")
# Enough bytes without a backslash, up to one. That one begins an escape, so a cut before it is safe.
_BEFORE_ESCAPE = re.compile(rb"[^\\]{12,}(?=\\)")
_COLON = re.compile(rb"[ \t\r\n]*:")
_LONGEST_ESCAPE = 12  # bytes: a surrogate pair

_NESTING = np.zeros(256, np.int8)
_NESTING[list(b"[{")] = 1
_NESTING[list(b"]}")] = -1


Cuts = Sequence[tuple[int, int]]  # after each token: offset in the document, offset in the body


@dataclass(frozen=True, slots=True)
class Body:
    """A request's body, scanned but not yet parsed."""

    document: bytes  # JSON in which a token stands for every long string
    strings: dict[str, LongString]  # token -> content; no client can guess a token
    num_bytes: int  # of the whole body
    cuts: tuple[tuple[int, int], ...] = ()

    def parse(self) -> dict[str, object]:
        """Returns the document as an object. Of equal keys the last one counts, as in Python's `json`.

        Raises InvalidRequest, for NaN and for numbers beyond a double too.
        """
        if not self.document.strip():
            raise InvalidRequest("The body is empty; send a JSON object.")
        try:
            value = orjson.loads(self.document)
        except orjson.JSONDecodeError as error:
            reason, at = _located(self.document, error)
            raise _json_error(reason, self.document, self.cuts, at, _body_offset(self.cuts, at)) from None
        if not isinstance(value, dict):
            raise InvalidRequest("The body must be a JSON object.")
        return value


class Scanner:
    """Scans one JSON text that comes in chunks, cut anywhere. `feed` every chunk, then `finish`."""

    def __init__(self, upload: Upload, threshold: int = LONG_STRING_BYTES) -> None:
        self._threshold = threshold
        self._upload = upload
        # A string that begins and ends within one step of this size is at most `threshold` bytes long.
        self._step_bytes = min(_REGEX_STEP, threshold + 2)
        self._nonce = secrets.token_hex(16)
        self._document = bytearray()
        self._strings: dict[str, LongString] = {}
        self._cuts: list[tuple[int, int]] = []
        self._short_start: int | None = None  # in the document: the open short string's content
        self._long: _OpenLongString | None = None  # the open string if it is long
        self._depth = 0
        self._num_values = 0
        self._data = b""  # the bytes at hand, scanned up to _pos
        self._pos = 0
        self._base = 0  # offset of _data's first byte in the body

    @property
    def num_bytes(self) -> int:
        return self._base + len(self._data)

    def feed(self, chunk: bytes) -> Iterator[None]:
        """Scans the chunk; yields after every bounded step. Raises InvalidRequest, RequestTooLarge."""
        for start in range(0, len(chunk), _SLICE):
            self._base += self._pos
            # Usually no bytes are left over, and then a chunk of up to a slice is not copied.
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
        """Scans one bounded step. Returns False if it needs more bytes."""
        if self._long is not None:
            return self._scan_long(self._long)
        before = self._pos
        if self._short_start is not None:
            self._scan_short(self._short_start)
        else:
            self._scan_outside()
        if len(self._document) > MAX_DOCUMENT_BYTES:
            raise RequestTooLarge(f"The body without its long strings is over {MAX_DOCUMENT_BYTES} bytes.")
        return self._pos != before or self._long is not None

    def _scan_outside(self) -> None:
        limit = min(len(self._data), self._pos + self._step_bytes)
        text = self._data[self._pos : _end(_OUTSIDE, self._data, self._pos, limit)]
        self._document += text
        self._pos += len(text)
        self._check_bounds(_STRING.sub(b"", text))
        if self._pos < limit:
            self._document += b'"'
            self._pos += 1
            self._short_start = len(self._document)

    def _scan_short(self, start: int) -> None:
        limit = min(len(self._data), self._pos + self._step_bytes)
        stop = _end(_CONTENT, self._data, self._pos, limit)
        self._document += self._data[self._pos : stop]
        self._pos = stop
        if len(self._document) - start > self._threshold:
            self._become_long(start)
        elif stop < limit and self._data[stop] == ord('"'):
            self._document += b'"'
            self._pos += 1
            self._short_start = None

    def _become_long(self, start: int) -> None:
        """Turns the open short string into a long one, and scans its content once more."""
        if len(self._strings) == MAX_LONG_STRINGS:
            raise InvalidRequest(f"The body has more than {MAX_LONG_STRINGS} long strings.")
        content = bytes(self._document[start:])
        del self._document[start:]
        self._short_start = None
        self._base += self._pos - len(content)
        self._data = content + self._data[self._pos :]
        self._pos = 0
        self._long = _OpenLongString(self._base, self._upload)

    def _scan_long(self, long: _OpenLongString) -> bool:
        stop = self._long_stop()
        closed = stop < len(self._data) and self._data[stop] == ord('"')
        if stop > self._pos:
            long.add(self._take_content(stop))
        elif not closed:
            return False
        self._pos = stop
        if closed:
            self._close(long)
        return True

    def _close(self, long: _OpenLongString) -> None:
        self._pos += 1
        token = f"long-string-{self._nonce}-{len(self._strings)}"
        self._document += token.encode() + b'"'
        self._cuts.append((len(self._document), self._base + self._pos))
        self._strings[token] = long.finish()
        self._long = None

    def _long_stop(self) -> int:
        """Returns the end of the open long string in the data, without splitting an escape or a character."""
        data, pos = self._data, self._pos
        quote = data.find(b'"', pos)
        stop = len(data) if quote < 0 else quote
        window = max(pos, stop - 8 * _LONGEST_ESCAPE)
        if data.find(b"\\", window, stop) < 0:
            return stop if quote >= 0 else _without_partial_character(data, pos, stop)
        before = _BEFORE_ESCAPE.search(data, window, stop)
        return before.end() if before else self._long_stop_by_regex()

    def _long_stop_by_regex(self) -> int:
        data, pos = self._data, self._pos
        limit = min(len(data), pos + _REGEX_STEP)
        stop = _end(_VALID_CONTENT, data, pos, limit)
        if stop == limit:
            return _without_partial_character(data, pos, stop)
        if data[stop] == ord("\\") and not _PARTIAL_ESCAPE.match(data, stop, limit):
            raise self._error("invalid escape in a string", self._base + stop)
        return stop

    def _take_content(self, stop: int) -> bytes:
        """Validates the next bytes of a long string and returns them without escapes."""
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
        """Counts values and nesting. `structure`: text of the document without strings."""
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
class _OpenLongString:
    """A long string while it arrives. Byte by byte must not mean an object per byte."""

    start: int  # offset in the body
    upload: Upload
    pieces: list[bytes | Segment] = field(default_factory=list)
    small: bytearray = field(default_factory=bytearray)  # the end of the string, up to a piece
    waiting: list[bytes] = field(default_factory=list)  # pieces of the next segment
    num_waiting: int = 0  # bytes in `waiting`

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
            self.pieces.append(piece)  # stays in the process: a data: URI's header is read from it
            return
        self.waiting.append(piece)
        self.num_waiting += len(piece)
        if self.num_waiting >= SEGMENT_BYTES:
            self.pieces.append(self.upload(self.waiting))
            self.waiting, self.num_waiting = [], 0

    def finish(self) -> LongString:
        self._flush()
        return LongString((*self.pieces, *self.waiting))


def _end(pattern: re.Pattern[bytes], data: bytes, pos: int, limit: int) -> int:
    match = pattern.match(data, pos, limit)
    assert match is not None  # the patterns match the empty string
    return match.end()


def _without_partial_character(data: bytes, pos: int, stop: int) -> int:
    cut = _PARTIAL_CHARACTER.search(data, max(pos, stop - 3), stop)
    return cut.start() if cut else stop


def _located(data: bytes, error: orjson.JSONDecodeError) -> tuple[str, int]:
    """The reason and its byte offset. (The parser counts characters, or says 0 for invalid UTF-8.)"""
    try:
        return error.msg, len(data.decode()[: error.pos].encode())
    except UnicodeDecodeError as bad:
        return "invalid UTF-8", bad.start


def _json_error(reason: str, document: bytes | bytearray, cuts: Cuts, at: int, offset: int) -> InvalidRequest:
    """`at`: offset in the document, which gives the line; `offset`: offset in the client's body."""
    line = document.count(b"\n", 0, at) + 1  # a JSON string contains no line break
    column = offset - _body_offset(cuts, document.rfind(b"\n", 0, at))
    return InvalidRequest(
        f"The body is not valid JSON: {reason} at line {line} column {column} (byte {offset})."
    )


def _body_offset(cuts: Cuts, offset: int) -> int:
    before = bisect_right(cuts, offset, key=itemgetter(0))
    token_end, body_end = cuts[before - 1] if before else (0, 0)
    return body_end + offset - token_end
