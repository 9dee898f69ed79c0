"""Clips are made here; each frame shows its own number, so that it can be read which frames were taken."""

import io
import socket
import threading
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from av.stream import Disposition
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from deployments.errors import InvalidMedia, MediaTooLarge, UnsupportedMedia
from deployments.media import video
from deployments.media.containers import Decoded, DecodingCancelled
from deployments.media.video import Timeline, VideoLimits, decode
from tests.support.media_files import HEIGHT, WIDTH, clip, number_of, numbered

LIMITS = VideoLimits()


def shown(decoded: Decoded) -> list[int]:
    return [number_of(frame) for frame in decoded.arrays["frames"]]


def indices(decoded: Decoded) -> list[int]:
    found: list[int] = decoded.info["frame_indices"]
    return found


CLIP = clip(list(range(60)))


@pytest.mark.parametrize("num_frames", [1, 2, 3, 8, 59, 60, 61, 1000])
def test_the_frames_taken_are_the_frames_told(num_frames: int) -> None:
    decoded = decode(CLIP, num_frames, None, LIMITS)
    count = min(num_frames, 60)
    assert shown(decoded) == indices(decoded) == np.linspace(0, 59, count, dtype=int).tolist()
    assert decoded.arrays["frames"].shape == (count, HEIGHT, WIDTH, 3)
    assert decoded.arrays["frames"].dtype == np.uint8
    assert decoded.info == {
        "duration_s": 2.0,
        "fps": 30.0,
        "num_frames": count,
        "frame_indices": indices(decoded),
        "width": WIDTH,
        "height": HEIGHT,
    }
    assert decoded.video_metadata == {
        "total_num_frames": 60,
        "fps": 30.0,
        "frames_indices": indices(decoded),
        "duration": 2.0,
    }
    assert decoded.mime == "video/mp4"


@pytest.mark.parametrize(
    ("num_frames", "fps", "count"),
    [
        (None, 2.0, 4),
        (None, 2.4, 4),
        (None, 30.0, 60),
        (None, 1e9, 60),
        (None, 0.1, 1),
        (3, 2.0, 3),
        (9, 2.0, 4),
    ],
)
def test_fps_is_frames_per_second_of_the_clip_and_num_frames_a_cap(
    num_frames: int | None, fps: float, count: int
) -> None:
    decoded = decode(CLIP, num_frames, fps, LIMITS)
    assert shown(decoded) == indices(decoded) == np.linspace(0, 59, count, dtype=int).tolist()


def test_without_wishes_every_frame() -> None:
    assert indices(decode(CLIP, None, None, LIMITS)) == list(range(60))


@pytest.mark.parametrize(
    ("format", "codec", "mime"),
    [
        ("webm", "libvpx-vp9", "video/webm"),
        ("webm", "libvpx", "video/webm"),
        ("matroska", "libx264", "video/x-matroska"),
        ("mov", "libx264", "video/quicktime"),
        ("avi", "mpeg4", "video/x-msvideo"),
        ("mpegts", "libx264", "video/mp2t"),
        ("mpeg", "mpeg2video", "video/mpeg"),
        ("flv", "flv", "video/x-flv"),
        ("mp4", "libx265", "video/mp4"),
        ("mp4", "libsvtav1", "video/mp4"),
    ],
)
def test_containers_and_codecs(format: str, codec: str, mime: str) -> None:
    options = {"x265-params": "log-level=none"} if codec == "libx265" else {}
    decoded = decode(clip(list(range(50)), format=format, codec=codec, options=options), 5, None, LIMITS)
    assert decoded.mime == mime
    assert shown(decoded) == indices(decoded)
    assert decoded.video_metadata is not None
    assert abs(decoded.video_metadata["total_num_frames"] - 50) <= 1
    assert abs(decoded.info["fps"] - 30) < 0.7


def test_ten_bits() -> None:
    data = clip(list(range(10)), pix_fmt="yuv420p10le", options={"profile": "high10"})
    assert shown(decode(data, 4, None, LIMITS)) == [0, 3, 6, 9]


@pytest.mark.parametrize("gop", ["1", "7", "300"])
@pytest.mark.parametrize("bframes", ["0", "3"])
def test_seeking_between_key_frames_finds_the_same_frames(gop: str, bframes: str) -> None:
    data = clip(list(range(100)), options={"g": gop, "bf": bframes, "sc_threshold": "0"})
    assert shown(decode(data, 9, None, LIMITS)) == np.linspace(0, 99, 9, dtype=int).tolist()


def test_only_what_is_needed_is_denumbered(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[Any] = []
    feed = video._feed

    def counting(*args: Any, **kwargs: Any) -> Any:
        for frame in feed(*args, **kwargs):
            fed.append(frame)
            yield frame

    monkeypatch.setattr(video, "_feed", counting)
    data = clip(list(range(200)), options={"g": "10", "bf": "0", "sc_threshold": "0"})
    assert shown(decode(data, 3, None, LIMITS)) == [0, 99, 199]
    assert len(fed) == 1 + 10 + 10


VARIABLE = [0, 1, 2, 3, 4, 5, 60, 61, 62, 63, 100, 101]  # thirtieths of a second


@pytest.mark.parametrize("format", ["mp4", "matroska"])
def test_variable_frame_rate_by_time(format: str) -> None:
    data = clip(VARIABLE, format=format)
    decoded = decode(data, None, 1.0, LIMITS)
    # At 0, 1.68 and 3.37 s: frame 5 is still shown at 1.68 s.
    assert shown(decoded) == indices(decoded) == [0, 5, 11]
    assert decoded.info["duration_s"] == pytest.approx(102 / 30, abs=0.05)
    assert decoded.info["fps"] == pytest.approx(12 / (102 / 30), rel=0.02)


def test_variable_frame_rate_by_number() -> None:
    assert indices(decode(clip(VARIABLE), 4, None, LIMITS)) == [0, 3, 7, 11]


def test_the_processor_reads_the_right_times_off_the_metadata() -> None:
    """At a variable rate too: index by rate is the time, number by rate the duration."""
    for times in (VARIABLE, list(range(12))):
        decoded = decode(clip(times), 5, None, LIMITS)
        metadata = decoded.video_metadata
        assert metadata is not None
        for index, told in zip(indices(decoded), metadata["frames_indices"], strict=True):
            assert told / metadata["fps"] == pytest.approx(times[index] / 30, abs=0.001)
        assert metadata["total_num_frames"] / metadata["fps"] == pytest.approx(
            metadata["duration"], abs=0.001
        )
        assert max(metadata["frames_indices"]) < metadata["total_num_frames"]


def test_a_clip_that_does_not_begin_at_zero() -> None:
    decoded = decode(clip(list(range(100, 130)), format="matroska"), 3, None, LIMITS)
    assert shown(decoded) == [0, 14, 29]
    assert decoded.info["duration_s"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_few_frames(frames: int) -> None:
    data = clip(list(range(frames)))
    for num_frames, fps in ((8, None), (None, 2.0), (8, 2.0), (None, None)):
        decoded = decode(data, num_frames, fps, LIMITS)
        assert shown(decoded) == ([0] if fps else list(range(frames)))
        assert decoded.info["duration_s"] == pytest.approx(frames / 30, abs=0.02)


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_rotation_is_applied(rotation: int) -> None:
    def red_top(number: int) -> np.ndarray:
        frame = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        frame[: HEIGHT // 2, :, 0] = 255
        return frame

    decoded = decode(clip([0, 1], rotation=rotation, draw=red_top), None, None, LIMITS)
    expected = np.rot90(red_top(0), rotation // 90)  # FFmpeg counts counter-clockwise
    assert decoded.arrays["frames"][0].shape == expected.shape
    assert (decoded.info["width"], decoded.info["height"]) == (expected.shape[1], expected.shape[0])
    assert np.abs(decoded.arrays["frames"][0].astype(int) - expected)[4:-4, 4:-4].mean() < 12


def test_odd_sizes() -> None:
    data = clip([0, 1], codec="libx264", pix_fmt="yuv444p", draw=lambda number: numbered(number)[:47])
    assert decode(data, None, None, LIMITS).arrays["frames"].shape == (2, 47, WIDTH, 3)


@pytest.mark.parametrize(("width", "height"), [(50, 34), (94, 62)])
def test_frames_are_what_pyav_makes_of_them(width: int, height: int) -> None:
    """Sizes whose lines FFmpeg pads."""
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (height, width, 3), np.uint8) for _ in range(3)]
    data = clip([0, 1, 2], draw=pictures.__getitem__)
    with av.open(io.BytesIO(data)) as container:
        expected = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert np.array_equal(decode(data, None, None, LIMITS).arrays["frames"], expected)


def animation(format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    frames = [Image.fromarray(numbered(number)) for number in range(6)]
    frames[0].save(file, format, save_all=True, append_images=frames[1:], **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("format", "mime", "options"),
    [("GIF", "image/gif", {}), ("WEBP", "image/webp", {"lossless": True}), ("PNG", "image/png", {})],
)
def test_animated_images(format: str, mime: str, options: dict[str, Any]) -> None:
    data = animation(format, duration=[100, 100, 100, 500, 100, 100], **options)
    decoded = decode(data, 3, None, LIMITS)
    assert shown(decoded) == indices(decoded) == [0, 2, 5]
    assert decoded.mime == mime
    assert decoded.info["duration_s"] == 1.0
    assert shown(decode(data, None, 3.0, LIMITS)) == [0, 3, 5]


def test_animations_without_times_and_with_transparency() -> None:
    frames = [Image.new("RGBA", (8, 8), (255, 0, 0, alpha)) for alpha in (0, 255)]
    file = io.BytesIO()
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:], lossless=True, duration=0)
    decoded = decode(file.getvalue(), None, None, LIMITS)
    assert decoded.info["duration_s"] == 0.2
    assert decoded.arrays["frames"][:, 0, 0].tolist() == [[255, 255, 255], [255, 0, 0]]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (VideoLimits(max_seconds=1.9), r"longer than the limit of 1\.9 s"),
        (VideoLimits(max_frames=59), "more than the limit of 59 frames"),
        (
            VideoLimits(max_pixels=WIDTH * HEIGHT - 1),
            "96x48 have more than the limit of 4607 pixels",
        ),
        (
            VideoLimits(max_decoded_bytes=8 * WIDTH * HEIGHT * 3 - 1),
            "8 frames of 96x48, and decoding them, take more than the limit",
        ),
    ],
)
def test_limits_hold_before_anything_is_denumbered(
    limits: VideoLimits, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video, "_feed", None)
    with pytest.raises(MediaTooLarge, match=message):
        decode(CLIP, 8, None, limits)


@pytest.mark.parametrize(("pix_fmt", "bits"), [("yuv420p", 12), ("yuv444p10le", 48)])
def test_what_the_decoder_holds_stays_below_twice_the_limit(pix_fmt: str, bits: int) -> None:
    data = clip([0, 1, 2], pix_fmt=pix_fmt)
    per_pixel = 27 * bits / 8 + 3 + 2 * 3  # of the frames it may hold, one as RGB, and the two taken
    half = int(per_pixel * WIDTH * HEIGHT / 2)
    decode(data, 2, None, VideoLimits(max_decoded_bytes=half))
    with pytest.raises(MediaTooLarge, match=r"2 frames of 96x48, and decoding them, take more"):
        decode(data, 2, None, VideoLimits(max_decoded_bytes=half - 1))


@pytest.mark.parametrize(("codec", "format"), [("mjpeg", "avi"), ("mpeg4", "mp4"), ("mpeg2video", "mpegts")])
def test_sizes_that_ffmpeg_has_to_decode_are_told_too(codec: str, format: str) -> None:
    pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    data = clip(list(range(30)), codec=codec, format=format, pix_fmt=pix_fmt)
    with pytest.raises(MediaTooLarge, match="96x48 have more than the limit of 4607 pixels"):
        decode(data, 2, None, VideoLimits(max_pixels=WIDTH * HEIGHT - 1))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_animations_have_the_same_limits(format: str) -> None:
    data = animation(format, duration=100)
    for limits, message in (
        (VideoLimits(max_seconds=0.5), "longer than"),
        (VideoLimits(max_frames=5), "limit of 5 frames"),
        (VideoLimits(max_pixels=100), "limit of 100 pixels"),
        (VideoLimits(max_decoded_bytes=100), "limit of 100 bytes"),
    ):
        with pytest.raises(MediaTooLarge, match=message):
            decode(data, None, None, limits)


def test_packets_that_promise_more_than_decodes_are_not_believed() -> None:
    data = bytearray(CLIP)
    start = data.index(b"mdat")
    at = start + (len(data) - start) // 3
    data[at : at + 40] = bytes(40)
    decoded = decode(bytes(data), 5, None, LIMITS)
    assert indices(decoded) == sorted(set(indices(decoded)))
    assert len(indices(decoded)) == len(decoded.arrays["frames"])
    assert indices(decoded)[-1] < 59  # as many as come out, not as many as are promised


def test_a_clip_cut_short_gives_what_is_there() -> None:
    data = clip(list(range(60)), format="matroska", options={"g": "10", "bf": "0"})
    decoded = decode(data[: len(data) * 2 // 3], 4, None, LIMITS)
    assert shown(decoded) == indices(decoded)
    assert 20 < indices(decoded)[-1] < 59


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", InvalidMedia, "The video is empty"),
        (b"<html></html>", UnsupportedMedia, "an HTML page"),
        (b"no video at all, but text", UnsupportedMedia, "not a video in a supported format"),
        (CLIP[: len(CLIP) // 4], InvalidMedia, "damaged or cut short"),
        (b"\x89PNG\r\n\x1a\n", InvalidMedia, "damaged or cut short"),
        (b"GIF89a\x01\x00", InvalidMedia, "damaged"),
    ],
)
def test_what_is_no_video_is_refused(data: bytes, error: type[InvalidMedia], message: str) -> None:
    with pytest.raises(error, match=message):
        decode(data, 8, None, LIMITS)


def test_sound_alone_is_no_video_nor_is_its_cover() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux([*stream.encode(frame), *stream.encode(None)])
    with pytest.raises(InvalidMedia, match="not have a video track"):
        decode(file.getvalue(), 8, None, LIMITS)


def test_a_cover_picture_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        disposition = Disposition.attached_pic
        codec_context = object()

    class Container:
        class streams:
            video = (Stream(),)

    with pytest.raises(InvalidMedia, match="not have a video track"):
        video._stream(Container())


def playlists(url: str) -> list[bytes]:
    return [
        f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{url}\n#EXT-X-ENDLIST\n".encode(),
        f"ffconcat version 1.0\nfile '{url}'\n".encode(),
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 9 RTP/AVP 96\n"
        + f"a=control:{url}\n".encode(),
        f'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" profiles="x">'
        f'<Period><AdaptationSet mimeType="video/mp4"><Representation id="1"><BaseURL>{url}</BaseURL>'
        f"</Representation></AdaptationSet></Period></MPD>".encode(),
        f"RTSPtext\r\n{url}\r\n".encode(),
        f"[Reference]\nRef1={url}\n".encode(),
        f"# Windows Media\n<asx version='3'><entry><ref href='{url}'/></entry></asx>".encode(),
    ]


def test_nothing_that_names_a_file_or_host_makes_ffmpeg_open_it(tmp_path: Any) -> None:
    secret = tmp_path / "clip.mp4"
    secret.write_bytes(CLIP)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        for url in (
            f"http://127.0.0.1:{port}/a.ts",
            f"tcp://127.0.0.1:{port}",
            f"file://{secret}",
            str(secret),
        ):
            for data in playlists(url):
                with pytest.raises(InvalidMedia):
                    decode(data, 8, None, LIMITS)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_decoding_stops_when_nobody_waits() -> None:
    cancelled = threading.Event()
    cancelled.set()
    for data in (CLIP, animation("GIF")):
        with pytest.raises(DecodingCancelled):
            decode(data, 8, None, LIMITS, cancelled)


def test_several_decoder_threads_give_the_same_frames() -> None:
    one, four = (decode(CLIP, 8, None, VideoLimits(threads=threads)) for threads in (1, 4))
    assert np.array_equal(one.arrays["frames"], four.arrays["frames"])


@given(
    st.lists(st.integers(1, 50), min_size=0, max_size=60),
    st.one_of(st.none(), st.integers(1, 70)),
    st.one_of(st.none(), st.floats(0.01, 200)),
)
def test_chosen_frames_ascend_from_the_first_to_the_last(
    gaps: list[int], num_frames: int | None, fps: float | None
) -> None:
    ticks = [0]
    for gap in gaps:
        ticks.append(ticks[-1] + gap)
    timeline = Timeline(ticks, ticks[-1] + 3, Fraction(1, 30))
    chosen = timeline.choose(num_frames, fps)
    assert chosen == sorted(set(chosen))
    assert chosen[0] == 0
    assert chosen[-1] == len(ticks) - 1 or chosen == [0]
    if num_frames is not None:
        assert len(chosen) <= num_frames
    if fps is not None:
        assert len(chosen) <= max(1, timeline.seconds * fps + 0.01)
    told = timeline.metadata(chosen)
    assert told["frames_indices"] == sorted(set(told["frames_indices"]))
    assert 0 <= told["frames_indices"][0] <= told["frames_indices"][-1] < told["total_num_frames"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 100_000), st.integers(0, 255)), min_size=1, max_size=8))
def test_damage_gives_frames_or_a_declared_error(damage: list[tuple[int, int]]) -> None:
    data = bytearray(CLIP)
    for place, value in damage:
        data[place % len(data)] = value
    try:
        decoded = decode(bytes(data), 4, None, LIMITS)
    except InvalidMedia:
        return
    assert len(decoded.arrays["frames"]) == len(indices(decoded))


@pytest.mark.parametrize(("longest", "count"), [(None, 10), (20.0, 10), (10.0, 10), (4.0, 4), (0.1, 1)])
def test_a_long_clip_gets_no_more_frames_than_the_longest_one_wanted(
    longest: float | None, count: int
) -> None:
    timeline = Timeline(list(range(100)), 100, Fraction(1, 10))
    chosen = timeline.choose(None, 1.0, longest)
    assert len(chosen) == count
    assert chosen[0] == 0
    assert count == 1 or chosen[-1] == 99
