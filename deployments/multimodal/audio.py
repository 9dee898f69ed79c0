"""Audio bytes, or the sound track of a video, into mono samples at the rate that the model takes."""

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
from deployments.multimodal.decoding import Decoded, check_cancelled, container_mime, open_container
from deployments.types import Modality

Samples = npt.NDArray[np.float32]

_BLOCK_FRAMES = 1 << 17
_MAX_CHANNELS = 64
_LOUDEST = 100.0  # floats may pass full scale a little; what is meant as integers overflows in the model
_RATES = (1_000, 768_000)  # Hz: what recorders make; a header may say anything
_NAMES = "WAV, FLAC, MP3, Ogg, Opus, M4A, AAC, WebM, AIFF or AMR"

# What libsndfile reads well; it would also try raw and scientific formats.
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
    max_decoded_bytes: int = 256 * 2**20  # float32 samples of all channels, at the file's rate


@dataclass(frozen=True, slots=True)
class _Track:
    """The sound as stored."""

    rate: int  # Hz
    channels: int
    mono: Samples
    mime: str


def decode(
    data: bytes, sampling_rate: int, limits: AudioLimits, cancelled: threading.Event | None = None
) -> Decoded:
    """{"samples": float32[n]}: mono by mean over the channels, resampled to `sampling_rate` Hz.

    `info` has duration_s, original_sampling_rate and original_channels of what was really decoded, whatever
    the headers say, sampling_rate, and num_samples at that rate. Raises UnsupportedMedia, InvalidMedia
    (damaged, empty, NaN or infinite samples) and MediaTooLarge, the last as soon as decoding passes a limit.
    """
    track = _from_sndfile(data, limits, cancelled) or _from_ffmpeg(data, limits, cancelled)
    check_cancelled(cancelled)
    samples = track.mono
    if track.rate != sampling_rate:
        samples = soxr.resample(samples, track.rate, sampling_rate)
    if not len(samples):  # shorter than one sample of the lower rate
        samples = track.mono[:1]
    info = {
        "duration_s": len(track.mono) / track.rate,
        "sampling_rate": sampling_rate,
        "original_sampling_rate": track.rate,
        "original_channels": track.channels,
        "num_samples": len(samples),
    }
    return Decoded({"samples": samples}, info, track.mime)


class _Gauge:
    """Mixes blocks down to mono and holds them against the limits, as they are decoded."""

    def __init__(self, rate: int, limits: AudioLimits, cancelled: threading.Event | None) -> None:
        if not _RATES[0] <= rate <= _RATES[1]:
            raise InvalidMedia(
                f"The audio's sampling rate is not between {_RATES[0]} and {_RATES[1]} Hz. Resample it."
            )
        self._rate, self._limits, self._cancelled = rate, limits, cancelled
        self._num_frames = self._num_bytes = 0
        self._mono: list[Samples] = []
        self.channels = 0

    def add(self, block: Samples) -> None:
        """`block` is (frames, channels)."""
        check_cancelled(self._cancelled)
        num_frames, channels = block.shape
        if not num_frames:
            return
        if not 0 < channels <= _MAX_CHANNELS:
            raise InvalidMedia(f"The audio has more than {_MAX_CHANNELS} channels. Mix it down.")
        self._num_frames += num_frames
        self._num_bytes += num_frames * channels * 4
        limits = self._limits
        if self._num_frames > limits.max_seconds * self._rate:
            raise MediaTooLarge(f"The audio is longer than the limit of {limits.max_seconds:g} s. Cut it.")
        if self._num_bytes > limits.max_decoded_bytes:
            raise MediaTooLarge(
                f"The audio decodes to more than the limit of {limits.max_decoded_bytes} bytes. Cut it, or"
                " lower its rate or number of channels."
            )
        with np.errstate(over="ignore"):  # told below, as not finite
            mono = block[:, 0].copy() if channels == 1 else block.mean(axis=1, dtype=np.float32)
        if not np.isfinite(mono).all():
            raise InvalidMedia("The audio has samples that are not finite numbers.")
        if np.abs(mono).max() > _LOUDEST:
            raise InvalidMedia("The audio's samples are far outside of -1 to 1. Scale them.")
        self.channels = max(self.channels, channels)
        self._mono.append(mono)

    def track(self, mime: str) -> _Track:
        """All that was added, which must be something."""
        return _Track(self._rate, self.channels, np.concatenate(self._mono), mime)


def _from_sndfile(data: bytes, limits: AudioLimits, cancelled: threading.Event | None) -> _Track | None:
    """None for what libsndfile does not read: FFmpeg knows more formats, and forgives more."""
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            mime = _SNDFILE_MIMES.get(file.format)
            if mime is None:
                return None
            gauge = _Gauge(file.samplerate, limits, cancelled)
            while True:
                # By blocks: the header's number of samples is a claim, and may be 2^63.
                block = file.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)
                if not len(block):
                    return gauge.track(mime) if gauge.channels else None
                gauge.add(block)
    except (soundfile.SoundFileError, OSError, RuntimeError, ValueError, TypeError):
        return None


def _from_ffmpeg(data: bytes, limits: AudioLimits, cancelled: threading.Event | None) -> _Track:
    with open_container(data, Modality.AUDIO, _NAMES) as container:
        if not container.streams.audio:
            raise InvalidMedia("The file has no sound track.")
        gauge: _Gauge | None = None
        rate = 0
        for frame in _frames(container, container.streams.audio[0], cancelled):
            if gauge is None:
                rate = frame.sample_rate
                gauge = _Gauge(rate, limits, cancelled)
            elif frame.sample_rate != rate:
                raise InvalidMedia("The audio changes its sampling rate midway. Convert it to one rate.")
            gauge.add(_block(frame))
        if gauge is None or not gauge.channels:
            raise InvalidMedia("The audio is damaged or empty: nothing in it decodes.")
        return gauge.track(container_mime(container, data, Modality.AUDIO))


def _frames(container: Any, stream: Any, cancelled: threading.Event | None) -> Iterator[Any]:
    """Frames that decode; a damaged packet costs its own sound only, as in any player."""
    for packet in container.demux(stream):
        check_cancelled(cancelled)
        try:
            yield from packet.decode()
        except av.error.FFmpegError:
            continue


def _block(frame: Any) -> Samples:
    """(frames, channels) in [-1, 1], from packed or planar samples."""
    # Not frame.to_ndarray(): from eight planes on PyAV 18 reads past the last, into other memory.
    name, channels = frame.format.name.rstrip("p"), frame.layout.nb_channels
    dtype, zero, scale = _SAMPLE_FORMATS[name]
    planar = frame.format.is_planar
    count = frame.samples if planar else frame.samples * channels
    planes: list[Any] = [AudioPlane(frame, index) for index in range(channels if planar else 1)]
    arrays = [np.frombuffer(plane, dtype, count) for plane in planes]
    values = np.stack(arrays, axis=1) if planar else arrays[0].reshape(-1, channels)
    block: Samples = (values.astype(np.float32) - np.float32(zero)) / np.float32(scale)
    return block
