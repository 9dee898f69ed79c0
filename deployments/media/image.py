"""Decodes images into RGB pixels, upright and opaque, as a viewer would show them."""

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
from deployments.media.guards.image_chunks import check_chunks, check_exif

# Not EPS, PDF and WMF, which start helper programs, nor SVG, JPEG 2000 and other formats that only fuzzers
# send. Importing the plugins by name keeps Pillow from importing all of them at the first unknown file.
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
    "MPO": "image/jpeg",  # Pillow's name for a JPEG with a second picture
    "HEIF": "image/heic",
}
_NAMES = "a JPEG, PNG, WebP, GIF, AVIF, HEIC, TIFF, BMP or ICO"
_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}

PILLOW_MAX_PIXELS = 178_956_970  # Pillow itself refuses more

# Bytes counted for each pixel. Pillow holds 4, and the result for the model takes 3 more. The formats listed
# here hold more while they decode: a JPEG's coefficients, a TIFF's strip, a WebP's two canvases. With these
# numbers the peak stays below twice the limit, as scripts/bench_bombs.py measures. Headers do not show one
# case: libavif scales a picture to the size that its container claims, and decodes up to 16384x16384 pixels
# for that, at most 6 bytes each. This is below twice the default limit.
_BYTES_PER_PIXEL = {"JPEG": 7, "MPO": 7, "TIFF": 7, "WEBP": 9, "ICO": 9, "AVIF": 11, "HEIF": 11}
_BYTES_PER_PIXEL_ELSE = 4
_DECODER_LINES = 2  # also counted: for a picture one pixel high they are most of the memory

_CANVAS_BYTES = 64 * 2**20  # 22 megapixels; a larger image gets its own memory
_TILE_PIXELS = 1 << 18  # converted at a time, so that intermediate arrays fit into the CPU's cache
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
_MIRRORED = {2, 3, 7, 8}  # the left side comes last
_UPSIDE_DOWN = {3, 4, 6, 7}  # the top comes last

# Errors that Pillow raises for damaged files, in open(), getexif() and load().
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
    # Both are checked against the header, before anything is decoded.
    max_pixels: int = PILLOW_MAX_PIXELS  # width x height
    max_decoded_bytes: int = 2**31  # see _BYTES_PER_PIXEL; 178 million pixels of any format fit
    background: tuple[int, int, int] = (255, 255, 255)  # RGB, under transparent pixels


class Canvas(threading.local):
    """Memory for the pixels of a thread's images. Each image overwrites the one before.

    Fresh memory for a 12-megapixel image costs at least an eighth of the time of decoding its JPEG.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def memory(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Returns memory of at least `num_bytes`."""
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
    """Decodes the first picture of a file into {"pixels": uint8[H, W, 3]}, which may lie on the `canvas`.

    Applies the EXIF orientation, composites transparency on the background, and converts grey, CMYK and deep
    pixels to 8-bit RGB. `info` has width and height, and both before the EXIF orientation (original_*).
    Raises UnsupportedMedia, MediaTooLarge (by the header), and InvalidMedia for damaged data.
    """
    image = _open(data, limits)
    original_width, original_height = image.size
    check_cancelled(cancelled)
    try:
        pixels = _plain_jpeg(image, data, canvas)
        if pixels is None:
            image.load()
            _check_size(image.format, image.size, limits)  # again: the header may have claimed less
            pixels = _upright_pixels(image, limits.background, cancelled)
    except Image.DecompressionBombError:
        raise _too_many_pixels(limits) from None
    except PILLOW_ERRORS as error:
        raise InvalidMedia(
            "The image is damaged or cut short and cannot be decoded. Save it again, or send another one."
        ) from error
    height, width = pixels.shape[:2]
    info = {
        "width": width,
        "height": height,
        "original_width": original_width,
        "original_height": original_height,
    }
    return Decoded({"pixels": pixels}, info, MIMES[image.format])


def _open(data: bytes, limits: ImageLimits) -> Any:
    """Opens an image, reads its header and checks its size. Pillow decodes only icons at this point."""
    try:
        if data[4:8] == b"ftyp" and data[8:12] in _HEIC_BRANDS and b"avif" not in data[:64]:
            # Opened directly: registering the plugin would change Pillow for other users of the process.
            image: Any = pillow_heif.HeifImageFile(io.BytesIO(data))
        else:
            _check_icons(data, limits)
            check_chunks(data)
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError:
        refuse(data, "image", _NAMES)
    except Image.DecompressionBombError:
        raise _too_many_pixels(limits) from None
    except PILLOW_ERRORS as error:
        raise InvalidMedia("The image's header is damaged. Save it again, or send another one.") from error
    check_exif(image.info.get("exif") or b"")
    _check_size(image.format, image.size, limits)
    return image


def _check_icons(data: bytes, limits: ImageLimits) -> None:
    """Checks the pictures inside an icon: Pillow decodes them at open, and the directory may claim less."""
    if data[:4] != b"\0\0\1\0":
        return
    for number in range(int.from_bytes(data[4:6], "little")):
        with suppress(struct.error):  # cut short; Pillow reports it
            (start,) = struct.unpack_from("<I", data, 6 + 16 * number + 12)
            (first,) = struct.unpack_from("<I", data, start)
            if first == int.from_bytes(b"\x89PNG", "little"):
                width, height = struct.unpack_from(">II", data, start + 16)
            else:  # a bitmap, whose height includes its mask's
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
    """Decodes an upright RGB JPEG straight into an array, bit for bit as Pillow does.

    This takes half of the time and memory. Returns None for any other image, and for one that is damaged at
    all.
    """
    plain = image.format in ("JPEG", "MPO") and image.mode == "RGB" and not _is_xyb(image)
    if not plain or _orientation(image) in _UPRIGHT:
        return None
    try:
        room = canvas.memory(3 * image.width * image.height) if canvas else None
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", buffer=room)
    except ValueError:
        return None
    return pixels if pixels.shape[:2] == (image.height, image.width) else None


def _upright_pixels(
    image: Any, background: tuple[int, int, int], cancelled: threading.Event | None
) -> npt.NDArray[np.uint8]:
    """Converts a loaded image tile by tile, so that no third whole copy is held. Returns uint8[H, W, 3]."""
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
    """Returns the EXIF orientation: 1 is upright."""
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)
    except PILLOW_ERRORS:  # a damaged EXIF must not cost the picture
        return 1
    return orientation if isinstance(orientation, int) else 1


def rgb_tiles(image: Any, background: tuple[int, int, int]) -> Iterator[tuple[Box, Any]]:
    """Yields a loaded Pillow image of any mode as RGB tiles, each with its box in the image."""
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
    """Returns the function that converts a tile of the image to RGB."""
    if image.mode.startswith("I") or image.mode == "F":
        low, high = _grey_range(image)
        return lambda tile: Image.fromarray(_to_8_bits(np.asarray(tile), low, high)).convert("RGB")
    if image.mode == "RGB" and _is_xyb(image):
        profile = ImageCms.ImageCmsProfile(io.BytesIO(image.info["icc_profile"]))
        transform = ImageCms.buildTransform(profile, ImageCms.createProfile("sRGB"), "RGB", "RGB")
        return lambda tile: ImageCms.applyTransform(tile, transform)
    return lambda tile: _opaque_rgb(tile, background)


def _is_xyb(image: Any) -> bool:
    """Checks for an XYB profile, the only colour profile that is applied.

    Hugging Face's loaders ignore profiles. Without an XYB profile, though, the channels are not red, green
    and blue.
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
    """Returns black and white of a deep grey image: 16 bits, floats to 1 or 255, or its extremes."""
    low, high, is_float = np.inf, -np.inf, False
    for box in _boxes(*image.size):
        values = np.asarray(image.crop(box))
        if not np.isfinite(values).all():
            raise InvalidMedia("The image has pixels that are NaN or infinite. Save it again as PNG or JPEG.")
        low, high = min(low, float(values.min())), max(high, float(values.max()))
        is_float = values.dtype.kind == "f"
    if not is_float and low >= 0 and high <= 65535:
        return 0.0, 65535.0
    if low >= 0 and high <= 255:
        return 0.0, 1.0 if high <= 1 else 255.0
    return low, high


def _to_8_bits(values: npt.NDArray[Any], low: float, high: float) -> npt.NDArray[np.uint8]:
    width = (high - low) or 1.0  # an image of one value is black
    scaled = (values.astype(np.float64) - low) * (255 / width)
    return np.rint(scaled).astype(np.uint8)
