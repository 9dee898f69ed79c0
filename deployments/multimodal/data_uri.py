"""What stands after the comma of a data: URI, into bytes. Works on buffers: no large `str` is ever made."""

from __future__ import annotations

import binascii

import numpy as np
import numpy.typing as npt
import pybase64

from deployments.errors import InvalidMedia, MediaTooLarge

_WHITESPACE = b" \t\r\n\f\v"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_NOT_HEX = 255
_SLICE = 2**20
_HEX = np.full(256, _NOT_HEX, np.uint8)
_HEX[list(b"0123456789")] = range(10)
_HEX[list(b"abcdef")] = _HEX[list(b"ABCDEF")] = range(10, 16)


def decode(header: str, data: npt.NDArray[np.uint8], max_bytes: int) -> bytes:
    """The media bytes of "data:" + header + "," + data.

    Base64 where the header says so, with whitespace, the URL-safe alphabet or missing padding if need be;
    else percent-encoded. Raises InvalidMedia for what is neither, MediaTooLarge before more than `max_bytes`
    are made.
    """
    is_base64 = any(part.strip().lower() == "base64" for part in header.split(";"))
    _check_size(data.nbytes * 3 // 4 - 2 if is_base64 else data.nbytes // 3, max_bytes)
    decoded = _base64(data) if is_base64 else _percent(data).tobytes()
    _check_size(len(decoded), max_bytes)
    if not decoded:
        raise InvalidMedia("The data: URI has no data after the comma.")
    return decoded


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise MediaTooLarge(f"The data: URI holds more than the limit of {max_bytes} bytes. Send less.")


def _base64(data: npt.NDArray[np.uint8]) -> bytes:
    try:
        return pybase64.b64decode(data.data, validate=True)
    except binascii.Error:
        return _unusual_base64(data)


def _unusual_base64(data: npt.NDArray[np.uint8]) -> bytes:
    if (data == ord("%")).any():
        data = _percent(data)
    text = data.tobytes().translate(_URL_SAFE, _WHITESPACE).rstrip(b"=")
    if len(text) % 4 == 1:
        raise InvalidMedia("The data: URI's base64 is cut short.")
    try:
        return pybase64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error:
        raise InvalidMedia("The data: URI's data is not valid base64.") from None


def _percent(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Every %XX replaced by its byte; slice by slice, since places take eight times the memory of bytes."""
    if not (data == ord("%")).any():
        return data
    pieces, start = [], 0
    while start < data.size:
        stop = start + _SLICE
        tail = data[stop - 2 : stop].tobytes()
        stop += (
            2 if tail.endswith(b"%") else tail.startswith(b"%")
        )  # a %XX that begins in the slice ends in it
        pieces.append(_percent_slice(data[start:stop]))
        start = stop
    return np.concatenate(pieces)


def _percent_slice(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
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
