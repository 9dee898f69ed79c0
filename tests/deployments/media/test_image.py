import contextlib
import io
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pillow_heif
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageFile, ImageOps

from deployments.errors import InvalidMedia, MediaTooLarge, UnsupportedMedia
from deployments.media import image
from deployments.media.containers import DecodingCancelled
from deployments.media.image import ImageLimits, decode

LIMITS = ImageLimits()
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def encode(picture: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def corners(width: int = 64, height: int = 32) -> Image.Image:
    """Red, green, blue and white quarters, in reading order."""
    pixels = np.zeros((height, width, 3), np.uint8)
    h, w = height // 2, width // 2
    pixels[:h, :w], pixels[:h, w:], pixels[h:, :w], pixels[h:, w:] = RED, GREEN, BLUE, WHITE
    return Image.fromarray(pixels)


def pixels(data: bytes, limits: ImageLimits = LIMITS) -> np.ndarray:
    decoded = decode(data, limits).arrays["pixels"]
    assert decoded.dtype == np.uint8
    assert decoded.ndim == 3
    assert decoded.shape[2] == 3
    return decoded


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def png_header(width: int, height: int) -> bytes:
    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    header = png_chunk(b"IHDR", size + b"\x08\x02\x00\x00\x00")
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(b"\x00" * 100))


@pytest.mark.parametrize(
    ("format", "mime", "tolerance", "options"),
    [
        ("PNG", "image/png", 0, {}),
        ("JPEG", "image/jpeg", 20, {"quality": 95}),
        ("JPEG", "image/jpeg", 20, {"quality": 95, "progressive": True}),
        ("WEBP", "image/webp", 0, {"lossless": True}),
        ("GIF", "image/gif", 0, {}),
        ("BMP", "image/bmp", 0, {}),
        ("TIFF", "image/tiff", 0, {}),
        ("TIFF", "image/tiff", 0, {"compression": "tiff_lzw"}),
        ("AVIF", "image/avif", 30, {"quality": 95}),
    ],
)
def test_formats(format: str, mime: str, tolerance: int, options: dict[str, Any]) -> None:
    decoded = decode(encode(corners(), format, **options), LIMITS)
    assert decoded.mime == mime
    assert decoded.info == {"width": 64, "height": 32, "original_width": 64, "original_height": 32}
    found = decoded.arrays["pixels"][[4, 4, -4, -4], [8, -8, 8, -8]].astype(int)
    assert np.abs(found - [RED, GREEN, BLUE, WHITE]).max() <= tolerance


def test_heic() -> None:
    file = io.BytesIO()
    pillow_heif.from_pillow(corners()).save(file, quality=90)
    decoded = decode(file.getvalue(), LIMITS)
    assert decoded.mime == "image/heic"
    assert np.abs(decoded.arrays["pixels"][4, 8].astype(int) - RED).max() < 30


def test_a_jpeg_with_a_second_picture_gives_the_first() -> None:
    data = encode(corners(), "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))], quality=95)
    decoded = decode(data, LIMITS)
    assert decoded.mime == "image/jpeg"
    assert decoded.info["width"] == 64


@pytest.mark.parametrize(
    ("orientation", "order"),
    [
        (1, "RGBW"),
        (2, "GRWB"),
        (3, "WBGR"),
        (4, "BWRG"),
        (5, "RBGW"),
        (6, "BRWG"),
        (7, "WGBR"),
        (8, "GWRB"),
        (0, "RGBW"),
        (9, "RGBW"),
        (65535, "RGBW"),
    ],
)
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied_once(format: str, orientation: int, order: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    decoded = decode(encode(corners(), format, exif=exif, quality=95), LIMITS)
    turned = 5 <= orientation <= 8
    assert (decoded.info["width"], decoded.info["height"]) == ((32, 64) if turned else (64, 32))
    assert (decoded.info["original_width"], decoded.info["original_height"]) == (64, 32)
    names = {"R": RED, "G": GREEN, "B": BLUE, "W": WHITE}
    found = decoded.arrays["pixels"][[4, 4, -4, -4], [4, -4, 4, -4]].astype(int)
    assert np.abs(found - [names[name] for name in order]).max() < 40


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_exif_that_cannot_be_read_does_not_cost_the_picture() -> None:
    data = encode(corners(), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff" + b"\x00" * 8)
    assert pixels(data).shape == (32, 64, 3)


def test_transparency_lies_on_white_or_on_what_is_asked_for() -> None:
    picture = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    picture.putpixel((0, 0), (255, 0, 0, 255))
    picture.putpixel((1, 0), (0, 0, 0, 128))
    for format, options in (("PNG", {}), ("WEBP", {"lossless": True, "exact": True}), ("TIFF", {})):
        data = encode(picture, format, **options)
        assert pixels(data)[0].tolist() == [[255, 0, 0], [127, 127, 127], [255, 255, 255], [255, 255, 255]]
        assert pixels(data, ImageLimits(background=(0, 0, 255)))[3, 3].tolist() == [0, 0, 255]


@pytest.mark.parametrize("size", [(1, 1), (17, 9), (333, 257)])
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_plain_jpeg_is_bit_for_bit_what_pillow_makes_of_it(
    size: tuple[int, int], subsampling: str, progressive: bool
) -> None:
    values = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    picture = Image.fromarray(values).resize(size)
    for quality in (10, 75, 100):
        data = encode(picture, "JPEG", quality=quality, subsampling=subsampling, progressive=progressive)
        opened = Image.open(io.BytesIO(data))
        plain = image._plain_jpeg(opened, data)
        assert plain is not None
        assert np.array_equal(plain, np.asarray(opened))


def test_a_jpeg_of_another_kind_or_damaged_is_left_to_pillow() -> None:
    sideways = Image.Exif()
    sideways[0x0112] = 6
    files = [
        encode(corners(), "JPEG", exif=sideways),
        encode(corners().convert("L"), "JPEG"),
        encode(corners().convert("CMYK"), "JPEG"),
        encode(corners(), "JPEG", quality=95)[:-20],
        encode(corners(), "PNG"),
    ]
    for data in files:
        assert image._plain_jpeg(Image.open(io.BytesIO(data)), data) is None


def test_jpegs_on_one_canvas_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "_CANVAS_BYTES", 3 * 40 * 40)
    canvas, memory = image.Canvas(), []
    for side in (40, 24, 40, 41):  # the last is too large to stay
        data = encode(Image.effect_noise((side, side), 80).convert("RGB"), "JPEG")
        drawn = image.decode(data, ImageLimits(), canvas=canvas).arrays["pixels"]
        assert np.array_equal(drawn, image.decode(data, ImageLimits()).arrays["pixels"])
        memory.append(drawn.ctypes.data)
    assert memory[0] == memory[1] == memory[2] != memory[3]
    with ThreadPoolExecutor(1) as other:
        assert other.submit(canvas.memory, 1).result().ctypes.data != canvas.memory(1).ctypes.data


@pytest.mark.parametrize("mode", ["P", "L", "RGB"])
def test_a_transparent_colour_is_transparent(mode: str) -> None:
    picture = Image.new(mode, (2, 1), 0)
    picture.putpixel((1, 0), (9, 9, 9) if mode == "RGB" else 9)
    if mode == "P":
        picture.putpalette([0, 0, 0] * 9 + [9, 9, 9])
    data = encode(picture, "PNG", transparency=(0, 0, 0) if mode == "RGB" else 0)
    assert pixels(data)[0].tolist() == [[255, 255, 255], [9, 9, 9]]


def test_grey_with_alpha() -> None:
    assert pixels(encode(Image.new("LA", (2, 2), (0, 128)), "PNG"))[0, 0].tolist() == [127] * 3


@pytest.mark.parametrize(
    ("picture", "format", "expected"),
    [
        (Image.new("1", (2, 2), 1), "PNG", (255, 255, 255)),
        (Image.new("L", (2, 2), 77), "PNG", (77, 77, 77)),
        (Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", (255, 0, 0)),
        (Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF", (255, 0, 0)),
        (Image.fromarray(np.full((2, 2), 65535, np.uint16)), "PNG", (255, 255, 255)),
        (Image.fromarray(np.full((2, 2), 257 * 100, np.uint16)), "PNG", (100, 100, 100)),
        (Image.fromarray(np.full((2, 2), 257 * 100, np.uint16)), "TIFF", (100, 100, 100)),
        (Image.fromarray(np.full((2, 2), 0.5, np.float32)), "TIFF", (128, 128, 128)),
        (Image.fromarray(np.full((2, 2), 200.0, np.float32)), "TIFF", (200, 200, 200)),
        (Image.fromarray(np.array([[-1000.0, 3000.0]], np.float32)), "TIFF", (0, 0, 0)),
        (Image.fromarray(np.array([[-5, 5]], np.int32)), "TIFF", (0, 0, 0)),
    ],
)
def test_every_mode_becomes_rgb(picture: Image.Image, format: str, expected: tuple[int, int, int]) -> None:
    found = pixels(encode(picture, format))[0, 0].astype(int)
    assert np.abs(found - expected).max() <= (4 if format == "JPEG" else 0)


def test_a_profile_without_which_there_are_no_colours_is_applied() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    # The same profile with the roles of red and blue exchanged, under the name by which XYB is known.
    swapped = profile.replace(b"rXYZ", b"????", 1).replace(b"bXYZ", b"rXYZ", 1).replace(b"????", b"bXYZ", 1)
    named = swapped.replace("sRGB".encode("utf-16-be"), "XYB_".encode("utf-16-be"))
    red = Image.new("RGB", (8, 8), RED)
    assert np.abs(pixels(encode(red, "PNG", icc_profile=named))[0, 0].astype(int) - BLUE).max() < 4
    assert pixels(encode(red, "PNG", icc_profile=swapped))[0, 0].tolist() == list(RED)
    with pytest.raises(InvalidMedia, match="damaged"):
        decode(encode(red, "PNG", icc_profile=b"XYB, but no profile"), LIMITS)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_pixels_that_are_no_numbers_are_refused(value: float) -> None:
    data = encode(Image.fromarray(np.full((2, 2), value, np.float32)), "TIFF")
    with pytest.raises(InvalidMedia, match="NaN or infinite"):
        decode(data, LIMITS)


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_of_several_pictures_the_first(format: str) -> None:
    others = [Image.new("RGB", (64, 32), BLUE), Image.new("RGB", (64, 32), GREEN)]
    data = encode(Image.new("RGB", (64, 32), RED), format, save_all=True, append_images=others)
    assert np.abs(pixels(data)[0, 0].astype(int) - RED).max() < 5


@pytest.mark.parametrize("size", [(1, 1), (2000, 1), (1, 2000)])
def test_tiny_and_extreme_sizes(size: tuple[int, int]) -> None:
    assert pixels(encode(Image.new("RGB", size, RED), "PNG")).shape == (size[1], size[0], 3)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_the_pixel_limit_is_exact_and_read_from_the_header(format: str) -> None:
    data = encode(corners(), format)
    decode(data, ImageLimits(max_pixels=64 * 32))
    with pytest.raises(MediaTooLarge, match="64x32 pixels, more than the limit of 2047"):
        decode(data, ImageLimits(max_pixels=64 * 32 - 1))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_default_limit_holds_before_anything_is_decoded() -> None:
    with pytest.raises(MediaTooLarge, match="more than the limit of 178956970 pixels"):
        decode(png_header(20_000, 14_000), LIMITS)
    with pytest.raises(InvalidMedia, match=r"damaged|cut short"):  # under the limit, and nothing there
        decode(png_header(13_000, 13_000), LIMITS)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "AVIF"])
def test_cut_short_files_are_refused(format: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = encode(Image.fromarray(noise), format)
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    for size in (12, 40, len(data) // 2, len(data) * 9 // 10):
        with pytest.raises(InvalidMedia, match=r"damaged|cut short|not an image"):
            decode(data[:size], LIMITS)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", InvalidMedia, "The image is empty"),
        (b"<!DOCTYPE html><html>", UnsupportedMedia, "It is an HTML page"),
        (b'\n <svg xmlns="http://www.w3.org/2000/svg">', UnsupportedMedia, "It is an SVG drawing"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", UnsupportedMedia, "a PostScript document"),
        (b"%PDF-1.7", UnsupportedMedia, "a PDF document"),
        (b"Hello World, this is text", UnsupportedMedia, "not an image in a supported format. Send a JPEG"),
        (b"\xff\xd8\xff\xe0 nothing more", InvalidMedia, "damaged"),
        (b"P6 2 2 255\n" + b"x" * 12, UnsupportedMedia, "not an image in a supported format"),
    ],
)
def test_what_is_no_image_is_named(data: bytes, error: type[InvalidMedia], message: str) -> None:
    with pytest.raises(error, match=message):
        decode(data, LIMITS)


def test_nothing_is_decoded_for_nobody() -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(DecodingCancelled):
        decode(encode(corners(), "PNG"), LIMITS, cancelled)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_damage_gives_a_picture_or_a_declared_error(format: str, damage: list[tuple[int, int]]) -> None:
    data = bytearray(encode(corners(), format))
    for place, value in damage:
        data[place % len(data)] = value
    with contextlib.suppress(InvalidMedia):
        pixels(bytes(data), ImageLimits(max_pixels=1 << 22))


@pytest.mark.parametrize("value", [-3.0, 1000.0])
def test_a_float_image_of_one_value_decodes(value: float) -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.full((4, 4), value, np.float32)).save(buffer, "tiff")
    assert decode(buffer.getvalue(), ImageLimits()).arrays["pixels"].max() == 0


def noise(mode: str, width: int = 13, height: int = 11) -> Image.Image:
    channels = {"L": 1, "RGB": 3, "RGBA": 4, "I;16": 2}[mode]
    data = np.random.default_rng(0).integers(0, 256, width * height * channels, np.uint8)
    return Image.frombytes(mode, (width, height), data.tobytes())


@pytest.mark.parametrize("tile_pixels", [1, 5, 13, 30, 1000])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_tiles_come_together_upright(
    orientation: int, tile_pixels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "_TILE_PIXELS", tile_pixels)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(noise("RGB"), "PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(pixels(data), np.asarray(expected))


@pytest.mark.parametrize(
    ("picture", "options"),
    [
        (noise("RGBA"), {}),
        (noise("L").convert("P"), {"transparency": 9}),
        (noise("L").convert("1"), {}),
        (noise("I;16"), {}),
        (noise("RGB"), {"transparency": (1, 2, 3)}),
    ],
)
def test_every_mode_is_the_same_by_tiles(
    picture: Image.Image, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode(picture, "PNG", **options)
    whole = pixels(data)
    monkeypatch.setattr(image, "_TILE_PIXELS", 7)
    assert np.array_equal(pixels(data), whole)


def test_black_and_white_of_a_float_image_are_those_of_all_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "_TILE_PIXELS", 2)
    values = np.array([[0, 250, 500, 750], [1000, 0, 100, 200]], np.float32)
    data = encode(Image.fromarray(values), "TIFF")
    assert pixels(data)[:, :, 0].tolist() == [[0, 64, 128, 191], [255, 0, 26, 51]]


@pytest.mark.parametrize(
    ("format", "per_pixel"),
    [("PNG", 4), ("GIF", 4), ("BMP", 4), ("JPEG", 7), ("MPO", 7), ("TIFF", 7), ("WEBP", 9), ("AVIF", 11)],
)
def test_the_limit_in_bytes_is_exact_and_read_from_the_header(format: str, per_pixel: int) -> None:
    data = encode(corners(), format)
    needed = 64 * (32 + 2) * per_pixel  # two lines are the decoder's
    decode(data, ImageLimits(max_decoded_bytes=needed))
    with pytest.raises(MediaTooLarge, match=rf"at {per_pixel} bytes a pixel .* limit of {needed - 1} bytes"):
        decode(data, ImageLimits(max_decoded_bytes=needed - 1))


def icon(*pictures: tuple[int, bytes]) -> bytes:
    """Each told to be of the given size."""
    entries, content = b"", b""
    for side, data in pictures:
        start = 6 + 16 * len(pictures) + len(content)
        entries += struct.pack("<BBBBHHII", side, side, 0, 0, 1, 32, len(data), start)
        content += data
    return struct.pack("<HHH", 0, 1, len(pictures)) + entries + content


def test_an_icon_is_its_largest_picture() -> None:
    small, large = (encode(corners(side, side), "ICO", sizes=[(side, side)]) for side in (16, 32))
    assert pixels(icon((16, small[22:]), (32, large[22:]))).shape == (32, 32, 3)
    bitmap = encode(corners(32, 32), "ICO", sizes=[(32, 32)], bitmap_format="bmp")
    assert pixels(bitmap)[4, 4].tolist() == list(RED)


@pytest.mark.parametrize("format", ["PNG", "DIB"])
def test_an_icon_that_hides_a_large_picture_is_refused_before_it_is_decoded(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = bytearray(encode(corners(), format))
    if format == "DIB":
        inner[8:12] = struct.pack("<i", 2 * 32)  # an icon's bitmap counts its mask's lines too
    monkeypatch.setattr(Image, "open", None)
    with pytest.raises(MediaTooLarge, match="64x32 pixels, more than the limit of 2047"):
        decode(icon((16, bytes(inner))), ImageLimits(max_pixels=64 * 32 - 1))


def test_an_icon_whose_directory_leads_nowhere_is_damaged() -> None:
    with pytest.raises(InvalidMedia, match="damaged"):
        decode(struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, 100, 5000), LIMITS)
