import io
import struct

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import InvalidMedia, MediaTooLarge
from deployments.media import audio, video
from deployments.media.audio import AudioLimits
from deployments.media.guards import mp4_index
from deployments.media.guards.mp4_index import promised_samples
from deployments.media.video import VideoLimits
from tests.support.media_files import clip

CLIP = clip(list(range(9)))
BILLION = 10**9


def box(name: bytes, *content: bytes | int) -> bytes:
    inside = b"".join(part if isinstance(part, bytes) else struct.pack(">I", part) for part in content)
    return struct.pack(">I", 8 + len(inside)) + name + inside


def sizes(count: int) -> bytes:
    return box(b"stsz", 0, 1, count)


def changed(data: bytes, table: bytes, *values: int) -> bytes:
    """Replaces the numbers that follow the table's version and flags."""
    at = data.index(table) + 8
    return data[:at] + struct.pack(f">{len(values)}I", *values) + data[at + 4 * len(values) :]


def sound(num_samples: int) -> bytes:
    """Returns PCM audio whose index declares every single sample."""
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        samples = np.zeros((1, num_samples), np.int16)
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux([*stream.encode(frame), *stream.encode(None)])
    return file.getvalue()


@pytest.mark.parametrize("muxer", [{}, {"movflags": "frag_keyframe+empty_moov"}], ids=["whole", "fragments"])
def test_frames_are_counted_in_a_whole_and_in_a_fragmented_file(muxer: dict[str, str]) -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4", options=muxer) as container:
        stream = container.add_stream("libx264", rate=30, width=32, height=32, pix_fmt="yuv420p")
        for number in range(9):
            frame = av.VideoFrame(32, 32, "yuv420p")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    assert promised_samples(file.getvalue()) == 9


def test_audio_of_one_tick_samples_is_counted_by_chunks() -> None:
    data = sound(80_000)
    promised = promised_samples(data)
    with av.open(io.BytesIO(data)) as container:
        packets = sum(packet.size > 0 for packet in container.demux(audio=0))
    assert packets <= promised < 2000
    assert audio.decode(data, 8000, AudioLimits(max_decoded_bytes=4 * 80_000)).info["duration_s"] == 10


@pytest.mark.parametrize("wrap", [b"moov", b"udta", b"free", b"wxyz"])
def test_a_table_counts_inside_any_box(wrap: bytes) -> None:
    tables = box(b"mdia", box(b"minf", box(b"stbl", sizes(7))))
    two = box(b"trak", tables) * 2
    assert promised_samples(box(b"ftyp", b"isom", 0) + box(wrap, two)) == 14
    inside_meta = box(b"meta", 0, box(b"hdlr", 0, 0, b"vide"), tables)
    assert promised_samples(box(wrap, box(b"trak", inside_meta))) == 7


def test_the_larger_of_two_equal_tables_counts() -> None:
    assert promised_samples(box(b"trak", sizes(BILLION), sizes(1))) == BILLION
    assert promised_samples(box(b"trak", sizes(1), sizes(BILLION))) == BILLION


def test_sizes_of_boxes_are_read_as_ffmpeg_reads_them() -> None:
    trak = box(b"trak", sizes(5))
    to_the_end = struct.pack(">I", 0) + b"moov" + trak
    beyond_the_end = struct.pack(">I", 2**32 - 1) + b"moov" + trak
    long = struct.pack(">I", 1) + b"moov" + struct.pack(">Q", 16 + len(trak)) + trak
    for data in (to_the_end, beyond_the_end, long):
        assert promised_samples(data) == 5


def test_tables_inside_media_data_do_not_count() -> None:
    assert promised_samples(box(b"mdat", box(b"moov", box(b"trak", sizes(BILLION))))) == 0
    assert promised_samples(box(b"moov", box(b"covr", sizes(BILLION)))) == 0


@pytest.mark.parametrize(
    "data",
    [
        box(b"moov", box(b"cmov", b"zlib")),
        box(b"moov", box(b"trak", box(b"stsd", 0, 1, box(b"avc1", bytes(78), sizes(BILLION))))),
    ],
    ids=["compressed", "in a description"],
)
def test_an_index_that_cannot_be_read_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidMedia, match="The file's index is"):
        promised_samples(data)


def test_too_many_boxes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mp4_index, "_MAX_BOXES", 100)
    with pytest.raises(InvalidMedia, match="too many pieces"):
        promised_samples(box(b"skip") * 102)


@given(
    st.lists(
        st.sampled_from([b"moov", b"trak", b"stsz", b"meta", b"hdlr", b"\0\0\0\1", b"\0\0\0\x10", b"\0"])
    )
)
def test_any_bytes_give_a_bounded_number(parts: list[bytes]) -> None:
    data = b"".join(parts)
    assert 0 <= promised_samples(data) < 2**32 * max(1, len(data))


def test_an_index_over_the_limit_is_refused_before_ffmpeg_opens_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    promising = changed(changed(CLIP, b"stsz", 1, BILLION), b"stts", 1, BILLION, 512)
    monkeypatch.setattr(av, "open", None)
    with pytest.raises(
        MediaTooLarge, match="The video's index alone is larger than the limit of 1073741824 bytes"
    ):
        video.decode(promising, 8, None, VideoLimits())
    with pytest.raises(MediaTooLarge, match="The audio's index alone is larger than the limit"):
        audio.decode(promising, 8000, AudioLimits())
