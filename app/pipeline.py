"""The fan-out: tokenization and every item start at once, features come back in the order of the items."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from app.calls import Deadline, InputLost, ReplicaDied, Timing, call, gather_all, once_more, stream
from app.chat import Item, ParsedChat
from app.intake import LongString
from deployments.errors import InvalidMedia, MediaTooLarge, PromptTooLong, ServingError, UnsupportedMedia
from deployments.multimodal.placeholders import Span, expand
from deployments.types import (
    Delta,
    InputSpec,
    Media,
    MediaOptions,
    MediaSource,
    MMFeatures,
    Modality,
    ModelSpec,
    Payload,
    Prompt,
    SamplingParams,
    Text,
    TokenizerSpec,
)

# gRPC is the quicker way for a call, but its messages hold 4 MiB and no references to the object store.
_GRPC_BYTES = 2**20

_NAMED = 3  # items that an error message lists

# Of one request: enough to keep many replicas at work, and so few that they neither fill the queues of the
# stages for others nor hold up the event loop while they start.
_ITEMS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Stages:
    """Handles to the stages, and what each said of itself when asked at start."""

    tokenizer: Any
    media: Any
    preprocessor: Any
    model: Any
    text: TokenizerSpec
    inputs: InputSpec
    limits: ModelSpec


@dataclass(frozen=True, slots=True)
class PreparedItem:
    item: Item
    media: Media
    features: MMFeatures
    timings: Mapping[str, Timing]


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that the model gets."""

    prompt: Prompt
    items: list[PreparedItem]  # in the order of the request
    token_ids: list[int]  # the prompt with each placeholder replaced by its item's tokens
    spans: list[Span]  # per item: where its tokens lie in token_ids
    tokenize: Timing

    @property
    def features(self) -> list[MMFeatures]:
        return [prepared.features for prepared in self.items]

    def media_tokens(self) -> dict[Modality, int]:
        counts: dict[Modality, int] = {}
        for features in self.features:
            counts[features.modality] = counts.get(features.modality, 0) + features.num_tokens
        return counts


class _Budget:
    """Bytes that the media of one request may have together, as sent or fetched."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._spent: dict[str, int] = {}  # by item, which may be loaded twice

    def spend(self, num_bytes: int, param: str) -> None:
        """Raises MediaTooLarge that names the item which is too much."""
        self._spent[param] = num_bytes
        if sum(self._spent.values()) > self._max_bytes:
            raise MediaTooLarge(
                f"The media of this request have more than {self._max_bytes} bytes together. Send fewer or"
                " smaller ones.",
                param,
            )


class Pipeline:
    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self.limits = stages.limits
        self.media_options = stages.inputs.options

    async def prepare(
        self, parsed: ParsedChat, options: MediaOptions, deadline: Deadline, max_media_bytes: int
    ) -> Prepared:
        """`max_media_bytes`: of all items together, as sent or fetched.

        Raises the first failure in input order: the prompt's, then the items'."""
        self._check_modalities(parsed.items)
        self._check_text(parsed.num_text_bytes)
        budget = _Budget(max_media_bytes)
        for item in parsed.items:
            budget.spend(item.num_bytes, item.param)
        at_once = asyncio.Semaphore(_ITEMS_AT_ONCE)

        async def prepare_item(item: Item) -> Any:
            async with at_once:
                return await self._prepare_item(item, options, deadline, budget)

        pending = map(prepare_item, parsed.items)
        results = await gather_all([self._encode(parsed, deadline), *pending])
        (prompt, tokenize), items = results[0], results[1:]
        token_ids, spans = expand(prompt, [prepared.features for prepared in items])
        self._check_length(len(token_ids), items)
        return Prepared(prompt, items, token_ids, spans, tokenize)

    def generate(
        self, prepared: Prepared, sampling: SamplingParams, deadline: Deadline
    ) -> AsyncGenerator[Delta]:
        """Closing the iterator ends the generation in the model's stage."""
        num_bytes = 8 * len(prepared.prompt.token_ids)
        num_bytes += sum(features.payload.nbytes for features in prepared.features)
        has_references = any(features.payload.ref is not None for features in prepared.features)
        by_reference = has_references or num_bytes > _GRPC_BYTES
        generate = self._stages.model.options(stream=True, _by_reference=by_reference).generate
        return stream(
            generate, prepared.prompt, prepared.features, sampling, stage="Model", deadline=deadline
        )

    async def encode_text(self, text: str, add_special_tokens: bool, deadline: Deadline) -> list[int]:
        num_bytes = len(text.encode())
        self._check_text(num_bytes, "prompt")
        encode = self._stages.tokenizer.options(_by_reference=num_bytes > _GRPC_BYTES // 8).encode_text
        prompt, _ = await once_more(
            lambda: call(encode, text, add_special_tokens, stage="Tokenizer", deadline=deadline),
            on=ReplicaDied,
        )
        token_ids: list[int] = prompt.token_ids
        return token_ids

    async def decode(self, token_ids: list[int], deadline: Deadline) -> Text:
        by_reference = len(token_ids) > _GRPC_BYTES // 32  # an id may be a long text
        decode = self._stages.tokenizer.options(_by_reference=by_reference).decode
        text, _ = await once_more(
            lambda: call(decode, token_ids, stage="Tokenizer", deadline=deadline), on=ReplicaDied
        )
        return cast(Text, text)

    async def _encode(self, parsed: ParsedChat, deadline: Deadline) -> Any:
        by_reference = parsed.num_text_bytes > _GRPC_BYTES // 8  # the answer has up to an id for each byte
        encode = self._stages.tokenizer.options(_by_reference=by_reference).encode
        return await once_more(
            lambda: call(encode, parsed.chat, stage="Tokenizer", deadline=deadline), on=ReplicaDied
        )

    async def _prepare_item(
        self, item: Item, options: MediaOptions, deadline: Deadline, budget: _Budget
    ) -> Any:
        """Load, then preprocess; a lost array means both once more."""
        source = await _source(item)

        async def load_and_process() -> PreparedItem:
            media, load = await self._load(source, options, deadline)
            if item.kind == "url":
                budget.spend(media.num_bytes, item.param)
            features, process = await self._process(media, deadline)
            # What the model does not need is let go of.
            kept = replace(item, data=b""), replace(media, payload=Payload(0)), features
            return PreparedItem(*kept, {"load": load, "preprocess": process})

        try:
            return await once_more(load_and_process, on=InputLost)
        except ServingError as error:
            error.param = error.param or item.param
            raise

    async def _load(self, source: MediaSource, options: MediaOptions, deadline: Deadline) -> Any:
        load = self._stages.media.load
        try:
            return await once_more(
                lambda: call(
                    load, source, options, deadline.left_s(), stage="MediaLoader", deadline=deadline
                ),
                on=ReplicaDied,
            )
        except ReplicaDied:  # twice: a file that crashes its decoder
            raise InvalidMedia("Decoding this item failed twice. Convert it to another format.") from None

    async def _process(self, media: Media, deadline: Deadline) -> Any:
        process = self._stages.preprocessor.process
        return await once_more(
            lambda: call(process, media, deadline.left_s(), stage="MMPreprocessor", deadline=deadline),
            on=ReplicaDied,
        )

    def _check_modalities(self, items: list[Item]) -> None:
        for item in items:
            if item.modality not in self._stages.inputs.modalities:
                takes = ", ".join(self._stages.inputs.modalities) or "text only"
                raise UnsupportedMedia(
                    f"{item.param}: this model takes no {item.modality}; it takes {takes}.", item.param
                )

    def _check_text(self, num_bytes: int, param: str = "messages") -> None:
        """What can not fit is not encoded first: it would hold up everybody's prompts."""
        limit = self.limits.max_model_len
        most = limit * self._stages.text.max_token_length
        if num_bytes > most:
            raise PromptTooLong(
                f"The text has {num_bytes} bytes; the model's context of {limit} tokens holds at most {most}."
                " Send less.",
                param,
            )

    def _check_length(self, num_tokens: int, items: list[PreparedItem]) -> None:
        limit = self.limits.max_model_len
        if num_tokens >= limit:
            largest = sorted(items, key=lambda p: -p.features.num_tokens)[:_NAMED]
            named = "".join(f", {p.item.param} has {p.features.num_tokens} of them" for p in largest)
            raise PromptTooLong(
                f"The prompt has {num_tokens} tokens{named}; the model's context of {limit} leaves no room"
                " for an answer. Send less.",
                "messages",
            )


async def _source(item: Item) -> MediaSource:
    if item.kind == "url":
        return MediaSource(item.modality, "url", url=item.url)
    return MediaSource(item.modality, "data", header=item.header, payloads=await _payloads(item.data))


async def _payloads(data: bytes | LongString) -> list[Payload]:
    long = data if isinstance(data, LongString) else LongString((data,))
    return await long.pack()
