import io
import struct
import zlib

import pillow_heif
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from deployments.errors import InvalidMedia
from deployments.media import video
from deployments.media.guards.image_chunks import check_chunks
from deployments.media.image import ImageLimits, decode
from deployments.media.video import VideoLimits

MANY = 300_000
NUMBERS = 2**20 + 1


def saved(kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (9, 9, 9)).save(file, kind, **options)
    return file.getvalue()


def jpeg(*segments: bytes) -> bytes:
    plain = saved("jpeg")
    return plain[:2] + b"".join(segments) + plain[2:]


def segment(marker: int, content: bytes = b"") -> bytes:
    return struct.pack(">BBH", 0xFF, marker, 2 + len(content)) + content


def png(*chunks: bytes) -> bytes:
    plain = saved("png")
    return plain[:33] + b"".join(chunks) + plain[33:]


def chunk(name: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def tiff(tag: int, count: int, order: str = "<") -> bytes:
    """Returns a TIFF of a single tag with `count` numbers."""
    folder = struct.pack(f"{order}IHHHIII", 8, 1, tag, 3, count, 26, 0)
    return (b"II*\0" if order == "<" else b"MM\0*") + folder + b"\x39\x30" * count


def big_tiff(tag: int, count: int) -> bytes:
    return b"II+\0" + struct.pack("<HHQQHHQQ", 8, 0, 16, 1, tag, 3, count, 44) + b"\x39\x30" * count


def in_exif(count: int) -> bytes:
    """Returns a TIFF whose EXIF, a directory inside the directory, has the numbers."""
    outer = struct.pack("<IHHHIII", 8, 1, 34665, 4, 1, 26, 0)
    return b"II*\0" + outer + struct.pack("<HHHIII", 1, 37500, 3, count, 44, 0) + b"\x39\x30" * count


def overlapping(count: int) -> bytes:
    """Returns a TIFF in which the value of each tag is also the head of a directory of equally many tags."""
    tags = [struct.pack("<HHQQ", 34665, 1, 0, 24 + 20 * number + 12) for number in range(count)]
    return b"II+\0" + struct.pack("<HHQQ", 8, 0, 16, count) + b"".join(tags)


def gif(extensions: bytes) -> bytes:
    plain = saved("gif")
    at = plain.index(b"\x2c")
    return plain[:at] + extensions + plain[at:]


def webp(exif: bytes) -> bytes:
    return saved("webp", exif=exif)


@pytest.mark.parametrize(
    "data",
    [
        jpeg(segment(0xE5) * MANY),
        jpeg(b"\xff" * MANY),
        jpeg(segment(0xE1, b"Exif\0\0" + bytes(65000)) * 40),
        png(chunk(b"prVt") * MANY),
        png(chunk(b"eXIf", bytes(2**21 + 1))),
        png(chunk(b"IDAT") * (2**20 + 1)),
        webp(b"Exif\0\0" + bytes(2**21 + 1)),
        tiff(273, NUMBERS),
        tiff(273, NUMBERS, ">"),
        big_tiff(273, NUMBERS),
        in_exif(NUMBERS),
        b"II\0*" + tiff(273, NUMBERS)[4:],
        b"MM*\0" + tiff(273, NUMBERS, ">")[4:],
        b"MM\0+" + tiff(273, NUMBERS, ">")[4:],
        overlapping(4000),
        jpeg(segment(0xF0, segment(0xE0) * 10_000)),
        gif(b"\x21\xfe\x01c\0" * MANY),
    ],
    ids=[
        *("segments", "fill bytes", "exif in segments", "chunks", "exif chunk", "pixel chunks", "webp exif"),
        *(
            "tiff",
            "tiff, big endian",
            "big tiff",
            "exif in tiff",
            "II0*",
            "MM*0",
            "MM0+",
            "overlapping folders",
        ),
        *("after a segment that Pillow does not skip", "gif"),
    ],
)
def test_implausibly_many_chunks_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidMedia, match="implausible number of chunks"):
        decode(data, ImageLimits())


@pytest.mark.parametrize(
    "data",
    [
        jpeg(segment(0xE2, bytes(60_000)) * 200),  # a colour profile or depth map in pieces
        jpeg(segment(0xE1, b"Exif\0\0" + bytes(60_000))),
        png(chunk(b"tEXt", b"a\0b") * 1000),
        webp(b"Exif\0\0" + bytes(100_000)),
        saved("tiff", compression="tiff_lzw"),
        saved("jpeg")[:10],
        saved("tiff")[:20],
        b"",
    ],
)
def test_usual_files_pass(data: bytes) -> None:
    check_chunks(data)


def test_directories_that_form_a_cycle_are_read_once() -> None:
    check_chunks(b"II*\0" + struct.pack("<IHHHIII", 8, 1, 34665, 4, 1, 8, 0))


@given(
    st.sampled_from([b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"II*\0", b"MM\0+", b"RIFF1234WEBP"]),
    st.binary(max_size=99),
)
def test_any_bytes_pass_or_are_refused(head: bytes, tail: bytes) -> None:
    check_chunks(head + tail)


def heic(exif: bytes) -> bytes:
    file = io.BytesIO()
    pillow_heif.from_pillow(Image.new("RGB", (64, 64))).save(file, exif=exif)
    return file.getvalue()


def test_exif_of_avif_and_heic_is_bounded() -> None:
    exif = b"Exif\0\0" + tiff(273, NUMBERS)
    for data in (saved("avif", exif=exif), heic(exif)):
        with pytest.raises(InvalidMedia, match="implausible number"):
            decode(data, ImageLimits())
    decode(heic(b"Exif\0\0" + tiff(273, 100)), ImageLimits())


def test_a_gif_with_many_frames_and_one_comment_passes() -> None:
    frames = [Image.new("L", (8, 8), shade) for shade in range(200)]
    file = io.BytesIO()
    frames[0].save(file, "gif", save_all=True, append_images=frames[1:], comment=b"c" * 100_000)
    check_chunks(file.getvalue())


@pytest.mark.parametrize(
    "data", [png(chunk(b"prVt") * MANY), gif(b"\x21\xfe\x01c\0" * MANY)], ids=["png", "gif"]
)
def test_an_animation_is_checked_like_an_image(data: bytes) -> None:
    with pytest.raises(InvalidMedia, match="implausible number"):
        video.decode(data, 4, None, VideoLimits())
