import base64
import io

import numpy as np
import pytest
import soundfile
from PIL import Image

from deployments.media.previews import previews
from deployments.types import Modality


def content(uri: str, mime: str) -> io.BytesIO:
    head, _, data = uri.partition(",")
    assert head == f"data:{mime};base64"
    return io.BytesIO(base64.b64decode(data))


@pytest.mark.parametrize(
    ("height", "width", "size"), [(20, 30, (30, 20)), (600, 300, (128, 256)), (4, 8000, (256, 1))]
)
def test_an_image_is_one_png_of_at_most_256_pixels(height: int, width: int, size: tuple[int, int]) -> None:
    (uri,) = previews(Modality.IMAGE, {"pixels": np.full((height, width, 3), 77, np.uint8)}, 0)
    image = Image.open(content(uri, "image/png"))
    assert image.size == size
    assert image.getpixel((0, 0)) == (77, 77, 77)


def test_a_video_is_a_png_for_each_frame_in_order() -> None:
    frames = np.stack([np.full((8, 8, 3), shade, np.uint8) for shade in (1, 2, 3)])
    pixels = [
        Image.open(content(uri, "image/png")).getpixel((0, 0))
        for uri in previews(Modality.VIDEO, {"frames": frames}, 0)
    ]
    assert pixels == [(1, 1, 1), (2, 2, 2), (3, 3, 3)]


def test_audio_is_a_wav_at_the_rate_of_the_model() -> None:
    samples = np.array([0.0, 0.5, -0.5, 1.5], np.float32)
    (uri,) = previews(Modality.AUDIO, {"samples": samples}, 16000)
    heard, rate = soundfile.read(content(uri, "audio/wav"))
    assert rate == 16000
    assert heard == pytest.approx([0, 0.5, -0.5, 1], abs=1e-3)
