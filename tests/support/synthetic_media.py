"""Synthetic images, sounds and clips whose content is known: the world that tiny-omni knows.

Every item is a pure function of a NumPy random generator, so a seed names an item for ever:

* an image is one coloured shape on a plain, graded or textured background: "red circle";
* a sound is one of eight kinds: "high tone", "noise", ...;
* a clip is one coloured shape that moves in one direction, or does not: "blue square moving left".

`write_image`, `write_audio` and `write_clip` store them in real file formats.
"""

import colorsys
import io
import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np
import soundfile as sf
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

Modality = Literal["image", "audio", "video"]
MODALITIES: tuple[Modality, ...] = ("image", "audio", "video")

# Hue in degrees, saturation and value, each as a range. The CSS colour of the same name is inside.
COLOURS: dict[str, tuple[tuple[float, float], ...]] = {
    "red": ((-7, 7), (0.75, 1.0), (0.65, 1.0)),
    "orange": ((25, 40), (0.8, 1.0), (0.88, 1.0)),
    "yellow": ((54, 63), (0.7, 1.0), (0.8, 1.0)),
    "green": ((95, 150), (0.6, 1.0), (0.45, 1.0)),
    "blue": ((205, 245), (0.65, 1.0), (0.5, 1.0)),
    "purple": ((272, 306), (0.55, 1.0), (0.45, 1.0)),
}
SHAPES = ("circle", "square", "triangle")
SOUNDS = ("low tone", "high tone", "rising tone", "falling tone", "beeps", "clicks", "noise", "silence")
MOTIONS: dict[str, tuple[int, int]] = {  # label -> direction (x, y) in pixels, y grows downwards
    "moving left": (-1, 0),
    "moving right": (1, 0),
    "moving up": (0, -1),
    "moving down": (0, 1),
    "not moving": (0, 0),
}

SAMPLE_RATE = 16_000  # Hz, of every sound

Pixels = NDArray[np.uint8]
Wave = NDArray[np.float32]


@dataclass(frozen=True)
class Clip:
    """Frames of a video: `frames` is (T, H, W, 3) uint8 RGB, `fps` frames a second."""

    frames: Pixels
    fps: float

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return len(self.frames) / self.fps


@dataclass(frozen=True)
class Item:
    """One piece of media with the words that name it.

    `data` is an (H, W, 3) uint8 RGB image, an (N,) float32 wave in [-1, 1] at 16 kHz, or a `Clip`.
    """

    modality: Modality
    label: str
    data: Any


def make_item(modality: Modality, seed: int, index: int) -> Item:
    """Returns the item of (modality, seed, index), always the same."""
    rng = np.random.default_rng([seed, MODALITIES.index(modality), index])
    if modality == "image":
        return make_image(rng)
    return make_audio(rng) if modality == "audio" else make_clip(rng)


# ---------------------------------------------------------------------------------------- images


def make_image(rng: Generator, label: str | None = None, size: tuple[int, int] | None = None) -> Item:
    """A coloured shape. `label` such as "red circle" and `size` (width, height) are drawn when None."""
    colour, shape = label.split() if label else (_pick(rng, COLOURS), _pick(rng, SHAPES))
    width, height = size or _image_size(rng)
    canvas = _background(rng, width, height)
    small = min(width, height)
    radius = small * rng.uniform(0.26, 0.46)
    centre = (rng.uniform(radius, width - radius), rng.uniform(radius, height - radius))
    _Sprite.draw_from(rng, colour, shape, radius).paste(canvas, centre)
    pixels = _camera(rng, np.array(canvas))
    if rng.random() < 0.4:
        pixels = _jpeg(pixels, int(rng.integers(35, 95)))
    return Item("image", f"{colour} {shape}", pixels)


def _image_size(rng: Generator) -> tuple[int, int]:
    """(width, height) in pixels: thumbnails to XGA, upright, square and wide."""
    area = math.exp(rng.uniform(math.log(48**2), math.log(640**2))) if rng.random() < 0.96 else 1024 * 768
    aspect = math.exp(rng.choice([0.0, rng.uniform(-0.75, 0.75), 0.288, 0.575], p=[0.25, 0.35, 0.2, 0.2]))
    return max(24, round(math.sqrt(area * aspect))), max(24, round(math.sqrt(area / aspect)))


def _background(rng: Generator, width: int, height: int) -> Image.Image:
    """A background that is never as saturated as a shape."""
    first, second = _background_colour(rng), _background_colour(rng)
    kind = rng.choice(["plain", "graded", "halves", "texture"], p=[0.5, 0.2, 0.1, 0.2])
    if kind == "plain":
        return Image.new("RGB", (width, height), first)
    if kind == "halves":
        canvas = Image.new("RGB", (width, height), first)
        level = int(height * rng.uniform(0.3, 0.8))
        ImageDraw.Draw(canvas).rectangle((0, level, width, height), fill=_between(first, second, 0.5))
        return canvas
    if kind == "graded":
        corners = np.array([[first, second], [_between(first, second, rng.random()), first]], np.uint8)
    else:
        grid = rng.integers(3, 9, 2)
        noise = rng.normal(0, rng.uniform(4, 14), (*grid, 1)) + rng.normal(0, 2, (*grid, 3))
        corners = np.clip(np.array(first) + noise, 0, 255).astype(np.uint8)
    return Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC)


def _background_colour(rng: Generator) -> tuple[int, int, int]:
    """White, black, a grey or a muted tint, as 8-bit RGB."""
    kind = rng.random()
    if kind < 0.25:
        return (255, 255, 255)
    if kind < 0.35:
        return (0, 0, 0)
    if kind < 0.65:
        grey = int(rng.integers(0, 256))
        return (grey, grey, grey)
    return _rgb(rng.uniform(0, 360), rng.uniform(0.03, 0.3), rng.uniform(0.1, 1.0))


@dataclass(frozen=True)
class _Sprite:
    """A coloured shape, ready to be pasted: an RGB fill and an 8-bit mask of the same size."""

    fill: Image.Image
    mask: Image.Image

    @staticmethod
    def draw_from(rng: Generator, colour: str, shape: str, radius: float) -> "_Sprite":
        """Draw it, smooth at the edges; `radius` is that of the circle around it, in pixels."""
        hue, saturation, value = (rng.uniform(*span) for span in COLOURS[colour])
        tilt = rng.uniform(-15, 15) if rng.random() < 0.5 else 0.0
        corners = {"circle": 0, "triangle": 3, "square": 4}[shape]
        turned = 180.0 if corners == 3 and rng.random() < 0.15 else 0.0
        side = max(4, round(2 * radius))
        scale = 3 if side < 120 else 1
        middle, reach = side * scale / 2, side * scale / 2 - scale
        mask = Image.new("L", (side * scale, side * scale), 0)
        pen = ImageDraw.Draw(mask)
        if corners == 0:
            pen.ellipse((middle - reach, middle - reach, middle + reach, middle + reach), fill=255)
        else:
            start = math.radians((45 if corners == 4 else -90) + tilt + turned)
            angles = [start + 2 * math.pi * k / corners for k in range(corners)]
            pen.polygon(
                [(middle + reach * math.cos(a), middle + reach * math.sin(a)) for a in angles], fill=255
            )
        mask = mask.resize((side, side), Image.Resampling.BOX)
        fill = Image.new("RGB", (side, side), _rgb(hue, saturation, value))
        return _Sprite(fill, mask)

    def paste(self, canvas: Image.Image, centre: tuple[float, float]) -> None:
        """Put it on `canvas` around `centre` (x, y), in pixels."""
        corner = (round(centre[0] - self.mask.width / 2), round(centre[1] - self.mask.height / 2))
        canvas.paste(self.fill, corner, self.mask)


def _camera(rng: Generator, pixels: Pixels) -> Pixels:
    """Adds the effects of a camera at random: blur, light, sensor noise. Works on any (..., H, W, 3)."""
    if rng.random() < 0.2 and pixels.ndim == 3:
        soft = ImageFilter.GaussianBlur(0.012 * rng.random() * min(pixels.shape[:2]))
        pixels = np.array(Image.fromarray(pixels).filter(soft))
    if rng.random() < 0.4:
        gain, lift = rng.uniform(0.88, 1.06), rng.uniform(-6, 6)
        noise = rng.normal(0, rng.uniform(0.5, 7), pixels.shape).astype(np.float32)
        pixels = np.clip(pixels * np.float32(gain) + np.float32(lift) + noise, 0, 255).astype(np.uint8)
    return pixels


def _jpeg(pixels: Pixels, quality: int) -> Pixels:
    """The image after a trip through JPEG."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality)
    return np.array(Image.open(buffer).convert("RGB"))


def _rgb(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    """8-bit RGB of a hue in degrees with saturation and value in [0, 1]."""
    red, green, blue = colorsys.hsv_to_rgb(hue % 360 / 360, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def _between(first: tuple[int, int, int], second: tuple[int, int, int], share: float) -> tuple[int, int, int]:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(first, second, strict=True))
    return red, green, blue


# ----------------------------------------------------------------------------------------- sounds


def make_audio(rng: Generator, label: str | None = None, seconds: float | None = None) -> Item:
    """A sound of one kind. `label` and `seconds` are drawn when None."""
    label = label or _pick(rng, SOUNDS)
    seconds = seconds or _duration(rng)
    if label in ("beeps", "clicks"):
        seconds = max(seconds, 0.9)  # at least two of them
    num_samples = round(seconds * SAMPLE_RATE)
    wave = _SOUND_MAKERS[label](rng, num_samples)
    wave *= rng.uniform(0.08, 0.9) / max(float(np.abs(wave).max()), 1e-6) if label != "silence" else 1.0
    if label != "silence" and rng.random() < 0.4:  # a quiet room
        wave = wave + rng.normal(0, 10 ** rng.uniform(-4.5, -2.8), num_samples)
    sound = np.clip(wave, -1, 1).astype(np.float32)
    return Item("audio", label, _mp3(sound) if rng.random() < 0.15 else sound)


def _duration(rng: Generator) -> float:
    """Seconds, from 0.3 to 30, mostly a few."""
    low, high = [(0.3, 1.0), (1.0, 4.0), (4.0, 12.0), (12.0, 30.0)][rng.choice(4, p=[0.25, 0.5, 0.17, 0.08])]
    return float(rng.uniform(low, high))


def _voice(rng: Generator, frequency: NDArray[np.float64]) -> NDArray[np.float64]:
    """A periodic sound of the given frequency (Hz at each sample): sine, or with some overtones."""
    phase = 2 * np.pi * np.cumsum(frequency) / SAMPLE_RATE + rng.uniform(0, 2 * np.pi)
    wave = np.sin(phase)
    if rng.random() < 0.5:
        top = float(frequency.max())
        for harmonic in range(2, int(rng.integers(3, 7))):
            if harmonic * top < 7000:
                wave = wave + rng.uniform(0.1, 0.7) / harmonic * np.sin(harmonic * phase)
    return wave


def _steady(rng: Generator, num_samples: int, low: float, high: float) -> NDArray[np.float64]:
    frequency = np.full(num_samples, math.exp(rng.uniform(math.log(low), math.log(high))))
    wave = _voice(rng, frequency)
    fade = min(num_samples // 4, int(rng.integers(16, 1600)))
    ramp = np.linspace(0, 1, fade)
    wave[:fade] *= ramp
    wave[num_samples - fade :] *= ramp[::-1]
    return wave


def _sweep(rng: Generator, num_samples: int, rising: bool) -> NDArray[np.float64]:
    """One sweep of at least an octave and a half, or, in a long sound, sometimes many of them."""
    low = math.exp(rng.uniform(math.log(150), math.log(700)))
    high = min(low * 2 ** rng.uniform(1.6, 3.2), 5000)
    period = num_samples
    if num_samples > 3 * SAMPLE_RATE and rng.random() < 0.5:
        period = int(rng.uniform(0.7, 3.0) * SAMPLE_RATE)
    share = (np.arange(num_samples) % period) / period
    frequency = low * (high / low) ** (share if rising else 1 - share)
    return _voice(rng, frequency)


def _beeps(rng: Generator, num_samples: int) -> NDArray[np.float64]:
    """The same short tone again and again."""
    tone = _voice(rng, np.full(num_samples, math.exp(rng.uniform(math.log(350), math.log(2800)))))
    on, off = (int(span * SAMPLE_RATE) for span in (rng.uniform(0.1, 0.25), rng.uniform(0.12, 0.3)))
    start = rng.integers(0, on + off)
    return tone * ((np.arange(num_samples) + start) % (on + off) < on)


def _clicks(rng: Generator, num_samples: int) -> NDArray[np.float64]:
    """Short cracks, two to five a second, more or less regular."""
    wave = np.zeros(num_samples)
    gap = SAMPLE_RATE / rng.uniform(2.0, 5.0)
    position = rng.uniform(0, gap / 2)
    length = int(rng.integers(30, 120))
    decay = np.exp(-np.arange(length) / (length / 5))
    while position < num_samples - length:
        start = int(position)
        wave[start : start + length] += rng.normal(0, 1, length) * decay
        position += gap * rng.uniform(0.9, 1.1)
    return wave


def _noise(rng: Generator, num_samples: int) -> NDArray[np.float64]:
    """Steady hiss, white or a little darker."""
    wave = rng.normal(0, 1, num_samples)
    if rng.random() < 0.4:
        taps = int(rng.integers(2, 5))
        wave = np.convolve(wave, np.ones(taps) / taps, "same")
    return wave


def _silence(rng: Generator, num_samples: int) -> NDArray[np.float64]:
    return rng.normal(0, 10 ** rng.uniform(-6, -4.3), num_samples) * float(rng.random() < 0.6)


_SOUND_MAKERS = {
    "low tone": lambda rng, n: _steady(rng, n, 100, 350),
    "high tone": lambda rng, n: _steady(rng, n, 1000, 4000),
    "rising tone": lambda rng, n: _sweep(rng, n, rising=True),
    "falling tone": lambda rng, n: _sweep(rng, n, rising=False),
    "beeps": _beeps,
    "clicks": _clicks,
    "noise": _noise,
    "silence": _silence,
}


def _mp3(wave: Wave) -> Wave:
    """The wave after a trip through MP3."""
    buffer = io.BytesIO()
    sf.write(buffer, wave, SAMPLE_RATE, format="MP3", subtype="MPEG_LAYER_III")
    buffer.seek(0)
    decoded: Wave = sf.read(buffer, dtype="float32")[0]
    return decoded[: len(wave)]


# ------------------------------------------------------------------------------------------ clips


def make_clip(
    rng: Generator,
    label: str | None = None,
    size: tuple[int, int] | None = None,
    seconds: float | None = None,
    fps: float | None = None,
    codec: bool | None = None,
) -> Item:
    """A coloured shape that moves. What is None is drawn; `codec` sends the frames through H.264."""
    if label:
        colour, shape, motion = label.split(" ", 2)
    else:
        colour, shape, motion = _pick(rng, COLOURS), _pick(rng, SHAPES), _pick(rng, MOTIONS)
    width, height = size or _clip_size(rng)
    seconds = seconds or float(rng.uniform(0.5, 5.0))
    codec = bool(rng.random() < 0.3) if codec is None else codec
    # Frames that go through no codec are only needed where they are sampled, so few of them do.
    fps = fps or (float(rng.choice([8, 12, 15, 24])) if codec else rng.integers(8, 25) / seconds)
    num_frames = max(2, round(seconds * fps))

    canvas = _background(rng, width, height)
    radius = min(width, height) * rng.uniform(0.21, 0.32)
    sprite = _Sprite.draw_from(rng, colour, shape, radius)
    path = _path(rng, MOTIONS[motion], np.array([width, height]), radius, num_frames)
    frames = np.empty((num_frames, height, width, 3), np.uint8)
    for frame, (x, y) in zip(frames, path, strict=True):
        picture = canvas.copy()
        sprite.paste(picture, (x, y))
        frame[:] = np.asarray(picture)
    frames = _h264(frames, fps, int(rng.integers(20, 33))) if codec else _camera(rng, frames)
    return Item("video", f"{colour} {shape} {motion}", Clip(frames, fps))


def _clip_size(rng: Generator) -> tuple[int, int]:
    """(width, height) in pixels, even, as H.264 wants it."""
    area = math.exp(rng.uniform(math.log(64**2), math.log(240**2)))
    aspect = math.exp(rng.choice([0.0, rng.uniform(-0.6, 0.6), 0.288, 0.575], p=[0.25, 0.25, 0.25, 0.25]))
    return 2 * max(16, round(math.sqrt(area * aspect) / 2)), 2 * max(16, round(math.sqrt(area / aspect) / 2))


def _path(
    rng: Generator, direction: tuple[int, int], size: NDArray[np.int64], radius: float, num_frames: int
) -> NDArray[np.float64]:
    """Centres (num_frames, 2) of a shape that crosses much of the picture, at a more or less even speed."""
    room = size - 2 * radius
    start = radius + room * rng.random(2)
    end = start + room * rng.uniform(-0.06, 0.06, 2) * any(direction)
    for axis, sign in enumerate(direction):
        if sign:
            reach = room[axis] * rng.uniform(0.5, 1.0)
            first = radius + rng.random() * (room[axis] - reach)
            start[axis], end[axis] = (first, first + reach) if sign > 0 else (first + reach, first)
    share = np.linspace(0, 1, num_frames) ** rng.uniform(0.8, 1.25)
    return start + share[:, None] * (end - start)


def _h264(frames: Pixels, fps: float, quality: int) -> Pixels:
    """The frames after a trip through H.264 at a constant rate factor `quality`."""
    buffer = io.BytesIO()
    _encode_h264(buffer, frames, fps, quality)
    buffer.seek(0)
    with av.open(buffer) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def _encode_h264(target: str | io.BytesIO, frames: Pixels, fps: float, quality: int) -> None:
    with av.open(target, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": str(quality), "preset": "ultrafast", "threads": "1"}
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


# ------------------------------------------------------------------------------------------ files


def write_image(path: Path, pixels: Pixels) -> None:
    """Store an (H, W, 3) uint8 RGB image as the format of the suffix, such as PNG or JPEG."""
    Image.fromarray(pixels).save(path)


def write_audio(path: Path, wave: Wave) -> None:
    """Store an (N,) float32 wave at 16 kHz as WAV, FLAC or MP3, as the suffix says."""
    sf.write(path, wave, SAMPLE_RATE)


def write_clip(path: Path, clip: Clip) -> None:
    """Store a clip as H.264 in MP4."""
    _encode_h264(str(path), clip.frames, clip.fps, quality=20)


def _pick(rng: Generator, names: Any) -> str:
    return str(list(names)[rng.integers(len(names))])
