"""Long strings of a request's body: bytes in pieces, which never become one `str`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from deployments.runtime.payload import pack_pieces
from deployments.types import Payload

SEGMENT_BYTES = 8 * 1024 * 1024  # pieces of a long string are put into the object store in such portions


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Pieces of a long string that are in the object store, or on their way there.

    The task belongs to `read_body`, which cancels it if the body fails and otherwise waits for it.
    """

    num_bytes: int
    payload: asyncio.Task[Payload]

    def __len__(self) -> int:
        return self.num_bytes


@dataclass(frozen=True, slots=True)
class LongString:
    """The content of one JSON string: UTF-8 without escapes, in pieces. `len` is in bytes.

    The first piece is always bytes, and so are all pieces of a string of up to SEGMENT_BYTES.
    """

    pieces: tuple[bytes | Segment, ...] = field(repr=False)

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def head(self, num_bytes: int) -> bytes:
        """The first bytes; at most the first piece if the string has segments."""
        return b"".join(_first(self.pieces, num_bytes))

    def tail(self, start: int) -> LongString:
        """The string without its first `start` bytes. Copies a part of one piece at most."""
        pieces = list(self.pieces)
        while pieces and start >= len(pieces[0]):
            start -= len(pieces.pop(0))
        if pieces and start:
            first = pieces[0]
            assert isinstance(first, bytes)
            pieces[0] = first[start:]
        return LongString(tuple(pieces))

    def join(self) -> bytes:
        """Copies a string without segments into one `bytes`. It releases the GIL meanwhile."""
        pieces = [piece for piece in self.pieces if isinstance(piece, bytes)]
        assert len(pieces) == len(self.pieces)
        return b"".join(pieces)  # releases the GIL for `bytes` only, not for views

    async def pack(self) -> list[Payload]:
        """Packs the string for a stage, which reads it with `unpack_pieces`."""
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
