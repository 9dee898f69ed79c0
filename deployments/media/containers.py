"""Shared by the decoders: their result, cancellation, and FFmpeg containers that open nothing but given
bytes.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import av

from deployments.errors import InvalidMedia, MediaTooLarge, UnsupportedMedia
from deployments.media.guards.mkv_elements import ELEMENT_BYTES, described_elements
from deployments.media.guards.mp4_index import ENTRY_BYTES, promised_samples
from deployments.types import Arrays, Modality, VideoMetadata

# Containers that contain their content. Playlists and descriptions (hls, concat, dash, sdp) are excluded,
# since FFmpeg would open the files and hosts that they name; so are game formats, which only fuzzers send.
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
    "protocol_whitelist": "none",  # not the name of any protocol
    "enable_drefs": "0",  # MOV tracks may not refer to other files
}

_NO_PICTURES = 1  # with this `max_pixels` FFmpeg decodes nothing

# Files that are often sent in place of media, by their first bytes.
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


_A = {"image": "an image", "audio": "audio", "video": "a video"}
_IMAGE, _AUDIO, _VIDEO = {Modality.IMAGE}, {Modality.AUDIO}, {Modality.VIDEO}
# Supported formats: offset, first bytes, name, and the modalities that accept them. A file that begins like
# this and does not open is damaged.
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
    """Raised in a decoder whose result is not needed any more."""


def check_cancelled(cancelled: threading.Event | None) -> None:
    """Decoding loops call this between frames."""
    if cancelled is not None and cancelled.is_set():
        raise DecodingCancelled


def refuse(data: bytes, modality: str, formats: str) -> NoReturn:
    """Raises the reason why bytes do not open: InvalidMedia (empty, damaged) or UnsupportedMedia."""
    if not data:
        raise InvalidMedia(f"The {modality} is empty. Send the content of a file.")
    head = data[:64].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for offset, magic, name, taken_as in _MEDIA:
        if head.startswith(magic, offset):
            if modality not in taken_as:
                raise UnsupportedMedia(
                    f"This is {name}, which is not accepted as {modality}. Send {formats}."
                )
            raise InvalidMedia(f"The {modality} is damaged or cut short and does not open. Send {formats}.")
    found = next((name for magic, name in _NOT_MEDIA if head.startswith(magic)), None)
    instead = f" It is {found}." if found else ""
    raise UnsupportedMedia(f"The data is not {_A[modality]} in a supported format.{instead} Send {formats}.")


@contextmanager
def open_container(
    data: bytes, modality: str, formats: str, max_pixels: int, max_decoded_bytes: int
) -> Iterator[Any]:
    """Opens an `av` input container over the bytes alone: no other file, host or unlisted format.

    To find out what the tracks contain, FFmpeg may decode frames of up to `max_pixels` in total. Raises the
    errors of `refuse` if the bytes do not open, MediaTooLarge for an index over `max_decoded_bytes`, and
    InvalidMedia if FFmpeg fails later.
    """
    index_bytes = promised_samples(data) * ENTRY_BYTES + described_elements(data) * ELEMENT_BYTES
    if index_bytes > max_decoded_bytes:
        raise MediaTooLarge(
            f"The {modality}'s index alone is larger than the limit of {max_decoded_bytes} bytes. Cut it."
        )
    try:
        container = _open(data, _NO_PICTURES)
        tracks = len(container.streams.video)
        if max_pixels and tracks:  # FFmpeg decodes one frame of each track, and holds them all
            container.close()
            container = _open(data, max_pixels // tracks)
    except _FFMPEG_ERRORS:
        refuse(data, modality, formats)
    try:
        with container:
            yield container
    except _FFMPEG_ERRORS as error:
        raise InvalidMedia(
            f"The {modality} is damaged and cannot be decoded. Convert it, or send another one."
        ) from error


def _open(data: bytes, max_pixels: int) -> Any:
    return av.open(
        io.BytesIO(data),
        options=_OPEN_OPTIONS | {"max_pixels": str(max_pixels)},
        metadata_errors="replace",
        io_open=_open_nothing,
    )


def container_mime(container: Any, data: bytes, modality: str) -> str:
    """Returns the MIME type by content."""
    if container.format.name == "matroska,webm" and b"webm" in data[:64]:
        return f"{modality}/webm"
    if data[4:12] == b"ftypqt  ":
        return f"{modality}/quicktime"
    return f"{modality}/{_CONTAINERS[container.format.name]}"


# PyAV raises ValueError and OverflowError if a file's numbers are out of range.
_FFMPEG_ERRORS = (av.error.FFmpegError, ValueError, OverflowError)


def _open_nothing(url: str, flags: int, options: dict[str, str]) -> NoReturn:
    raise PermissionError("media may not refer to other files")
