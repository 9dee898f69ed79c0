"""Decodes sounds, or the sound track of a video, into mono samples at the model's rate."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import soundfile
import soxr
from av.audio.plane import AudioPlane

from deployments.errors import InvalidMedia, MediaTooLarge
from deployments.media.containers import Decoded, check_cancelled, container_mime, open_container
from deployments.types import Modality

Samples = npt.NDArray[np.float32]

_BLOCK_SAMPLES = 1 << 18  # of all channels together
_MAX_CHANNELS = 64
_LOUDEST = (
    100.0  # floats may exceed full scale a little; integers stored as floats would overflow in the model
)
_RATES = (1_000, 768_000)  # Hz, of real recorders; a header may claim anything
_NAMES = "WAV, FLAC, MP3, Ogg, Opus, M4A, AAC, WebM, AIFF or AMR"

# Formats that libsndfile reads well. It would also try raw and scientific ones.
_SNDFILE_MIMES = {
    "WAV": "audio/wav",
    "WAVEX": "audio/wav",
    "RF64": "audio/wav",
    "W64": "audio/x-w64",
    "FLAC": "audio/flac",
    "OGG": "audio/ogg",
    "MP3": "audio/mpeg",
    "AIFF": "audio/aiff",
    "CAF": "audio/x-caf",
    "AU": "audio/basic",
}
# FFmpeg's sample formats: type, zero level and full scale.
_SAMPLE_FORMATS: dict[str, tuple[type[np.generic], float, float]] = {
    "u8": (np.uint8, 2**7, 2**7),
    "s16": (np.int16, 0, 2**15),
    "s32": (np.int32, 0, 2**31),
    "s64": (np.int64, 0, 2**63),
    "flt": (np.float32, 0, 1),
    "dbl": (np.float64, 0, 1),
}


@dataclass(frozen=True, slots=True)
class AudioLimits:
    max_seconds: float = 600.0
    # float32 samples of all channels at the file's rate, and of the one channel at the model's
    max_decoded_bytes: int = 256 * 2**20


@dataclass(frozen=True, slots=True)
class _Decoding:
    """Options of decoding one sound."""

    sampling_rate: int  # Hz, of the result
    limits: AudioLimits
    cancelled: threading.Event | None


def decode(
    data: bytes, sampling_rate: int, limits: AudioLimits, cancelled: threading.Event | None = None
) -> Decoded:
    """Decodes into {"samples": float32[n]}: mono by mean over the channels, at `sampling_rate` Hz.

    `info` has duration_s, original_sampling_rate and original_channels as decoded, not as the header claims,
    and sampling_rate and num_samples of the result. Raises UnsupportedMedia, InvalidMedia (damaged, empty,
    NaN or infinite samples), and MediaTooLarge as soon as decoding passes a limit.
    """
    wanted = _Decoding(sampling_rate, limits, cancelled)
    return _from_sndfile(data, wanted) or _from_ffmpeg(data, wanted)


class _Track:
    """Mixes blocks down to mono and resamples them while they are decoded, within the limits.

    The result grows in place, so it is never held twice.
    """

    def __init__(self, rate: int, wanted: _Decoding) -> None:
        """`rate`: the file's, in Hz."""
        if not _RATES[0] <= rate <= _RATES[1]:
            raise InvalidMedia(
                f"The audio's sampling rate is not between {_RATES[0]} and {_RATES[1]} Hz. Resample it."
            )
        self._rate, self._wanted = rate, wanted
        self._resampler = None
        if rate != wanted.sampling_rate:
            self._resampler = soxr.ResampleStream(rate, wanted.sampling_rate, 1)
        self._first = np.empty(0, np.float32)  # the first sample, as soon as there is one
        self._num_frames = self._num_bytes = 0
        self._samples = bytearray()  # float32
        self.channels = 0

    def count(self, num_frames: int, channels: int) -> None:
        """Counts a block against the limits, before it is converted and added."""
        if not 0 < channels <= _MAX_CHANNELS:
            raise InvalidMedia(f"The audio has more than {_MAX_CHANNELS} channels. Mix it down.")
        self._num_frames += num_frames
        self._num_bytes += num_frames * channels * 4
        self.channels = max(self.channels, channels)
        limits, rate = self._wanted.limits, self._wanted.sampling_rate
        if self._num_frames > limits.max_seconds * self._rate:
            raise MediaTooLarge(f"The audio is longer than the limit of {limits.max_seconds:g} s. Cut it.")
        if max(self._num_bytes, self._num_frames * 4 * rate // self._rate) > limits.max_decoded_bytes:
            raise MediaTooLarge(
                f"The audio decodes to more than the limit of {limits.max_decoded_bytes} bytes. Cut it, or"
                " lower its rate or number of channels."
            )

    def add(self, block: Samples) -> None:
        """Adds a counted block of shape (frames, channels)."""
        check_cancelled(self._wanted.cancelled)
        mono = _mono(block)
        peak = np.abs(mono).max()
        if not np.isfinite(peak):
            raise InvalidMedia("The audio has samples that are NaN or infinite. Convert it to 16-bit WAV.")
        if peak > _LOUDEST:
            raise InvalidMedia("The audio's samples are far outside the range -1 to 1. Scale them.")
        if not len(self._first):
            self._first = mono[:1].copy()
        self._append(mono)

    def _append(self, mono: Samples, last: bool = False) -> None:
        if self._resampler is not None:
            mono = self._resampler.resample_chunk(mono, last)
        self._samples += np.ascontiguousarray(mono).data

    def decoded(self, mime: str) -> Decoded:
        """Returns the result. At least one block must have been added."""
        self._append(self._first[:0], last=True)
        samples = np.frombuffer(self._samples, np.float32)
        if not len(samples):  # shorter than one sample of the lower rate
            samples = self._first
        info = {
            "duration_s": self._num_frames / self._rate,
            "sampling_rate": self._wanted.sampling_rate,
            "original_sampling_rate": self._rate,
            "original_channels": self.channels,
            "num_samples": len(samples),
        }
        return Decoded({"samples": samples}, info, mime)


def _mono(block: Samples) -> Samples:
    """Returns the mean over the channels of a block of shape (frames, channels)."""
    channels = block.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):  # the caller reports samples that are not finite
        if channels == 1:
            return block[:, 0]
        if channels == 2:  # the same numbers; NumPy's mean over a short axis takes longer than decoding
            return (block[:, 0] + block[:, 1]) / np.float32(2)
        mean: Samples = block.mean(axis=1, dtype=np.float32)
        return mean


def _from_sndfile(data: bytes, wanted: _Decoding) -> Decoded | None:
    """Returns None for files that libsndfile does not read: FFmpeg reads more formats, and tolerates more."""
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            mime = _SNDFILE_MIMES.get(file.format)
            if mime is None:
                return None
            track = _Track(file.samplerate, wanted)
            while True:
                # By blocks, since the header may claim 2^63 samples.
                block = file.read(_BLOCK_SAMPLES // file.channels, dtype="float32", always_2d=True)
                if not len(block):
                    return track.decoded(mime) if track.channels else None
                track.count(*block.shape)
                track.add(block)
    except (soundfile.SoundFileError, OSError, RuntimeError, ValueError, TypeError):
        return None


def _from_ffmpeg(data: bytes, wanted: _Decoding) -> Decoded:
    max_bytes = wanted.limits.max_decoded_bytes
    with open_container(data, Modality.AUDIO, _NAMES, 0, max_bytes) as container:
        if not container.streams.audio:
            raise InvalidMedia("The file does not have a sound track. Send a file with sound.")
        track: _Track | None = None
        rate = 0
        for frame in _frames(container, container.streams.audio[0], wanted.cancelled):
            if track is None:
                rate = frame.sample_rate
                track = _Track(rate, wanted)
            elif frame.sample_rate != rate:
                raise InvalidMedia("The audio changes its sampling rate midway. Convert it to one rate.")
            if frame.samples:
                track.count(frame.samples, frame.layout.nb_channels)
                for block in _blocks(frame):
                    track.add(block)
        if track is None or not track.channels:
            raise InvalidMedia(
                "The audio is damaged or empty: no part of it can be decoded. Convert it, or send another."
            )
        return track.decoded(container_mime(container, data, Modality.AUDIO))


def _frames(container: Any, stream: Any, cancelled: threading.Event | None) -> Iterator[Any]:
    """Yields the frames that decode. As in any player, a damaged packet loses only its own sound."""
    for packet in container.demux(stream):
        check_cancelled(cancelled)
        try:
            yield from packet.decode()
        except av.error.FFmpegError:
            continue


def _blocks(frame: Any) -> Iterator[Samples]:
    """Yields blocks of shape (frames, channels) in [-1, 1], from packed or planar samples."""
    # Not frame.to_ndarray(): with eight or more planes PyAV 18 reads beyond the last, into other memory.
    name, channels = frame.format.name.rstrip("p"), frame.layout.nb_channels
    dtype, zero, scale = _SAMPLE_FORMATS[name]
    planar = frame.format.is_planar
    count = frame.samples if planar else frame.samples * channels
    planes: list[Any] = [AudioPlane(frame, index) for index in range(channels if planar else 1)]
    arrays = [np.frombuffer(plane, dtype, count).reshape(frame.samples, -1) for plane in planes]
    step = max(1, _BLOCK_SAMPLES // channels)  # a packet of PCM may hold the whole file
    for start in range(0, frame.samples, step):
        values = np.concatenate([array[start : start + step] for array in arrays], axis=1)
        with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite are reported later
            block: Samples = (values.astype(np.float32) - np.float32(zero)) / np.float32(scale)
        yield block
