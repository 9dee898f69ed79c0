"""How many elements describe a WebM or Matroska file. Pure: a look at their heads, no more.

FFmpeg keeps a record of each while it opens the file, some fifty times the three bytes of an empty one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from deployments.errors import InvalidMedia

ELEMENT_BYTES = 256  # that FFmpeg holds of one, at most

_MAX_ELEMENTS = 1 << 18  # the index of half a day of video has fewer
_WINDOW = 1 << 18
_MAGIC = b"\x1a\x45\xdf\xa3"
# SeekHead, Info, Tracks, Cues, Attachments, Chapters, Tags. Wherever one stands FFmpeg may come to it: by its
# place, by a SeekHead, or looking for a way on in a damaged file.
_DESCRIPTION = re.compile(
    b"|".join(
        re.escape(bytes.fromhex(name))
        for name in ("114d9b74", "1549a966", "1654ae6b", "1c53bb6b", "1941a469", "1043a770", "1254c367")
    )
)
# What elements of these hold others: of a track, of cues, of attachments, of chapters, of tags, and Seek.
_HOLDERS = frozenset(
    {
        0xAE,
        0xE0,
        0xE1,
        0xE2,
        0xE3,
        0xE4,
        0xE9,
        0x6624,
        0x26A5,
        0x6D80,
        0x6240,
        0x5034,
        0x5035,
        0x47E7,
    }  # tracks
    | {
        0x55B0,
        0x55D0,
        0x7670,
        0x41E4,
        0x6FAB,
        0xBB,
        0xB7,
        0xDB,
        0x61A7,
        0x4DBB,
    }  # and cues, attachments, Seek
    | {0x45B9, 0xB6, 0x80, 0x8F, 0x6944, 0x7373, 0x63C0, 0x67C8}  # chapters, tags
)
# BlockAdditions, and what its BlockMores are made of: a block has a record of each while it is read.
_ADDITIONS = re.compile(re.escape(b"\x75\xa1"))
_ADDITION = frozenset({0xA6, 0xEE, 0xA5})


def described_elements(data: bytes) -> int:
    """At most; 0 for what is no WebM or Matroska. Raises InvalidMedia where they are absurdly many."""
    if not data.startswith(_MAGIC):
        return 0
    count = 0
    for _ in _elements(data):
        count += 1
        if count > _MAX_ELEMENTS:
            raise InvalidMedia("The file is described by too many elements. Convert it.")
    return count


def _elements(data: bytes) -> Iterator[int]:
    """One for each. What only looks like one soon claims to be longer than the file, and ends the look."""
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
    """A window at a time: a search keeps the GIL, and the event loop would wait for all of the file."""
    for start in range(0, len(data), _WINDOW):
        for found in pattern.finditer(data, start, start + _WINDOW + 3):
            if found.start() < start + _WINDOW:  # else the next window finds it
                yield found.start()


def _inside(data: bytes, start: int, stop: int) -> Iterator[int]:
    """The elements of one, and theirs, in the order in which they lie in the file."""
    while start < stop:
        name, inside, end = _head(data, start)
        yield name
        start = inside if name in _HOLDERS or name in _ADDITION else end


def _head(data: bytes, at: int) -> tuple[int, int, int]:
    """Id, begin and end of what is inside; both are the file's end for what is none."""
    id_length = _length(data, at)
    size_at = at + id_length
    size_length = _length(data, size_at)
    if id_length > 4 or size_length > 8:
        return 0, len(data), len(data)
    mask = (1 << 7 * size_length) - 1
    size = int.from_bytes(data[size_at : size_at + size_length], "big") & mask
    inside = size_at + size_length
    stop = len(data) if size == mask else min(inside + size, len(data))  # all ones: of unknown size
    return int.from_bytes(data[at:size_at], "big"), inside, stop


def _length(data: bytes, at: int) -> int:
    """Of a number, by its first bit that is set; 9 where there is none."""
    return 9 - data[at].bit_length() if at < len(data) else 9
