import io
import time

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import InvalidMedia, MediaTooLarge
from deployments.media import audio
from deployments.media.audio import AudioLimits
from deployments.media.guards import mkv_elements
from deployments.media.guards.mkv_elements import described_elements

MANY = 100_000


def element(name: str, *inside: bytes) -> bytes:
    content = b"".join(inside)
    return bytes.fromhex(name) + (1 << 56 | len(content)).to_bytes(8, "big") + content


def empty(name: str, count: int = MANY) -> bytes:
    return count * (bytes.fromhex(name) + b"\x80")


HEAD = element("1a45dfa3", element("4282", b"matroska"))
TRACKS = element(
    "1654ae6b",
    element(
        "ae",
        element("d7", b"\1"),
        element("83", b"\2"),
        element("86", b"A_PCM/INT/LIT"),
        element(
            "e1", element("b5", bytes.fromhex("45fa0000")), element("9f", b"\1"), element("6264", b"\x10")
        ),
    ),
)
CLUSTER = element("1f43b675", element("e7", b"\0"), element("a3", b"\x81\0\0\x80" + bytes(16000)))


def file(*parts: bytes) -> bytes:
    return HEAD + element("18538067", *parts)


BOMBS = {
    "tags": element("1254c367", empty("7373")),
    "simple tags": element("1254c367", element("7373", empty("67c8"))),
    "cues": element("1c53bb6b", empty("bb")),
    "cue positions": element("1c53bb6b", element("bb", empty("b7"))),
    "chapters": element("1043a770", element("45b9", empty("b6"))),
    "attachments": element("1941a469", empty("61a7")),
    "seek": element("114d9b74", empty("4dbb")),
    "tracks": element("1654ae6b", empty("ae")),
    "encodings": element("1654ae6b", element("ae", element("6d80", empty("6240")))),
    "mappings": element("1654ae6b", element("ae", empty("41e4"))),
    "additions": element("1f43b675", element("a0", element("75a1", empty("a6")))),
}


@pytest.mark.parametrize("place", ["before", "after", "inside a value"])
@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_elements_are_counted_at_any_place(bomb: bytes, place: str) -> None:
    if place == "inside a value":  # a SeekHead may point there
        bomb = element("ec", bomb)
    data = file(TRACKS, CLUSTER, bomb) if place == "after" else file(TRACKS, bomb, CLUSTER)
    assert MANY <= described_elements(data) < MANY + 100
    with pytest.raises(MediaTooLarge, match="index alone"):
        audio.decode(data, 8000, AudioLimits(600, 2**20))


def test_a_plain_file_is_decoded() -> None:
    decoded = audio.decode(file(TRACKS, CLUSTER), 8000, AudioLimits(600, 2**20))
    assert decoded.arrays["samples"].shape == (8000,)


def test_a_muxed_file_has_few_elements() -> None:
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        container.metadata["title"] = "a sound"
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux([*stream.encode(frame), *stream.encode(None)])
    assert 10 < described_elements(out.getvalue()) < 200


def test_counting_stops_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mkv_elements, "_MAX_ELEMENTS", MANY // 2)
    with pytest.raises(InvalidMedia, match="too many elements"):
        described_elements(file(TRACKS, BOMBS["tags"]))


@pytest.mark.parametrize("name", ["114d9b74", "75a1"])
def test_too_many_empty_elements_are_refused(name: str) -> None:
    with pytest.raises(InvalidMedia, match="too many elements"):
        described_elements(HEAD + empty(name, 1_000_000))


@pytest.mark.parametrize("shift", range(6))
@pytest.mark.parametrize("name", ["1254c36780", "75a180"])
def test_an_element_across_two_windows_counts_once(name: str, shift: int) -> None:
    padding = bytes(mkv_elements._WINDOW - len(HEAD) - shift)
    assert described_elements(HEAD + padding + bytes.fromhex(name) + bytes(9)) == 1


def test_media_bytes_that_look_like_elements_count_little() -> None:
    """In random data a four-byte id occurs once in 4 GB; here it occurs every 4 KB."""
    random = np.random.default_rng(0).integers(0, 256, 2**20, np.uint8).tobytes()
    chunks = [random[i : i + 4096] for i in range(0, len(random), 4096)]
    start = time.process_time()
    count = described_elements(file(element("1f43b675", bytes.fromhex("1254c367").join(chunks))))
    assert count < 256 * 1000
    assert time.process_time() - start < 5


@given(st.binary(max_size=200))
def test_any_bytes_can_be_counted(data: bytes) -> None:
    described_elements(HEAD + bytes.fromhex("1254c367") + data)
    described_elements(HEAD + bytes.fromhex("75a1") + data)
