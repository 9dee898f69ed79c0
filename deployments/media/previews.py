"""What came out of decoding, as a person can look at it and listen to it."""

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
    """data: URIs of the arrays in `Media`, at most 256 px on the long side.

    An image gives one PNG, a video one for each frame in order, audio one 16-bit WAV at `sampling_rate` Hz.
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
