"""Measures the cost of `MediaLoader` over the bare libraries, and the gain of loading all items at once.

    .venv/bin/python -m scripts.bench_media [-n 21] [--niceness 0]

Overhead: each file is loaded by the class itself, from a data: URI, and in alternation decoded by Pillow,
soundfile and soxr, or PyAV alone, in a thread of the same priority; medians of `n`. `load` is the wall time
of the call beside transport: the arrays are not copied for another process.
Fan-out: two images, two sounds and two videos from a host with a latency of 50 ms; all at once, one modality
after the other, and each alone; in alternation too.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import logging
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import av
import numpy as np
import numpy.typing as npt
import soundfile
import soxr
from aiohttp import web
from PIL import Image, ImageOps

from deployments.runtime.payload import pack_pieces
from deployments.runtime.pool import WorkPool
from deployments.stages.media_loader import MediaLoader, MediaLoaderConfig
from deployments.types import Arrays, CallHeader, MediaOptions, MediaSource, Modality, Payload

WARM_UP = 2
NUM_FRAMES = 8
OPTIONS = MediaOptions(sampling_rate=16000, num_frames=NUM_FRAMES)
LATENCY_S = 0.05
HEADER = CallHeader(timeout_s=60.0)
GOAL_RATIO = 1.15
GOAL_MS = 3.0  # for the small image, of which a ratio says little

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class File:
    name: str
    modality: Modality
    data: bytes
    goal_ms: float | None = None  # else GOAL_RATIO counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=21)
    parser.add_argument("--niceness", type=int, default=0)
    args = parser.parse_args()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # a line for each item
    asyncio.run(run(args.n, args.niceness))


async def run(n: int, niceness: int) -> None:
    loader = MediaLoader(MediaLoaderConfig(niceness=niceness, allowed_private_networks=["127.0.0.0/8"]))
    pool = WorkPool(1, niceness)
    try:
        print(f"{'':<20} {'load ms':>8} {'bare ms':>8} {'ratio':>6} {'more ms':>8}   median of {n}")
        for file in files():
            await compare(file, loader, pool, n)
        async with serving(mixed()) as sources:
            await fan_out(loader, sources, n)
    finally:
        pool.shutdown()
        await loader.close()


# Overhead


def files() -> list[File]:
    sound = noise_and_tone(30, 44100)
    return [
        File("JPEG 12 MP", Modality.IMAGE, jpeg(4000, 3000, orientation=6)),
        File("WAV 30 s", Modality.AUDIO, encoded_sound(sound, 44100, "WAV")),
        File("MP3 30 s", Modality.AUDIO, encoded_sound(sound, 44100, "MP3")),
        File("H.264 5 s 720p", Modality.VIDEO, h264(1280, 720, seconds=5)),
        File("JPEG 224 px", Modality.IMAGE, jpeg(224, 224), GOAL_MS),
    ]


async def compare(file: File, loader: MediaLoader, pool: WorkPool, n: int) -> None:
    payload = await pack_pieces([base64.b64encode(file.data)])
    source = MediaSource(file.modality, "data", header="x/y;base64", payloads=[payload])
    bare = BARE[file.modality]
    kept = _Kept()
    loads, bares = [], []
    with patch("deployments.stages.media_loader.pack", kept):
        for _ in range(n + WARM_UP):
            loads.append(await wall_ms(loader.load(HEADER, source, OPTIONS)))
            expected, ms = await pool.run(bare, file.data)
            bares.append(ms)
            (loaded,) = kept.arrays.values()
            assert np.array_equal(loaded, expected), f"{file.name} is not decoded as by the bare library"
    load_ms, bare_ms = median(loads), median(bares)
    ratio, more = load_ms / bare_ms, load_ms - bare_ms
    if file.goal_ms is None:
        goal, met = f"ratio <= {GOAL_RATIO}", ratio <= GOAL_RATIO
    else:
        goal, met = f"more <= {file.goal_ms:g} ms", more <= file.goal_ms
    print(
        f"{file.name:<20} {load_ms:8.2f} {bare_ms:8.2f} {ratio:6.3f} {more:8.2f}   "
        f"{goal}: {'met' if met else 'MISSED'}"
    )


class _Kept:
    """Stands for `pack`, so that nothing is copied."""

    def __init__(self) -> None:
        self.arrays: Arrays = {}

    def __call__(self, arrays: Arrays) -> Payload:
        self.arrays = arrays
        return Payload(sum(array.nbytes for array in arrays.values()))


def bare_image(data: bytes) -> Array:
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    return np.asarray(upright.convert("RGB"))


def bare_audio(data: bytes) -> Array:
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    resampled: Array = soxr.resample(samples.mean(axis=1), rate, OPTIONS.sampling_rate)
    return resampled


def bare_video(data: bytes) -> Array:
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        stream.codec_context.thread_type = "SLICE"
        wanted = {(stream.frames - 1) * k // (NUM_FRAMES - 1) for k in range(NUM_FRAMES)}
        frames = (frame for i, frame in enumerate(container.decode(stream)) if i in wanted)
        return np.stack([frame.to_ndarray(format="rgb24") for frame in frames])


BARE: dict[Modality, Callable[[bytes], Array]] = {
    Modality.IMAGE: bare_image,
    Modality.AUDIO: bare_audio,
    Modality.VIDEO: bare_video,
}


# Fan-out


def mixed() -> list[File]:
    sounds = [encoded_sound(noise_and_tone(5, 44100), 44100, kind) for kind in ("WAV", "MP3")]
    return [
        File("1.jpg", Modality.IMAGE, jpeg(1280, 960)),
        File("2.wav", Modality.AUDIO, sounds[0]),
        File("3.mp4", Modality.VIDEO, h264(640, 360, seconds=2)),
        File("4.jpg", Modality.IMAGE, jpeg(1024, 1024)),
        File("5.mp3", Modality.AUDIO, sounds[1]),
        File("6.mp4", Modality.VIDEO, h264(480, 270, seconds=3)),
    ]


@asynccontextmanager
async def serving(content: list[File]) -> AsyncIterator[list[MediaSource]]:
    """The files behind URLs on loopback, each answered after the latency."""
    bodies = {f"/{file.name}": file.data for file in content}

    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(LATENCY_S)
        return web.Response(body=bodies[request.path])

    app = web.Application()
    app.router.add_get("/{name}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    root = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield [MediaSource(file.modality, "url", url=f"{root}/{file.name}") for file in content]
    finally:
        await runner.cleanup()


async def fan_out(loader: MediaLoader, sources: list[MediaSource], n: int) -> None:
    def load(chosen: list[MediaSource]) -> Awaitable[Any]:
        return asyncio.gather(*(loader.load(HEADER, source, OPTIONS) for source in chosen))

    async def by_modality() -> None:
        for modality in Modality:
            await load([source for source in sources if source.modality == modality])

    at_once, in_turn = [], []
    alone: list[list[float]] = [[] for _ in sources]
    for _ in range(n + WARM_UP):
        at_once.append(await wall_ms(load(sources)))
        in_turn.append(await wall_ms(by_modality()))
        for source, times in zip(sources, alone, strict=True):
            times.append(await wall_ms(load([source])))
    together, turns = median(at_once), median(in_turn)
    singles = [median(times) for times in alone]
    print(f"\nsix items from a host {LATENCY_S * 1000:g} ms away, median of {n}")
    print(f"all at once {together:8.1f} ms")
    print(f"by modality {turns:8.1f} ms   at once takes {together / turns:.2f} of it")
    print(f"the slowest {max(singles):8.1f} ms   at once takes {together / max(singles):.2f} times it")
    print(f"one by one  {sum(singles):8.1f} ms   ({', '.join(f'{ms:.1f}' for ms in singles)})")


async def wall_ms(work: Awaitable[Any]) -> float:
    start = time.perf_counter()
    await work
    return (time.perf_counter() - start) * 1000


def median(times: list[float]) -> float:
    return statistics.median(times[WARM_UP:])


# Media


def jpeg(width: int, height: int, orientation: int = 1) -> bytes:
    """Smooth noise, so that the file has the size of a photo's."""
    pixels = np.random.default_rng(width).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    photo = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
    photo.save(file, "jpeg", quality=92, exif=exif)
    return file.getvalue()


def noise_and_tone(seconds: float, rate: int) -> Array:
    """Stereo samples in [-1, 1]."""
    times = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(0).normal(0, 0.05, (len(times), 2))
    return (noise + 0.5 * np.sin(2 * np.pi * 440 * times)[:, None]).astype(np.float32)


def encoded_sound(samples: Array, rate: int, kind: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind)
    return file.getvalue()


def h264(width: int, height: int, seconds: float, fps: int = 30) -> bytes:
    """A texture that drifts, with FFmpeg's default key frames."""
    rng = np.random.default_rng(height)
    count = int(seconds * fps)
    small = rng.integers(0, 256, (height // 8 + count, width // 8, 3), np.uint8)
    texture = np.asarray(Image.fromarray(small).resize((width, height + 8 * count)))
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream(
            "libx264", rate=fps, width=width, height=height, pix_fmt="yuv420p", options={"crf": "23"}
        )
        stream.codec_context.time_base = Fraction(1, fps)
        for i in range(count):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(texture[i : i + height]), format="rgb24")
            frame.pts = i
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


if __name__ == "__main__":
    main()
