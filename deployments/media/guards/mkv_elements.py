"""Counts the elements that describe a WebM or Matroska file, from their heads alone.

FFmpeg keeps a record of each while it opens the file. The record of an empty element is about fifty times as
large as the element's three bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from deployments.errors import InvalidMedia

ELEMENT_BYTES = 256  # the most memory that FFmpeg needs for one element

_MAX_ELEMENTS = 1 << 18  # the index of half a day of video has fewer
_WINDOW = 1 << 18  # bytes searched at once
_MAGIC = b"\x1a\x45\xdf\xa3"
# SeekHead, Info, Tracks, Cues, Attachments, Chapters, Tags. FFmpeg may reach one at any offset: in sequence,
# by a SeekHead, or while it resynchronizes in a damaged file.
_DESCRIPTION = re.compile(
    b"|".join(
        re.escape(bytes.fromhex(name))
        for name in ("114d9b74", "1549a966", "1654ae6b", "1c53bb6b", "1941a469", "1043a770", "1254c367")
    )
)
# The elements inside those that hold further elements.
_HOLDERS = frozenset(
    [
        *(0xAE, 0xE0, 0xE1, 0xE2, 0xE3, 0xE4, 0xE9, 0x6624, 0x26A5, 0x6D80, 0x6240, 0x5034, 0x5035),  # tracks
        *(0x47E7, 0x55B0, 0x55D0, 0x7670, 0x41E4, 0x6FAB),  # tracks
        *(0xBB, 0xB7, 0xDB),  # cues
        *(0x61A7, 0x4DBB),  # attachments, SeekHead
        *(0x45B9, 0xB6, 0x80, 0x8F, 0x6944, 0x7373, 0x63C0, 0x67C8),  # chapters, tags
    ]
)
# BlockAdditions, and the parts of its BlockMores: FFmpeg keeps a record of each while it reads a block.
_ADDITIONS = re.compile(re.escape(b"\x75\xa1"))
_ADDITION = frozenset({0xA6, 0xEE, 0xA5})


def described_elements(data: bytes) -> int:
    """Returns an upper bound; 0 if the file is not WebM or Matroska. Raises InvalidMedia for far too many."""
    if not data.startswith(_MAGIC):
        return 0
    count = 0
    for _ in _elements(data):
        count += 1
        if count > _MAX_ELEMENTS:
            raise InvalidMedia("The file's metadata has too many elements. Remux it without tags.")
    return count


def _elements(data: bytes) -> Iterator[int]:
    """Yields something for each element.

    Media bytes that only look like an element soon declare a length beyond the file, which ends the count.
    """
    for place in _places(_DESCRIPTION, data):
        yield place
        yield from _inside(data, *_head(data, place)[1:])
    for place in _places(_ADDITIONS, data):
        yield place
        for name in _inside(data, *_head(data, place)[1:]):
            if name not in _ADDITION:
                break
            yield name


def _places(pattern: re.Pattern[bytes], data: bytes) -> Iterator[int]:
    """Yields the offsets of all matches. Searches in windows, because a search holds the GIL."""
    for start in range(0, len(data), _WINDOW):
        for found in pattern.finditer(data, start, start + _WINDOW + 3):
            if found.start() < start + _WINDOW:  # else the next window finds it
                yield found.start()


def _inside(data: bytes, start: int, stop: int) -> Iterator[int]:
    """Yields the ids of the elements in this range, nested ones included, in file order."""
    while start < stop:
        name, inside, end = _head(data, start)
        yield name
        start = inside if name in _HOLDERS or name in _ADDITION else end


def _head(data: bytes, at: int) -> tuple[int, int, int]:
    """Returns an element's id, and begin and end of its content: the file's end if it is invalid."""
    id_length = _length(data, at)
    size_at = at + id_length
    size_length = _length(data, size_at)
    if id_length > 4 or size_length > 8:
        return 0, len(data), len(data)
    mask = (1 << 7 * size_length) - 1
    size = int.from_bytes(data[size_at : size_at + size_length], "big") & mask
    inside = size_at + size_length
    stop = len(data) if size == mask else min(inside + size, len(data))  # all ones: unknown size
    return int.from_bytes(data[at:size_at], "big"), inside, stop


def _length(data: bytes, at: int) -> int:
    """Returns the length of a variable-length number, given by its first set bit; 9 if no bit is set."""
    return 9 - data[at].bit_length() if at < len(data) else 9
