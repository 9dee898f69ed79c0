"""Image bytes into RGB pixels, upright and opaque, as a viewer would show them."""

from __future__ import annotations

import io
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pillow_heif
import simplejpeg
from PIL import Image, ImageCms, UnidentifiedImageError
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.IcoImagePlugin import IcoImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from deployments.errors import InvalidMedia, MediaTooLarge
from deployments.media.containers import Decoded, check_cancelled, refuse
from deployments.media.image_parts import check_exif, check_parts

# No EPS, PDF, WMF (they start helpers), SVG, JPEG 2000 or anything that only fuzzers send. With the plugins
# imported by name Pillow does not import all it has at the first unknown file.
_PLUGINS = (
    JpegImageFile,
    PngImageFile,
    WebPImageFile,
    GifImageFile,
    AvifImageFile,
    BmpImageFile,
    TiffImageFile,
    IcoImageFile,
)
_FORMATS = [str(plugin.format) for plugin in _PLUGINS]
MIMES = {name: Image.MIME[name] for name in _FORMATS} | {
    "MPO": "image/jpeg",  # what Pillow calls a JPEG that holds a second picture
    "HEIF": "image/heic",
}
_NAMES = "a JPEG, PNG, WebP, GIF, AVIF, HEIC, TIFF, BMP or ICO"
_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}

PILLOW_MAX_PIXELS = 178_956_970  # above, Pillow refuses by itself

# Bytes of a pixel that count as decoded. Pillow holds 4, and what is made of them for the model takes 3 more;
# the formats named here hold copies of their own while they decode (a JPEG's coefficients, a TIFF's strip, a
# WebP's two canvases). So counted, the peak stays below twice the limit: scripts/bench_bombs.py measures it.
# One thing no header tells: libavif scales a picture to the size that its container claims, and decodes up to
# 16384x16384 pixels for that, at most 6 bytes each. This is below twice the default, whatever the file says.
_BYTES_PER_PIXEL = {"JPEG": 7, "MPO": 7, "TIFF": 7, "WEBP": 9, "ICO": 9, "AVIF": 11, "HEIF": 11}
_BYTES_PER_PIXEL_ELSE = 4
_DECODER_LINES = 2  # count too: of a picture one pixel high they are most of what is held

_CANVAS_BYTES = 64 * 2**20  # 22 MP; a larger image has memory of its own
_TILE_PIXELS = 1 << 18  # converted at once: what is made on the way stays small, and in the CPU's cache
Box = tuple[int, int, int, int]  # left, top, right, bottom

_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = {5, 6, 7, 8}  # rows become columns
_MIRRORED = {2, 3, 7, 8}  # what is left comes last
_UPSIDE_DOWN = {3, 4, 6, 7}  # what is on top comes last

# What Pillow raises for damaged files, at open, in getexif() and in load().
PILLOW_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    EOFError,
    MemoryError,
    RuntimeError,
    AssertionError,
    ZeroDivisionError,
    struct.error,
    ImageCms.PyCMSError,
)


@dataclass(frozen=True, slots=True)
class ImageLimits:
    # Both are held against the header, before anything is decoded.
    max_pixels: int = PILLOW_MAX_PIXELS  # width x height
    max_decoded_bytes: int = 2**31  # see _BYTES_PER_PIXEL; 178 million pixels of any format fit
    background: tuple[int, int, int] = (255, 255, 255)  # RGB, under what is transparent


class Canvas(threading.local):
    """Memory for the pixels of a thread's images, one after another: those before are gone with the next.

    To have 36 MB of fresh memory takes as long as an eighth of a 12 MP JPEG's decoding, or more.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def of(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """At least so many."""
        if num_bytes > _CANVAS_BYTES:
            return np.empty(num_bytes, np.uint8)
        if num_bytes > self._memory.nbytes:
            self._memory = np.empty(num_bytes, np.uint8)
        return self._memory


def decode(
    data: bytes,
    limits: ImageLimits,
    cancelled: threading.Event | None = None,
    canvas: Canvas | None = None,
) -> Decoded:
    """{"pixels": uint8[H, W, 3]} of the first picture in the file, which may be on the `canvas`.

    EXIF orientation is applied, transparency composited on the background, grey and CMYK and deep pixels
    brought to RGB of 8 bits. `info` has width, height, and both before the EXIF orientation (original_*).
    Raises UnsupportedMedia, MediaTooLarge (from the header), InvalidMedia for damaged data.
    """
    image = _open(data, limits)
    original_width, original_height = image.size
    check_cancelled(cancelled)
    try:
        pixels = _plain_jpeg(image, data, canvas)
        if pixels is None:
            image.load()
            _check_size(image.format, image.size, limits)  # once more: a header may tell less than there is
            pixels = _upright_pixels(image, limits.background, cancelled)
    except Image.DecompressionBombError:
        raise _too_many_pixels(limits) from None
    except PILLOW_ERRORS as error:
        raise InvalidMedia("The image is damaged or cut short and cannot be decoded.") from error
    height, width = pixels.shape[:2]
    info = {
        "width": width,
        "height": height,
        "original_width": original_width,
        "original_height": original_height,
    }
    return Decoded({"pixels": pixels}, info, MIMES[image.format])


def _open(data: bytes, limits: ImageLimits) -> Any:
    """A Pillow image within the limits whose header has been read, and but for an icon no more."""
    try:
        if data[4:8] == b"ftyp" and data[8:12] in _HEIC_BRANDS and b"avif" not in data[:64]:
            # Not registered with Pillow, which stays as it is for others.
            image: Any = pillow_heif.HeifImageFile(io.BytesIO(data))
        else:
            _check_icons(data, limits)
            check_parts(data)
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError:
        refuse(data, "image", _NAMES)
    except Image.DecompressionBombError:
        raise _too_many_pixels(limits) from None
    except PILLOW_ERRORS as error:
        raise InvalidMedia("The image's header is damaged.") from error
    check_exif(image.info.get("exif") or b"")
    _check_size(image.format, image.size, limits)
    return image


def _check_icons(data: bytes, limits: ImageLimits) -> None:
    """Pillow decodes an icon while it opens it, and the directory may tell less than the pictures inside."""
    if data[:4] != b"\0\0\1\0":
        return
    for number in range(int.from_bytes(data[4:6], "little")):
        with suppress(struct.error):  # cut short, which Pillow tells
            (start,) = struct.unpack_from("<I", data, 6 + 16 * number + 12)
            (first,) = struct.unpack_from("<I", data, start)
            if first == int.from_bytes(b"\x89PNG", "little"):
                width, height = struct.unpack_from(">II", data, start + 16)
            else:  # a bitmap, whose height is told with its mask's
                width, height = struct.unpack_from("<HH" if first == 12 else "<ii", data, start + 4)
                height //= 2
            _check_size("ICO", (abs(width), abs(height)), limits)


def _check_size(kind: str, size: tuple[int, int], limits: ImageLimits) -> None:
    width, height = size
    if width * height > limits.max_pixels:
        raise _too_many_pixels(limits, width, height)
    per_pixel = _BYTES_PER_PIXEL.get(kind, _BYTES_PER_PIXEL_ELSE)
    if width * (height + _DECODER_LINES) * per_pixel > limits.max_decoded_bytes:
        raise MediaTooLarge(
            f"The image is {width}x{height} pixels, which at {per_pixel} bytes a pixel for {kind} are more"
            f" than the limit of {limits.max_decoded_bytes} bytes. Scale it down."
        )


def _too_many_pixels(limits: ImageLimits, width: int = 0, height: int = 0) -> MediaTooLarge:
    size = f"is {width}x{height} pixels, " if width else "has "
    return MediaTooLarge(f"The image {size}more than the limit of {limits.max_pixels} pixels. Scale it down.")


def _plain_jpeg(image: Any, data: bytes, canvas: Canvas | None = None) -> npt.NDArray[np.uint8] | None:
    """uint8[H, W, 3] of a JPEG in RGB that has only to be decoded, as Pillow would decode it, bit for bit.

    It goes straight into the array: half of the time, and of the memory. None for any other image, and for
    what is the least damaged.
    """
    plain = image.format in ("JPEG", "MPO") and image.mode == "RGB" and not _is_xyb(image)
    if not plain or _orientation(image) in _UPRIGHT:
        return None
    try:
        room = canvas.of(3 * image.width * image.height) if canvas else None
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", buffer=room)
    except ValueError:
        return None
    return pixels if pixels.shape[:2] == (image.height, image.width) else None


def _upright_pixels(
    image: Any, background: tuple[int, int, int], cancelled: threading.Event | None
) -> npt.NDArray[np.uint8]:
    """uint8[H, W, 3] of a loaded image, tile by tile, so that besides the two no third copy is ever whole."""
    orientation = _orientation(image)
    width, height = image.size
    shape = (width, height) if orientation in _SIDEWAYS else (height, width)
    pixels = np.empty((*shape, 3), np.uint8)
    for (left, top, right, bottom), tile in rgb_tiles(image, background):
        check_cancelled(cancelled)
        columns = slice(width - right, width - left) if orientation in _MIRRORED else slice(left, right)
        rows = slice(height - bottom, height - top) if orientation in _UPSIDE_DOWN else slice(top, bottom)
        place = (columns, rows) if orientation in _SIDEWAYS else (rows, columns)
        transpose = _UPRIGHT.get(orientation)
        pixels[place] = np.asarray(tile if transpose is None else tile.transpose(transpose))
    return pixels


def _orientation(image: Any) -> int:
    """As EXIF tells it: 1 is upright."""
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)
    except PILLOW_ERRORS:  # EXIF that cannot be read must not cost the picture
        return 1
    return orientation if isinstance(orientation, int) else 1


def rgb_tiles(image: Any, background: tuple[int, int, int]) -> Iterator[tuple[Box, Any]]:
    """A loaded Pillow image of any mode as tiles of mode RGB, each with its place in the image."""
    convert = _conversion(image, background)
    for box in _boxes(*image.size):
        yield box, convert(image.crop(box))


def _boxes(width: int, height: int) -> Iterator[Box]:
    columns = min(width, _TILE_PIXELS)
    rows = _TILE_PIXELS // columns
    for top in range(0, height, rows):
        for left in range(0, width, columns):
            yield left, top, min(left + columns, width), min(top + rows, height)


def _conversion(image: Any, background: tuple[int, int, int]) -> Callable[[Any], Any]:
    """What makes RGB of a tile of the image."""
    if image.mode.startswith("I") or image.mode == "F":
        low, high = _grey_range(image)
        return lambda tile: Image.fromarray(_to_8_bits(np.asarray(tile), low, high)).convert("RGB")
    if image.mode == "RGB" and _is_xyb(image):
        profile = ImageCms.ImageCmsProfile(io.BytesIO(image.info["icc_profile"]))
        transform = ImageCms.buildTransform(profile, ImageCms.createProfile("sRGB"), "RGB", "RGB")
        return lambda tile: ImageCms.applyTransform(tile, transform)
    return lambda tile: _opaque_rgb(tile, background)


def _is_xyb(image: Any) -> bool:
    """As in Hugging Face's loaders, colour profiles are left alone, but for XYB.

    There the profile is no nuance: without it the three channels are no red, green and blue at all.
    """
    profile = image.info.get("icc_profile") or b""
    return b"XYB" in profile or "XYB".encode("utf-16-be") in profile


def _opaque_rgb(image: Any, background: tuple[int, int, int]) -> Any:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        canvas = Image.new("RGBA", rgba.size, background)
        canvas.alpha_composite(rgba)
        image = canvas
    return image.convert("RGB")


def _grey_range(image: Any) -> tuple[float, float]:
    """Black and white of a deep grey image: of 16 bits, floats in [0, 1] or [0, 255], else its extremes."""
    low, high, is_float = np.inf, -np.inf, False
    for box in _boxes(*image.size):
        values = np.asarray(image.crop(box))
        if not np.isfinite(values).all():
            raise InvalidMedia("The image has pixels that are not finite numbers.")
        low, high = min(low, float(values.min())), max(high, float(values.max()))
        is_float = values.dtype.kind == "f"
    if not is_float and low >= 0 and high <= 65535:
        return 0.0, 65535.0
    if low >= 0 and high <= 255:
        return 0.0, 1.0 if high <= 1 else 255.0
    return low, high


def _to_8_bits(values: npt.NDArray[Any], low: float, high: float) -> npt.NDArray[np.uint8]:
    width = (high - low) or 1.0  # all of one value: black
    scaled = (values.astype(np.float64) - low) * (255 / width)
    return np.rint(scaled).astype(np.uint8)
