"""Translates a request into a conversation with ordered items, decoding options and sampling parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, overload

from app.intake.long_string import LongString
from app.openai.content import (
    AudioPart,
    ContentPart,
    EmbedsPart,
    ImagePart,
    InlineTensor,
    InputAudioPart,
    RecalledPart,
    Tensor,
    TextPart,
    VideoPart,
)
from app.openai.requests import ChatRequest, MediaIOKwargs, ProcessorKwargs, VideoIO
from deployments.errors import InvalidRequest
from deployments.processor.settings import ProcessorSettings
from deployments.types import Chat, MediaOptions, Modality, ModelSpec, SamplingParams

_SCHEME = re.compile(r"(https?|file):", re.IGNORECASE)
_MAX_DATA_HEADER = 1024  # bytes between "data:" and the comma
_MAX_URL = 16 * 1024
_MAX_TEXT_BYTES = 8 * 2**20  # more than the longest contexts hold


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a request. Its index in `ParsedChat.items` is its identity."""

    param: str  # "messages[0].content[1]"
    modality: Modality | None  # None: embeddings in the place of text
    kind: Literal["url", "data", "embeds", "uuid"]  # "uuid": sent before, recalled by its uuid
    url: str = ""
    header: str = ""  # kind "data": "image/png;base64"
    data: bytes | LongString = b""  # kind "data": what follows the comma, still encoded
    tensors: Mapping[str, bytes | LongString | InlineTensor] = field(default_factory=dict)  # kind "embeds"
    uuid: str | None = None  # the client's own name for it

    @property
    def num_bytes(self) -> int:
        """Bytes of the item in the request, still encoded."""
        tensors = (tensor for tensor in self.tensors.values() if not isinstance(tensor, list))
        return len(self.data) + sum(map(len, tensors))


@dataclass(frozen=True, slots=True)
class ParsedChat:
    chat: Chat
    items: list[Item]  # in the order in which the user wrote them, across messages and modalities
    settings: ProcessorSettings = field(default_factory=dict)  # for the checkpoint's processor
    salt: str = ""  # the cache salt, within which uuids are known


def parse_chat(
    request: ChatRequest,
    limits: Mapping[Modality, int] | None = None,
    disabled: Mapping[str, str] | None = None,
) -> ParsedChat:
    """Separates the items of a request from its texts.

    `limits`: the most items of a modality; a modality that is missing has no limit.
    `disabled`: types of parts that this server refuses -> the setting that enables them.

    Raises InvalidRequest for an item over its limit, for a part that is neither a URL nor a data: URI, and
    for a disabled one.
    """
    items: list[Item] = []
    messages = []
    for i, message in enumerate(request.messages):
        content: str | list[dict[str, str]] = []
        if not isinstance(message.content, list):
            content = to_text(message.content)
        else:
            content = []
            for j, part in enumerate(message.content):
                if isinstance(part, TextPart):
                    content.append({"type": "text", "text": to_text(part.text)})
                else:
                    items.append(_item(part, f"messages[{i}].content[{j}]", disabled or {}))
                    content.append({"type": str(items[-1].modality or "prompt")})
        name = {"name": to_text(message.name)} if message.name else {}
        messages.append({"role": message.role, "content": content, **name})
    _check_counts(items, limits or {})
    settings = request.mm_processor_kwargs.processor_settings()
    chat = Chat(messages, num_text_bytes=_num_text_bytes(messages))
    return ParsedChat(chat, items, settings, request.cache_salt or "")


def _num_text_bytes(messages: Sequence[Mapping[str, object]]) -> int:
    """Counts the UTF-8 bytes of all texts and names."""
    total = 0
    for message in messages:
        contents = [message["content"], message.get("name", "")]
        texts = [content for content in contents if isinstance(content, str)]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        texts += [part["text"] for part in parts if part["type"] == "text"]
        total += sum(len(text.encode()) for text in texts)
    return total


def _check_counts(items: Sequence[Item], limits: Mapping[Modality, int]) -> None:
    for modality, limit in limits.items():
        alike = [item for item in items if item.modality == modality]
        if len(alike) > limit:
            raise InvalidRequest(
                f"The request has {len(alike)} {modality} items; the limit is {limit}. Send fewer.",
                alike[limit].param,
            )


def to_text(text: str | LongString, param: str = "messages") -> str:
    """Joins a text that the intake cut out: unlike media, it will be tokenized as a `str`."""
    if isinstance(text, str):
        return text
    if len(text) > _MAX_TEXT_BYTES:  # joining it would block the event loop
        raise InvalidRequest(
            f"A text has {len(text)} bytes; the limit is {_MAX_TEXT_BYTES}. Send less.", param
        )
    return text.join().decode()


def _item(part: ContentPart, param: str, disabled: Mapping[str, str]) -> Item:
    match part:
        case EmbedsPart():
            item = _embeds_item(part, param, disabled)
        case RecalledPart():
            item = Item(param, Modality(part.modality), "uuid")
        case InputAudioPart(input_audio=audio) if _is_data_uri(audio.data):  # not OpenAI's form, but clear
            item = _url_item(audio.data, param, Modality.AUDIO)
        case InputAudioPart(input_audio=audio):
            header = f"audio/{audio.format};base64"
            item = Item(param, Modality.AUDIO, "data", header=header, data=_encoded(audio.data))
        case ImagePart(image_url=source):
            item = _url_item(source.url, param, Modality.IMAGE)
        case AudioPart(audio_url=source):
            item = _url_item(source.url, param, Modality.AUDIO)
        case VideoPart(video_url=source):
            item = _url_item(source.url, param, Modality.VIDEO)
        case TextPart():
            raise AssertionError("a text is no item")
    return replace(item, uuid=part.uuid)


def _embeds_item(part: EmbedsPart, param: str, disabled: Mapping[str, str]) -> Item:
    kind = f"{part.modality}_embeds"
    if kind in disabled:
        raise InvalidRequest(
            f"{param}: this server does not accept {kind} parts (its setting {disabled[kind]} is off). Send"
            " the image, sound, video or text itself.",
            param,
        )
    tensors = {name: _encoded(tensor) for name, tensor in part.tensors.items()}
    modality = None if part.modality == "prompt" else Modality(part.modality)
    return Item(param, modality, "embeds", tensors=tensors)


def _url_item(url: str | LongString, param: str, modality: Modality) -> Item:
    head = _head(url, _MAX_DATA_HEADER + 6)
    if head[:5].lower() == b"data:":
        header, comma, _ = head[5:].partition(b",")
        if not comma:
            raise InvalidRequest(
                f"{param}: this data: URI has no comma in its first 1024 bytes. Add one.",
                param,
            )
        start = 5 + len(header) + 1
        data = url.tail(start) if isinstance(url, LongString) else url.encode()[start:]
        return Item(param, modality, "data", header=header.decode("latin-1"), data=data)
    if isinstance(url, LongString) or len(url) > _MAX_URL or not _SCHEME.match(url):
        raise InvalidRequest(
            f"{param}: {modality}_url.url must be an http(s) URL or a data: URI"
            f" such as data:{modality}/...;base64,...",
            param,
        )
    return Item(param, modality, "url", url=url)


def _is_data_uri(text: str | LongString) -> bool:
    return _head(text, 5).lower() == b"data:"


def _head(text: str | LongString, num_bytes: int) -> bytes:
    return text.head(num_bytes) if isinstance(text, LongString) else text[:num_bytes].encode()[:num_bytes]


@overload
def _encoded(tensor: str | LongString) -> bytes | LongString: ...
@overload
def _encoded(tensor: Tensor) -> bytes | LongString | InlineTensor: ...
def _encoded(tensor: Tensor) -> bytes | LongString | InlineTensor:
    return tensor.encode() if isinstance(tensor, str) else tensor


def media_options(
    kwargs: MediaIOKwargs, defaults: MediaOptions, processor: ProcessorKwargs | None = None
) -> MediaOptions:
    """Options for decoding media: the request's, and `defaults` for what the request leaves out.

    A requested `fps` replaces a default `num_frames` and the other way round, so that a default never limits
    what the request asks for. Either may come from `mm_processor_kwargs` (`processor`) too.
    """
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
    """Sampling parameters of the request, with the checkpoint's defaults for those that it leaves out.

    `room`: tokens left in the context.


    Raises InvalidRequest for a token id beyond the vocabulary.
    """
    biases = {int(token_id): bias for token_id, bias in request.logit_bias.items()}
    _check_vocabulary(biases, "logit_bias", spec)
    _check_vocabulary(request.stop_token_ids, "stop_token_ids", spec)
    limit = min(request.token_limit() or spec.default_sampling.get("max_tokens") or room, room)
    requested = {name: value for name in _DEFAULTED if (value := getattr(request, name)) is not None}
    shape = {name: value for name, value in spec.default_sampling.items() if name in _DEFAULTED} | requested
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


# Parameters for which a checkpoint may have defaults.
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _check_vocabulary(token_ids: Iterable[int], param: str, spec: ModelSpec) -> None:
    for token_id in token_ids:
        if token_id >= spec.vocab_size:
            raise InvalidRequest(
                f"{param} names token {token_id}; the model has {spec.vocab_size} tokens.", param
            )
