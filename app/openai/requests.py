"""Requests as clients send them: OpenAI's chat API, vLLM's additions to it, and /tokenize and /detokenize."""

from __future__ import annotations

import json
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from app.openai.content import MAX_UUID, Content, is_uuid_alone, part_type
from app.openai.validation import (
    EntryError,
    FieldError,
    LongStrings,
    LongText,
    NotLong,
    WireModel,
    parse_as,
)
from deployments.errors import InvalidRequest

MAX_STOPS = 4
MAX_ANSWERS = 128
MAX_TOKEN_IDS = 1024  # in `logit_bias` and `stop_token_ids`
MAX_PARTS = 8192  # messages and content parts of a request together

# Fields of OpenAI's and vLLM's APIs that would change the answer and are not supported -> the values that
# change nothing, which are accepted. docs/api.md has the same table.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
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
_NEUTRAL_VALUES_IN_MESSAGE: dict[str, tuple[object, ...]] = {
    "tool_calls": ([],),
    "function_call": (),
    "audio": (),
}


def _refuse_unsupported(data: object, neutral: dict[str, tuple[object, ...]]) -> None:
    if not isinstance(data, dict):
        return
    for field, values in neutral.items():
        value = data.get(field)
        is_flag = isinstance(value, bool)  # 1 == True, but they are not the same value
        if value is None or any(value == v and is_flag == isinstance(v, bool) for v in values):
            continue
        remedy = f"send {json.dumps(values[0])} or leave it out" if values else "leave it out"
        raise FieldError(f"{field} is not supported here: {remedy}.", field)


class Message(WireModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: LongText | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported_fields(cls, data: object) -> object:
        _refuse_unsupported(data, _NEUTRAL_VALUES_IN_MESSAGE)
        return data

    @model_validator(mode="before")
    @classmethod
    def _allow_silent_assistant(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("role") == "assistant" and data.get("content") is None:
            return {**data, "content": ""}
        return data

    @field_validator("content", mode="before")
    @classmethod
    def _refuse_recalled_embeddings(cls, content: object) -> object:
        """Embeddings are not kept by their uuid. Without this check the error would name a missing field."""
        for index, part in enumerate(content if isinstance(content, list) else []):
            kind = part_type(part) if isinstance(part, dict) else None
            if kind and kind.endswith("_embeds") and is_uuid_alone(part, kind):
                raise EntryError(
                    f"{kind} is missing: embeddings are not kept by their uuid, send them", index
                )
        return content


class _MediaIO(WireModel):
    """vLLM's settings for media decoding. Unknown keys are refused, since they would change the answer."""

    model_config = ConfigDict(strict=True, extra="forbid")


class ImageIO(_MediaIO):
    image_mode: Literal["RGB"] = Field(default="RGB", description="Only `RGB` is supported.")
    rgba_background_color: list[Annotated[int, Field(ge=0, le=255)]] | None = Field(
        default=None,
        min_length=3,
        max_length=3,
        description="Colour under transparent pixels, `[red, green, blue]`. null: white.",
    )


def _refuse_zero(value: float) -> float:
    if value == 0 or -1 < value < 0:
        raise ValueError("must be greater than 0, or -1")
    return value


class VideoIO(_MediaIO):
    num_frames: int | None = Field(
        default=None,
        ge=-1,
        description="Most frames of a video that the model sees. -1: all. null: as its processor wants.",
    )
    fps: float | None = Field(
        default=None,
        ge=-1,
        le=1000,
        description="Frames per second of a video that the model sees. -1: no sampling by rate. null: as its"
        " processor wants.",
    )
    max_duration: float | None = Field(
        default=None,
        gt=0,
        description="Seconds. With `fps`, a longer video gets no more frames than one of this duration.",
    )

    _not_zero = field_validator("num_frames", "fps")(_refuse_zero)


class AudioIO(_MediaIO):
    pass


class MediaIOKwargs(_MediaIO):
    image: ImageIO = Field(default_factory=ImageIO)
    audio: AudioIO = Field(default_factory=AudioIO)
    video: VideoIO = Field(default_factory=VideoIO)


class ProcessorKwargs(WireModel):
    """The safe ones of vLLM's `mm_processor_kwargs`. Each model's processor accepts some of them.

    `fps` and `num_frames` mean the same as in `media_io_kwargs.video`, which takes precedence.
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
    fps: float | None = Field(default=None, ge=-1, le=1000)  # -1: do not sample by rate
    num_frames: int | None = Field(default=None, ge=-1)  # -1: all

    _not_zero = field_validator("num_frames", "fps")(_refuse_zero)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: object) -> object:
        for name, value in data.items() if isinstance(data, dict) else ():
            if value is not None and name not in cls.model_fields:
                allowed = ", ".join(sorted(cls.model_fields))
                raise FieldError(f"{name[:64]} is not supported here; allowed are {allowed}.", name[:64])
        return data

    def processor_settings(self) -> dict[str, int | bool]:
        return self.model_dump(exclude_none=True, exclude={"fps", "num_frames"})


class StreamOptions(WireModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # with include_usage: usage in every chunk, as in vLLM


_ShortText = Annotated[str, NotLong]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]  # a key of a JSON object
Bias = Annotated[float, Field(ge=-100, le=100)]


class ChatRequest(WireModel):
    messages: list[Message] = Field(min_length=1)
    model: _ShortText | None = None  # absent: the served model
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(
        default=None, ge=1
    )  # the newer name; the smaller of both counts
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stop: list[Annotated[str, Field(min_length=1), NotLong]] = Field(
        default_factory=list, max_length=MAX_STOPS
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    n: int = Field(default=1, ge=1, le=MAX_ANSWERS)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[TokenId, Bias] = Field(default_factory=dict, max_length=MAX_TOKEN_IDS)
    # vLLM's additions from here on.
    top_k: int | None = Field(default=None, ge=-1)  # 0 or -1: no limit
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    min_tokens: int = Field(default=0, ge=0)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list, max_length=MAX_TOKEN_IDS)
    ignore_eos: bool = False  # generate up to the token limit
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    user: str | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_UUID), NotLong] | None = None  # uuids are known within it
    media_io_kwargs: MediaIOKwargs = Field(default_factory=MediaIOKwargs)
    mm_processor_kwargs: ProcessorKwargs = Field(default_factory=ProcessorKwargs)
    previews: bool = False  # for `render`: return the decoded items
    timings: bool = False  # report where the time went

    @field_validator("stop", mode="before")
    @classmethod
    def _accept_one_stop(cls, stop: object) -> object:
        return [stop] if isinstance(stop, str) else stop

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported_fields(cls, data: object) -> object:
        _refuse_unsupported(data, NEUTRAL_VALUES)
        return data

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs needs logprobs to be true.", "top_logprobs")
        limit = self.token_limit()
        if limit is not None and self.min_tokens > limit:
            raise FieldError(f"min_tokens is greater than the token limit of {limit}.", "min_tokens")
        return self

    def token_limit(self) -> int | None:
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)


class TokenizeRequest(WireModel):
    """A bare text. A request to tokenize messages is a ChatRequest."""

    prompt: LongText
    model: _ShortText | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(WireModel):
    tokens: list[int]
    model: _ShortText | None = None


def parse_chat_request(document: object, strings: LongStrings | None = None) -> ChatRequest:
    """Raises InvalidRequest naming the first wrong field: `messages[0].content[2].image_url.url`."""
    _check_size(document)
    return parse_as(ChatRequest, document, strings)


def _check_size(document: object) -> None:
    """Bounds the validation, which takes some microseconds of the event loop for each part."""
    messages = document.get("messages") if isinstance(document, dict) else None
    if not isinstance(messages, list):
        return
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    count = len(messages) + sum(len(content) for content in contents if isinstance(content, list))
    if count > MAX_PARTS:
        raise InvalidRequest(
            f"The request has {count} messages and content parts together; the limit is {MAX_PARTS}.",
            "messages",
        )
