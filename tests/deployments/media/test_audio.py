import contextlib
import io
import struct
import threading
import wave
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.errors import InvalidMedia, MediaTooLarge, UnsupportedMedia
from deployments.media import audio
from deployments.media.audio import AudioLimits, decode
from deployments.media.containers import DecodingCancelled

LIMITS = AudioLimits()


def tone(seconds: float, rate: int, hz: float = 440.0, level: float = 0.5) -> np.ndarray:
    return (level * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def encode(samples: np.ndarray, rate: int, format: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, subtype, format=format)
    return file.getvalue()


def encode_av(samples: np.ndarray, rate: int, format: str, codec: str) -> bytes:
    """`samples` is (n,), by FFmpeg, for what libsndfile does not write."""
    file = io.BytesIO()
    with av.open(file, "w", format=format) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        resampler = av.AudioResampler(format=stream.format, layout="mono", rate=rate)
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        for converted in [*resampler.resample(frame), *resampler.resample(None), None]:
            container.mux(stream.encode(converted))
    return file.getvalue()


def peak_hz(samples: np.ndarray, rate: int) -> float:
    return float(np.abs(np.fft.rfft(samples * np.hanning(len(samples)))).argmax() * rate / len(samples))


@pytest.mark.parametrize(
    ("format", "subtype", "mime", "tolerance"),
    [
        ("WAV", "PCM_U8", "audio/wav", 1 / 64),
        ("WAV", "PCM_16", "audio/wav", 1e-4),
        ("WAV", "PCM_24", "audio/wav", 1e-6),
        ("WAV", "PCM_32", "audio/wav", 1e-6),
        ("WAV", "FLOAT", "audio/wav", 0),
        ("WAV", "DOUBLE", "audio/wav", 1e-7),
        ("WAV", "ULAW", "audio/wav", 0.02),
        ("WAVEX", "PCM_16", "audio/wav", 1e-4),
        ("RF64", "PCM_16", "audio/wav", 1e-4),
        ("FLAC", "PCM_16", "audio/flac", 1e-4),
        ("AIFF", "PCM_16", "audio/aiff", 1e-4),
        ("OGG", "VORBIS", "audio/ogg", 0.05),
        ("MP3", "MPEG_LAYER_III", "audio/mpeg", 0.05),
    ],
)
def test_formats(format: str, subtype: str, mime: str, tolerance: float) -> None:
    samples = tone(0.5, 16000)
    decoded = decode(encode(samples, 16000, format, subtype), 16000, LIMITS)
    found = decoded.arrays["samples"]
    assert decoded.mime == mime
    assert found.dtype == np.float32
    assert decoded.info["original_sampling_rate"] == 16000
    if format == "MP3":  # adds silence before and after
        assert len(samples) <= len(found) <= len(samples) + 4000
        assert abs(peak_hz(found, 16000) - 440) < 3
    else:
        assert decoded.info == {
            "duration_s": 0.5,
            "sampling_rate": 16000,
            "original_sampling_rate": 16000,
            "original_channels": 1,
            "num_samples": 8000,
        }
        assert np.abs(found - samples)[100:-100].max() <= tolerance


@pytest.mark.parametrize(
    ("format", "codec", "mime"),
    [
        ("mp4", "aac", "audio/mp4"),
        ("adts", "aac", "audio/aac"),
        ("webm", "libopus", "audio/webm"),
        ("ogg", "flac", "audio/ogg"),
        ("matroska", "pcm_s16le", "audio/x-matroska"),
        ("mov", "pcm_f64le", "audio/quicktime"),
        ("avi", "pcm_u8", "audio/x-msvideo"),
        ("mov", "pcm_s32le", "audio/quicktime"),
    ],
)
def test_formats_that_only_ffmpeg_reads(format: str, codec: str, mime: str) -> None:
    decoded = decode(encode_av(tone(0.5, 48000), 48000, format, codec), 16000, LIMITS)
    found = decoded.arrays["samples"]
    assert decoded.mime == mime
    assert abs(len(found) - 8000) < 1000
    assert abs(peak_hz(found, 16000) - 440) < 4
    assert np.sqrt(np.mean(found[2000:6000] ** 2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.05)


def test_amr() -> None:
    decoded = decode(encode_av(tone(0.5, 8000), 8000, "amr", "libopencore_amrnb"), 16000, LIMITS)
    assert decoded.mime == "audio/amr"
    assert decoded.info["original_sampling_rate"] == 8000
    assert abs(decoded.info["num_samples"] - 8000) <= 320  # frames of 20 ms
    assert abs(peak_hz(decoded.arrays["samples"], 16000) - 440) < 4


@pytest.mark.parametrize("channels", [2, 3, 6])
def test_mono_is_the_mean_over_the_channels(channels: int) -> None:
    samples = np.zeros((1000, channels), np.float32)
    samples[:, 0] = 0.6
    decoded = decode(encode(samples, 8000, subtype="FLOAT"), 8000, LIMITS)
    assert decoded.info["original_channels"] == channels
    np.testing.assert_allclose(decoded.arrays["samples"], 0.6 / channels, rtol=1e-6)


def test_packed_stereo_is_not_read_as_interleaved_mono() -> None:
    left, right = tone(0.5, 48000, 440), tone(0.5, 48000, 2000)
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:  # libsndfile does not read it
        stream = container.add_stream("pcm_s16le", rate=48000, layout="stereo")
        packed = (np.stack([left, right], 1) * 32767).astype(np.int16).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(packed, format="s16", layout="stereo")
        frame.sample_rate = 48000
        container.mux([*stream.encode(frame), *stream.encode(None)])
    decoded = decode(file.getvalue(), 48000, LIMITS)
    assert decoded.info["original_channels"] == 2
    np.testing.assert_allclose(decoded.arrays["samples"], (left + right) / 2, atol=1e-3)


@pytest.mark.parametrize(("layout", "channels"), [("7.1", 8), ("hexadecagonal", 16)])
def test_many_planes_are_read_and_no_more(layout: str, channels: int) -> None:
    """PyAV's own conversion reads past the last of eight planes, and crashes now and then."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("wavpack", rate=8000, layout=layout)
        planes = np.repeat(np.arange(channels, dtype=np.float32)[:, None] / 32, 2048, axis=1)
        packed = av.AudioFrame.from_ndarray(planes.T.reshape(1, -1).copy(), format="flt", layout=layout)
        packed.sample_rate = 8000
        for frame in av.AudioResampler(format="fltp", layout=layout, rate=8000).resample(packed):
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    decoded = decode(file.getvalue(), 8000, LIMITS)
    assert decoded.info["original_channels"] == channels
    np.testing.assert_allclose(decoded.arrays["samples"], np.arange(channels).mean() / 32, atol=1e-6)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000])
def test_resampling_is_along_time(rate: int) -> None:
    stereo = np.stack([tone(1.0, rate), tone(1.0, rate)], axis=1)
    decoded = decode(encode(stereo, rate, subtype="FLOAT"), 16000, LIMITS)
    samples = decoded.arrays["samples"]
    assert samples.ndim == 1
    assert decoded.info["num_samples"] == len(samples)
    assert abs(len(samples) - 16000) <= 1
    assert decoded.info["duration_s"] == 1.0
    assert decoded.info["original_sampling_rate"] == rate
    assert abs(peak_hz(samples, 16000) - 440) < 2
    assert np.sqrt(np.mean(samples[1000:-1000] ** 2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.01)


@pytest.mark.parametrize("num_samples", [1, 2, 5])
def test_very_short_clips(num_samples: int) -> None:
    decoded = decode(encode(np.full(num_samples, 0.5), 48000), 16000, LIMITS)
    assert decoded.info["num_samples"] == len(decoded.arrays["samples"]) >= 1
    assert decoded.info["duration_s"] == num_samples / 48000


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_are_refused(value: float) -> None:
    samples = tone(0.1, 8000)
    samples[100] = value
    with pytest.raises(InvalidMedia, match="NaN or infinite"):
        decode(encode(samples, 8000, subtype="FLOAT"), 8000, LIMITS)


@pytest.mark.parametrize("channels", [2, 3])
def test_infinities_of_both_signs_and_sums_past_the_largest_float_are_refused(channels: int) -> None:
    for first, second in ((np.inf, -np.inf), (3e38, 3e38)):
        samples = np.zeros((100, channels), np.float32)
        samples[50, :2] = first, second
        with pytest.raises(InvalidMedia, match=r"NaN or infinite|far outside"):
            decode(encode(samples, 8000, subtype="FLOAT"), 8000, LIMITS)


@pytest.mark.parametrize("value", [1e300, np.nan, -np.inf])
def test_floats_that_only_ffmpeg_reads_are_held_to_the_same(value: float) -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("pcm_f64le", rate=8000, layout="mono")
        frame = av.AudioFrame(format="dbl", layout="mono", samples=100)
        frame.planes[0].update(np.full(frame.planes[0].buffer_size // 8, value).tobytes())
        frame.sample_rate = 8000
        container.mux([*stream.encode(frame), *stream.encode(None)])
    with pytest.raises(InvalidMedia, match="NaN or infinite"):
        decode(file.getvalue(), 8000, LIMITS)


def test_the_limit_on_seconds_is_exact() -> None:
    data = encode(tone(0.5, 8000), 8000)
    decode(data, 8000, AudioLimits(max_seconds=0.5))
    with pytest.raises(MediaTooLarge, match=r"longer than the limit of 0\.4 s"):
        decode(data, 8000, AudioLimits(max_seconds=0.4))


@pytest.mark.parametrize("by", ["libsndfile", "ffmpeg"])
def test_limits_hold_while_decoding_whatever_the_size_of_the_file(by: str) -> None:
    silence = np.zeros(48000 * 20, np.float32)
    data = (
        encode(silence, 48000, "FLAC") if by == "libsndfile" else encode_av(silence, 48000, "webm", "libopus")
    )
    assert len(data) < 100_000
    with pytest.raises(MediaTooLarge, match="longer than the limit of 3 s"):
        decode(data, 16000, AudioLimits(max_seconds=3))
    with pytest.raises(MediaTooLarge, match="more than the limit of 1000000 bytes"):
        decode(data, 16000, AudioLimits(max_decoded_bytes=1_000_000))


def wav_header(rate: int, channels: int, claimed: int, data: bytes) -> bytes:
    block = 2 * channels
    format = struct.pack("<HHIIHH", 1, channels, rate, rate * block % 2**32, block % 65536, 16)
    size = struct.pack("<I", claimed)
    return b"RIFF" + size + b"WAVEfmt " + struct.pack("<I", 16) + format + b"data" + size + data


def test_a_header_that_claims_4_gb_is_not_believed() -> None:
    decoded = decode(wav_header(8000, 1, 2**32 - 1, b"\x00\x40" * 800), 8000, LIMITS)
    assert decoded.info["duration_s"] == 0.1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "The audio is empty"),
        (b"RIFF\x00\x00\x00\x00WAVEx", "damaged"),
        (wav_header(16000, 1, 0, b""), "damaged or empty"),
        (wav_header(0, 1, 200, b"x" * 200), "damaged"),
        (wav_header(2**32 - 1, 1, 200, b"x" * 200), "damaged|sampling rate"),
        (wav_header(500, 1, 200, b"x" * 200), "sampling rate is not between 1000 and 768000 Hz"),
        (wav_header(16000, 65535, 200, b"x" * 200), "damaged|channels"),
        (b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1/a.ts\n", "a playlist"),
        (b"<html>", "an HTML page"),
        (b"just text, no sound", "Send WAV, FLAC"),
    ],
)
def test_what_is_no_audio_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidMedia, match=message):
        decode(data, 16000, LIMITS)


def test_a_video_without_sound_has_no_sound_track() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=25, width=32, height=32, pix_fmt="yuv420p")
        container.mux([*stream.encode(av.VideoFrame(32, 32, "yuv420p")), *stream.encode(None)])
    with pytest.raises(InvalidMedia, match="not have a sound track"):
        decode(file.getvalue(), 16000, LIMITS)


def test_scientific_formats_of_libsndfile_are_not_taken() -> None:
    with pytest.raises(UnsupportedMedia, match="not audio in a supported format"):
        decode(encode(tone(0.1, 8000), 8000, "MAT5", "FLOAT"), 8000, LIMITS)


@pytest.mark.parametrize("format", ["wav", "webm"])
def test_decoding_stops_when_nobody_waits(format: str) -> None:
    cancelled = threading.Event()
    cancelled.set()
    samples = tone(0.5, 48000)
    data = encode(samples, 48000) if format == "wav" else encode_av(samples, 48000, "webm", "libopus")
    with pytest.raises(DecodingCancelled):
        decode(data, 16000, LIMITS, cancelled)


def test_a_wav_of_the_standard_library() -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(2)
        writer.setsampwidth(2)
        writer.setframerate(16000)
        writer.writeframes(np.tile(np.array([16384, 0], "<i2"), 1600).tobytes())
    np.testing.assert_allclose(decode(file.getvalue(), 16000, LIMITS).arrays["samples"], 0.25, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["wav", "flac", "ogg", "mp4"]),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_damage_gives_sound_or_a_declared_error(format: str, damage: list[tuple[int, int]]) -> None:
    data = bytearray(whole(format))
    for place, value in damage:
        data[place % len(data)] = value
    with contextlib.suppress(InvalidMedia):
        decode(bytes(data), 16000, AudioLimits(max_seconds=10))


def whole(format: str, cache: dict[str, Any] = {}) -> bytes:  # noqa: B006
    if not cache:
        samples = tone(0.2, 16000)
        cache.update({name: encode(samples, 16000, name.upper()) for name in ("wav", "flac", "ogg")})
        cache["mp4"] = encode_av(samples, 16000, "mp4", "aac")
    return cache[format]  # type: ignore[no-any-return]


def test_samples_far_outside_of_full_scale_are_refused() -> None:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.full(1600, 1e20, np.float32), 16000, "FLOAT", format="WAV")
    with pytest.raises(InvalidMedia, match="far outside the range -1 to 1"):
        decode(buffer.getvalue(), 16000, AudioLimits())


@pytest.mark.parametrize(("rate", "wanted"), [(44100, 16000), (8000, 48000), (1000, 16000), (16000, 16000)])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_block_by_block_gives_what_all_at_once_gives(
    rate: int, wanted: int, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audio, "_BLOCK_SAMPLES", 1000)
    samples = np.random.default_rng(0).uniform(-1, 1, (7 * 997, channels)).astype(np.float32)
    mono = samples.mean(axis=1, dtype=np.float32)
    expected = mono if rate == wanted else soxr.resample(mono, rate, wanted)
    decoded = decode(encode(samples, rate, subtype="FLOAT"), wanted, LIMITS)
    assert np.array_equal(decoded.arrays["samples"], expected)


def test_the_limit_in_bytes_counts_what_resampling_makes() -> None:
    data = encode(tone(1.0, 8000), 8000)
    decode(data, 48000, AudioLimits(max_decoded_bytes=4 * 48000))
    with pytest.raises(MediaTooLarge, match="more than the limit of 191999 bytes"):
        decode(data, 48000, AudioLimits(max_decoded_bytes=4 * 48000 - 1))


def test_a_packet_as_large_as_the_file_is_counted_before_it_is_converted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = encode_av(tone(2.0, 8000), 8000, "matroska", "pcm_u8")
    whole = decode(data, 8000, LIMITS).arrays["samples"]
    monkeypatch.setattr(audio, "_BLOCK_SAMPLES", 100)
    assert np.array_equal(decode(data, 8000, LIMITS).arrays["samples"], whole)
    monkeypatch.setattr(audio, "_blocks", None)
    with pytest.raises(MediaTooLarge, match="more than the limit of 30000 bytes"):
        decode(data, 8000, AudioLimits(max_decoded_bytes=30_000))
