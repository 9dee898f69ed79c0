"""Decodes the data of a data: URI piece by piece, without ever making a large `str`."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import unquote_to_bytes

import numpy as np

from deployments.errors import InvalidMedia, MediaTooLarge
from deployments.media import base64_stream as base64
from deployments.media.base64_stream import Piece

_WHITESPACE = b" \t\r\n\f\v"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
# Unquoting takes 0.3 us for each escape. Real clients do not escape large media byte by byte.
_MAX_ESCAPES = 2**22
_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")


def decode(header: str, pieces: Sequence[Piece], max_bytes: int) -> bytes:
    """Returns the media bytes of "data:" + header + "," + the pieces.

    If the header declares base64, whitespace, the URL-safe alphabet and missing padding are accepted as well.
    Otherwise the data is percent-encoded. Raises InvalidMedia if it is neither, and MediaTooLarge if there
    are more than `max_bytes`.
    """
    size = sum(piece.nbytes for piece in pieces)
    is_base64 = any(part.strip().lower() == "base64" for part in header.split(";"))
    _check_size(size * 3 // 4 - 2 if is_base64 else size // 3, max_bytes)
    decoded = _base64(pieces) if is_base64 else _joined(_unquoted(pieces))
    _check_size(len(decoded), max_bytes)
    if not decoded:
        raise InvalidMedia("The data: URI has no data after the comma. Put the media there.")
    return decoded


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise MediaTooLarge(
            f"The data: URI holds more than the limit of {max_bytes} bytes. Send fewer bytes."
        )


def _joined(parts: Iterable[bytes]) -> bytes:
    """Joins parts in a growing buffer, so that parts and whole are never in memory at once."""
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
        return _joined(base64.decode(_normalized(pieces)))
    except ValueError:
        raise InvalidMedia("The data: URI's data is not valid base64. Encode it again.") from None


def _normalized(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yields lenient base64 as strict base64. Raises ValueError if padding is not at the end."""
    num_chars, ended = 0, False
    for part in _unquoted(pieces):
        text = part.translate(_URL_SAFE, _WHITESPACE)
        chars = text.rstrip(b"=")
        if ended and chars:
            raise ValueError("there is padding before the end")
        ended = len(chars) < len(text) or ended
        num_chars += len(chars)
        yield np.frombuffer(chars, np.uint8)
    if num_chars % 4 == 1:
        raise InvalidMedia("The data: URI's base64 is cut short. Send all of it.")
    yield np.frombuffer(b"=" * (-num_chars % 4), np.uint8)


def _unquoted(pieces: Iterable[Piece]) -> Iterator[bytes]:
    """Yields the bytes with every %XX replaced. Works in slices: unquoting makes an object of each escape."""
    num_escapes = 0
    cut = b""  # the beginning of an escape at the end of a slice
    for piece in base64.slices(pieces):
        text = cut + piece.tobytes()
        end = text.rfind(b"%", max(len(text) - 2, 0))
        text, cut = (text, b"") if end < 0 else (text[:end], text[end:])
        num_escapes += text.count(b"%")
        if num_escapes > _MAX_ESCAPES:
            raise InvalidMedia(f"The data: URI has more than {_MAX_ESCAPES} percent escapes. Send base64.")
        if _BAD_ESCAPE.search(text):
            raise InvalidMedia("The data: URI's percent-encoding is not valid. Write % itself as %25.")
        yield unquote_to_bytes(text)
    if cut:
        raise InvalidMedia("The data: URI's percent-encoding is cut short. Send all of it.")
