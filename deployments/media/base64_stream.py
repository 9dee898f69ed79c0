"""Decodes base64 that arrives in pieces, without ever joining them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pybase64

Piece = npt.NDArray[np.uint8]

_SLICE = 2**18  # bytes; input and output fit a core's cache, and callers can stop between two slices


def slices(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yields the same bytes in pieces of at most one slice."""
    for piece in pieces:
        for start in range(0, piece.size, _SLICE):
            yield piece[start : start + _SLICE]


def decode(pieces: Iterable[Piece]) -> Iterator[bytes]:
    """Decodes strict base64: only the alphabet, and padding at the end. Else raises ValueError."""
    ended = False
    for text in _quads(pieces):
        if ended:
            raise ValueError("there is padding before the end")
        yield pybase64.b64decode(text, validate=True)
        ended = text[-1:] == b"="


def _quads(pieces: Iterable[Piece]) -> Iterator[bytes | memoryview]:
    """Cuts after multiples of four characters, so that each part decodes alone. The rest comes last."""
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
