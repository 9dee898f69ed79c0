"""Bodies of requests, their parts, and the events of streamed answers."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
from PIL import Image

from tests.support.media_files import Frame, encoded

COMPLETIONS = "/v1/chat/completions"
RENDER = f"{COMPLETIONS}/render"

# Fields of a request whose answer lasts longer than any test.
ENDLESS: dict[str, object] = {"ignore_eos": True, "max_tokens": 3000}


def chat(*content: object, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": list(content)}], **fields}


def media(kind: str, url: str) -> dict[str, object]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def text(content: str) -> dict[str, object]:
    return {"type": "text", "text": content}


def data_uri(mime: str, data: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def image_part(
    colour: str | tuple[int, ...] = (255, 0, 0), size: tuple[int, int] = (48, 48)
) -> dict[str, object]:
    """An image of one colour, in the request."""
    return media("image", data_uri("image/png", encoded(Image.new("RGB", size, colour))))


def events(stream: str) -> list[dict[str, Any]]:
    """Parses the events of a stream, which must end with [DONE]."""
    *chunks, done = [event.removeprefix("data: ") for event in stream.split("\n\n") if event]
    assert done == "[DONE]", done
    return [json.loads(chunk) for chunk in chunks]


def previews(item: dict[str, Any]) -> list[Frame]:
    """Returns the decoded image, or the sampled frames of a video, from an item of a rendered request."""
    files = (base64.b64decode(preview.partition(",")[2]) for preview in item["previews"])
    return [np.asarray(Image.open(io.BytesIO(file))) for file in files]
