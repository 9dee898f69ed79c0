"""The fan-out: tokenization and every item start at once, features come back in the order of the items."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from app.calls import (
    TEXT,
    Broken,
    Deadline,
    ObjectLost,
    ReplicaDied,
    Timing,
    call,
    gather_or_cancel,
    retry_once,
    stream,
    tell_all,
    without_gaps,
)
from app.intake.long_string import LongString
from app.intake.precedence import Precedence
from app.openai.content import InlineTensor
from app.openai.parse_chat import Item, ParsedChat
from app.watch import Watch
from deployments.errors import (
    ArraysEvicted,
    InvalidMedia,
    InvalidRequest,
    MediaTooLarge,
    PromptTooLong,
    ServingError,
    UnsupportedMedia,
)
from deployments.processor.placeholders import Span, expand
from deployments.processor.settings import ProcessorSettings, check_settings
from deployments.runtime import tracing
from deployments.runtime.hashing import digest
from deployments.runtime.metrics import CALL_BYTES_IN, CALL_BYTES_OUT
from deployments.runtime.payload import INLINE_BYTES
from deployments.types import (
    SECONDS_PER_GRID,
    Affixes,
    Delta,
    EmbeddingSource,
    EmbedsForm,
    InputSpec,
    Media,
    MediaOptions,
    MediaSource,
    MediaUUID,
    MMFeatures,
    MMItem,
    Modality,
    ModelSpec,
    Payload,
    Prompt,
    SamplingParams,
    Text,
    TokenizerSpec,
    embeds_name,
)

# gRPC is the quicker way for a call, but its messages hold 4 MiB and no references to the object store.
_GRPC_BYTES = 2**20

# Images of so many bytes as text may have features that a message holds; see `Pipeline._read`.
_SMALL_IMAGE = 32 * 1024

# What is decoded where it is processed, in bytes of its text. Other work waits for it there.
_READ_AT_ONCE = {Modality.IMAGE: math.inf, Modality.AUDIO: 32 * 1024}

_NAMED = 3  # items that an error message lists
_SAMPLE_BYTES = 16 * 1024

# Of one request: enough to keep many replicas at work, and so few that they neither fill the queues of the
# stages for others nor hold up the event loop while they start.
_ITEMS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Stages:
    """Handles to the stages, and what each said of itself when asked at start."""

    tokenizer: Any
    media: Any
    embeddings: Any
    preprocessor: Any
    model: Any
    text: TokenizerSpec
    inputs: InputSpec
    limits: ModelSpec


@dataclass(frozen=True, slots=True)
class PreparedItem:
    item: Item
    features: MMFeatures
    timings: Mapping[str, Timing]
    num_bytes: int  # as fetched or sent
    media: Media | None = None  # None: the client sent embeddings

    @property
    def mime(self) -> str | None:
        return self.media.mime if self.media else None


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that the model gets."""

    prompt: Prompt
    items: list[PreparedItem]  # in the order of the request
    token_ids: list[int]  # the prompt with each placeholder replaced by its item's tokens
    spans: list[Span]  # per item: where its tokens lie in token_ids
    tokenize: Timing
    ready: float  # ms since the request came

    @property
    def features(self) -> list[MMFeatures]:
        return [prepared.features for prepared in self.items]

    def media_tokens(self) -> dict[Modality, int]:
        counts: dict[Modality, int] = {}
        for features in self.features:
            if features.modality:  # what was embedded in the place of text counts as text
                counts[features.modality] = counts.get(features.modality, 0) + features.num_tokens
        return counts


class _Sum:
    """Over the items of one request; an item that is worked on twice counts once."""

    def __init__(self) -> None:
        self.total = 0
        self._of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._of)

    def count(self, amount: int, param: str) -> int:
        """The new total; not added up anew for each of maybe thousands of items, on the event loop."""
        self.total += amount - self._of.get(param, 0)
        self._of[param] = amount
        return self.total


class _Budget:
    """Bytes that the media of one request may have together, as sent or fetched."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._spent = _Sum()

    def spend(self, num_bytes: int, param: str) -> None:
        """Raises MediaTooLarge that names the item which is too much."""
        if self._spent.count(num_bytes, param) > self._max_bytes:
            raise MediaTooLarge(
                f"The media of this request have more than {self._max_bytes} bytes together. Send fewer or"
                " smaller ones.",
                param,
            )


class _Room:
    """Tokens that the items of one request take of the context; many items need not all be seen to know."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = _Sum()

    def take(self, num_tokens: int, param: str) -> None:
        total = self._taken.count(num_tokens, param)
        if total >= self._limit:
            raise PromptTooLong(
                f"{len(self._taken)} of the items alone have {total} tokens; the model's context holds"
                f" {self._limit}. Send fewer or smaller ones.",
                "messages",
            )


@dataclass(frozen=True, slots=True)
class _Terms:
    """What holds for all items of a request."""

    options: MediaOptions
    settings: ProcessorSettings
    deadline: Deadline
    budget: _Budget
    room: _Room
    salt: str
    died: bool = False  # a replica that decoded the item: one more, and it is the item
    at_once: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_ITEMS_AT_ONCE))

    def name(self, item: Item) -> MediaUUID | None:
        return MediaUUID(self.salt, item.modality, item.uuid) if item.modality and item.uuid else None


class Pipeline:
    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self.watch = Watch(
            {
                "Tokenizer": stages.tokenizer,
                "MediaLoader": stages.media,
                "EmbeddingLoader": stages.embeddings,
                "MMPreprocessor": stages.preprocessor,
                "Model": stages.model,
            }
        )
        self.precedence = Precedence()
        self._small_ones_fit = True  # into a message, with their features, as far as the last one tells
        self.limits = stages.limits
        self.media_options = stages.inputs.options

    async def prepare(
        self, parsed: ParsedChat, options: MediaOptions, deadline: Deadline, max_media_bytes: int
    ) -> Prepared:
        """`max_media_bytes`: of all items together, as sent or fetched.

        Raises the first failure in input order, the items' before the prompt's."""
        self._check_modalities(parsed.items)
        self._check_text(parsed.num_text_bytes)
        self._check_settings(parsed)
        budget = _Budget(max_media_bytes)
        for item in parsed.items:
            budget.spend(item.num_bytes, item.param)
        # What was processed before need not be decoded again.
        options = replace(options, decode_again=not self._stages.inputs.caches)
        terms = _Terms(
            options, parsed.settings, deadline, budget, _Room(self.limits.max_model_len), parsed.salt
        )
        groups = _groups(parsed.items, self._stages.inputs.joint)
        start = deadline.ms()
        pending = (self._prepare_traced(group, terms) for group in groups)
        with nullcontext() if groups else self.precedence.hold_priority():
            # Items start first: they take longer than the prompt.
            results: list[Any] = await gather_or_cancel([*pending, self._encode(parsed, deadline)])
        *done, (prompt, tokenize) = results
        by_param = {prepared.item.param: prepared for group in done for prepared in group}
        items = [_timed_from(start, by_param[item.param]) for item in parsed.items]
        tokenize = without_gaps(start, [tokenize])[0]
        if any(any(prepared.features.affixes) for prepared in items):
            # Texts of the items grow together with those around them: the prompt is encoded with both.
            affixes = [prepared.features.affixes for prepared in items]
            prompt, _ = await self._encode(parsed, deadline, affixes)
        self._check_length(len(prompt.token_ids) + sum(p.features.length - 1 for p in items), items)
        token_ids, spans = expand(prompt, [prepared.features for prepared in items])
        return Prepared(prompt, items, token_ids, spans, tokenize, deadline.ms())

    def generate(
        self, prepared: Prepared, sampling: SamplingParams, key: str, deadline: Deadline
    ) -> AsyncGenerator[Delta]:
        """Closing the iterator ends the generation in the model's stage. `key` is the request's own."""
        num_bytes = 8 * len(prepared.prompt.token_ids)
        num_bytes += sum(features.nbytes for features in prepared.features)
        payloads = [features.payload for features in prepared.features]
        has_references = any(payload and payload.ref is not None for payload in payloads)
        by_reference = has_references or num_bytes > _GRPC_BYTES
        generate = self._stages.model.options(stream=True, _by_reference=by_reference).generate
        modality = "media" if prepared.items else TEXT
        deltas = stream(
            generate,
            prepared.prompt,
            prepared.features,
            sampling,
            key,
            stage="Model",
            deadline=deadline,
            modality=modality,
        )
        return deltas if prepared.items else self.precedence.until_first(deltas)

    async def end(self, key: str, index: int) -> None:
        """Of a request's answers this one gets no more tokens, whichever replica it is in."""
        await tell_all(self._stages.model, "end", key, index)

    async def reset_caches(self) -> None:
        """Nothing that came in before is remembered in any replica."""
        for stage in (self._stages.media, self._stages.preprocessor):
            await stage.broadcast("reset_cache").results_async()

    async def encode_text(self, text: str, add_special_tokens: bool, deadline: Deadline) -> list[int]:
        num_bytes = len(text.encode())
        self._check_text(num_bytes, "prompt")
        encode = self._stages.tokenizer.options(_by_reference=num_bytes > _GRPC_BYTES // 8).encode_text
        prompt, _ = await retry_once(
            lambda: call(encode, text, add_special_tokens, stage="Tokenizer", deadline=deadline),
            on=ReplicaDied,
        )
        token_ids: list[int] = prompt.token_ids
        return token_ids

    async def decode(self, token_ids: list[int], deadline: Deadline) -> Text:
        # The answer has each token's text twice.
        by_reference = len(token_ids) * self._stages.text.max_token_length > _GRPC_BYTES // 2
        decode = self._stages.tokenizer.options(_by_reference=by_reference).decode
        text, _ = await retry_once(
            lambda: call(decode, token_ids, stage="Tokenizer", deadline=deadline), on=ReplicaDied
        )
        return cast(Text, text)

    async def _encode(
        self, parsed: ParsedChat, deadline: Deadline, affixes: list[Affixes] | None = None
    ) -> Any:
        by_reference = parsed.num_text_bytes > _GRPC_BYTES // 8  # the answer has up to an id for each byte
        encode = self._stages.tokenizer.options(_by_reference=by_reference).encode
        return await retry_once(
            lambda: call(encode, parsed.chat, affixes, stage="Tokenizer", deadline=deadline), on=ReplicaDied
        )

    async def _prepare_traced(self, items: list[Item], terms: _Terms) -> list[PreparedItem]:
        param = ", ".join(item.param for item in items)
        with tracing.span("item", param=param, modality=items[0].modality or "prompt"):
            prepared = await self._prepare_group(items, terms)
            tracing.tell(
                num_bytes=sum(each.num_bytes for each in prepared),
                num_tokens=sum(each.features.num_tokens for each in prepared),
            )
            return prepared

    async def _prepare_group(self, items: list[Item], terms: _Terms) -> list[PreparedItem]:
        """One item, or several that are preprocessed in one call; see `InputSpec.joint`."""
        try:
            async with terms.at_once:
                if items[0].kind == "embeds":
                    return [await self._load_embeddings(items[0], terms.deadline)]
                if items[0].kind == "uuid":
                    return [await self._recall(items[0], terms)]
                sources = [await _source(item) for item in items]
                items = [replace(item, data=b"") for item in items]  # they live as long as the answer
                load = partial(self._load_and_process, items, sources)
                if len(items) == 1 and _is_read_at_once(sources[0], terms.options):
                    read = partial(self._read, items[0], sources[0], terms)
                    return await retry_once(read, partial(load, replace(terms, died=True)), on=Broken)
                return await retry_once(partial(load, terms), on=ObjectLost)
        except ServingError as error:
            error.param = error.param or items[0].param
            raise

    async def _read(self, item: Item, source: MediaSource, terms: _Terms) -> list[PreparedItem]:
        """Decoded where it is processed: one hop, and a copy of what was decoded, less."""
        name = terms.name(item)
        is_small = sum(payload.nbytes for payload in source.payloads) <= _SMALL_IMAGE
        by_reference = not (is_small and self._small_ones_fit)
        done, timing = await self._call_read(source, name, terms, by_reference)
        if done.features.payload is None:
            # The work was done in the first call, and is told as that: the second one finds it in a cache.
            again, more = await self._call_read(source, name, terms, by_reference=True)
            done = replace(done, features=replace(done.features, payload=again.features.payload))
            timing = timing.and_then(more)
        if is_small:
            self._small_ones_fit = done.features.nbytes <= INLINE_BYTES
        terms.room.take(done.features.length, item.param)
        _count_bytes("MMPreprocessor", source.modality, done.media.num_bytes, done.features.nbytes)
        loading, processing = timing.split(done.media.service_ms)
        timings = {"MediaLoader": loading, "MMPreprocessor": processing}
        return [PreparedItem(item, done.features, timings, done.media.num_bytes, done.media)]

    async def _call_read(
        self, source: MediaSource, name: MediaUUID | None, terms: _Terms, by_reference: bool
    ) -> tuple[MMItem, Timing]:
        place = _place(name or source.sample)
        stage = self._stages.preprocessor.options(session_id=place, _by_reference=by_reference)
        answer: tuple[MMItem, Timing] = await _call_in_time(
            stage.read,
            source,
            terms.options,
            terms.settings,
            name,
            by_reference,
            stage="MMPreprocessor",
            deadline=terms.deadline,
            modality=source.modality,
        )
        return answer

    async def _load_and_process(
        self, items: list[Item], sources: list[MediaSource], terms: _Terms
    ) -> list[PreparedItem]:
        loaded = await self._load_all(items, sources, terms)
        try:
            batch, processing = await self._process([media for media, _ in loaded], terms)
        except ArraysEvicted:
            terms = replace(terms, options=replace(terms.options, decode_again=True))
            loaded = await self._load_all(items, sources, terms)
            batch, processing = await self._process([media for media, _ in loaded], terms)
        for item, features in zip(items, batch, strict=True):
            terms.room.take(features.length, item.param)
        return [
            PreparedItem(
                item,
                features,
                {"MediaLoader": loading, "MMPreprocessor": processing},
                media.num_bytes,
                replace(media, payload=None),  # the model does not need it
            )
            for item, (media, loading), features in zip(items, loaded, batch, strict=True)
        ]

    async def _load_all(
        self, items: list[Item], sources: list[MediaSource], terms: _Terms
    ) -> list[tuple[Media, Timing]]:
        pairs = zip(items, sources, strict=True)
        return await gather_or_cancel(self._load_one(item, source, terms) for item, source in pairs)

    async def _load_one(self, item: Item, source: MediaSource, terms: _Terms) -> tuple[Media, Timing]:
        try:
            media, loading = await self._load(source, terms)
            if item.kind == "url":
                terms.budget.spend(media.num_bytes, item.param)
            return replace(media, uuid=terms.name(item), param=item.param), loading
        except ServingError as error:
            error.param = error.param or item.param
            raise

    async def _recall(self, item: Item, terms: _Terms) -> PreparedItem:
        name = terms.name(item)
        assert name is not None
        recall = self._stages.preprocessor.options(session_id=_place(name)).recall
        record, timing = await retry_once(
            partial(
                call,
                recall,
                name,
                terms.settings,
                stage="MMPreprocessor",
                deadline=terms.deadline,
                modality=name.modality,
            ),
            on=ReplicaDied,
        )
        return PreparedItem(
            item, record.features, {"MMPreprocessor": timing}, record.media.num_bytes, record.media
        )

    async def _load_embeddings(self, item: Item, deadline: Deadline) -> PreparedItem:
        source = await self._embedding_source(item)
        num_bytes = item.num_bytes
        item = replace(item, tensors={})  # it lives as long as the answer
        load = self._stages.embeddings.load
        modality = item.modality or "prompt"
        features, timing = await retry_once(
            partial(
                _call_in_time, load, source, stage="EmbeddingLoader", deadline=deadline, modality=modality
            ),
            on=ReplicaDied,
        )
        _count_bytes("EmbeddingLoader", modality, num_bytes, features.nbytes)
        return PreparedItem(item, features, {"EmbeddingLoader": timing}, num_bytes)

    async def _load(self, source: MediaSource, terms: _Terms) -> tuple[Media, Timing]:
        stage = self._stages.media.options(session_id=_place(source.url or source.sample))
        attempt = partial(
            _call_in_time,
            stage.load,
            source,
            terms.options,
            stage="MediaLoader",
            deadline=terms.deadline,
            modality=source.modality,
        )
        try:
            media, timing = await (attempt() if terms.died else retry_once(attempt, on=ReplicaDied))
        except ReplicaDied:  # twice: a file that crashes its decoder
            raise InvalidMedia("Decoding this item failed twice. Convert it to another format.") from None
        _count_bytes("MediaLoader", source.modality, media.num_bytes, media.nbytes)
        return media, timing

    async def _process(self, items: list[Media], terms: _Terms) -> tuple[list[MMFeatures], Timing]:
        first, *others = items
        stage = self._stages.preprocessor.options(session_id=_place(first.uuid or first.digest))
        method, media = (stage.process_together, items) if others else (stage.process, first)

        attempt = partial(
            _call_in_time,
            method,
            media,
            terms.settings,
            stage="MMPreprocessor",
            deadline=terms.deadline,
            modality=first.modality,
        )
        record, timing = await retry_once(attempt, on=ReplicaDied)
        batch = record.features if others else [record]
        for each, features in zip(items, batch, strict=True):
            _count_bytes("MMPreprocessor", each.modality, each.nbytes, features.nbytes)
        return batch, timing

    def _check_settings(self, parsed: ParsedChat) -> None:
        inputs = self._stages.inputs
        decoding = ("fps", "num_frames") if Modality.VIDEO in inputs.modalities else ()
        check_settings(parsed.settings, inputs.settings, decoding)

    def _check_modalities(self, items: list[Item]) -> None:
        for item in items:
            if item.kind == "embeds":
                self._form(item)
            elif item.kind == "uuid" and item.modality in self._stages.inputs.joint:
                raise InvalidRequest(
                    f"{item.param}: this model looks at every {item.modality} of a request together; none is"
                    " kept by its uuid. Send it again.",
                    item.param,
                )
            elif item.modality not in self._stages.inputs.modalities:
                takes = ", ".join(self._stages.inputs.modalities) or "text only"
                raise UnsupportedMedia(
                    f"{item.param}: this model takes no {item.modality}; it takes {takes}.", item.param
                )

    def _form(self, item: Item) -> EmbedsForm:
        plain = EmbedsForm(self._stages.text.plain_token_id)
        form = self._stages.inputs.embeds.get(item.modality) if item.modality else plain
        if form is None or self.limits.hidden_size is None:
            name = embeds_name(item.modality)
            raise UnsupportedMedia(f"{item.param}: this model takes no {name}.", item.param)
        return form

    async def _embedding_source(self, item: Item) -> EmbeddingSource:
        """With what the model makes use of; other tensors do not travel."""
        form = self._form(item)
        used = {embeds_name(item.modality), form.grid, *(SECONDS_PER_GRID if form.seconds else ())}
        sent = {name: await _as_sent(tensor) for name, tensor in item.tensors.items() if name in used}
        assert self.limits.hidden_size is not None
        return EmbeddingSource(item.modality, sent, form, self.limits.hidden_size, item.param)

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


def _timed_from(start: float, prepared: PreparedItem) -> PreparedItem:
    timings = without_gaps(start, prepared.timings.values())
    return replace(prepared, timings=dict(zip(prepared.timings, timings, strict=True)))


def _count_bytes(stage: str, modality: str, bytes_in: int, bytes_out: int) -> None:
    CALL_BYTES_IN.add(bytes_in, stage, modality)
    CALL_BYTES_OUT.add(bytes_out, stage, modality)


async def _call_in_time(method: Any, *args: Any, stage: str, deadline: Deadline, modality: str) -> Any:
    """With what is left of the time in seconds as the last argument.

    Not a closure: those keep what they captured as long as the traceback of an error lives.
    """
    return await call(method, *args, deadline.left_s(), stage=stage, deadline=deadline, modality=modality)


def _place(key: MediaUUID | str) -> str:
    """Tells a router what belongs together; see `deployments.runtime.affinity`."""
    return key if isinstance(key, str) else "\0".join(key)


def _is_read_at_once(source: MediaSource, options: MediaOptions) -> bool:
    """Without `MediaLoader`: its work on an image, or on a little sound, is less than its hop."""
    if source.kind != "data" or options.previews:
        return False
    num_bytes = sum(payload.nbytes for payload in source.payloads)
    return num_bytes <= _READ_AT_ONCE.get(source.modality, 0)


def _sample(data: bytes | LongString) -> str:
    """Equal for equal data, in whatever pieces it came, and hardly ever for others, which does no harm."""
    head = data.head(_SAMPLE_BYTES) if isinstance(data, LongString) else data[:_SAMPLE_BYTES]
    return digest(str(len(data)), head)


def _groups(items: list[Item], together: list[Modality]) -> list[list[Item]]:
    """Items that are preprocessed in one call; in the order of their first ones."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        in_one = item.kind != "embeds" and item.modality in together
        groups.setdefault(str(item.modality) if in_one else item.param, []).append(item)
    return list(groups.values())


async def _source(item: Item) -> MediaSource:
    assert item.modality is not None
    if item.kind == "url":
        return MediaSource(item.modality, "url", url=item.url, param=item.param)
    payloads, sample = await _payloads(item.data), _sample(item.data)
    return MediaSource(
        item.modality, "data", header=item.header, payloads=payloads, sample=sample, param=item.param
    )


async def _as_sent(tensor: bytes | LongString | InlineTensor) -> list[Payload] | npt.NDArray[Any]:
    return np.array(tensor) if isinstance(tensor, list) else await _payloads(tensor)


async def _payloads(data: bytes | LongString) -> list[Payload]:
    long = data if isinstance(data, LongString) else LongString((data,))
    return await long.pack()
