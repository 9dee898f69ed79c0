"""Refuses image files with a huge number of tiny chunks, or with millions of numbers in their tags.

Pillow makes Python objects of each, which take ten to a hundred times the bytes of the file. The checks are
pure functions that only walk the file's structure.
"""

from __future__ import annotations

import struct

from PIL.JpegImagePlugin import MARKER

from deployments.errors import InvalidMedia

_MAX_CHUNKS = 10_000  # JPEG segments, PNG chunks without pixels, GIF comments or TIFF tags
_MAX_PNG_CHUNKS = 1 << 20  # all chunks of a PNG, those with pixels included
_MAX_EXIF_BYTES = 2 << 20  # cameras write 64 KB, and sometimes a large maker note
_MAX_NUMBERS = 1 << 20  # in all tags of a TIFF; a large image has an offset and a length for each strip

_PIXELS = {b"IDAT", b"fdAT", b"fcTL"}
_RAW_TYPES = {1, 2, 7}  # TIFF types that Pillow keeps as bytes instead of making numbers
_SUBDIRECTORIES = {34665, 34853, 40965}  # tags that point to more tags: EXIF, GPS, interoperability
_START_OF_SCAN = 0xDA
# Markers whose segment Pillow reads or skips as a whole; after any other marker it searches for the next one.
_WITH_LENGTH = {marker & 0xFF for marker, (*_, handler) in MARKER.items() if handler}


def check_chunks(data: bytes) -> None:
    """Raises InvalidMedia if an image file has more chunks, tags or EXIF than is plausible."""
    if data[:2] == b"\xff\xd8":
        _check_jpeg(data)
    elif data[:8] == b"\x89PNG\r\n\x1a\n":
        _check_png(data)
    elif data[:4] in (b"II*\0", b"MM\0*", b"II\0*", b"MM*\0", b"II+\0", b"MM\0+"):  # those Pillow accepts
        _check_tiff(data)
    elif data[:4] == b"GIF8":
        _check_gif(data)
    elif data[8:12] == b"WEBP":
        _check_webp(data)


def _check_jpeg(data: bytes) -> None:
    at = num_chunks = num_exif_bytes = 0
    while (at := data.find(b"\xff", at)) >= 0:
        at += 1
        marker, length = data[at : at + 1], int.from_bytes(data[at + 1 : at + 3], "big")
        if not marker or marker[0] == _START_OF_SCAN:
            return
        num_chunks += 1
        if marker[0] not in _WITH_LENGTH:
            length = 0
        elif data[at + 3 : at + 9] == b"Exif\0\0":
            num_exif_bytes += length
        at += length and 1 + length
        _check(num_chunks, _MAX_CHUNKS)
        _check(num_exif_bytes, _MAX_EXIF_BYTES)


def _check_png(data: bytes) -> None:
    at, num_all, num_chunks = 8, 0, 0
    while at + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        num_all += 1
        num_chunks += name not in _PIXELS
        _check(num_all, _MAX_PNG_CHUNKS)
        _check(num_chunks, _MAX_CHUNKS)
        _check(length if name == b"eXIf" else 0, _MAX_EXIF_BYTES)
        at += 12 + length


def _check_webp(data: bytes) -> None:
    at = 12
    while at + 8 <= len(data):
        name, length = struct.unpack_from("<4sI", data, at)
        _check(length if name == b"EXIF" else 0, _MAX_EXIF_BYTES)
        at += 8 + length + length % 2


def _check_gif(data: bytes) -> None:
    at, num_chunks = 13 + _colours(data, 10), 0
    while at < len(data):
        kind, at = data[at], at + 1
        if kind == 0x21:  # an extension
            num_chunks += data[at : at + 1] != b"\xf9"
            at += 1
        elif kind == 0x2C:  # a frame
            at += 10 + _colours(data, at + 8)
        elif kind == 0x3B:
            return
        else:
            continue
        while at < len(data) and data[at]:
            at += 1 + data[at]
        at += 1
        _check(num_chunks, _MAX_CHUNKS)


def _colours(data: bytes, at: int) -> int:
    """Returns the length in bytes of the colour table that the flags at this offset declare."""
    flags = data[at] if at < len(data) else 0
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def check_exif(exif: bytes) -> None:
    """Raises InvalidMedia if the EXIF block is larger than any camera writes."""
    _check(len(exif), _MAX_EXIF_BYTES)


def _check_tiff(data: bytes) -> None:
    order, is_big = "<" if data[:2] == b"II" else ">", data[2:3] == b"+"
    head, entry, offset = ("Q", "HHQQ", 8) if is_big else ("H", "HHII", 4)
    begin = data[offset : 2 * offset]
    directories = [int.from_bytes(begin, "little" if order == "<" else "big")]
    seen: set[int] = set()
    num_tags = total = 0
    while directories:
        start = directories.pop()
        if start in seen or start + struct.calcsize(order + head) > len(data):
            continue
        seen.add(start)
        (count,) = struct.unpack_from(order + head, data, start)
        first, size = start + struct.calcsize(order + head), struct.calcsize(order + entry)
        for place in range(first, min(first + count * size, len(data) - size + 1), size):
            tag, kind, num, value = struct.unpack_from(order + entry, data, place)
            num_tags += 1
            total += num if kind not in _RAW_TYPES else 0
            _check(num_tags, _MAX_CHUNKS)
            _check(total, _MAX_NUMBERS)
            if tag in _SUBDIRECTORIES:
                directories.append(value)


def _check(count: int, limit: int) -> None:
    if count > limit:
        raise InvalidMedia(
            "The image file contains an implausible number of chunks. Re-save it as PNG or JPEG."
        )
