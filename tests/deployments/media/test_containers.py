import io

import av
import numpy as np
import pytest

from deployments.errors import InvalidMedia, UnsupportedMedia
from deployments.media import audio, video
from deployments.media import containers as decoding
from deployments.media.audio import AudioLimits
from deployments.media.containers import refuse
from deployments.media.video import VideoLimits
from deployments.types import Modality

WAV = b"RIFF\x00\x00\x00\x00WAVEfmt "
PNG = b"\x89PNG\r\n\x1a\n"
MP4 = b"\x00\x00\x00\x18ftypisom"
HEIC = b"\x00\x00\x00\x18ftypheic"


@pytest.mark.parametrize(
    ("data", "modality", "words"),
    [
        (WAV, Modality.IMAGE, "is a WAV sound, which is not accepted as image"),
        (MP4, Modality.IMAGE, "is an MP4 or MOV file, which is not accepted as image"),
        (PNG, Modality.AUDIO, "is a PNG image, which is not accepted as audio"),
        (WAV, Modality.VIDEO, "is a WAV sound, which is not accepted as video"),
        (HEIC, Modality.VIDEO, "is a HEIC image, which is not accepted as video"),
        (b"<html><body>403", Modality.IMAGE, "It is an HTML page"),
        (b"hello", Modality.IMAGE, "is not an image in a supported format"),
    ],
)
def test_another_kind_of_data_is_called_by_its_name(data: bytes, modality: Modality, words: str) -> None:
    with pytest.raises(UnsupportedMedia, match=words):
        refuse(data, modality, "something else")


@pytest.mark.parametrize(
    ("data", "modality"),
    [(WAV, Modality.AUDIO), (PNG, Modality.IMAGE), (PNG, Modality.VIDEO), (MP4, Modality.AUDIO)],
)
def test_what_begins_right_and_does_not_open_is_damaged(data: bytes, modality: Modality) -> None:
    with pytest.raises(InvalidMedia, match="damaged or cut short") as caught:
        refuse(data, modality, "it again")
    assert type(caught.value) is InvalidMedia


def pictures_and_sound(tracks: int) -> bytes:
    """Each track of pictures has to be decoded to tell what it is."""
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as container:
        streams = [
            container.add_stream("png", rate=10, width=40, height=20, pix_fmt="rgb24") for _ in range(tracks)
        ]
        sound = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        picture = av.VideoFrame.from_ndarray(np.full((20, 40, 3), 77, np.uint8), format="rgb24")
        picture.pts = 0
        for stream in streams:
            container.mux([*stream.encode(picture), *stream.encode(None)])
        frame = av.AudioFrame.from_ndarray(np.full((1, 800), 8192, np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux([*sound.encode(frame), *sound.encode(None)])
    return file.getvalue()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pixels that FFmpeg may decode of a frame, each time that it opens the file."""
    pixels: list[int] = []
    opening = decoding._open

    def noting(data: bytes, max_pixels: int) -> object:
        pixels.append(max_pixels)
        return opening(data, max_pixels)

    monkeypatch.setattr(decoding, "_open", noting)
    return pixels


def test_tracks_share_the_pixels_that_are_decoded_to_tell_what_they_are(opened: list[int]) -> None:
    decoded = video.decode(pictures_and_sound(3), None, None, VideoLimits(max_pixels=4000))
    assert opened == [1, 16000 // 3]
    assert (decoded.arrays["frames"] == 77).all()


def test_of_a_sounds_pictures_nothing_is_decoded(opened: list[int]) -> None:
    decoded = audio.decode(pictures_and_sound(2), 8000, AudioLimits())
    assert opened == [1]
    assert decoded.arrays["samples"].tolist() == [0.25] * 800
