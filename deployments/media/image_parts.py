"""Image files of very many tiny parts, or with numbers by the million in their tags.

Pillow makes objects of each, which take ten to a hundred times the bytes, so they are refused before it reads
them. Pure: a look at the file's structure.
"""

from __future__ import annotations

import struct

from PIL.JpegImagePlugin import MARKER

from deployments.errors import InvalidMedia

_MAX_PARTS = 10_000  # JPEG: segments, PNG: chunks beside its pixels', GIF: comments, TIFF: tags
_MAX_CHUNKS = 1 << 20  # of a PNG, with its pixels'
_MAX_EXIF_BYTES = 2 << 20  # cameras have 64 KB, and sometimes a large note of the maker's
_MAX_NUMBERS = 1 << 20  # in all tags of a TIFF: where its strips lie, and how long they are

_PIXELS = {b"IDAT", b"fdAT", b"fcTL"}
_RAW_TYPES = {1, 2, 7}  # bytes, of which Pillow makes no numbers
_FOLDERS = {34665, 34853, 40965}  # tags that lead to further tags: EXIF, GPS, interoperability
_START_OF_SCAN = 0xDA
_WITH_LENGTH = {marker & 0xFF for marker, (*_, handler) in MARKER.items() if handler}  # that Pillow skips


def check_parts(data: bytes) -> None:
    """Raises InvalidMedia."""
    if data[:2] == b"\xff\xd8":
        _check_jpeg(data)
    elif data[:8] == b"\x89PNG\r\n\x1a\n":
        _check_png(data)
    elif data[:4] in (b"II*\0", b"MM\0*", b"II\0*", b"MM*\0", b"II+\0", b"MM\0+"):  # as Pillow takes them
        _check_tiff(data)
    elif data[:4] == b"GIF8":
        _check_gif(data)
    elif data[8:12] == b"WEBP":
        _check_webp(data)


def _check_jpeg(data: bytes) -> None:
    at = num_parts = num_exif_bytes = 0
    while (at := data.find(b"\xff", at)) >= 0:
        at += 1
        marker, length = data[at : at + 1], int.from_bytes(data[at + 1 : at + 3], "big")
        if not marker or marker[0] == _START_OF_SCAN:
            return
        num_parts += 1
        if marker[0] not in _WITH_LENGTH:
            length = 0
        elif data[at + 3 : at + 9] == b"Exif\0\0":
            num_exif_bytes += length
        at += length and 1 + length
        _check(num_parts, _MAX_PARTS)
        _check(num_exif_bytes, _MAX_EXIF_BYTES)


def _check_png(data: bytes) -> None:
    at, num_chunks, num_parts = 8, 0, 0
    while at + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        num_chunks += 1
        num_parts += name not in _PIXELS
        _check(num_chunks, _MAX_CHUNKS)
        _check(num_parts, _MAX_PARTS)
        _check(length if name == b"eXIf" else 0, _MAX_EXIF_BYTES)
        at += 12 + length


def _check_webp(data: bytes) -> None:
    at = 12
    while at + 8 <= len(data):
        name, length = struct.unpack_from("<4sI", data, at)
        _check(length if name == b"EXIF" else 0, _MAX_EXIF_BYTES)
        at += 8 + length + length % 2


def _check_gif(data: bytes) -> None:
    at, num_parts = 13 + _colours(data, 10), 0
    while at < len(data):
        kind, at = data[at], at + 1
        if kind == 0x21:  # an extension
            num_parts += data[at : at + 1] != b"\xf9"
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
        _check(num_parts, _MAX_PARTS)


def _colours(data: bytes, at: int) -> int:
    """Bytes of the table that the flags there tell of."""
    flags = data[at] if at < len(data) else 0
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def check_exif(exif: bytes) -> None:
    """Raises InvalidMedia."""
    _check(len(exif), _MAX_EXIF_BYTES)


def _check_tiff(data: bytes) -> None:
    order, is_big = "<" if data[:2] == b"II" else ">", data[2:3] == b"+"
    head, entry, offset = ("Q", "HHQQ", 8) if is_big else ("H", "HHII", 4)
    begin = data[offset : 2 * offset]
    folders = [int.from_bytes(begin, "little" if order == "<" else "big")]
    seen: set[int] = set()
    num_tags = total = 0
    while folders:
        start = folders.pop()
        if start in seen or start + struct.calcsize(order + head) > len(data):
            continue
        seen.add(start)
        (count,) = struct.unpack_from(order + head, data, start)
        first, size = start + struct.calcsize(order + head), struct.calcsize(order + entry)
        for place in range(first, min(first + count * size, len(data) - size + 1), size):
            tag, kind, num, value = struct.unpack_from(order + entry, data, place)
            num_tags += 1
            total += num if kind not in _RAW_TYPES else 0
            _check(num_tags, _MAX_PARTS)
            _check(total, _MAX_NUMBERS)
            if tag in _FOLDERS:
                folders.append(value)


def _check(count: int, limit: int) -> None:
    if count > limit:
        raise InvalidMedia("The image's file has more parts than an image has. Save it again as PNG or JPEG.")
