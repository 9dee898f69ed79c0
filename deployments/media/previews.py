"""Makes small pictures and sounds of decoded media, for people to look at."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from deployments.types import Arrays, Modality

MAX_SIDE = 256  # pixels


def previews(modality: Modality, arrays: Arrays, sampling_rate: int) -> list[str]:
    """Returns data: URIs: one PNG for an image, one PNG for each frame of a video, one 16-bit WAV for audio.

    Pictures have at most 256 pixels on the long side. The WAV has `sampling_rate` Hz.
    """
    match modality:
        case Modality.IMAGE:
            return [_png(arrays["pixels"])]
        case Modality.VIDEO:
            return [_png(frame) for frame in arrays["frames"]]
        case Modality.AUDIO:
            return [_wav(arrays["samples"], sampling_rate)]


def _png(pixels: Any) -> str:
    image = Image.fromarray(pixels)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return _data_uri("image/png", buffer.getvalue())


def _wav(samples: Any, sampling_rate: int) -> str:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.clip(samples, -1, 1), sampling_rate, "PCM_16", format="WAV")
    return _data_uri("audio/wav", buffer.getvalue())


def _data_uri(mime: str, data: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"
