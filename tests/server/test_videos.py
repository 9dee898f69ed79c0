"""Videos: the sampled frames and the rotation."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tests.support.cluster import Server
from tests.support.media_files import Frame, clip, number_of
from tests.support.requests import RENDER, chat, data_uri, media, previews

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

TENTH = Fraction(1, 10)


@pytest.fixture(scope="module")
def minute() -> str:
    return data_uri("video/mp4", clip(range(610), time_base=TENTH))  # 61 s


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
def test_the_smaller_of_fps_and_num_frames_decides(
    server: Server, minute: str, wanted: dict[str, float], count: int
) -> None:
    body = server.render(media("video", minute), media_io_kwargs={"video": wanted}, previews=True)
    (item,) = body["items"]
    indices = item["media"]["frame_indices"]
    assert item["media"]["num_frames"] == len(indices) == len(item["previews"]) == count
    assert [number_of(frame) for frame in previews(item)] == indices
    assert indices[0] == 0
    assert count == 1 or indices[-1] == 609


@pytest.mark.parametrize(
    "wanted", [{"fps": 0}, {"num_frames": 0}, {"fps": -2}, {"num_frames": -7}, {"fps": "1"}], ids=str
)
def test_invalid_fps_and_num_frames_are_refused(
    server: Server, minute: str, wanted: dict[str, object]
) -> None:
    body = chat(media("video", minute), media_io_kwargs={"video": wanted})
    message = server.post(RENDER, body).refusal(f"media_io_kwargs.video.{next(iter(wanted))}", (400,))
    assert "media_io_kwargs" in message


def test_num_frames_beyond_the_video_gives_every_frame(server: Server, minute: str) -> None:
    content = media("video", data_uri("video/mp4", clip(range(30), time_base=TENTH)))
    item = server.render(content, media_io_kwargs={"video": {"num_frames": 10**6}})["items"][0]
    assert item["media"]["frame_indices"] == list(range(30))
    server.assert_answers()


def test_a_rotated_video_is_turned_upright(server: Server) -> None:
    def draw(_: int) -> Frame:
        frame = np.zeros((48, 96, 3), np.uint8)
        frame[:, :24] = 255  # bright at the left
        return frame

    for rotation, edge in ((90, np.s_[-20:]), (-90, np.s_[:20])):
        data = clip(range(4), draw=draw, rotation=rotation)
        (item,) = server.render(media("video", data_uri("video/mp4", data)), previews=True)["items"]
        assert (item["media"]["width"], item["media"]["height"]) == (48, 96)
        pixels = previews(item)[0]
        assert pixels.shape == (96, 48, 3)
        assert pixels[edge].mean() > 200
        assert pixels.mean() < 100
    senseless = bytearray(data)
    at = senseless.index(b"tkhd") + 44
    senseless[at : at + 36] = b"\x80\x00\x00\x00" * 9
    assert server.ask(media("video", data_uri("video/mp4", bytes(senseless)))).status in (200, 422)
