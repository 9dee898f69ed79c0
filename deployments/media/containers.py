"""What the decoders share: their result, cancellation, and FFmpeg kept to the bytes that it was given."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import av

from deployments.errors import InvalidMedia, MediaTooLarge, UnsupportedMedia
from deployments.media.mkv_elements import ELEMENT_BYTES, described_elements
from deployments.media.mp4_index import ENTRY_BYTES, promised_samples
from deployments.types import Arrays, Modality, VideoMetadata

# Containers that carry their content in themselves. Playlists and descriptions (hls, concat, dash, sdp),
# which make FFmpeg open what they name, are not among them, nor are games' formats that only fuzzers send.
_CONTAINERS = {
    "mov,mp4,m4a,3gp,3g2,mj2": "mp4",
    "matroska,webm": "x-matroska",
    "avi": "x-msvideo",
    "mpegts": "mp2t",
    "mpeg": "mpeg",
    "flv": "x-flv",
    "ogg": "ogg",
    "mp3": "mpeg",
    "aac": "aac",
    "flac": "flac",
    "wav": "wav",
    "w64": "x-w64",
    "aiff": "aiff",
    "caf": "x-caf",
    "au": "basic",
    "amr": "amr",
}
_OPEN_OPTIONS = {
    "format_whitelist": ",".join(_CONTAINERS),
    "protocol_whitelist": "none",  # no protocol has this name
    "enable_drefs": "0",  # MOV tracks whose data lie in another file
}

_NO_PICTURES = 1  # FFmpeg's `max_pixels` with which it decodes nothing

# What is often sent in place of media, by its first bytes.
_NOT_MEDIA = [
    (b"<!doctype html", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"<svg", "an SVG drawing"),
    (b"<?xml", "an XML document"),
    (b"%pdf", "a PDF document"),
    (b"%!ps", "a PostScript document"),
    (b"#extm3u", "a playlist"),
    (b"ffconcat", "a playlist"),
    (b"\xff\x0a", "a JPEG XL image"),
    (b"\x00\x00\x00\x0cjxl ", "a JPEG XL image"),
    (b"\xff\x4f\xff\x51", "a JPEG 2000 image"),
    (b"\x00\x00\x00\x0cjp  ", "a JPEG 2000 image"),
    (b"pk\x03\x04", "a ZIP archive"),
]


_IMAGE, _AUDIO, _VIDEO = {Modality.IMAGE}, {Modality.AUDIO}, {Modality.VIDEO}
# Formats taken here, by what they begin with at an offset, and as what they are taken. If it does not open as
# that, it is damaged.
_MEDIA: list[tuple[int, bytes, str, set[Modality]]] = [
    (0, b"\xff\xd8\xff", "a JPEG image", _IMAGE),
    (0, b"\x89png\r\n", "a PNG image", _IMAGE | _VIDEO),
    (0, b"gif8", "a GIF image", _IMAGE | _VIDEO),
    (0, b"\x00\x00\x01\x00", "a Windows icon", _IMAGE),
    (0, b"ii*\x00", "a TIFF image", _IMAGE),
    (0, b"mm\x00*", "a TIFF image", _IMAGE),
    (8, b"webp", "a WebP image", _IMAGE | _VIDEO),
    (8, b"wave", "a WAV sound", _AUDIO),
    (8, b"avi ", "an AVI video", _VIDEO | _AUDIO),
    (8, b"aif", "an AIFF sound", _AUDIO),
    (0, b"fLaC".lower(), "a FLAC sound", _AUDIO),
    (0, b"id3", "an MP3 sound", _AUDIO),
    (0, b"#!amr", "an AMR sound", _AUDIO),
    (8, b"avif", "an AVIF image", _IMAGE),
    (8, b"hei", "a HEIC image", _IMAGE),
    (8, b"mif1", "a HEIC image", _IMAGE),
    (4, b"ftyp", "an MP4 or MOV file", _AUDIO | _VIDEO),
    (0, b"oggs", "an Ogg file", _AUDIO | _VIDEO),
    (0, b"\x1aE\xdf\xa3".lower(), "a WebM or Matroska file", _AUDIO | _VIDEO),
]


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded item; see `Media` in deployments.types for the arrays and `info`."""

    arrays: Arrays
    info: dict[str, Any]
    mime: str
    video_metadata: VideoMetadata | None = None


class DecodingCancelled(Exception):
    """Nobody waits for the result any more."""


def check_cancelled(cancelled: threading.Event | None) -> None:
    """Decoding loops call this between frames."""
    if cancelled is not None and cancelled.is_set():
        raise DecodingCancelled


def refuse(data: bytes, modality: str, formats: str) -> NoReturn:
    """Says why bytes do not open: raises InvalidMedia (empty, damaged) or UnsupportedMedia."""
    if not data:
        raise InvalidMedia(f"The {modality} is empty.")
    head = data[:64].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for offset, magic, name, taken_as in _MEDIA:
        if head.startswith(magic, offset):
            if modality not in taken_as:
                raise UnsupportedMedia(f"This is {name}, which is not taken as {modality}. Send {formats}.")
            raise InvalidMedia(f"The {modality} is damaged or cut short: it does not open. Send {formats}.")
    found = next((name for magic, name in _NOT_MEDIA if head.startswith(magic)), None)
    instead = f" It is {found}." if found else ""
    raise UnsupportedMedia(f"This is no {modality} in a format taken here.{instead} Send {formats}.")


@contextmanager
def open_container(
    data: bytes, modality: str, formats: str, max_pixels: int, max_decoded_bytes: int
) -> Iterator[Any]:
    """An `av` input container over the bytes alone: it opens no file, no host and no unlisted format.

    To tell what the tracks hold FFmpeg may decode frames of up to `max_pixels` together. Raises as `refuse`
    does for what does not open, MediaTooLarge for an index over `max_decoded_bytes`, and InvalidMedia for
    what FFmpeg stumbles over later.
    """
    index_bytes = promised_samples(data) * ENTRY_BYTES + described_elements(data) * ELEMENT_BYTES
    if index_bytes > max_decoded_bytes:
        raise MediaTooLarge(f"The {modality}'s index alone is over the limit of {max_decoded_bytes} bytes.")
    try:
        container = _open(data, _NO_PICTURES)
        tracks = len(container.streams.video)
        if max_pixels and tracks:  # FFmpeg decodes a frame of each, and holds them all
            container.close()
            container = _open(data, max_pixels // tracks)
    except _FFMPEG_ERRORS:
        refuse(data, modality, formats)
    try:
        with container:
            yield container
    except _FFMPEG_ERRORS as error:
        raise InvalidMedia(f"The {modality} is damaged and cannot be decoded.") from error


def _open(data: bytes, max_pixels: int) -> Any:
    return av.open(
        io.BytesIO(data),
        options=_OPEN_OPTIONS | {"max_pixels": str(max_pixels)},
        metadata_errors="replace",
        io_open=_open_nothing,
    )


def container_mime(container: Any, data: bytes, modality: str) -> str:
    """MIME type by content."""
    if container.format.name == "matroska,webm" and b"webm" in data[:64]:
        return f"{modality}/webm"
    if data[4:12] == b"ftypqt  ":
        return f"{modality}/quicktime"
    return f"{modality}/{_CONTAINERS[container.format.name]}"


# PyAV adds ValueError and OverflowError, where a file's numbers do not fit.
_FFMPEG_ERRORS = (av.error.FFmpegError, ValueError, OverflowError)


def _open_nothing(url: str, flags: int, options: dict[str, str]) -> NoReturn:
    raise PermissionError("media may not refer to other files")
