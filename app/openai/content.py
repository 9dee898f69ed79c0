"""Content of messages as clients send it: a text, or a list of content parts in OpenAI's and vLLM's forms."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, InstanceOf, Tag, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from app.intake.long_string import LongString
from app.openai.validation import UNION, LongStrings, LongText, NotLong, WireModel, long_strings

_MEDIA_TYPES = ("image_url", "input_audio", "audio_url", "video_url")
MM_EMBEDS_TYPES = ("image_embeds", "audio_embeds", "video_embeds")
PART_TYPES = ("text", *_MEDIA_TYPES, *MM_EMBEDS_TYPES, "prompt_embeds")
MAX_UUID = 256  # characters
_MAX_TENSOR_NUMBERS = 64

InlineTensor = list[int | float]  # a small tensor as a list of JSON numbers
Tensor = str | InstanceOf[LongString] | InlineTensor  # a string holds a file in base64
Uuid = Annotated[str, Field(max_length=MAX_UUID), NotLong]


class TextPart(WireModel):
    text: LongText

    @model_validator(mode="before")
    @classmethod
    def _accept_bare_string(cls, data: object) -> object:
        return {"text": data} if isinstance(data, str) else data


class MediaURL(WireModel):
    url: LongText

    @model_validator(mode="before")
    @classmethod
    def _accept_bare_string(cls, data: object) -> object:
        return {"url": data} if isinstance(data, str) else data


class InputAudio(WireModel):
    data: LongText
    format: str = Field(default="wav", max_length=32, pattern=r"^[A-Za-z0-9.+-]+$")


class _ItemPart(WireModel):
    uuid: Uuid | None = None  # the client's own name for the item


class ImagePart(_ItemPart):
    image_url: MediaURL


class AudioPart(_ItemPart):
    audio_url: MediaURL


class VideoPart(_ItemPart):
    video_url: MediaURL


class InputAudioPart(_ItemPart):
    input_audio: InputAudio


class RecalledPart(WireModel):
    """An item that was sent before. It comes as its uuid alone."""

    modality: Literal["image", "audio", "video"]
    uuid: Annotated[str, Field(min_length=1, max_length=MAX_UUID), NotLong]

    @model_validator(mode="before")
    @classmethod
    def _add_modality(cls, data: object) -> object:
        assert isinstance(data, dict)  # `_part_tag` saw to it
        kind = part_type(data)
        assert kind is not None
        return {**data, "modality": "audio" if kind == "input_audio" else kind.removesuffix("_url")}


class EmbedsPart(_ItemPart):
    """An item, or a piece of text, as the embeddings that the model would compute for it."""

    modality: Literal["image", "audio", "video", "prompt"]
    tensors: dict[str, Tensor]  # the one with the name of the part's type holds the embeddings

    @model_validator(mode="before")
    @classmethod
    def _collect_tensors(cls, data: object, info: ValidationInfo) -> object:
        """Accepts one tensor or a dict of tensors; `prompt_embeds` may have its tensor under `data`."""
        assert isinstance(data, dict)  # `_part_tag` saw to it
        kind = part_type(data)
        assert kind is not None
        value = part_value(data, kind)
        tensors = value if isinstance(value, dict) else {kind: value}
        if kind == "prompt_embeds" and isinstance(value, dict) and "data" in value:
            tensors = {kind: value["data"]}
        if not isinstance(tensors.get(kind), str):
            raise _tensor_error(f"{kind} must be the base64 of a tensor, or a dict with one of this name")
        strings = long_strings(info)
        tensors = {name: _tensor(name, each, strings) for name, each in tensors.items() if each is not None}
        return {**data, "modality": kind.removesuffix("_embeds"), "tensors": tensors}


def _tensor(name: str, value: object, strings: LongStrings) -> Tensor:
    """The base64 of a file, or up to 64 numbers: `[1, 22, 40]`, `[[1, 22, 40]]` or `0.5`."""
    if isinstance(value, str):
        return strings.get(value, value)
    numbers: list[Any] = value if isinstance(value, list) else [value]
    if len(numbers) == 1 and isinstance(numbers[0], list):
        numbers = numbers[0]
    fits = 0 < len(numbers) <= _MAX_TENSOR_NUMBERS
    if fits and all(type(number) in (int, float) and abs(number) < 2**31 for number in numbers):
        return numbers
    raise _tensor_error(
        f"{name[:64]} must be a base64 string or a list of at most {_MAX_TENSOR_NUMBERS} numbers"
    )


def _tensor_error(message: str) -> PydanticCustomError:
    return PydanticCustomError("tensor", "{message}", {"message": message})


def is_uuid_alone(part: dict[str, object], kind: str) -> bool:
    return part.get("uuid") is not None and part_value(part, kind) is None


def part_type(part: dict[str, object]) -> str | None:
    """The part's type. If `type` is missing, the key that the part has decides."""
    kind = part.get("type")
    if kind is None:
        kind = next((key for key in PART_TYPES if key in part), None)
    return kind if isinstance(kind, str) and kind in PART_TYPES else None


def part_value(part: dict[str, object], kind: str) -> object:
    """The text, media or tensors of the part; None if they are missing."""
    return part.get("data") if kind == "prompt_embeds" and part.get(kind) is None else part.get(kind)


def _part_tag(part: object) -> str | None:
    if isinstance(part, str | TextPart):
        return UNION + "text"
    kind = part_type(part) if isinstance(part, dict) else None
    if kind is None:
        return None
    assert isinstance(part, dict)
    if kind.endswith("_embeds"):
        return UNION + "embeds"
    return UNION + ("recalled" if kind != "text" and is_uuid_alone(part, kind) else kind)


def _content_tag(content: object) -> str | None:
    return UNION + type(content).__name__ if isinstance(content, str | list) else None


ContentPart = Annotated[
    Annotated[TextPart, Tag(UNION + "text")]
    | Annotated[ImagePart, Tag(UNION + "image_url")]
    | Annotated[InputAudioPart, Tag(UNION + "input_audio")]
    | Annotated[AudioPart, Tag(UNION + "audio_url")]
    | Annotated[VideoPart, Tag(UNION + "video_url")]
    | Annotated[EmbedsPart, Tag(UNION + "embeds")]
    | Annotated[RecalledPart, Tag(UNION + "recalled")],
    Discriminator(
        _part_tag,
        custom_error_type="part_type",
        custom_error_message=f"a part is a string or an object whose type is one of {', '.join(PART_TYPES)}",
    ),
]

Content = Annotated[
    Annotated[LongText, Tag(UNION + "str")] | Annotated[list[ContentPart], Tag(UNION + "list")],
    Discriminator(
        _content_tag,
        custom_error_type="content_type",
        custom_error_message="content is a string or a list of parts",
    ),
]
