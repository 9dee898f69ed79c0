"""Image bytes into RGB pixels, upright and opaque, as a viewer would show them."""

from __future__ import annotations

import io
import struct
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pillow_heif
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
from deployments.multimodal.decoding import Decoded, check_cancelled, refuse

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
    max_pixels: int = PILLOW_MAX_PIXELS  # width x height, told by the header before anything is decoded
    background: tuple[int, int, int] = (255, 255, 255)  # RGB, under what is transparent


def decode(data: bytes, limits: ImageLimits, cancelled: threading.Event | None = None) -> Decoded:
    """{"pixels": uint8[H, W, 3]} of the first picture in the file.

    EXIF orientation is applied, transparency composited on the background, grey and CMYK and deep pixels
    brought to RGB of 8 bits. `info` has width, height, and both before the EXIF orientation (original_*).
    Raises UnsupportedMedia, MediaTooLarge (from the header), InvalidMedia for damaged data.
    """
    image = _open(data)
    original_width, original_height = image.size
    _check_pixels(original_width, original_height, limits)
    check_cancelled(cancelled)
    try:
        image.load()
        _check_pixels(
            image.width, image.height, limits
        )  # an ICO's directory may tell less than the picture inside
        pixels = np.asarray(opaque_rgb(_upright(_in_srgb(image)), limits.background))
    except Image.DecompressionBombError:
        raise _too_many_pixels(limits) from None
    except (InvalidMedia, MediaTooLarge):
        raise
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


def _open(data: bytes) -> Any:
    """A Pillow image whose header has been read, and no more."""
    try:
        if data[4:8] == b"ftyp" and data[8:12] in _HEIC_BRANDS and b"avif" not in data[:64]:
            # Not registered with Pillow, which stays as it is for others.
            return pillow_heif.HeifImageFile(io.BytesIO(data))
        return Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError:
        refuse(data, "image", _NAMES)
    except Image.DecompressionBombError:
        raise _too_many_pixels(ImageLimits()) from None
    except PILLOW_ERRORS as error:
        raise InvalidMedia("The image's header is damaged.") from error


def _check_pixels(width: int, height: int, limits: ImageLimits) -> None:
    if width * height > limits.max_pixels:
        raise _too_many_pixels(limits, width, height)


def _too_many_pixels(limits: ImageLimits, width: int = 0, height: int = 0) -> MediaTooLarge:
    size = f"is {width}x{height} pixels, " if width else "has "
    return MediaTooLarge(f"The image {size}more than the limit of {limits.max_pixels} pixels. Scale it down.")


def _in_srgb(image: Any) -> Any:
    """As Hugging Face's loaders do, colour profiles are left alone, but for XYB.

    There the profile is no nuance: without it the three channels are no red, green and blue at all.
    """
    profile = image.info.get("icc_profile") or b""
    if image.mode != "RGB" or not (b"XYB" in profile or "XYB".encode("utf-16-be") in profile):
        return image
    return ImageCms.profileToProfile(
        image, ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB"), outputMode="RGB"
    )


def _upright(image: Any) -> Any:
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)
    except PILLOW_ERRORS:  # EXIF that cannot be read must not cost the picture
        return image
    transpose = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if transpose is None else image.transpose(transpose)


def opaque_rgb(image: Any, background: tuple[int, int, int]) -> Any:
    """A loaded Pillow image of any mode as one of mode RGB."""
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(_to_8_bits(np.asarray(image)))
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        canvas = Image.new("RGBA", rgba.size, background)
        canvas.alpha_composite(rgba)
        image = canvas
    return image.convert("RGB")


def _to_8_bits(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Deep grey values into 0..255: 16 bits by 1/257, floats in [0, 1] by 255, else from least to most."""
    if not np.isfinite(values).all():
        raise InvalidMedia("The image has pixels that are not finite numbers.")
    low, high = float(values.min()), float(values.max())
    if values.dtype.kind != "f" and low >= 0 and high <= 65535:
        span = (0.0, 65535.0)
    elif low >= 0 and high <= 255:
        span = (0.0, 1.0 if high <= 1 else 255.0)
    else:
        span = (low, high)
    width = (span[1] - span[0]) or 1.0  # all of one value: black
    scaled = (values.astype(np.float64) - span[0]) * (255 / width)
    return np.rint(scaled).astype(np.uint8)
