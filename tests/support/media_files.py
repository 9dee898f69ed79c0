"""Small media files, made when a test needs them."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
import soundfile
from PIL import Image

Frame = np.ndarray[Any, np.dtype[np.uint8]]
Sound = np.ndarray[Any, np.dtype[np.float64]]

BITS = 12
WIDTH, HEIGHT = 8 * BITS, 48


def encoded(image: Image.Image, kind: str = "png", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def flat_image(
    colour: str | int | tuple[int, ...], size: tuple[int, int] = (48, 48), mode: str = "RGB"
) -> Image.Image:
    return Image.new(mode, size, colour)


def png(shade: int = 128, size: tuple[int, int] = (48, 48)) -> bytes:
    """A PNG of one colour; each shade gives other pixels."""
    return encoded(Image.new("RGB", size, (shade, 255 - shade, 0)))


def noise(width: int, height: int) -> Image.Image:
    """An image of random pixels, other ones in each call."""
    return Image.effect_noise((width, height), 80).convert("RGB")


def damaged_png() -> bytes:
    """A PNG with zeros in the middle of its compressed pixels."""
    data = bytearray(
        encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)))
    )
    data[200:400] = bytes(200)
    return bytes(data)


def gif(frames: int) -> bytes:
    first, *rest = (Image.new("RGB", (48, 48), (8 * i, 0, 0)) for i in range(frames))
    return encoded(first, "gif", save_all=True, append_images=rest, duration=100)


def tone(seconds: float, rate: int = 16000, channels: int = 1) -> Sound:
    """A sine of 440 Hz, of shape (samples, channels)."""
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)
    return np.repeat(wave[:, None], channels, axis=1)


def sound(seconds: float, rate: int = 16000, channels: int = 1, kind: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, tone(seconds, rate, channels), rate, format=kind)
    return file.getvalue()


def silence(seconds: float, kind: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(int(16000 * seconds)), 16000, format=kind)
    return file.getvalue()


def numbered(number: int) -> Frame:
    """A frame that shows `number` as twelve dark or bright columns, the first bit left."""
    columns = [255 if number >> (BITS - 1 - bit) & 1 else 0 for bit in range(BITS)]
    row = np.repeat(np.array(columns, np.uint8), WIDTH // BITS)
    return np.broadcast_to(row[None, :, None], (HEIGHT, WIDTH, 3)).copy()


def number_of(frame: Frame) -> int:
    """Reads the number that a frame of `numbered` shows, at any size."""
    width = frame.shape[1]
    middles = frame[frame.shape[0] // 2, width // (2 * BITS) :: width // BITS].mean(axis=1)
    return sum(1 << (BITS - 1 - bit) for bit in range(BITS) if middles[bit] > 128)


def clip(
    times: Sequence[int],
    *,
    format: str = "mp4",
    codec: str = "libx264",
    time_base: Fraction = Fraction(1, 30),
    pix_fmt: str = "yuv420p",
    options: dict[str, str] | None = None,
    rotation: int = 0,
    draw: Callable[[int], Frame] = numbered,
    audio: Sound | None = None,
) -> bytes:
    """A video with frames at `times`, in units of `time_base`. `audio`: a sound track, mono at 16 kHz."""
    file = io.BytesIO()
    with av.open(file, "w", format=format) as container:
        height, width = draw(0).shape[:2]
        stream = container.add_stream(codec, rate=1 / time_base, width=width, height=height, pix_fmt=pix_fmt)
        stream.codec_context.time_base = stream.time_base = time_base
        stream.codec_context.options = options or {}
        if rotation:
            stream.set_display_rotation(rotation)
        track = None if audio is None else container.add_stream("aac", rate=16000, layout="mono")
        for number, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(draw(number), format="rgb24")
            frame.pts, frame.time_base = time, time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if track and audio is not None:
            samples = np.ascontiguousarray(audio.T.astype(np.float32))
            block = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
            block.sample_rate = 16000
            container.mux(track.encode(block))
            container.mux(track.encode(None))
    return file.getvalue()
