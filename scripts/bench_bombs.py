"""Peak memory of the media stage over files that are small and decode to much, against the declared limit.

    .venv/bin/python -m scripts.bench_bombs [NAME ...]

Each runs in a process of its own, in which every limit in bytes is lowered to 64 MiB. The peak is the most
resident memory during `MediaLoader.load` over that right before it. All must stay below twice the limit:
bombs, which must be refused with a 4xx, and those marked "fits", which are as large as the limit allows and
must be taken. Copies for transport between processes
are left out, and so are files that decode to no more than what was sent: `max_image_bytes` and its like
bound those.
Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import logging
import struct
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import av
import numpy as np
import pillow_heif
import soundfile
from PIL import Image

from deployments.errors import ServingError
from deployments.stages.media_loader import MediaLoader, MediaLoaderConfig
from deployments.types import CallHeader, Media, MediaOptions, MediaSource, Modality, Payload

ROOT = Path(__file__).parent.parent
MIB = 2**20
LIMIT = 64 * MIB
GOAL = 2.0
TIMEOUT_S = 120.0
CONFIG = MediaLoaderConfig(
    niceness=0,
    allowed_private_networks=["127.0.0.0/8"],
    max_image_bytes=LIMIT,
    max_audio_bytes=LIMIT,
    max_video_bytes=LIMIT,
    max_image_decoded_bytes=LIMIT,
    max_audio_seconds=1e6,
    max_audio_decoded_bytes=LIMIT,
    max_video_pixels=1920 * 1088,
    max_video_decoded_bytes=LIMIT,
)


@dataclass(frozen=True, slots=True)
class Bomb:
    modality: Modality
    make: Callable[[], bytes]
    header: str = "x/y;base64"
    encoding: str = ""  # sent over HTTP with this Content-Encoding
    num_frames: int | None = 8
    fits: bool = False  # as large as the limit allows: taken
    harmless: bool = False  # taken or refused, for whatever reason


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BOMBS)}")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        asyncio.run(load(args.names[0], args.child))
        return
    print(f"{'':<22} {'sent':>10}  {'outcome':<26} {'peak MiB':>8} {'of limit':>8}   ({LIMIT // MIB} MiB)")
    with tempfile.TemporaryDirectory() as folder:
        good = [measure(name, Path(folder)) for name in args.names or BOMBS]
    sys.exit(not all(good))


def measure(name: str, folder: Path) -> bool:
    """Prints the line; whether all is as it should be."""
    bomb = BOMBS[name]
    data = bomb.make()
    file = folder / name
    file.write_bytes(data)
    with serving(data, bomb.encoding) as url:
        where = url if bomb.encoding else str(file)
        command = [sys.executable, "-m", "scripts.bench_bombs", "--child", where, name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * TIMEOUT_S)
    if done.returncode:
        print(f"{name:<22} {len(data):10}  the process ended with {done.returncode}: {done.stderr[-500:]}")
        return False
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    ratio = result["peak"] / LIMIT
    print(
        f"{name:<22} {len(data):10}  {result['outcome']:<26} {result['peak'] / MIB:8.1f} {ratio:8.2f}", end=""
    )
    taken = bool(result["status"] == 200)
    right = bomb.harmless or (taken if bomb.fits else 400 <= result["status"] < 500)
    remarks = {"fits": bomb.fits, "TOO MUCH": ratio >= GOAL, "WRONG": not right}
    print("  ", " ".join(remark for remark, holds in remarks.items() if holds))
    return right and ratio < GOAL


@contextmanager
def serving(data: bytes, encoding: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Content-Encoding", encoding or "identity")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/bomb"
        finally:
            server.shutdown()
            thread.join()


# In the process that is measured


async def load(name: str, where: str) -> None:
    """Prints the outcome and the peak as JSON."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    bomb = BOMBS[name]
    sent = b"" if bomb.encoding else read(where)
    if bomb.header.endswith(";base64"):
        sent = base64.b64encode(sent)
    loader = MediaLoader(CONFIG)
    await warm_up(loader)
    before = resident("VmRSS")
    reset_peak()
    try:
        media = await load_one(loader, bomb, sent, where if bomb.encoding else "")
        status, outcome = 200, f"200 {media.mime}"
    except ServingError as error:
        status, outcome = error.status, f"{error.status} {type(error).__name__}"
    peak = resident("VmHWM") - before
    await loader.close()
    print(json.dumps({"status": status, "outcome": outcome, "peak": peak}))


async def load_one(loader: MediaLoader, bomb: Bomb, sent: bytes, url: str = "") -> Media:
    """As in production, where arrays lie in shared memory: packing and unpacking copy nothing."""
    payload = Payload(len(sent))
    if url:
        source = MediaSource(bomb.modality, "url", url=url)
    else:
        source = MediaSource(bomb.modality, "data", header=bomb.header)
    pieces = [np.frombuffer(sent, np.uint8)]
    options = MediaOptions(num_frames=bomb.num_frames)
    with (
        patch("deployments.stages.media_loader.unpack_pieces", AsyncMock(return_value=pieces)),
        patch("deployments.stages.media_loader.pack", Mock(return_value=payload)),
    ):
        return (await loader.load(CallHeader(TIMEOUT_S), source, options)).value


async def warm_up(loader: MediaLoader) -> None:
    """Loads the libraries first, so that their memory is not counted for a bomb."""
    for modality, data in (
        (Modality.IMAGE, png(8, 8)),
        (Modality.AUDIO, silence(1, 8000, 1, "WAV", "PCM_16")),
        (Modality.VIDEO, h264(64, 64, 2)),
    ):
        await load_one(loader, Bomb(modality, bytes), base64.b64encode(data))


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def reset_peak() -> None:
    """The high-water mark begins anew."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(field: str) -> int:
    """Bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


# Images


def png(width: int, height: int, rows: bytes | None = None, kind: int = 0, bits: int = 8) -> bytes:
    """`rows` or nothing but zeros, of which at most a megabyte: the header claims the rest."""

    def chunk(name: bytes, content: bytes) -> bytes:
        check = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    rows = bytes(min((width + 1) * height, MIB)) if rows is None else rows
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def png_text() -> bytes:
    """A text chunk that inflates to 1 GiB."""
    plain = png(8, 8)
    squeeze = zlib.compressobj(9)
    text = b"Comment\0\0" + b"".join(squeeze.compress(bytes(MIB)) for _ in range(1024)) + squeeze.flush()
    chunk = struct.pack(">I", len(text)) + b"zTXt" + text + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    return plain[:33] + chunk + plain[33:]


def gif(width: int, height: int) -> bytes:
    """A small picture on a screen that the header declares as large."""
    return b"GIF89a" + struct.pack("<HH", width, height) + saved(Image.new("P", (8, 8)), "gif")[10:]


def jpeg(width: int, height: int) -> bytes:
    """A small picture whose header claims another size."""
    data = bytearray(saved(Image.new("L", (8, 8)), "jpeg"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def tiff(width: int, height: int) -> bytes:
    """Deflated zeros, of which the header claims more."""
    tags = [
        *((256, 4, width), (257, 4, height), (258, 3, 8), (259, 3, 8), (262, 3, 1), (273, 4, 200)),
        *((277, 3, 1), (278, 4, height), (279, 4, 1000)),
    ]
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    head = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    return head.ljust(200, b"\0") + zlib.compress(bytes(MIB))


def ico(inner: bytes) -> bytes:
    """An icon declared as 16 x 16 whose PNG is larger."""
    entry = struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(inner), 22)
    return b"\0\0\1\0\1\0" + entry + inner


def jpeg_parts(part: bytes, count: int) -> bytes:
    """A small picture behind segments of which Pillow makes objects."""
    plain = saved(Image.new("RGB", (8, 8)), "jpeg")
    return plain[:2] + part * count + plain[2:]


def png_parts(name: bytes, content: bytes, count: int) -> bytes:
    plain = png(8, 8)
    check = struct.pack(">I", zlib.crc32(name + content))
    return plain[:33] + (struct.pack(">I", len(content)) + name + content + check) * count + plain[33:]


def numbers(tag: int, count: int, at: int = 8) -> bytes:
    """TIFF tags, or EXIF, one of which has very many numbers."""
    head = b"II*\0" + struct.pack("<IHHHIII", 8, 1, tag, 3, count, at, 0)
    return head.ljust(at, b"\0") + b"\x39\x30" * count


def tiff_tiles(count: int) -> bytes:
    """Two pixels in very many strips, each of which says where it is."""
    tags = [
        *((256, 4, 1, 2), (257, 4, 1, 2), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)),
        *((273, 3, count, 200), (277, 3, 1, 1), (278, 4, 1, 1), (279, 3, count, 200)),
    ]
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    head = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    return head.ljust(200, b"\0") + b"\x90\x01" * count


def tiff_strip() -> bytes:
    """Four channels of 16 bits in a single deflated strip, as large as the limit allows."""
    side = side_of(7)
    strip = zlib.compress(bytes(side * side * 8))
    tags = [
        *((256, 4, 1, side), (257, 4, 1, side), (258, 3, 4, 200), (259, 3, 1, 8), (262, 3, 1, 2)),
        *((273, 4, 1, 208), (277, 3, 1, 4), (278, 4, 1, side), (279, 4, 1, len(strip)), (338, 3, 1, 2)),
    ]
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    head = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    return head.ljust(200, b"\0") + struct.pack("<4H", 16, 16, 16, 16) + strip


def side_of(bytes_per_pixel: int) -> int:
    """Makes an image of the largest square that the limit allows."""
    return int((LIMIT // bytes_per_pixel) ** 0.5) - 1


def square(mode: str, bytes_per_pixel: int, color: Any = 0) -> Image.Image:
    return Image.new(mode, (side_of(bytes_per_pixel),) * 2, color)


def heic(chroma: int) -> bytes:
    file = io.BytesIO()
    pillow_heif.from_pillow(square("RGBA", 11)).save(file, quality=50, chroma=chroma)
    return file.getvalue()


def sideways() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


# Sounds


def silence(seconds: float, rate: int, channels: int, kind: str, subtype: str) -> bytes:
    file = io.BytesIO()
    block = np.zeros((rate, channels), np.float32)
    with soundfile.SoundFile(file, "w", rate, channels, subtype, format=kind) as out:
        for _ in range(int(seconds)):
            out.write(block)
    return file.getvalue()


def aac(seconds: int, rate: int, channels: int) -> bytes:
    file = io.BytesIO()
    layout = {1: "mono", 2: "stereo"}[channels]
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=rate, layout=layout)
        for second in range(seconds):
            samples = np.zeros((channels, rate), np.float32)
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
            frame.sample_rate, frame.pts = rate, second * rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def pcm_in_one_packet(num_samples: int) -> bytes:
    """8 bits a sample, all in one packet."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("pcm_u8", rate=48000, layout="mono")
        frame = av.AudioFrame(format="u8", layout="mono", samples=num_samples)
        frame.planes[0].update(b"\x80" * frame.planes[0].buffer_size)
        frame.sample_rate = 48000
        container.mux([*stream.encode(frame), *stream.encode(None)])
    return file.getvalue()


def sound_beside_pictures(side: int, tracks: int = 1) -> bytes:
    """A second of silence; FFmpeg would have to decode the other tracks to know their content."""
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as container:
        size = {"width": side, "height": side}
        streams = [container.add_stream("png", rate=10, pix_fmt="rgba64be", **size) for _ in range(tracks)]
        sound = container.add_stream("pcm_s16le", rate=16000, layout="mono")
        picture = av.VideoFrame(side, side, "rgba64be")
        picture.planes[0].update(bytes(picture.planes[0].buffer_size))
        picture.pts = 0
        for pictures in streams:
            container.mux([*pictures.encode(picture), *pictures.encode(None)])
        frame = av.AudioFrame(format="s16", layout="mono", samples=16000)
        frame.planes[0].update(bytes(frame.planes[0].buffer_size))
        frame.sample_rate = 16000
        container.mux([*sound.encode(frame), *sound.encode(None)])
    return file.getvalue()


# Videos


def promising(plain: bytes, count: int) -> bytes:
    """An MP4 whose tables promise `count` samples of a byte each."""
    data = bytearray(plain)
    for table, values in ((b"stsz", (1, count)), (b"stsc", (1, 1, count, 1)), (b"stts", (1, count, 1000))):
        at = data.index(table) + 8
        data[at : at + 4 * len(values)] = struct.pack(f">{len(values)}I", *values)
    return bytes(data)


def promising_fragment(count: int) -> bytes:
    fragments = {"movflags": "frag_keyframe+empty_moov"}
    data = bytearray(encoded("libx264", "mp4", [(64, 64)] * 3, {"preset": "ultrafast"}, fragments))
    at = data.index(b"trun") + 4
    data[at : at + 8] = struct.pack(">II", 0, count)
    return bytes(data)


def mkv_tags(count: int) -> bytes:
    """Makes elements of three bytes each before an invalid track."""
    tags = count * b"\x73\x73\x80"
    sized = b"\x12\x54\xc3\x67" + (1 << 56 | len(tags)).to_bytes(8, "big") + tags
    segment = b"\x18\x53\x80\x67" + (1 << 56 | len(sized)).to_bytes(8, "big") + sized
    return b"\x1a\x45\xdf\xa3\x8b\x42\x82\x88matroska" + segment


def h264(width: int, height: int, count: int, kind: str = "mp4") -> bytes:
    return encoded("libx264", kind, [(width, height)] * count, {"preset": "ultrafast"})


def encoded(
    codec: str,
    kind: str,
    sizes: list[tuple[int, int]],
    options: dict[str, str],
    muxer: dict[str, str] | None = None,
) -> bytes:
    """Black frames. From where the size changes another encoder goes on in the same track."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind, options=muxer or {}) as container:
        width, height = sizes[0]
        pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream = container.add_stream(codec, rate=10, width=width, height=height, pix_fmt=pix_fmt)
        stream.codec_context.options = options
        encoder = stream.codec_context
        for number, (width, height) in enumerate(sizes):
            if (encoder.width, encoder.height) != (width, height):
                mux(container, stream, encoder.encode(None))
                encoder = av.CodecContext.create(codec, "w")
                encoder.width, encoder.height, encoder.pix_fmt = width, height, pix_fmt
                encoder.time_base, encoder.options = Fraction(1, 10), options
            frame = av.VideoFrame(width, height, pix_fmt)
            for plane, level in zip(frame.planes, (16, 128, 128), strict=True):
                plane.update(bytes([level]) * plane.buffer_size)
            frame.pts, frame.time_base = number, Fraction(1, 10)
            mux(container, stream, encoder.encode(frame))
        mux(container, stream, encoder.encode(None))
    return file.getvalue()


def animation(kind: str, count: int, **options: Any) -> bytes:
    """As many frames of 1024 x 512 as asked for."""
    first, *rest = (Image.new("RGBA", (1024, 512), (i, 0, 0, 128)) for i in range(count))
    return saved(first, kind, save_all=True, append_images=rest, duration=100, **options)


def mux(container: Any, stream: Any, packets: list[Any]) -> None:
    for packet in packets:
        packet.stream = stream
        container.mux(packet)


# Bodies


def gzipped(megabytes: int) -> bytes:
    squeeze = zlib.compressobj(9, wbits=31)
    return b"".join(squeeze.compress(bytes(MIB)) for _ in range(megabytes)) + squeeze.flush()


_IMAGE, _AUDIO, _VIDEO = Modality.IMAGE, Modality.AUDIO, Modality.VIDEO
_VP8 = {"deadline": "realtime", "cpu-used": "8"}
_16_FRAMES = {"preset": "veryfast", "refs": "16", "bf": "3"}
BOMBS = {
    "png-65536": Bomb(_IMAGE, lambda: png(65536, 65536, bits=1)),
    "png-text-1g": Bomb(_IMAGE, png_text),
    "gif-65535": Bomb(_IMAGE, lambda: gif(65535, 65535)),
    "jpeg-65500": Bomb(_IMAGE, lambda: jpeg(65500, 65500)),
    "tiff-60000": Bomb(_IMAGE, lambda: tiff(60000, 60000)),
    "webp-16383": Bomb(_IMAGE, lambda: saved(Image.new("L", (16383, 8192)), "webp", method=0)),
    "ico-65536": Bomb(_IMAGE, lambda: ico(png(65536, 65536, bits=1))),
    "ico-8192": Bomb(_IMAGE, lambda: ico(saved(Image.new("RGBA", (8192, 8192)), "png"))),
    "jpeg-segments": Bomb(_IMAGE, lambda: jpeg_parts(b"\xff\xe5\0\2", 8 * MIB)),
    "png-chunks": Bomb(_IMAGE, lambda: png_parts(b"prVt", b"", 2 * MIB)),
    "png-exif": Bomb(_IMAGE, lambda: png_parts(b"eXIf", numbers(0x0112, 16 * MIB, 64), 1)),
    "tiff-numbers": Bomb(_IMAGE, lambda: numbers(256, 16 * MIB, 64)),
    "tiff-strips": Bomb(_IMAGE, lambda: tiff_tiles(8 * MIB)),
    "png-rgb-over": Bomb(_IMAGE, lambda: saved(square("RGB", 4).resize((4200, 4200)), "png")),
    "png-rgb": Bomb(_IMAGE, lambda: saved(square("RGB", 4), "png"), fits=True),
    "png-rgba": Bomb(_IMAGE, lambda: saved(square("RGBA", 4), "png"), fits=True),
    "png-rgba-sideways": Bomb(_IMAGE, lambda: saved(square("RGBA", 4), "png", exif=sideways()), fits=True),
    "png-rgba16": Bomb(
        _IMAGE,
        lambda: png(side_of(4), side_of(4), bytes((1 + side_of(4) * 8) * side_of(4)), kind=6, bits=16),
        fits=True,
    ),
    "png-grey-alpha": Bomb(_IMAGE, lambda: saved(square("LA", 4), "png"), fits=True),
    "apng-fits": Bomb(
        _IMAGE,
        lambda: saved(
            square("RGBA", 4), "png", save_all=True, append_images=[square("RGBA", 4, 9)], disposal=1
        ),
        fits=True,
    ),
    "png-grey16": Bomb(_IMAGE, lambda: saved(square("I;16", 4, 9), "png"), fits=True),
    "png-palette": Bomb(_IMAGE, lambda: saved(square("P", 4), "png", transparency=0), fits=True),
    "png-1-bit": Bomb(_IMAGE, lambda: saved(square("1", 4), "png"), fits=True),
    "png-one-line": Bomb(_IMAGE, lambda: saved(Image.new("RGBA", (LIMIT // 12, 1)), "png"), fits=True),
    "gif-fits": Bomb(_IMAGE, lambda: saved(square("P", 4), "gif"), fits=True),
    "jpeg-fits": Bomb(_IMAGE, lambda: saved(square("RGB", 7), "jpeg", exif=sideways()), fits=True),
    "jpeg-progressive": Bomb(
        _IMAGE, lambda: saved(square("RGB", 7), "jpeg", progressive=True, subsampling=0), fits=True
    ),
    "jpeg-progressive-cmyk": Bomb(
        _IMAGE, lambda: saved(square("CMYK", 7), "jpeg", progressive=True), fits=True
    ),
    "tiff-strip": Bomb(_IMAGE, tiff_strip, fits=True),
    "tiff-float": Bomb(
        _IMAGE, lambda: saved(square("F", 7, 0.5), "tiff", compression="tiff_adobe_deflate"), fits=True
    ),
    "webp-fits": Bomb(_IMAGE, lambda: saved(square("RGBA", 9), "webp", method=0), fits=True),
    "webp-lossless": Bomb(_IMAGE, lambda: saved(square("RGBA", 9), "webp", lossless=True), fits=True),
    "avif-fits": Bomb(
        _IMAGE, lambda: saved(square("RGBA", 11), "avif", speed=10, subsampling="4:4:4"), fits=True
    ),
    "heic-fits": Bomb(_IMAGE, lambda: heic(444), fits=True),
    "ico-fits": Bomb(_IMAGE, lambda: ico(saved(square("RGBA", 9), "png")), fits=True),
    "mkv-tags": Bomb(_AUDIO, lambda: mkv_tags(8 * MIB)),
    "flac-1h-stereo": Bomb(_AUDIO, lambda: silence(3600, 48000, 2, "FLAC", "PCM_16")),
    "flac-8-channels": Bomb(_AUDIO, lambda: silence(120, 96000, 8, "FLAC", "PCM_16")),
    "opus-30min": Bomb(_AUDIO, lambda: silence(1800, 48000, 1, "OGG", "OPUS")),
    "vorbis-30min": Bomb(_AUDIO, lambda: silence(1800, 48000, 1, "OGG", "VORBIS")),
    "m4a-20min": Bomb(_AUDIO, lambda: aac(1200, 48000, 2)),
    "flac-8k-over": Bomb(_AUDIO, lambda: silence(1100, 8000, 1, "FLAC", "PCM_16")),
    "pcm-packet-over": Bomb(_AUDIO, lambda: pcm_in_one_packet(LIMIT // 2)),
    "pcm-packet": Bomb(_AUDIO, lambda: pcm_in_one_packet(LIMIT // 4), fits=True),
    "flac-mono": Bomb(_AUDIO, lambda: silence(349, 48000, 1, "FLAC", "PCM_16"), fits=True),
    "flac-mono-16k": Bomb(_AUDIO, lambda: silence(1048, 16000, 1, "FLAC", "PCM_16"), fits=True),
    "flac-mono-8k": Bomb(_AUDIO, lambda: silence(1048, 8000, 1, "FLAC", "PCM_16"), fits=True),
    "m4a-fits": Bomb(_AUDIO, lambda: aac(174, 48000, 2), fits=True),
    "mov-png-as-sound": Bomb(_AUDIO, lambda: sound_beside_pictures(16000), fits=True),
    "mov-png-tracks": Bomb(_VIDEO, lambda: sound_beside_pictures(1400, 40), harmless=True),
    "m4a-promises": Bomb(_AUDIO, lambda: promising(aac(1, 16000, 1), 40 * 10**6)),
    "h264-promises": Bomb(_VIDEO, lambda: promising(h264(64, 64, 3), 40 * 10**6)),
    "h264-fragment-promises": Bomb(_VIDEO, lambda: promising_fragment(40 * 10**6)),
    "h264-8k": Bomb(_VIDEO, lambda: h264(7680, 4320, 3)),
    "h264-8k-ts": Bomb(_VIDEO, lambda: h264(7680, 4320, 3, "mpegts")),
    "vp8-grows-to-8k": Bomb(
        _VIDEO,
        lambda: encoded("libvpx", "webm", [(64, 64)] * 3 + [(7680, 4320)] * 2, _VP8),
        harmless=True,
    ),
    "mjpeg-8k-avi": Bomb(_VIDEO, lambda: encoded("mjpeg", "avi", [(7680, 4320)] * 3, {})),
    "h264-all-frames": Bomb(_VIDEO, lambda: h264(1920, 1080, 60), num_frames=None),
    "gif-65535-video": Bomb(_VIDEO, lambda: gif(65535, 65535)),
    "apng-65536-video": Bomb(_VIDEO, lambda: png(65536, 65536, bits=1)),
    "h264-1080p-6": Bomb(_VIDEO, lambda: h264(1920, 1080, 6), num_frames=None, fits=True),
    "h264-720p-24": Bomb(_VIDEO, lambda: h264(1280, 720, 24), num_frames=None, fits=True),
    "h264-holds-16-frames": Bomb(
        _VIDEO, lambda: encoded("libx264", "mp4", [(1280, 720)] * 40, _16_FRAMES), num_frames=24, fits=True
    ),
    "gif-animation": Bomb(_VIDEO, lambda: animation("gif", 42), num_frames=None, fits=True),
    "webp-animation": Bomb(_VIDEO, lambda: animation("webp", 42, lossless=True), num_frames=None, fits=True),
    "apng-animation": Bomb(_VIDEO, lambda: animation("png", 42), num_frames=None, fits=True),
    "gzip-1g": Bomb(_IMAGE, lambda: gzipped(1024), encoding="gzip"),
    "gzip-64m": Bomb(_IMAGE, lambda: gzipped(64), encoding="gzip", harmless=True),
    "percent-64m": Bomb(_IMAGE, lambda: b"%41" * LIMIT, header="image/png"),
    "base64-64m": Bomb(_IMAGE, lambda: bytes(LIMIT)),
    "base64-lines-64m": Bomb(_IMAGE, lambda: base64.encodebytes(bytes(LIMIT)), header="image/png; base64"),
    "base64-lines-60m": Bomb(
        _IMAGE, lambda: base64.encodebytes(bytes(60 * MIB)), header="image/png; base64 "
    ),
}


if __name__ == "__main__":
    main()
