"""The decoders against real files: what must decode gives the known facts, what must not is refused clearly.

The corpus is not part of the repository; without it these tests are skipped. Its own `check.py` says what is
expected of each file, so that here and against a running server the same is checked.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import time
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from deployments.errors import InvalidMedia
from deployments.media import audio, image, video
from deployments.media.audio import AudioLimits
from deployments.media.containers import Decoded
from deployments.media.image import ImageLimits
from deployments.media.video import VideoLimits
from tests.support.paths import CORPUS

MANIFEST = CORPUS / "MANIFEST.jsonl"

pytestmark = [
    pytest.mark.skipif(not MANIFEST.exists(), reason="the corpus ../shared/corpus is not here"),
    pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning"),
    pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*(truncat|Truncat|corrupt):UserWarning"),
]


def rows() -> list[dict[str, Any]]:
    if not MANIFEST.exists():
        return []
    found = [json.loads(line) for line in MANIFEST.read_text().splitlines()]
    return [row for row in found if not row["file"].startswith("embeds/")]


def facts(row: dict[str, Any], item: dict[str, Any]) -> list[str]:
    """The corpus' own comparison, by the code that checks a running server."""
    spec = importlib.util.spec_from_file_location("corpus_check", CORPUS / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[str] = module.facts(row, item)
    return found


def decode(kind: str, data: bytes) -> Decoded:
    match kind:
        case "image":
            return image.decode(data, ImageLimits())
        case "audio":
            return audio.decode(data, 16000, AudioLimits())
        case _:
            return video.decode(data, 8, None, VideoLimits())


def decode_or_refuse(kind: str, data: bytes) -> Decoded | InvalidMedia:
    try:
        return decode(kind, data)
    except InvalidMedia as error:
        return error


def previews(kind: str, decoded: Decoded) -> list[str]:
    match kind:
        case "image":
            return [png(decoded.arrays["pixels"])]
        case "audio":
            return [wav(decoded.arrays["samples"], decoded.info["sampling_rate"])]
        case _:
            return [png(frame) for frame in decoded.arrays["frames"]]


def png(pixels: np.ndarray) -> str:
    picture, file = Image.fromarray(pixels), io.BytesIO()
    picture.thumbnail((256, 256))
    picture.save(file, "png", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def wav(samples: np.ndarray, rate: int) -> str:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, "PCM_16", format="WAV")
    return "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["file"])
def test_corpus_file(row: dict[str, Any]) -> None:
    kind, path = row["file"].split("/")[0], CORPUS / "media" / row["file"]
    if not path.exists():
        pytest.skip("this file of the corpus is not here")
    start = time.perf_counter()
    outcome = decode_or_refuse(kind, path.read_bytes())
    assert time.perf_counter() - start < 30
    if isinstance(outcome, InvalidMedia):
        assert row["outcome"] != "accept", outcome.message
        assert len(outcome.message) >= 10
        assert " at 0x" not in outcome.message
    else:
        assert row["outcome"] != "reject"
        assert facts(row, {"media": outcome.info, "previews": previews(kind, outcome)}) == []
