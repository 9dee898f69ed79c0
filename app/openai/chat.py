"""Pure translation: a request into a conversation with ordered items, tokens back into OpenAI's answers."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from app.intake.body import LongString
from app.openai.protocol import (
    AudioPart,
    ChatRequest,
    ContentPart,
    EmbedsPart,
    ImagePart,
    InputAudioPart,
    MediaIOKwargs,
    NamedPart,
    Numbers,
    ProcessorKwargs,
    TextPart,
    VideoIO,
    VideoPart,
)
from deployments.errors import InvalidRequest
from deployments.processor.settings import ProcessorSettings
from deployments.types import Chat, MediaOptions, Modality, ModelSpec, SamplingParams

_SCHEME = re.compile(r"(https?|file):", re.IGNORECASE)
_MAX_DATA_HEADER = 1024  # bytes between "data:" and the comma
_MAX_URL = 16 * 1024
_MAX_TEXT = 8 * 2**20  # bytes; more than the longest contexts hold


@dataclass(frozen=True, slots=True)
class Item:
    """One item as the request names it; its place in `ParsedChat.items` is its identity."""

    param: str  # "messages[0].content[1]"
    modality: Modality | None  # None: embeddings in the place of text
    kind: Literal["url", "data", "embeds", "name"]  # "name": sent before, by its uuid
    url: str = ""
    header: str = ""  # kind "data": "image/png;base64"
    data: bytes | LongString = b""  # kind "data": what follows the comma, still encoded
    tensors: Mapping[str, bytes | LongString | Numbers] = field(default_factory=dict)  # kind "embeds": base64
    uuid: str | None = None  # the client's name for it

    @property
    def num_bytes(self) -> int:
        """As sent, still encoded."""
        tensors = (tensor for tensor in self.tensors.values() if not isinstance(tensor, list))
        return len(self.data) + sum(map(len, tensors))


@dataclass(frozen=True, slots=True)
class ParsedChat:
    chat: Chat
    items: list[Item]  # in the order in which the user wrote them, across messages and modalities
    settings: ProcessorSettings = field(default_factory=dict)  # of the checkpoint's processor
    salt: str = ""  # names of items are known within it

    @property
    def num_text_bytes(self) -> int:
        """UTF-8 bytes of all texts and names together."""
        contents: list[Any] = [message["content"] for message in self.chat.messages]
        contents += [message["name"] for message in self.chat.messages if "name" in message]
        texts: list[str] = [content for content in contents if isinstance(content, str)]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        texts += [part["text"] for part in parts if part["type"] == "text"]
        return sum(len(text.encode()) for text in texts)


def parse_chat(
    request: ChatRequest,
    strings: Mapping[str, LongString],
    limits: Mapping[Modality, int] | None = None,
    off: Mapping[str, str] | None = None,
) -> ParsedChat:
    """`limits`: so many items of a modality; none where a modality is not in it.

    `off`: types of parts that are not served -> the setting that would switch them on.

    Raises InvalidRequest for one item too many, for a part that is neither a URL nor a data: URI, and for one
    that is switched off.
    """
    items: list[Item] = []
    messages = []
    for i, message in enumerate(request.messages):
        content: str | list[dict[str, Any]]
        if isinstance(message.content, str):
            content = whole_text(message.content, strings)
        else:
            content = []
            for j, part in enumerate(message.content):
                if isinstance(part, TextPart):
                    content.append({"type": "text", "text": whole_text(part.text, strings)})
                else:
                    items.append(_item(part, f"messages[{i}].content[{j}]", strings, off or {}))
                    content.append({"type": str(items[-1].modality or "prompt")})
        named = {"name": whole_text(message.name, strings)} if message.name else {}
        messages.append({"role": message.role, "content": content, **named})
    _check_counts(items, limits or {})
    return ParsedChat(
        Chat(messages), items, request.mm_processor_kwargs.of_processor(), request.cache_salt or ""
    )


def check_short(request: ChatRequest, strings: Mapping[str, LongString]) -> None:
    """Raises InvalidRequest for a long string that the intake moved out where only short ones make sense."""
    if request.model in strings:
        raise InvalidRequest("model is too long.", "model")
    if request.cache_salt in strings:
        raise InvalidRequest("cache_salt is too long.", "cache_salt")
    if any(stop in strings for stop in request.stop):
        raise InvalidRequest("stop is too long.", "stop")


def _check_counts(items: Sequence[Item], limits: Mapping[Modality, int]) -> None:
    for modality, limit in limits.items():
        alike = [item for item in items if item.modality == modality]
        if len(alike) > limit:
            raise InvalidRequest(
                f"The request has {len(alike)} {modality} items; the limit is {limit}. Send fewer.",
                alike[limit].param,
            )


def whole_text(text: str, strings: Mapping[str, LongString], param: str = "messages") -> str:
    """A text that the intake moved out of line is text again: it will be tokenized, not decoded."""
    moved = strings.get(text)
    if moved is None:
        return text
    if len(moved) > _MAX_TEXT:  # joining it would hold up the event loop
        raise InvalidRequest(f"A text has {len(moved)} bytes; the limit is {_MAX_TEXT}.", param)
    return moved.join().decode()


def _item(part: ContentPart, param: str, strings: Mapping[str, LongString], off: Mapping[str, str]) -> Item:
    assert not isinstance(part, TextPart)
    if part.uuid in strings:
        raise InvalidRequest(f"{param}: uuid is too long.", param)
    if isinstance(part, EmbedsPart):
        item = _embeds(part, param, strings, off)
    elif isinstance(part, NamedPart):
        item = Item(param, Modality(part.modality), "name")
    else:
        item = _media(part, param, strings)
    return replace(item, uuid=part.uuid)


def _embeds(part: EmbedsPart, param: str, strings: Mapping[str, LongString], off: Mapping[str, str]) -> Item:
    kind = f"{part.modality}_embeds"
    if kind in off:
        raise InvalidRequest(
            f"{param}: {kind} parts are switched off on this server (its setting {off[kind]}); send what they"
            " were made of.",
            param,
        )
    tensors = {
        name: value if isinstance(value, list) else strings.get(value) or value.encode()
        for name, value in part.tensors.items()
    }
    modality = None if part.modality == "prompt" else Modality(part.modality)
    return Item(param, modality, "embeds", tensors=tensors)


def _media(part: ContentPart, param: str, strings: Mapping[str, LongString]) -> Item:
    match part:
        case InputAudioPart(input_audio=audio) if _is_data_uri(audio.data, strings):
            return _from_url(audio.data, param, Modality.AUDIO, strings)  # a common mistake, and clear
        case InputAudioPart(input_audio=audio):
            data = strings.get(audio.data) or audio.data.encode()
            return Item(param, Modality.AUDIO, "data", header=f"audio/{audio.format};base64", data=data)
        case ImagePart(image_url=source):
            modality = Modality.IMAGE
        case AudioPart(audio_url=source):
            modality = Modality.AUDIO
        case VideoPart(video_url=source):
            modality = Modality.VIDEO
        case _:
            raise AssertionError(part)
    return _from_url(source.url, param, modality, strings)


def _is_data_uri(text: str, strings: Mapping[str, LongString]) -> bool:
    long = strings.get(text)
    return (long.head(5) if long else text[:5].encode()).lower() == b"data:"


def _from_url(url: str, param: str, modality: Modality, strings: Mapping[str, LongString]) -> Item:
    long = strings.get(url)
    head = (bytes(long.head(_MAX_DATA_HEADER + 6)) if long else url.encode())[: _MAX_DATA_HEADER + 6]
    if head[:5].lower() == b"data:":
        header, comma, _ = head[5:].partition(b",")
        if not comma:
            raise InvalidRequest(
                f"{param}: this data: URI has no comma within 1 KiB of its beginning.", param
            )
        start = 5 + len(header) + 1
        data = long.tail(start) if long else url.encode()[start:]
        return Item(param, modality, "data", header=header.decode("latin-1"), data=data)
    if long or len(url) > _MAX_URL or not _SCHEME.match(url):
        raise InvalidRequest(
            f"{param}: {modality}_url.url must be an http(s) URL or a data: URI"
            f" such as data:{modality}/...;base64,...",
            param,
        )
    return Item(param, modality, "url", url=url)


def media_options(
    kwargs: MediaIOKwargs, defaults: MediaOptions, processor: ProcessorKwargs | None = None
) -> MediaOptions:
    """`defaults`: as the model's processor wants. An `fps` takes the place of a default `num_frames` and the
    other way round, so that a default never bounds what was asked for. `processor` may say both as well."""
    image, video = kwargs.image, kwargs.video
    options = defaults
    if video.max_duration is not None:
        options = replace(options, max_duration=video.max_duration)
    if image.rgba_background_color:
        red, green, blue = image.rgba_background_color
        options = replace(options, background=(red, green, blue))
    frames: VideoIO | ProcessorKwargs = video
    if processor and video.num_frames is None and video.fps is None:
        frames = processor
    if frames.num_frames is not None or frames.fps is not None:
        num_frames = frames.num_frames if frames.num_frames != -1 else None
        options = replace(options, num_frames=num_frames, fps=frames.fps if frames.fps != -1 else None)
    return options


def sampling_params(request: ChatRequest, room: int, spec: ModelSpec) -> SamplingParams:
    """`room`: tokens left in the context. Where the request is silent the checkpoint's defaults hold.

    Raises InvalidRequest for a token that the model does not have.
    """
    biases = {int(token_id): bias for token_id, bias in request.logit_bias.items()}
    _check_vocabulary(biases, "logit_bias", spec)
    _check_vocabulary(request.stop_token_ids, "stop_token_ids", spec)
    limit = min(request.token_limit() or spec.default_sampling.get("max_tokens") or room, room)
    told = {name: value for name in _DEFAULTED if (value := getattr(request, name)) is not None}
    shape = {name: value for name, value in spec.default_sampling.items() if name in _DEFAULTED} | told
    return SamplingParams(
        limit,
        **shape | {"top_k": max(0, shape.get("top_k", 0))},
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=biases,
        seed=request.seed,
        min_tokens=min(request.min_tokens, limit),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        n=request.n,
    )


# What a checkpoint may have an opinion on.
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _check_vocabulary(token_ids: Iterable[int], param: str, spec: ModelSpec) -> None:
    for token_id in token_ids:
        if token_id >= spec.vocab_size:
            raise InvalidRequest(
                f"{param} names token {token_id}; the model has {spec.vocab_size} tokens.", param
            )


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    media_tokens: dict[Modality, int]
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt

    def to_json(self) -> dict[str, Any]:
        media = {f"{modality}_tokens": self.media_tokens.get(modality, 0) for modality in Modality}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {
                "text_tokens": self.prompt_tokens - sum(media.values()),
                **media,
                "cached_tokens": self.cached_tokens,
            },
        }


Logprobs = Sequence[dict[str, Any]] | None  # OpenAI's entries, one for each token; None: not asked for


@dataclass(slots=True)
class ChatWriter:
    """One answer in OpenAI's format, whole or in chunks, under one id."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, choices: Sequence[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return self._object("chat.completion", choices) | {"usage": usage.to_json()}

    def choice(self, index: int, text: str, finish_reason: str, logprobs: Logprobs) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._choice(index, {"message": message}, finish_reason, logprobs)

    def chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Logprobs = None
    ) -> dict[str, Any]:
        choice = self._choice(index, {"delta": delta}, finish_reason, logprobs)
        return self._object("chat.completion.chunk", [choice])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._object("chat.completion.chunk", []) | {"usage": usage.to_json()}

    def _choice(
        self, index: int, content: dict[str, Any], finish_reason: str | None, logprobs: Logprobs
    ) -> dict[str, Any]:
        told = None if logprobs is None else {"content": logprobs, "refusal": None}
        return {"index": index, **content, "logprobs": told, "finish_reason": finish_reason}

    def _object(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
