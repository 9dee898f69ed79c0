"""What stands after the comma of a data: URI, into bytes, piece by piece: no large `str` is ever made."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from deployments.errors import InvalidMedia, MediaTooLarge
from deployments.media import base64_stream as base64
from deployments.media.base64_stream import Piece

_WHITESPACE = b" \t\r\n\f\v"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_NOT_HEX = 255
_HEX = np.full(256, _NOT_HEX, np.uint8)
_HEX[list(b"0123456789")] = range(10)
_HEX[list(b"abcdef")] = _HEX[list(b"ABCDEF")] = range(10, 16)


def decode(header: str, pieces: Sequence[Piece], max_bytes: int) -> bytes:
    """The media bytes of "data:" + header + "," + the pieces.

    Base64 where the header says so, with whitespace, the URL-safe alphabet or missing padding if need be;
    else percent-encoded. Raises InvalidMedia for what is neither, MediaTooLarge before more than `max_bytes`
    are made.
    """
    size = sum(piece.nbytes for piece in pieces)
    is_base64 = any(part.strip().lower() == "base64" for part in header.split(";"))
    _check_size(size * 3 // 4 - 2 if is_base64 else size // 3, max_bytes)
    decoded = _base64(pieces) if is_base64 else _joined(piece.data for piece in _percent(pieces))
    _check_size(len(decoded), max_bytes)
    if not decoded:
        raise InvalidMedia("The data: URI has no data after the comma.")
    return decoded


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise MediaTooLarge(f"The data: URI holds more than the limit of {max_bytes} bytes. Send less.")


def _joined(parts: Iterable[bytes | memoryview]) -> bytes:
    """Grows in place, so that parts and whole are never there at once."""
    whole = io.BytesIO()
    for part in parts:
        whole.write(part)
    return whole.getvalue()


def _base64(pieces: Sequence[Piece]) -> bytes:
    try:
        return _joined(base64.decode(pieces))
    except ValueError:
        pass
    try:
        return _joined(base64.decode(_usual(pieces)))
    except ValueError:
        raise InvalidMedia("The data: URI's data is not valid base64.") from None


def _usual(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Base64 in one of its disguises, as strict base64; raises ValueError where padding is not at the end."""
    num_chars, ended = 0, False
    for piece in _percent(pieces):
        text = piece.tobytes().translate(_URL_SAFE, _WHITESPACE)
        chars = text.rstrip(b"=")
        if ended and chars:
            raise ValueError("there is padding before the end")
        ended = len(chars) < len(text) or ended
        num_chars += len(chars)
        yield np.frombuffer(chars, np.uint8)
    if num_chars % 4 == 1:
        raise InvalidMedia("The data: URI's base64 is cut short.")
    yield np.frombuffer(b"=" * (-num_chars % 4), np.uint8)


def _percent(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Every %XX replaced by its byte; slice by slice, since places take eight times the memory of bytes."""
    cut = np.empty(0, np.uint8)  # the beginning of a %XX, up to two bytes
    for piece in base64.slices(pieces):
        data = np.concatenate((cut, piece)) if cut.size else piece
        tail = data[-2:].tobytes()
        end = data.size - (1 if tail.endswith(b"%") else 2 * tail.startswith(b"%"))
        yield _percent_slice(data[:end])
        cut = data[end:]
    if cut.size:
        raise InvalidMedia("The data: URI's percent-encoding is cut short.")


def _percent_slice(data: Piece) -> Piece:
    signs = np.flatnonzero(data == ord("%"))
    if not signs.size:
        return data
    if signs[-1] + 2 >= data.size:
        raise InvalidMedia("The data: URI's percent-encoding is cut short.")
    high, low = _HEX[data[signs + 1]], _HEX[data[signs + 2]]
    if (high == _NOT_HEX).any() or (low == _NOT_HEX).any():
        raise InvalidMedia("The data: URI's data is not valid percent-encoding.")
    decoded, keep = data.copy(), np.ones(data.size, bool)
    decoded[signs] = high << 4 | low
    keep[signs + 1] = keep[signs + 2] = False
    return decoded[keep]
