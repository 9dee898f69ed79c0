"""OpenAI's chat wire format as far as Headrace speaks it: requests, answers, error envelope.

Unknown fields are ignored and `null` means absent, at every level, as OpenAI's API does; a wrong type is
an error that names the field. Nothing here knows Ray or the stages.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from deployments.errors import InvalidRequest

MAX_STOPS = 4
MAX_ANSWERS = 128
MAX_TOKEN_IDS = 1024  # in `logit_bias` and `stop_token_ids`
MAX_PARTS = 8192  # messages and parts of a request together
_MEDIA_TYPES = ("image_url", "input_audio", "audio_url", "video_url")
MM_EMBEDS_TYPES = ("image_embeds", "audio_embeds", "video_embeds")
PART_TYPES = ("text", *_MEDIA_TYPES, *MM_EMBEDS_TYPES, "prompt_embeds")
MAX_UUID = 256  # characters
_MAX_NUMBERS = 64  # of a list in the place of a tensor
_UNION = "union:"  # marks a union's tag in an error's location, so that it can be left out again


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


W = TypeVar("W", bound=_Wire)


class TextPart(_Wire):
    text: str

    @model_validator(mode="before")
    @classmethod
    def _bare_string(cls, data: Any) -> Any:
        return {"text": data} if isinstance(data, str) else data


class MediaURL(_Wire):
    url: str

    @model_validator(mode="before")
    @classmethod
    def _bare_string(cls, data: Any) -> Any:
        return {"url": data} if isinstance(data, str) else data


class InputAudio(_Wire):
    data: str
    format: str = Field(default="wav", max_length=32, pattern=r"^[A-Za-z0-9.+-]+$")


class _ItemPart(_Wire):
    uuid: str | None = Field(default=None, max_length=MAX_UUID)  # the client's name for the item


class ImagePart(_ItemPart):
    image_url: MediaURL


class AudioPart(_ItemPart):
    audio_url: MediaURL


class VideoPart(_ItemPart):
    video_url: MediaURL


class InputAudioPart(_ItemPart):
    input_audio: InputAudio


class NamedPart(_Wire):
    """An item that was sent before, by its uuid alone."""

    modality: Literal["image", "audio", "video"]
    uuid: str = Field(min_length=1, max_length=MAX_UUID)

    @model_validator(mode="before")
    @classmethod
    def _of_modality(cls, data: Any) -> Any:
        kind = _part_kind(data)
        assert kind is not None
        return {**data, "modality": "audio" if kind == "input_audio" else kind.removesuffix("_url")}


Numbers = list[int | float]


def _tensor(name: str, value: Any) -> str | Numbers:
    """Base64 of a file, or numbers: `[1, 22, 40]`, `[[1, 22, 40]]`, `0.5`."""
    if isinstance(value, str):
        return value
    numbers = value if isinstance(value, list) else [value]
    if len(numbers) == 1 and isinstance(numbers[0], list):
        numbers = numbers[0]
    if 0 < len(numbers) <= _MAX_NUMBERS and all(type(n) in (int, float) and abs(n) < 2**31 for n in numbers):
        return numbers
    raise _not_a_tensor(f"{name[:64]} must be a base64 string or a list of at most {_MAX_NUMBERS} numbers")


def _not_a_tensor(message: str) -> PydanticCustomError:
    return PydanticCustomError("tensor", "{message}", {"message": message})


class EmbedsPart(_ItemPart):
    """An item, or a piece of text, as the embeddings that the model would make of it."""

    modality: Literal["image", "audio", "video", "prompt"]
    tensors: dict[str, Any]  # name -> str or Numbers; under the part's type the embeddings, a str

    @model_validator(mode="before")
    @classmethod
    def _in_one_form(cls, data: Any) -> Any:
        """A tensor or a dict of them under the part's type; of `prompt_embeds` also a tensor under `data`."""
        kind = _part_kind(data)
        assert kind is not None
        value = _payload(data, kind)
        tensors = value if isinstance(value, dict) else {kind: value}
        if kind == "prompt_embeds" and isinstance(value, dict) and "data" in value:
            tensors = {kind: value["data"]}
        if not isinstance(tensors.get(kind), str):
            raise _not_a_tensor(f"{kind} must be the base64 of a tensor, or a dict with one of this name")
        tensors = {name: _tensor(name, each) for name, each in tensors.items() if each is not None}
        return {**data, "modality": kind.removesuffix("_embeds"), "tensors": tensors}


def _part_tag(part: Any) -> str | None:
    if isinstance(part, str | TextPart):
        return _UNION + "text"
    kind = _part_kind(part) if isinstance(part, dict) else None
    if kind is None:
        return None
    if kind.endswith("_embeds"):
        return _UNION + "embeds"
    named = kind != "text" and part.get("uuid") is not None and _payload(part, kind) is None
    return _UNION + ("named" if named else kind)


def _part_kind(part: dict[str, Any]) -> str | None:
    """The part's type, told by its key where `type` is missing."""
    kind = part.get("type")
    if kind is None:
        kind = next((key for key in PART_TYPES if key in part), None)
    return kind if isinstance(kind, str) and kind in PART_TYPES else None


def _payload(part: dict[str, Any], kind: str) -> Any:
    """What the part is about, None where it is missing."""
    return part.get("data") if kind == "prompt_embeds" and part.get(kind) is None else part.get(kind)


ContentPart = Annotated[
    Annotated[TextPart, Tag(_UNION + "text")]
    | Annotated[ImagePart, Tag(_UNION + "image_url")]
    | Annotated[InputAudioPart, Tag(_UNION + "input_audio")]
    | Annotated[AudioPart, Tag(_UNION + "audio_url")]
    | Annotated[VideoPart, Tag(_UNION + "video_url")]
    | Annotated[EmbedsPart, Tag(_UNION + "embeds")]
    | Annotated[NamedPart, Tag(_UNION + "named")],
    Discriminator(
        _part_tag,
        custom_error_type="part_type",
        custom_error_message=f"a part is a string or an object whose type is one of {', '.join(PART_TYPES)}",
    ),
]


def _content_tag(content: Any) -> str | None:
    return _UNION + type(content).__name__ if isinstance(content, str | list) else None


Content = Annotated[
    Annotated[str, Tag(_UNION + "str")] | Annotated[list[ContentPart], Tag(_UNION + "list")],
    Discriminator(
        _content_tag,
        custom_error_type="content_type",
        custom_error_message="content is a string or a list of parts",
    ),
]


# Fields of OpenAI's and vLLM's APIs that would change the answer and are not offered: only these values are
# taken, which change nothing. README.md has the same table.
ONLY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tools", "functions", "documents", "bad_words", "logits_processors"), ([],)),
    **dict.fromkeys(("chat_template_kwargs", "structured_outputs", "vllm_xargs"), ({},)),
    **dict.fromkeys(
        (
            "continue_final_message",
            "add_special_tokens",
            "echo",
            "use_beam_search",
            "include_stop_str_in_output",
            "return_token_ids",
            "return_tokens_as_token_ids",
        ),
        (False,),
    ),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens"), (True,)),
    "best_of": (1,),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    **dict.fromkeys(
        (
            "prompt_logprobs",
            "truncate_prompt_tokens",
            "allowed_token_ids",
            "chat_template",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "structural_tag",
            "web_search_options",
            "thinking_token_budget",
            "repetition_detection",
        ),
        (),
    ),
}
_ONLY_IN_MESSAGE: dict[str, tuple[Any, ...]] = {"tool_calls": ([],), "function_call": (), "audio": ()}


def _refuse_what_is_not_offered(data: Any, only: dict[str, tuple[Any, ...]]) -> None:
    for field, values in only.items() if isinstance(data, dict) else ():
        value = data.get(field)
        is_flag = isinstance(value, bool)
        if value is None or any(value == v and is_flag == isinstance(v, bool) for v in values):
            continue
        allowed = f" other than as {json.dumps(values[0])}" if values else "; leave it out"
        raise _NotOffered(f"{field} is not supported here{allowed}", field)


class Message(_Wire):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_offered(cls, data: Any) -> Any:
        _refuse_what_is_not_offered(data, _ONLY_IN_MESSAGE)
        return data

    @model_validator(mode="before")
    @classmethod
    def _assistant_may_be_silent(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("role") == "assistant" and data.get("content") is None:
            return {**data, "content": ""}
        return data

    @field_validator("content", mode="before")
    @classmethod
    def _no_embeddings_by_name_alone(cls, content: Any) -> Any:
        """They are not kept; without this it would be misread as a missing field."""
        for index, part in enumerate(content if isinstance(content, list) else []):
            kind = _part_kind(part) if isinstance(part, dict) else None
            by_name = kind and part.get("uuid") is not None and _payload(part, kind) is None
            if kind and by_name and kind.endswith("_embeds"):
                raise _Unserved(f"{kind} is missing: embeddings are not kept by their uuid, send them", index)
        return content


class _Unserved(ValueError):
    def __init__(self, message: str, index: int) -> None:
        super().__init__(message, index)
        self.message, self.index = message, index


class _MediaIO(_Wire):
    """vLLM's settings of how media are decoded; what is not known here would change the answer unseen."""

    model_config = ConfigDict(strict=True, extra="forbid")


class ImageIO(_MediaIO):
    image_mode: Literal["RGB"] = "RGB"
    rgba_background_color: list[Annotated[int, Field(ge=0, le=255)]] | None = Field(
        default=None, min_length=3, max_length=3
    )


def _not_zero(value: float) -> float:
    if value == 0 or -1 < value < 0:
        raise ValueError("must be greater than 0, or -1")
    return value


class VideoIO(_MediaIO):
    num_frames: int | None = Field(default=None, ge=-1)  # -1: all
    fps: float | None = Field(default=None, ge=-1, le=1000)  # -1: not by rate
    max_duration: float | None = Field(default=None, gt=0)  # seconds

    _not_zero = field_validator("num_frames", "fps")(_not_zero)


class AudioIO(_MediaIO):
    pass


class MediaIOKwargs(_MediaIO):
    image: ImageIO = Field(default_factory=ImageIO)
    audio: AudioIO = Field(default_factory=AudioIO)
    video: VideoIO = Field(default_factory=VideoIO)


class ProcessorKwargs(_Wire):
    """vLLM's `mm_processor_kwargs`, as far as they are safe; what a model's processor takes is its own.

    `fps` and `num_frames` mean those of `media_io_kwargs.video`, which come first.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    min_pixels: int | None = Field(default=None, ge=1)
    max_pixels: int | None = Field(default=None, ge=1)
    max_patches: int | None = Field(default=None, ge=1)
    dynamic_hd: int | None = Field(default=None, ge=1)
    max_soft_tokens: int | None = Field(default=None, ge=1)
    crop_to_patches: bool | None = None
    do_image_splitting: bool | None = None
    do_pan_and_scan: bool | None = None
    fps: float | None = Field(default=None, ge=-1, le=1000)  # -1: not by rate
    num_frames: int | None = Field(default=None, ge=-1)  # -1: all

    _not_zero = field_validator("num_frames", "fps")(_not_zero)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        for name, value in data.items() if isinstance(data, dict) else ():
            if value is not None and name not in cls.model_fields:
                allowed = ", ".join(sorted(cls.model_fields))
                raise _NotOffered(f"{name[:64]} is not supported here; allowed are {allowed}", name[:64])
        return data

    def of_processor(self) -> dict[str, int | bool]:
        return self.model_dump(exclude_none=True, exclude={"fps", "num_frames"})


class StreamOptions(_Wire):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: with include_usage, in every chunk as well


TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]  # as JSON has it for a key
Bias = Annotated[float, Field(ge=-100, le=100)]


class ChatRequest(_Wire):
    messages: list[Message] = Field(min_length=1)
    model: str | None = None  # absent: the served model
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)  # the newer name; the smaller one holds
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list, max_length=MAX_STOPS)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    n: int = Field(default=1, ge=1, le=MAX_ANSWERS)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[TokenId, Bias] = Field(default_factory=dict, max_length=MAX_TOKEN_IDS)
    # As vLLM, from here on.
    top_k: int | None = Field(default=None, ge=-1)  # 0 and -1: all
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    min_tokens: int = Field(default=0, ge=0)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list, max_length=MAX_TOKEN_IDS)
    ignore_eos: bool = False  # go on to the token limit
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    user: str | None = None
    cache_salt: str | None = Field(default=None, max_length=MAX_UUID)  # as vLLM: names are known within it
    media_io_kwargs: MediaIOKwargs = Field(default_factory=MediaIOKwargs)  # as vLLM
    mm_processor_kwargs: ProcessorKwargs = Field(default_factory=ProcessorKwargs)  # as vLLM
    previews: bool = False  # of `render`: show what came out of decoding
    timings: bool = False  # tell where the time went

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_offered(cls, data: Any) -> Any:
        _refuse_what_is_not_offered(data, ONLY)
        return data

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise _NotOffered("top_logprobs needs logprobs to be true", "top_logprobs")
        limit = self.token_limit()
        if limit is not None and self.min_tokens > limit:
            raise _NotOffered(f"min_tokens is greater than the token limit of {limit}", "min_tokens")
        return self

    def token_limit(self) -> int | None:
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)


class TokenizeRequest(_Wire):
    """A bare text; a conversation is a ChatRequest."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(_Wire):
    tokens: list[int]
    model: str | None = None


class _NotOffered(ValueError):
    """`field` of the object that was being validated."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message, field)
        self.message, self.field = message, field


def parse_chat_request(document: Any) -> ChatRequest:
    """Raises InvalidRequest naming the first wrong field: `messages[0].content[2].image_url.url`."""
    _check_size(document)
    return parse_as(ChatRequest, document)


def parse_as(model: type[W], document: Any) -> W:
    """Raises InvalidRequest naming the first wrong field."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise _first_error(error) from None


def _check_size(document: Any) -> None:
    """Validation runs on the event loop, some microseconds for each part."""
    messages = document.get("messages") if isinstance(document, dict) else None
    if not isinstance(messages, list):
        return
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    count = len(messages) + sum(len(content) for content in contents if isinstance(content, list))
    if count > MAX_PARTS:
        raise InvalidRequest(f"There are {count} messages and parts; the limit is {MAX_PARTS}.", "messages")


# By pydantic's names of what is wrong; filled in with what it tells of the limit.
_WRONG = {
    "missing": "is missing",
    "string_type": "must be a string",
    **dict.fromkeys(
        ("int_type", "int_parsing", "int_from_float"),
        "must be an integer, of at most 64 bits and without a decimal point",
    ),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "literal_error": "must be {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "extra_forbidden": "is not known here",
    "value_error": "{error}",
    **dict.fromkeys(("part_type", "content_type", "tensor"), "{message}"),
}


def _first_error(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    param, details = param_path(first["loc"]), first.get("ctx", {})
    match details.get("error"):
        case _Unserved() as unserved:
            return InvalidRequest(unserved.message, f"{param}[{unserved.index}]")
        case _NotOffered() as not_offered:
            return InvalidRequest(not_offered.message, f"{param}.{not_offered.field}".lstrip("."))
    if not param:
        return InvalidRequest("The body must be a JSON object.")
    return InvalidRequest(f"{param}: {plainly(first)}", param)


def plainly(wrong: ErrorDetails) -> str:
    """What is wrong with a value, without pydantic's words."""
    return _WRONG.get(wrong["type"], "is not valid").format(
        **{"message": wrong["msg"], **wrong.get("ctx", {})}
    )


def param_path(location: tuple[str | int, ...]) -> str:
    """("messages", 0, "content", "union:list", 1) → "messages[0].content[1]"."""
    steps = [step for step in location if not (isinstance(step, str) and step.startswith(_UNION))]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step[:64]}" for step in steps)
    return path.removeprefix(".")


def error_envelope(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
