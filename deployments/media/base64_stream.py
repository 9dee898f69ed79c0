"""Base64 that comes in pieces, decoded piece by piece: it is never put together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pybase64

Piece = npt.NDArray[np.uint8]

_SLICE = 2**18  # bytes; a core's cache holds one and what becomes of it, and between two work can be stopped


def slices(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same bytes in pieces that are not larger than a slice."""
    for piece in pieces:
        for start in range(0, piece.size, _SLICE):
            yield piece[start : start + _SLICE]


def decode(pieces: Iterable[Piece]) -> Iterator[bytes]:
    """Of strict base64: the alphabet, and padding at its end. Raises ValueError for anything else."""
    ended = False
    for text in _quads(pieces):
        if ended:
            raise ValueError("there is padding before the end")
        yield pybase64.b64decode(text, validate=True)
        ended = text[-1:] == b"="


def _quads(pieces: Iterable[Piece]) -> Iterator[bytes | memoryview]:
    """Cut so that each decodes alone: after a multiple of four characters. What is left over comes last."""
    carry = b""  # up to three characters
    for piece in slices(pieces):
        text = piece.data
        if carry:
            missing = 4 - len(carry)
            carry, text = carry + bytes(text[:missing]), text[missing:]
            if len(carry) < 4:
                continue
            yield carry
        whole = len(text) // 4 * 4
        if whole:
            yield text[:whole]
        carry = bytes(text[whole:])
    if carry:
        yield carry
