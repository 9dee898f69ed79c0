import pytest

from deployments.errors import InvalidMedia, UnsupportedMedia
from deployments.multimodal.decoding import refuse
from deployments.types import Modality

WAV = b"RIFF\x00\x00\x00\x00WAVEfmt "
PNG = b"\x89PNG\r\n\x1a\n"
MP4 = b"\x00\x00\x00\x18ftypisom"
HEIC = b"\x00\x00\x00\x18ftypheic"


@pytest.mark.parametrize(
    ("data", "modality", "words"),
    [
        (WAV, Modality.IMAGE, "is a WAV sound, which is not taken as image"),
        (MP4, Modality.IMAGE, "is an MP4 or MOV file, which is not taken as image"),
        (PNG, Modality.AUDIO, "is a PNG image, which is not taken as audio"),
        (WAV, Modality.VIDEO, "is a WAV sound, which is not taken as video"),
        (HEIC, Modality.VIDEO, "is a HEIC image, which is not taken as video"),
        (b"<html><body>403", Modality.IMAGE, "It is an HTML page"),
        (b"hello", Modality.IMAGE, "is no image in a format taken here"),
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
