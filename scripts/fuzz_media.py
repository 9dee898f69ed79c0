"""Mutated media, data: URIs and URLs against the pure functions that read what strangers send.

    .venv/bin/python -m scripts.fuzz_media [--seconds 60] [--seed N] [--only image] [--corpus FOLDER]

Every input comes from its own seed alone. Anything but a ServingError, wrong results included, is printed
with that seed and makes the run fail; so does a crash of the process, and an input that takes over 30 s.
Again: `--only TARGET --seed SEED --seconds 0` (and the same --corpus).
"""

from __future__ import annotations

import argparse
import base64
import faulthandler
import io
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import av
import numpy as np
import pillow_heif
import soundfile
from PIL import Image
from yarl import URL

from deployments.errors import ServingError
from deployments.media import audio, data_uri, image, video
from deployments.media.audio import AudioLimits
from deployments.media.containers import DecodingCancelled
from deployments.media.image import ImageLimits
from deployments.media.urls import UrlPolicy
from deployments.media.video import VideoLimits

ROOT = Path(__file__).parent.parent
HANGS_S = 30
MIB = 2**20
IMAGES = ImageLimits(max_pixels=4 * MIB)
SOUNDS = AudioLimits(max_seconds=60, max_decoded_bytes=32 * MIB)
CLIPS = VideoLimits(max_seconds=600, max_frames=2000, max_pixels=4 * MIB, max_decoded_bytes=64 * MIB)
MAX_CORPUS_BYTES = 2 * MIB  # of one file: larger ones are slow and teach no more
POLICY = UrlPolicy()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--only", choices=TARGETS)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        sys.exit(fuzz(args.only, args.seed, args.seconds, args.corpus, args.child))
    names = [args.only] if args.only else list(TARGETS)
    good = [supervise(name, args.seed, args.seconds / len(names), args.corpus) for name in names]
    sys.exit(not all(good))


def supervise(name: str, seed: int, seconds: float, corpus: Path | None) -> bool:
    """Fuzzes in another process, which may crash, and goes on after the seed that crashed it."""
    end = time.monotonic() + seconds
    good = True
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "seed"
        while True:
            left = max(0.0, end - time.monotonic())
            command = [sys.executable, "-m", "scripts.fuzz_media", "--child", str(progress)]
            command += ["--only", name, "--seed", str(seed), "--seconds", str(left)]
            if corpus:
                command += ["--corpus", str(corpus)]
            done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace")
            if done.returncode in (0, FOUND):
                return good and done.returncode == 0
            good = False
            died_at = int(progress.read_text() or seed) if progress.exists() else seed
            why = "hung" if done.returncode == 1 else signal.strsignal(-done.returncode) or done.returncode
            print(f"{name}: seed {died_at} ended the process: {why}\n{done.stderr[-3000:]}", flush=True)
            seed = died_at + 1
            if time.monotonic() >= end:
                return False


FOUND = 3  # exit status of a process that found something and lived


def fuzz(name: str, seed: int, seconds: float, corpus: Path | None, progress: str) -> int:
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", RuntimeWarning)  # NumPy's, of values that are wrong from there on
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    target, sources = TARGETS[name], seeds_of(name, corpus)
    outcomes: Counter[str] = Counter()
    slowest, slowest_seed = 0.0, seed
    found: set[str] = set()  # lines of code: each is reported once
    with open(progress, "w") as file:
        end = time.monotonic() + seconds
        while True:
            os.pwrite(file.fileno(), f"{seed:<20}".encode(), 0)
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            start = time.monotonic()
            outcome, line, trace = try_one(target, random.Random(seed), sources)
            took = time.monotonic() - start
            faulthandler.cancel_dump_traceback_later()
            outcomes[outcome] += 1
            if took > slowest:
                slowest, slowest_seed = took, seed
            if trace and line not in found:
                found.add(line)
                print(f"{name}: seed {seed}: {outcome}\n{trace}", flush=True)
            seed += 1
            if time.monotonic() >= end:
                break
    summary = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.most_common())
    total = sum(outcomes.values())
    print(
        f"{name}: {total} inputs in {seconds:.0f} s: {summary}; slowest {slowest:.2f} s, seed {slowest_seed}"
    )
    return FOUND if found else 0


def try_one(target: Target, rng: random.Random, sources: list[bytes]) -> tuple[str, str, str]:
    """The outcome; the line of code and the traceback, if it should not have come."""
    try:
        target(rng, sources)
    except (ServingError, DecodingCancelled) as error:
        return type(error).__name__, "", ""
    except Exception as error:  # noqa: BLE001  # what is looked for here
        last = traceback.extract_tb(error.__traceback__)[-1]
        trace = "".join(traceback.format_exception(error))
        return type(error).__name__, f"{last.filename}:{last.lineno}", trace[-2000:]
    return "ok", "", ""


# Targets

Target = Callable[[random.Random, list[bytes]], None]


def fuzz_image(rng: random.Random, sources: list[bytes]) -> None:
    limits = ImageLimits(IMAGES.max_pixels, background=(rng.randrange(256), 0, 255))
    decoded = image.decode(mutated(rng, sources), limits)
    pixels = decoded.arrays["pixels"]
    assert pixels.dtype == np.uint8
    assert pixels.shape == (decoded.info["height"], decoded.info["width"], 3)
    assert 0 < pixels.shape[0] * pixels.shape[1] <= limits.max_pixels
    assert decoded.mime.startswith("image/")


def fuzz_audio(rng: random.Random, sources: list[bytes]) -> None:
    rate = rng.choice([8000, 16000, 24000, 48000])
    decoded = audio.decode(mutated(rng, sources), rate, SOUNDS)
    samples = decoded.arrays["samples"]
    assert samples.dtype == np.float32
    assert samples.ndim == 1
    assert len(samples) == decoded.info["num_samples"] > 0
    assert np.isfinite(samples).all()
    assert abs(len(samples) - decoded.info["duration_s"] * rate) < 2


def fuzz_video(rng: random.Random, sources: list[bytes]) -> None:
    num_frames = rng.choice([None, 1, 2, 8, 10**6])
    fps = rng.choice([None, None, 1e-6, 0.5, 2.0, 30.0, 1e9])
    decoded = video.decode(
        mutated(rng, sources), num_frames, fps, CLIPS, max_duration=rng.choice([None, 0.1, 5.0])
    )
    frames, info, metadata = decoded.arrays["frames"], decoded.info, decoded.video_metadata
    assert metadata is not None
    assert frames.dtype == np.uint8
    assert frames.shape == (info["num_frames"], info["height"], info["width"], 3)
    assert 0 < frames.nbytes <= CLIPS.max_decoded_bytes
    assert len(info["frame_indices"]) == len(metadata["frames_indices"]) == len(frames)
    assert info["frame_indices"] == sorted(set(info["frame_indices"]))
    assert metadata["frames_indices"] == sorted(metadata["frames_indices"])
    assert num_frames is None or len(frames) <= num_frames
    assert 0 < info["duration_s"] <= CLIPS.max_seconds
    assert metadata["fps"] > 0
    assert np.isfinite([metadata["fps"], info["fps"]]).all()


def fuzz_data_uri(rng: random.Random, sources: list[bytes]) -> None:
    """Mutated encodings; those that are left as they are must give back what was encoded."""
    plain = rng.randbytes(rng.choice([1, 2, 3, 4, 100, 5000]))
    header = rng.choice(["", "image/png", "image/png;x=y"]) + rng.choice([";base64", "; BASE64 ", ""])
    encoded: bytes | str
    if "base64" in header.lower():
        encode = rng.choice([base64.b64encode, base64.urlsafe_b64encode, base64.encodebytes])
        encoded = encode(plain).rstrip(b"=") if rng.random() < 0.3 else encode(plain)
        encoded = quote(encoded).encode() if rng.random() < 0.3 else encoded
    else:
        encoded = quote(plain, safe=rng.choice(["", "/+ "])).encode()
    intact = rng.random() < 0.3
    sent = encoded if intact else mutated(rng, [encoded, *sources])
    limit = rng.choice([1, 100, 10**6])
    decoded = data_uri.decode(header, [np.frombuffer(sent, np.uint8)], limit)
    assert 0 < len(decoded) <= limit
    assert not intact or decoded == plain


def fuzz_url(rng: random.Random, sources: list[bytes]) -> None:
    """Checks that accepted URLs are read alike by other parsers, and pass again unchanged."""
    pieces = [rng.choice(rng.choice(_URL_PIECES)) for _ in range(rng.randrange(7))]
    scheme = rng.choice(["http://", "https://", "HTTP://", "http:/", "https:///", ""])
    text = "".join([scheme, rng.choice(_HOSTS), rng.choice(["", "/", ":8080/"]), *pieces])
    if rng.random() < 0.3:
        data = mutated(rng, [text.encode(errors="surrogatepass")])
        text = data.decode(rng.choice(["utf-8", "latin-1"]), "replace")
    passed = POLICY.check_url(text)
    assert passed.isascii()
    assert passed.isprintable()
    assert " " not in passed
    assert POLICY.check_url(passed) == passed
    host, port = urlsplit(passed).hostname, urlsplit(passed).port
    theirs = URL(passed, encoded=True)
    assert host
    assert (theirs.raw_host, theirs.explicit_port) == (host, port), (theirs, host, port)
    assert theirs.user is None
    if host.replace(".", "").isdigit() or ":" in host:
        POLICY.check_address(host)


_HOSTS = [
    *("example.com", "a.example", "b-c.example", "127.0.0.1", "localhost", "0x7f.1", "2130706433", "٣.com"),
    *("[::1]", "8.8.8.8", "017700000001", "[::ffff:127.0.0.1]", "169.254.169.254", "①②⑦.0.0.1", "a..b"),
    *("ex\u00adample.com", "xn--nxasmq6b", "ﬀ.com", "ß.de", "faß.de", "a.", "1.1.1.1.", "[2606:4700::1111]"),
    "[64:ff9b::7f00:1]",
]
_URL_PIECES = [
    _HOSTS,
    _HOSTS,
    ["/", "?", "#", "//", ":", "@", "\\", "%", "&", "=", ".", "..", ";"],
    [":80", ":0", ":65535", ":65536", ":", ":00080", ":٣", ":-1", ":8_0"],
    ["a:b@", "@", "%40", "%2f", "%00", "%0d%0a", "%E4", "%zz", "\t", "\n", " ", "\x00", "\x7f", "\u2028"],
    ["/path", "/图.png", "?q=ä b", "#x", "?a=1&b=%2F%2B", "/..;/", "/\ud800", "\U0001f600", "[", "]", "%25"],
]
TARGETS: dict[str, Target] = {
    "image": fuzz_image,
    "audio": fuzz_audio,
    "video": fuzz_video,
    "data_uri": fuzz_data_uri,
    "url": fuzz_url,
}


# Mutations

_NUMBERS = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]


def mutated(rng: random.Random, sources: list[bytes]) -> bytes:
    data = bytearray(rng.choice(sources))
    for _ in range(rng.choice([0, 1, 1, 2, 4, 8, 30])):
        if not data:
            break
        rng.choice(_MUTATIONS)(rng, data, sources)
    return bytes(data)


def flip(rng: random.Random, data: bytearray, sources: list[bytes]) -> None:
    data[place(rng, data)] ^= 1 << rng.randrange(8)


def number(rng: random.Random, data: bytearray, sources: list[bytes]) -> None:
    at, size = place(rng, data), rng.choice([1, 2, 4])
    value = rng.choice(_NUMBERS) & (1 << 8 * size) - 1
    data[at : at + size] = value.to_bytes(size, rng.choice(["little", "big"]))


def add(rng: random.Random, data: bytearray, sources: list[bytes]) -> None:
    at = place(rng, data)
    data[at] = (data[at] + rng.choice([-1, 1, 16])) % 256


def noise(rng: random.Random, data: bytearray, sources: list[bytes]) -> None:
    at = place(rng, data)
    data[at : at + rng.randrange(1, 64)] = rng.randbytes(rng.randrange(1, 64))


def drop(rng: random.Random, data: bytearray, sources: list[bytes]) -> None:
    at = place(rng, data)
    del data[at : at + rng.choice([1, 4, 100, 5000])]


def cut(rng: random.Random, data: bytearray, sources: list[bytes]) -> None:
    del data[place(rng, data) :]


def repeat(rng: random.Random, data: bytearray, sources: list[bytes]) -> None:
    at, size = place(rng, data), rng.choice([1, 8, 200, 5000])
    data[at:at] = data[at : at + size] * rng.choice([1, 2, 20])


def splice(rng: random.Random, data: bytearray, sources: list[bytes]) -> None:
    other = rng.choice(sources)
    start = rng.randrange(len(other))
    at = place(rng, data)
    data[at : at + rng.choice([0, 100, 5000])] = other[start : start + rng.choice([16, 500, 5000])]


_MUTATIONS = (flip, number, number, add, noise, drop, cut, repeat, splice)


def place(rng: random.Random, data: bytearray) -> int:
    """Often near the beginning, where headers are."""
    return min(int(len(data) * rng.random() ** rng.choice([1, 4])), len(data) - 1)


# Seeds


def seeds_of(name: str, corpus: Path | None) -> list[bytes]:
    made = [make() for make in _MADE.get(name, [])]
    if corpus and (found := sorted((corpus / name).glob("*") if (corpus / name).is_dir() else [])):
        made += [file.read_bytes() for file in found if 0 < file.stat().st_size <= MAX_CORPUS_BYTES]
    return made


def still(kind: str, mode: str = "RGB", **options: Any) -> Callable[[], bytes]:
    def make() -> bytes:
        pixels = np.random.default_rng(1).integers(0, 256, (6, 8, 3), np.uint8)
        picture = Image.fromarray(pixels).resize((40, 30)).convert(mode)
        file = io.BytesIO()
        picture.save(file, kind, **options)
        return file.getvalue()

    return make


def animation(kind: str) -> Callable[[], bytes]:
    def make() -> bytes:
        first, *rest = (Image.new("RGB", (40, 30), (40 * i, 0, 255 - 40 * i)) for i in range(6))
        file = io.BytesIO()
        first.save(file, kind, save_all=True, append_images=rest, duration=90)
        return file.getvalue()

    return make


def heic() -> bytes:
    file = io.BytesIO()
    pillow_heif.from_pillow(Image.linear_gradient("L").convert("RGB")).save(file)
    return file.getvalue()


def exif() -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = 6
    return tags


def sound(kind: str, subtype: str | None = None, channels: int = 1) -> Callable[[], bytes]:
    def make() -> bytes:
        samples = np.sin(np.arange(6000 * channels) / 9).reshape(-1, channels) * 0.5
        file = io.BytesIO()
        soundfile.write(file, samples, 16000, subtype, format=kind)
        return file.getvalue()

    return make


def coded_sound(codec: str, kind: str) -> Callable[[], bytes]:
    def make() -> bytes:
        file = io.BytesIO()
        with av.open(file, "w", format=kind) as container:
            stream = container.add_stream(codec, rate=48000, layout="mono")
            wave = (np.sin(np.arange(9600) / 9) * 0.5).astype(np.float32)[None]
            frame = av.AudioFrame.from_ndarray(wave, format="fltp", layout="mono")
            frame.sample_rate = 48000
            container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        return file.getvalue()

    return make


def clip(codec: str, kind: str, rotation: int = 0) -> Callable[[], bytes]:
    def make() -> bytes:
        rng = np.random.default_rng(2)
        file = io.BytesIO()
        with av.open(file, "w", format=kind) as container:
            stream = container.add_stream(codec, rate=25, width=64, height=48, pix_fmt="yuv420p")
            stream.codec_context.options = {"g": "5"}
            if rotation:
                stream.set_display_rotation(rotation)
            for i in range(14):
                pixels = np.repeat(np.repeat(rng.integers(0, 256, (6, 8, 3), np.uint8), 8, 0), 8, 1)
                frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                frame.pts, frame.time_base = i, Fraction(1, 25)
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        return file.getvalue()

    return make


_MADE: dict[str, list[Callable[[], bytes]]] = {
    "image": [
        *(still("jpeg"), still("jpeg", progressive=True, exif=exif()), still("jpeg", "CMYK"), heic),
        *(still("png"), still("png", "RGBA"), still("png", "P"), still("png", "1"), still("png", "I;16")),
        *(still("png", "LA"), still("webp"), still("webp", "RGBA", lossless=True), still("avif")),
        *(still("tiff"), still("tiff", "F"), still("tiff", compression="tiff_lzw"), still("bmp")),
        *(still("gif"), still("ico"), animation("gif"), animation("webp"), animation("png")),
    ],
    "audio": [
        *(sound("WAV", "PCM_16"), sound("WAV", "PCM_U8", 2), sound("WAV", "FLOAT"), sound("WAV", "ULAW")),
        *(sound("WAV", "IMA_ADPCM"), sound("WAVEX", "PCM_24", 6), sound("FLAC"), sound("OGG", "VORBIS", 2)),
        *(sound("OGG", "OPUS"), sound("MP3"), sound("AIFF"), sound("CAF"), sound("AU"), sound("RF64")),
        *(sound("W64"), coded_sound("aac", "mp4"), coded_sound("aac", "adts")),
        coded_sound("libopus", "webm"),
    ],
    "video": [
        *(clip("libx264", "mp4"), clip("libx264", "mov", 90), clip("libx264", "mpegts"), clip("flv", "flv")),
        *(clip("libvpx-vp9", "webm"), clip("libvpx", "matroska"), clip("mpeg4", "avi")),
        *(clip("libx265", "mp4"), clip("mpeg1video", "mpeg")),
        *(animation("gif"), animation("webp"), animation("png")),
    ],
}


if __name__ == "__main__":
    main()
