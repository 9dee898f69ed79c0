"""Faults that users of other multimodal servers reported, tried here; each test is named after its case."""

from __future__ import annotations

import base64
import gzip
import http.client
import io
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, urlsplit

import av
import numpy as np
import pillow_heif
import pytest
import soundfile
from PIL import Image
from tokenizers import Tokenizer

from tests.support.cluster import MEDIA_HOST, ROOT, Answer, Server, chat, media, read, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

COMPLETIONS = "/v1/chat/completions"
RENDER = f"{COMPLETIONS}/render"
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


# Media


def flat(colour: str | tuple[int, ...], size: tuple[int, int] = (48, 48), mode: str = "RGB") -> Image.Image:
    return Image.new(mode, size, colour)


def saved(image: Image.Image, kind: str = "png", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def uri(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def picture(image: Image.Image) -> dict[str, object]:
    return media("image", uri(saved(image)))


def tone(seconds: float, rate: int, channels: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)
    return np.repeat(wave[:, None], channels, axis=1)


def sound(seconds: float, rate: int = 16000, channels: int = 1, kind: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, tone(seconds, rate, channels), rate, format=kind)
    return file.getvalue()


def clip(
    num_frames: int,
    fps: int = 10,
    draw: Callable[[int], Pixels] | None = None,
    rotation: int = 0,
    track: bool = False,
) -> bytes:
    """H.264 whose frames show their numbers; with `track`, two seconds of sound."""
    file = io.BytesIO()
    draw = draw or numbered
    with av.open(file, "w", format="mp4") as container:
        height, width = draw(0).shape[:2]
        stream = container.add_stream("libx264", rate=fps, width=width, height=height, pix_fmt="yuv420p")
        stream.codec_context.time_base = Fraction(1, fps)
        stream.codec_context.options = {"preset": "ultrafast"}
        if rotation:
            stream.set_display_rotation(rotation)
        audio = container.add_stream("aac", rate=16000, layout="mono") if track else None
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(draw(number), format="rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if audio:
            samples = tone(2, 16000, 1).T.astype(np.float32)
            block = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout="mono")
            block.sample_rate = 16000
            container.mux(audio.encode(block))
            container.mux(audio.encode(None))
    return file.getvalue()


BITS = 12


def numbered(number: int) -> Pixels:
    """`number` as twelve dark or bright columns, the first bit left."""
    columns = [255 if number >> (BITS - 1 - bit) & 1 else 0 for bit in range(BITS)]
    row = np.repeat(np.array(columns, np.uint8), 8)
    return np.broadcast_to(row[None, :, None], (48, 8 * BITS, 3)).copy()


def number_of(frame: Pixels) -> int:
    middles = frame[frame.shape[0] // 2, 4::8].mean(axis=1)
    return sum(1 << (BITS - 1 - bit) for bit in range(BITS) if middles[bit] > 128)


# Answers


def previews(item: dict[str, Any]) -> list[Pixels]:
    """What came out of decoding, of an image or a video."""
    files = (base64.b64decode(shown.partition(",")[2]) for shown in item["previews"])
    return [np.asarray(Image.open(io.BytesIO(file))) for file in files]


def shown(server: Server, part: object) -> Pixels:
    """The first preview of a request's only item."""
    return previews(rendered(server, part, previews=True)["items"][0])[0]


def rendered(server: Server, *content: object, **fields: object) -> dict[str, Any]:
    answer = server.post(RENDER, chat(*content, **fields))
    assert answer.status == 200, answer.body
    body: dict[str, Any] = answer.body
    return body


def refused(answer: Answer, param: str | None = None, status: tuple[int, ...] = (400, 413, 415, 422)) -> str:
    """The message of an error in OpenAI's envelope, which names the place."""
    assert answer.status in status, (answer.status, answer.body)
    error = answer.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param, error
    return str(error["message"])


def ask(server: Server, *content: object, **fields: object) -> Answer:
    return server.post(COMPLETIONS, chat(*content, **{"temperature": 0, "max_tokens": 12, **fields}))


def events(server: Server, *content: object, **fields: object) -> list[dict[str, Any]]:
    """The chunks of a stream, which ends with [DONE]."""
    target = urlsplit(server.url)
    connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)
    body = {"temperature": 0, "max_tokens": 12, **fields, "stream": True}
    connection.request("POST", COMPLETIONS, json.dumps(chat(*content, **body)))
    lines = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    assert lines[-2:] == ["data: [DONE]", ""], lines
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"])


def is_well(server: Server) -> None:
    assert ask(server, "hello", max_tokens=1).status == 200


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ROOT / "deployments" / "tiny_omni" / "tokenizer.json"))


# A media host


@dataclass
class Host:
    """Serves what a test puts into `pages`; keeps the request lines' targets as they came."""

    url: str = ""
    pages: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    agents: list[str | None] = field(default_factory=list)


@contextmanager
def hosting(address: str = MEDIA_HOST) -> Iterator[Host]:
    host = Host()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            host.asked.append(self.path)
            host.agents.append(self.headers["User-Agent"])
            status, headers, body = host.pages.get(self.path, (404, {}, b"nothing here"))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if headers.get("Transfer-Encoding") == "chunked":
                body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:], b""))
            else:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Listener(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

    with Listener((address, 0), Handler) as listener:
        host.url = f"http://{f'[{address}]' if ':' in address else address}:{listener.server_port}"
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield host
        finally:
            listener.shutdown()
            thread.join()


@pytest.fixture
def host() -> Iterator[Host]:
    with hosting() as running:
        yield running


# Order


def test_b01_each_picture_stays_between_its_texts(server: Server, tokenizer: Tokenizer) -> None:
    red, blue = picture(flat("red")), picture(flat("blue"))
    first = rendered(server, "alpha", red, "bravo", blue, "charlie", previews=True)
    swapped = rendered(server, "alpha", blue, "bravo", red, "charlie", previews=True)
    ids, spans = first["prompt_token_ids"], [item["placeholder"] for item in first["items"]]
    edges = [0, *(e for s in spans for e in (s["offset"], s["offset"] + s["length"])), len(ids)]
    texts = [tokenizer.decode(ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    for text, word in zip(texts, ("alpha", "bravo", "charlie"), strict=True):
        assert [w for w in ("alpha", "bravo", "charlie") if w in text] == [word]
    assert swapped["prompt_token_ids"] == ids
    digests, others = ([item["digest"] for item in r["items"]] for r in (first, swapped))
    assert digests == others[::-1]
    colours = [previews(item)[0][0, 0].tolist() for item in first["items"]]
    assert colours == [[255, 0, 0], [0, 0, 255]]


def test_b04_every_size_has_as_many_rows_as_tokens(server: Server) -> None:
    sides = (1, 2, 3, 13, 27, 28, 29, 47, 48, 49, 70)
    sizes = [(w, h) for w in sides for h in sides] + [(27, 257), (1000, 31), (333, 777)]
    for some in (sizes[::2], sizes[1::2]):
        items = rendered(server, *(picture(flat("red", size)) for size in some))["items"]
        for item, size in zip(items, some, strict=True):
            assert (item["media"]["width"], item["media"]["height"]) == size
            assert item["features"]["pixel_values"]["shape"][0] == 4 * item["num_tokens"] > 0
            assert item["placeholder"]["length"] >= item["num_tokens"]
    odd = [picture(flat("red", size)) for size in ((1, 1), (27, 257), (1000, 31), (333, 777), (70, 1))]
    assert ask(server, *odd).status == 200


# Pictures

_STORED = {  # what makes an upright picture what a camera stores under the tag
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def test_b05_every_exif_orientation_is_applied_once(server: Server) -> None:
    upright = flat("white", (96, 64))
    upright.paste("red", (0, 0, 16, 64))
    upright.paste("blue", (0, 0, 96, 16))

    def photo(tag: int) -> dict[str, object]:
        stored = upright.transpose(_STORED[tag]) if tag in _STORED else upright
        exif = Image.Exif()
        exif[0x0112] = tag
        return media("image", uri(saved(stored, "jpeg", quality=95, exif=exif), "image/jpeg"))

    items = rendered(server, *(photo(tag) for tag in range(1, 9)), previews=True)["items"]
    for item in items:
        assert (item["media"]["width"], item["media"]["height"]) == (96, 64)
        (pixels,) = previews(item)
        assert np.abs(pixels.astype(int) - np.asarray(upright)).mean() < 5


def test_b06_colours_under_transparency_stay_hidden(server: Server) -> None:
    def logo(hidden: tuple[int, int, int, int]) -> Image.Image:
        image = flat(hidden, mode="RGBA")
        image.paste((0, 128, 0, 255), (12, 12, 36, 36))
        return image

    one, other = logo((255, 0, 255, 0)), logo((0, 0, 0, 0))
    palette = flat(0, mode="P")
    palette.putpalette([255, 0, 255, 0, 128, 0])
    palette.paste(1, (12, 12, 36, 36))
    grey = flat((0, 0), mode="LA")
    grey.paste((128, 255), (12, 12, 36, 36))
    rgb = flat((255, 0, 255))
    rgb.paste((0, 128, 0), (12, 12, 36, 36))
    seen = [
        shown(server, media("image", uri(data)))
        for data in (
            saved(one),
            saved(other),
            saved(one, "webp", lossless=True, exact=True),
            saved(palette, transparency=0),
            saved(rgb, transparency=(255, 0, 255)),
            saved(grey),
        )
    ]
    for pixels in seen:
        assert pixels[0, 0].tolist() == [255, 255, 255]
    for pixels in seen[1:5]:
        assert (pixels == seen[0]).all()
    assert seen[0][24, 24].tolist() == [0, 128, 0]
    assert seen[5][24, 24].tolist() == [128, 128, 128]


def test_b08_tiny_pictures_alone_and_among_larger_ones(server: Server) -> None:
    tiny = [picture(flat("red", size)) for size in ((1, 1), (3, 3), (3, 1), (1, 3), (2, 2))]
    for part in tiny:
        assert ask(server, part).status == 200
    mixed = rendered(server, *tiny, picture(flat("blue", (918, 1850))), previews=True)
    assert [previews(item)[0][0, 0].tolist() for item in mixed["items"][:5]] == [[255, 0, 0]] * 5
    is_well(server)


def damaged_png() -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = bytearray(saved(Image.fromarray(noise)))
    data[200:400] = bytes(200)
    return bytes(data)


BROKEN = {
    "damaged-png": uri(damaged_png()),
    "cut-png": uri(saved(Image.effect_noise((64, 64), 80))[:500]),
    "cut-jpeg": uri(saved(Image.effect_noise((64, 64), 80), "jpeg")[:400], "image/jpeg"),
    "empty": "data:image/png;base64,",
    "hello": uri(b"Hello World"),
    "exe": uri(b"MZ\x90\x00" + bytes(500)),
    "heic": uri(b"\x00\x00\x00\x18ftypheic" + bytes(500), "image/heic"),
    "svg": uri(b'<svg xmlns="http://www.w3.org/2000/svg"/>', "image/svg+xml"),
    "html": uri(b"<!doctype html><html></html>"),
    "x-foo": uri(bytes(range(256)), "image/x-foo"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_b11_broken_pictures_are_refused_at_once(server: Server, stream: bool) -> None:
    for name, url in BROKEN.items():
        start = time.monotonic()
        message = refused(ask(server, "look", media("image", url), stream=stream), "messages[0].content[1]")
        assert time.monotonic() - start < 2, name
        assert len(message) > 20, name
    (pid,) = server.replicas("MMPreprocessor")
    used = [-1]

    def idle() -> bool:
        used.append(sum(map(int, read(f"/proc/{pid}/stat").rpartition(")")[2].split()[11:13])))
        return used[-1] == used[-2]

    wait_until(idle, why=lambda: f"still busy: {used}")
    is_well(server)


def test_b13_no_picture_is_dropped_without_a_word(server: Server) -> None:
    green = flat((0, 128, 0), (64, 64))
    heic = io.BytesIO()
    pillow_heif.from_pillow(green).save(heic)
    without = rendered(server, "look")["num_prompt_tokens"]
    for data in (saved(green, "webp"), saved(green, "avif"), saved(green, "tiff"), heic.getvalue()):
        body = rendered(server, media("image", uri(data)), "look", previews=True)
        (item,) = body["items"]
        assert body["num_prompt_tokens"] >= without + item["num_tokens"] > without
        assert np.abs(previews(item)[0].astype(int) - (0, 128, 0)).max() < 6
    jxl = uri(b"\x00\x00\x00\x0cJXL \r\n\x87\n" + bytes(100), "image/jxl")
    assert "JPEG XL" in refused(ask(server, media("image", jxl)), "messages[0].content[0]")


# URLs


def test_b15_spellings_of_a_data_uri(server: Server) -> None:
    data = saved(flat("red"))
    encoded = base64.b64encode(data).decode()
    digests = {
        rendered(server, media("image", url))["items"][0]["digest"]
        for url in (
            f"data:image/png;base64,{encoded}",
            f"data:image/jpeg;charset=utf-8;base64,{encoded}",
            f"data:image/png;name=a.png;base64,{encoded}",
            f"data:;base64,{encoded}",
            f"DATA:IMAGE/PNG;BASE64,{encoded}",
            f"data:image/png; base64,{encoded}",
            f"data:application/octet-stream;base64,{encoded.rstrip('=')}",
            f"data:image/png,{quote(data)}",
        )
    }
    assert len(digests) == 1
    assert "comma" in refused(ask(server, media("image", f"data:image/png;base64{encoded}")), status=(400,))
    refused(ask(server, media("image", f"data:image/png;base32,{encoded}")))


def test_b17_data_uris_are_alike_under_every_key_and_no_path_is_one(server: Server) -> None:
    url = uri(sound(3.2), "audio/wav")  # some 100 kB
    assert rendered(server, media("audio", url))["items"][0]["modality"] == "audio"
    for kind in ("image", "video"):
        assert "file name" not in refused(ask(server, media(kind, url)), "messages[0].content[0]")
    for kind in ("image", "audio", "video"):
        for path in ("/etc/passwd", "file:///etc/passwd", "C:\\x.png", "ftp://h/x"):
            message = refused(ask(server, media(kind, path)), "messages[0].content[0]", (400, 422))
            assert "passwd" not in message


def test_b19_bare_base64_is_no_url(server: Server) -> None:
    for data in (saved(flat("red"), "jpeg"), saved(flat("red")), saved(Image.effect_noise((300, 300), 80))):
        message = refused(
            ask(server, media("image", base64.b64encode(data).decode())), "messages[0].content[0]", (400,)
        )
        assert "data:" in message


def test_b21_the_bytes_tell_the_type_and_the_query_is_sent_unchanged(server: Server, host: Host) -> None:
    data = saved(flat("red"), "jpeg")
    signature = "/pic?X-Amz-Signature=" + "0123456789abcdef" * 96 + "&a=%2F%2B"
    plain = ["/pic", "/pic.jpeg?auto=compress&cs=tinysrgb&w=1260", signature, "/bild%20eins.png", "/P.JPG"]
    host.pages = dict.fromkeys(plain, (200, {"Content-Type": "image/jpeg"}, data))
    host.pages |= {
        "/text": (200, {"Content-Type": "text/plain"}, data),
        "/untyped": (200, {}, data),
        "/attached": (200, {"Content-Disposition": "attachment; filename=x.exe"}, data),
        "/chunked": (200, {"Transfer-Encoding": "chunked"}, data),
        "/gzip": (200, {"Content-Encoding": "gzip"}, gzip.compress(data)),
        "/deflate": (200, {"Content-Encoding": "deflate"}, zlib.compress(data)),
        "/%E5%9B%BE.png": (200, {}, data),
    }
    paths = [*host.pages, "/图.png"]
    items = rendered(server, *(media("image", host.url + path) for path in paths))["items"]
    assert {item["digest"] for item in items} == {items[0]["digest"]}
    assert sorted(host.asked) == sorted([*host.pages, "/%E5%9B%BE.png"])
    host.pages["/br"] = (200, {"Content-Encoding": "br"}, b"\x8b\x00\x80\x03")
    message = refused(ask(server, media("image", host.url + "/br")), "messages[0].content[0]", (422, 502))
    assert "compression" in message


def test_b22_the_status_of_the_host_is_told(server: Server, host: Host) -> None:
    host.pages = {
        "/ok": (200, {}, saved(flat("red"))),
        "/403": (403, {"Content-Type": "text/plain"}, b"who are you?"),
        "/login": (200, {"Content-Type": "text/html"}, b"<!DOCTYPE html><html>log in</html>"),
    }
    assert ask(server, media("image", f"{host.url}/ok")).status == 200
    assert host.agents[0]
    assert "Python" not in str(host.agents[0])
    param = "messages[0].content[0]"
    assert "403 Forbidden" in refused(ask(server, media("image", f"{host.url}/403")), param)
    assert "HTML" in refused(ask(server, media("image", f"{host.url}/login")), param)


def test_b24_every_hop_of_a_redirect_is_checked(server: Server, host: Host) -> None:
    """IPv4 loopback is allowed to this server, IPv6 loopback is not."""
    with hosting("::1") as inner:
        targets = {
            "/302": (302, f"{inner.url}/secret"),
            "/307": (307, f"{inner.url}/secret"),
            "/two": (301, "/302"),
            "/relative": (303, f"//{urlsplit(inner.url).netloc}/secret"),
            "/metadata": (302, "http://169.254.169.254/latest/meta-data/"),
            "/private": (308, "http://10.0.0.1/"),
            "/file": (302, "file:///etc/passwd"),
            "/decimal": (302, f"http://2130706433:{urlsplit(inner.url).port}/"),
            "/mapped": (302, f"http://[::ffff:10.0.0.1]:{urlsplit(inner.url).port}/"),
            "/self": (302, "/self"),
        }
        host.pages = {path: (status, {"Location": to}, b"") for path, (status, to) in targets.items()}
        inner.pages = {"/secret": (200, {}, saved(flat("red")))}
        for path in targets:
            refused(ask(server, media("image", host.url + path)), "messages[0].content[0]", (400, 422))
        refused(ask(server, media("image", f"{inner.url}/secret")), "messages[0].content[0]", (400, 422))
        assert inner.asked == []
        assert host.asked.count("/self") <= 10
    host.pages = {
        "/a": (302, {"Location": "b?c=%2F"}, b""),
        "/b?c=%2F": (200, {}, saved(flat("red"))),
    }
    assert ask(server, media("image", f"{host.url}/a")).status == 200


# Sounds


def test_b27_stereo_at_another_rate_is_resampled_over_time(server: Server) -> None:
    files = [
        sound(2, 48000, 1),
        sound(2, 48000, 2),
        sound(2, 96000, 2),
        sound(2, 44100, 2),
        sound(2, 48000, 6, "FLAC"),
    ]
    parts = [media("audio", uri(data, "audio/wav")) for data in files]
    items = rendered(server, *parts, previews=True)["items"]
    for item in items:
        assert item["media"]["num_samples"] == 2 * 16000
        assert item["media"]["duration_s"] == pytest.approx(2)
        assert abs(item["num_tokens"] - items[0]["num_tokens"]) <= 1
        heard, rate = soundfile.read(io.BytesIO(base64.b64decode(item["previews"][0].partition(",")[2])))
        assert rate == 16000
        assert np.abs(heard - tone(2, 16000, 1)[:, 0])[800:-800].max() < 0.01
    answers = [ask(server, part).body["choices"][0]["message"]["content"] for part in parts[:2]]
    assert answers[0] == answers[1]


def test_b30_the_sound_of_a_video_that_has_none(server: Server) -> None:
    silent, loud = uri(clip(20), "video/mp4"), uri(clip(20, track=True), "video/mp4")
    assert ask(server, media("video", silent)).status == 200
    assert ask(server, media("video", silent), media("video", loud)).status == 200
    assert rendered(server, media("audio", loud))["items"][0]["media"]["duration_s"] > 1.9
    for content in ([media("audio", loud), media("audio", silent)], ["listen", media("audio", silent)]):
        assert "no sound track" in refused(ask(server, *content), "messages[0].content[1]")


# Videos


@pytest.fixture(scope="module")
def minute() -> str:
    return uri(clip(610), "video/mp4")  # 61 s


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ({"fps": 1, "num_frames": 16}, 16),
        ({"fps": 0.25, "num_frames": 32}, 15),
        ({"fps": 1000, "num_frames": 4}, 4),
        ({"fps": -1, "num_frames": 5}, 5),
        ({"num_frames": 1}, 1),
        ({"num_frames": 10**6, "fps": 0.5}, 30),
    ],
    ids=str,
)
def test_b31_the_smaller_of_rate_and_cap_holds(
    server: Server, minute: str, wanted: dict[str, float], count: int
) -> None:
    body = rendered(server, media("video", minute), media_io_kwargs={"video": wanted}, previews=True)
    (item,) = body["items"]
    indices = item["media"]["frame_indices"]
    assert item["media"]["num_frames"] == len(indices) == len(item["previews"]) == count
    assert [number_of(frame) for frame in previews(item)] == indices
    assert indices[0] == 0
    assert count == 1 or indices[-1] == 609


@pytest.mark.parametrize(
    "wanted", [{"fps": 0}, {"num_frames": 0}, {"fps": -2}, {"num_frames": -7}, {"fps": "1"}], ids=str
)
def test_b31_senseless_rates_and_caps_are_refused(
    server: Server, minute: str, wanted: dict[str, object]
) -> None:
    body = chat(media("video", minute), media_io_kwargs={"video": wanted})
    message = refused(server.post(RENDER, body), f"media_io_kwargs.video.{next(iter(wanted))}", (400,))
    assert "media_io_kwargs" in message


def test_b31_a_cap_beyond_all_frames_is_no_fault(server: Server, minute: str) -> None:
    content = media("video", uri(clip(30), "video/mp4"))
    item = rendered(server, content, media_io_kwargs={"video": {"num_frames": 10**6}})["items"][0]
    assert item["media"]["frame_indices"] == list(range(30))
    is_well(server)


def test_b34_rotated_clips_stand_upright(server: Server) -> None:
    def draw(_: int) -> Pixels:
        frame = np.zeros((48, 96, 3), np.uint8)
        frame[:, :24] = 255  # bright at the left
        return frame

    for rotation, edge in ((90, np.s_[-20:]), (-90, np.s_[:20])):
        data = clip(4, draw=draw, rotation=rotation)
        (item,) = rendered(server, media("video", uri(data, "video/mp4")), previews=True)["items"]
        assert (item["media"]["width"], item["media"]["height"]) == (48, 96)
        pixels = previews(item)[0]
        assert pixels.shape == (96, 48, 3)
        assert pixels[edge].mean() > 200
        assert pixels.mean() < 100
    senseless = bytearray(data)
    at = senseless.index(b"tkhd") + 44
    senseless[at : at + 36] = b"\x80\x00\x00\x00" * 9
    assert ask(server, media("video", uri(bytes(senseless), "video/mp4"))).status in (200, 422)


# Messages


def test_b35_empty_contents(server: Server) -> None:
    red = picture(flat("red"))
    hello = {"role": "user", "content": "hello"}
    accepted: list[list[dict[str, Any]]] = [
        [hello, {"role": "assistant", "content": ""}, hello],
        [hello, {"role": "assistant"}, hello],
        [{"role": "system", "content": ""}, hello],
        [{"role": "system", "content": []}, hello],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "text", "text": ""}]}],
        [{"role": "user", "content": " \n\t "}],
        [{"role": "user", "content": [{"type": "text", "text": ""}, red]}],
        [{"role": "user", "content": [red]}, {"role": "assistant", "content": ""}, hello],
    ]
    for messages in accepted:
        answer = server.post(COMPLETIONS, {"messages": messages, "max_tokens": 2})
        assert answer.status == 200, (messages, answer.body)
    for message in ({"role": "user"}, {"role": "system", "content": None}, {"content": "A"}):
        refused(server.post(COMPLETIONS, {"messages": [message]}), status=(400,))
    refused(server.post(COMPLETIONS, {"messages": []}), "messages", (400,))


def test_b37_a_string_and_one_text_part_render_alike(server: Server) -> None:
    def content(text: str, as_parts: bool) -> object:
        return [{"type": "text", "text": text}] if as_parts else text

    prompts = set()
    for which in range(8):
        roles = (("system", "be brief"), ("user", "hello"), ("assistant", "hi"), ("user", "bye"))
        messages = [
            {"role": role, "content": content(text, bool(which >> i & 1))}
            for i, (role, text) in enumerate(roles)
        ]
        answer = server.post(RENDER, {"messages": messages})
        prompts.add(tuple(answer.body["prompt_token_ids"]))
    assert len(prompts) == 1


def test_b39_a_developers_message_is_the_systems(server: Server) -> None:
    def prompt(role: str) -> Answer:
        messages = [
            {"role": role, "content": "answer only BANANA"},
            {"role": "user", "content": "capital of France?"},
        ]
        return server.post(RENDER, {"messages": messages})

    developer, system = prompt("developer"), prompt("system")
    assert developer.body["prompt_token_ids"] == system.body["prompt_token_ids"]
    refused(prompt("banana"), "messages[0].role", (400,))


# Answers


def test_b41_a_stream_is_the_whole_text_and_no_character_is_split(server: Server) -> None:
    """Hot sampling without an end makes tokens of single bytes; the seed makes both runs equal."""
    with ThreadPoolExecutor(4) as pool:

        def both(max_tokens: int) -> tuple[str, str]:
            hot = {"temperature": 2, "seed": max_tokens, "ignore_eos": True, "max_tokens": max_tokens}
            whole = ask(server, "emoji", **hot).body["choices"][0]["message"]["content"]
            return whole, text_of(events(server, "emoji", **hot))

        results = list(pool.map(both, range(1, 21)))
    assert all(whole == streamed for whole, streamed in results)


def test_b43_usage_is_one_chunk_without_a_choice(server: Server) -> None:
    requests: list[list[object]] = [
        ["hello"],
        [picture(flat("red")), "what?"],
        [media("audio", uri(sound(1), "audio/wav")), "what?"],
    ]
    for content in requests:
        first = ask(server, *content, max_tokens=3).body["usage"]
        chunks = events(server, *content, max_tokens=3, stream_options={"include_usage": True})
        (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        for told in (first, usage):
            told["prompt_tokens_details"].pop("cached_tokens")  # the second finds what the first left
        assert usage == first
        assert chunks[-1]["choices"] == []
        assert all(chunk["choices"] for chunk in chunks[:-1])
        assert all(c["choices"] and not c.get("usage") for c in events(server, *content, max_tokens=3))
    several = ask(server, "hello", n=2, max_tokens=3, ignore_eos=True).body
    assert (len(several["choices"]), several["usage"]["completion_tokens"]) == (2, 6)
    refused(ask(server, "hello", n=0), "n", (400,))


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": 5, "max_tokens": 50}, 5),
        ({"max_completion_tokens": 50, "max_tokens": 5}, 5),
        ({"max_tokens": 1}, 1),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_tokens": 0}, None),
        ({"max_tokens": -1}, None),
        ({"max_completion_tokens": 0}, None),
        ({"max_tokens": "5"}, None),
    ],
    ids=str,
)
def test_b45_the_token_limit(server: Server, fields: dict[str, object], limit: int | None) -> None:
    answer = server.post(COMPLETIONS, chat("hello", ignore_eos=True, **fields))
    if limit is None:
        refused(answer, next(iter(fields)), (400,))
    else:
        assert answer.body["usage"]["completion_tokens"] == limit
        assert answer.body["choices"][0]["finish_reason"] == "length"


def test_b45_a_limit_beyond_the_context(server: Server) -> None:
    for fields in ({"max_tokens": 10**9}, {"max_tokens": None}):
        assert server.post(COMPLETIONS, chat("hello", **fields)).status == 200


# Load


def test_b47_no_client_gets_anothers_picture(server: Server) -> None:
    """A picture's digest and pixels come back to whoever sent it, with broken ones in between."""
    colours = [(16 * i, 255 - 16 * i, 8 * i) for i in range(16)]
    parts = [picture(flat(colour)) for colour in colours]
    digests = [item["digest"] for item in rendered(server, *parts)["items"]]
    assert len(set(digests)) == 16

    def client(which: int) -> None:
        for turn in range(6):
            if (which + turn) % 5 == 0:
                refused(server.post(RENDER, chat(media("image", BROKEN["damaged-png"]))))
            other = (which + turn) % 16
            items = rendered(server, parts[which], parts[other], previews=True)["items"]
            assert [item["digest"] for item in items] == [digests[which], digests[other]]
            seen = [tuple(previews(item)[0][7, 7].tolist()) for item in items]
            assert seen == [colours[which], colours[other]]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(client, range(16)))


@pytest.mark.parametrize("count", [1, 10, 11, 64])
def test_b49_many_pictures_in_one_message(server: Server, count: int) -> None:
    parts = [picture(flat((i, 0, 0), (8, 8))) for i in range(count)]
    assert ask(server, *parts, max_tokens=2).status == 200


def test_b49_pictures_beyond_the_context_are_one_clear_error(server: Server) -> None:
    small = picture(flat("red", (8, 8)))
    answer = ask(server, *[small] * 250, max_tokens=2)
    assert answer.status == 200 or "token" in refused(answer, status=(400,))
    is_well(server)


def test_b49_pictures_beyond_the_limit_are_not_fetched(server: Server, host: Host) -> None:
    parts = [media("image", f"{host.url}/{i}") for i in range(1000)]
    message = refused(ask(server, *parts), "messages[0].content[999]", (400,))
    assert "1000" in message
    assert "999" in message
    assert host.asked == []


GOOD_BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
BODIES = {
    "half": (b'{"model": "m", "messages": [], x}', 400),
    "text": (b"hi", 400),
    "list": (b"[]", 400),
    "number": (b"7", 400),
    "null": (b"null", 400),
    "empty": (b"", 400),
    "cut": (GOOD_BODY[:-5].encode(), 400),
    "utf-16": (GOOD_BODY.encode("utf-16"), 400),
    "latin-1": ('{"messages": [{"role": "user", "content": "é"}]}'.encode("latin-1"), 400),
    "nan": (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}', 400),
    "nested": (b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", 400),
    "two": (GOOD_BODY.encode() * 2, 400),
    "twice": (b'{"max_tokens": 0, ' + GOOD_BODY[1:].encode(), 200),
    "untyped": (GOOD_BODY.encode(), 200),
}


ODD_TYPES: dict[str, dict[str, str]] = {"untyped": {}, "twice": {"Content-Type": "text/plain"}}


def test_b51_bodies_that_are_no_json_on_one_connection(server: Server) -> None:
    target = urlsplit(server.url)
    connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
    connection.connect()
    first = connection.sock
    for name, (body, status) in BODIES.items():
        headers = ODD_TYPES.get(name, {"Content-Type": "application/json"})
        connection.request("POST", COMPLETIONS, body, headers)
        response = connection.getresponse()
        answer = Answer(response.status, dict(response.headers), json.loads(response.read()))
        assert answer.status == status, (name, answer.body)
        if status == 400:
            refused(answer, status=(400,))
        assert connection.sock is first, name
    connection.close()


OPTIONAL = (
    *("model", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "max_completion_tokens", "n"),
    *("presence_penalty", "response_format", "seed", "service_tier", "stop", "stream", "stream_options"),
    *("top_p", "tools", "tool_choice", "parallel_tool_calls", "user", "functions", "function_call", "store"),
    *("metadata", "modalities", "audio", "prediction", "reasoning_effort", "media_io_kwargs", "verbosity"),
)


def test_b53_null_is_absent_and_unknown_keys_change_nothing(server: Server) -> None:
    url = uri(saved(flat("red")))

    def said(part: dict[str, object], message: dict[str, object], **fields: object) -> str:
        content = [{"type": "image_url", "image_url": {"url": url}} | part, {"type": "text", "text": "what?"}]
        body = {
            "messages": [{"role": "user", "content": content} | message],
            "temperature": 0,
            "max_tokens": 8,
            **fields,
        }
        answer = server.post(COMPLETIONS, body)
        assert answer.status == 200, answer.body
        return str(answer.body["choices"][0]["message"]["content"])

    plain = said({}, {})
    for detail in (None, "low", "auto", "high", "ultra"):
        assert said({"image_url": {"url": url, "detail": detail}}, {}) == plain
    assert said({}, {}, **dict.fromkeys(OPTIONAL)) == plain
    assert said({"x_unknown": 1, "cache_control": {"type": "ephemeral"}}, {}) == plain
    assert said({"image_url": {"url": url, "x_unknown": [1]}}, {}) == plain
    assert said({}, {"name": "ann", "x_unknown": {}, "tool_calls": None}) == plain
    extra = {"user": "u", "store": True, "metadata": {"a": "b"}, "parallel_tool_calls": False, "x_unknown": 1}
    assert said({}, {}, **extra) == plain
