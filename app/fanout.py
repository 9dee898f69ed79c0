"""The fan-out: the prompt and every item start at once, and the results come back in the order of the items.

Plain asyncio over the Protocols of `app.stages`. PREPARE has one function for each kind of item.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from app.intake.long_string import LongString
from app.intake.precedence import Precedence
from app.openai.content import InlineTensor
from app.openai.parse_chat import Item, ParsedChat
from app.stages import CallContext, Deadline, Stages, Timed, Timing, without_gaps
from deployments.errors import (
    ArraysEvicted,
    InvalidRequest,
    MediaTooLarge,
    ObjectLost,
    PromptTooLong,
    ReplicaDied,
    UnsupportedMedia,
)
from deployments.processor.placeholders import Span, expand
from deployments.processor.settings import ProcessorSettings, check_settings
from deployments.runtime import tracing
from deployments.runtime.hashing import digest
from deployments.types import (
    SECONDS_PER_GRID,
    Affixes,
    Delta,
    EmbeddingSource,
    EmbedsForm,
    Media,
    MediaOptions,
    MediaSource,
    MediaUUID,
    MMFeatures,
    Modality,
    Payload,
    Prompt,
    SamplingParams,
    Text,
    embeds_name,
)

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")

# Items up to this size, in bytes of their text, are decoded by MMPreprocessor: decoding them there costs less
# than a call to MediaLoader. Larger sounds, and all videos, would hold up the items that wait for the
# preprocessor.
_READ_BYTES = {Modality.IMAGE: math.inf, Modality.AUDIO: 32 * 1024}

# Items of one request in flight: enough to keep many replicas busy, and few enough not to fill their queues
# or to hold up the event loop while the calls start.
_ITEMS_IN_FLIGHT = 32

_NAMED_ITEMS = 3  # items that an error message lists
_SAMPLE_BYTES = 16 * 1024  # of an item's data, for its affinity key


@dataclass(frozen=True, slots=True)
class PreparedItem:
    item: Item
    features: MMFeatures
    timings: Mapping[str, Timing]  # by stage, in the order of the calls
    num_bytes: int  # encoded size as fetched or sent
    media: Media | None = None  # None: the client sent embeddings

    @property
    def mime(self) -> str | None:
        return self.media.mime if self.media else None


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that the model gets for one request."""

    prompt: Prompt
    items: list[PreparedItem]  # in the order of the request
    token_ids: list[int]  # the prompt, with each placeholder replaced by its item's tokens
    spans: list[Span]  # for each item: the place of its tokens in token_ids
    tokenize: Timing
    ready: float  # ms since the request came

    @property
    def features(self) -> list[MMFeatures]:
        return [prepared.features for prepared in self.items]

    def media_tokens(self) -> dict[Modality, int]:
        """Counts the tokens of each modality. Prompt embeddings count as text, so they are left out."""
        counts: dict[Modality, int] = {}
        for features in self.features:
            if features.modality:
                counts[features.modality] = counts.get(features.modality, 0) + features.num_tokens
        return counts


class _Totals:
    """A sum over the items of a request, in which an item that is prepared twice counts once."""

    def __init__(self) -> None:
        self.total = 0
        self._amounts: dict[str, int] = {}  # by param

    def __len__(self) -> int:
        return len(self._amounts)

    def set(self, param: str, amount: int) -> int:
        """Sets one item's amount and returns the new total, without adding all items up again."""
        self.total += amount - self._amounts.get(param, 0)
        self._amounts[param] = amount
        return self.total


@dataclass(frozen=True, slots=True)
class _Request:
    """The settings of one request that hold for all its items, and the budgets that they share."""

    options: MediaOptions
    settings: ProcessorSettings
    deadline: Deadline
    salt: str
    max_media_bytes: int
    max_tokens: int
    media_bytes: _Totals = field(default_factory=_Totals)
    tokens: _Totals = field(default_factory=_Totals)
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_ITEMS_IN_FLIGHT))

    def context(self, item: Item, affinity: str = "", attempt: int = 1) -> CallContext:
        return CallContext(self.deadline, item.param, item.modality or "prompt", affinity, attempt)

    def uuid(self, item: Item) -> MediaUUID | None:
        return MediaUUID(self.salt, item.modality, item.uuid) if item.modality and item.uuid else None

    def spend_bytes(self, item: Item, num_bytes: int) -> None:
        if self.media_bytes.set(item.param, num_bytes) > self.max_media_bytes:
            raise MediaTooLarge(
                f"The media of this request are larger than {self.max_media_bytes} bytes in total. Send fewer"
                " or smaller items.",
                item.param,
            )

    def spend_tokens(self, item: Item, num_tokens: int) -> None:
        """Fails as soon as some of the items exceed the context, without waiting for the others."""
        total = self.tokens.set(item.param, num_tokens)
        if total >= self.max_tokens:
            raise PromptTooLong(
                f"{len(self.tokens)} of the items alone have {total} tokens, and the model's context holds"
                f" {self.max_tokens}. Send fewer or smaller items.",
                "messages",
            )


class FanOut:
    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self.precedence = Precedence()
        self.limits = stages.model_spec
        self.media_options = stages.input_spec.options

    async def prepare(
        self, parsed: ParsedChat, options: MediaOptions, deadline: Deadline, max_media_bytes: int
    ) -> Prepared:
        """Prepares the prompt and all items. `max_media_bytes`: of all items together, as sent or fetched.

        Raises the first failure in input order, the items' before the prompt's.
        """
        self._check(parsed)
        # An item that was processed before need not be decoded again.
        options = replace(options, decode_again=not self._stages.input_spec.caches)
        request = _Request(
            options, parsed.settings, deadline, parsed.salt, max_media_bytes, self.limits.max_model_len
        )
        for item in parsed.items:
            request.spend_bytes(item, item.num_bytes)
        start = deadline.ms()
        with nullcontext() if parsed.items else self.precedence.hold_priority():
            # The items start first: they take longer than the prompt.
            items, encoded = await _gather_two(
                self._prepare_items(parsed.items, request), self._encode(parsed, deadline)
            )
        prompt = encoded.value
        affixes = [prepared.features.affixes for prepared in items]
        if any(map(any, affixes)):  # they may merge with the text around them, so it is encoded again
            prompt = (await self._encode(parsed, deadline, affixes)).value
        self._check_length(len(prompt.token_ids) + sum(p.features.length - 1 for p in items), items)
        token_ids, spans = expand(prompt, [prepared.features for prepared in items])
        return Prepared(
            prompt,
            [_without_gaps(start, prepared) for prepared in items],
            token_ids,
            spans,
            without_gaps(start, [encoded.timing])[0],
            deadline.ms(),
        )

    def generate(
        self, prepared: Prepared, sampling: SamplingParams, key: str, deadline: Deadline
    ) -> AsyncGenerator[Delta]:
        """Yields the model's deltas. Closing the generator ends the generation. `key` names the request."""
        context = CallContext(deadline, modality="media" if prepared.items else "text")
        deltas = self._stages.model.generate(prepared.prompt, prepared.features, sampling, key, context)
        return deltas if prepared.items else self.precedence.until_first(deltas)

    async def end(self, key: str, index: int) -> None:
        """Ends one of a request's answers."""
        await self._stages.model.end(key, index)

    async def reset_caches(self) -> None:
        """Makes all replicas forget all media."""
        await self._stages.media_loader.reset_cache()
        await self._stages.mm_preprocessor.reset_cache()

    async def encode_text(self, text: str, add_special_tokens: bool, deadline: Deadline) -> list[int]:
        self._check_text(len(text.encode()), "prompt")
        encoded = await self._stages.tokenizer.encode_text(text, add_special_tokens, CallContext(deadline))
        return encoded.value.token_ids

    async def decode(self, token_ids: list[int], deadline: Deadline) -> Text:
        return (await self._stages.tokenizer.decode(token_ids, CallContext(deadline))).value

    async def _encode(
        self, parsed: ParsedChat, deadline: Deadline, affixes: Sequence[Affixes] = ()
    ) -> Timed[Prompt]:
        return await self._stages.tokenizer.encode(parsed.chat, affixes, CallContext(deadline))

    async def _prepare_items(self, items: list[Item], request: _Request) -> list[PreparedItem]:
        """Prepares all items at once. Items of a joint modality, see `InputSpec.joint`, go together."""
        groups = self._groups(items)
        done = await gather_or_cancel(
            self._prepare_group([items[index] for index in group], request) for group in groups
        )
        by_index = {
            index: prepared
            for group, group_done in zip(groups, done, strict=True)
            for index, prepared in zip(group, group_done, strict=True)
        }
        return [by_index[index] for index in range(len(items))]

    def _groups(self, items: list[Item]) -> list[list[int]]:
        """Returns the indices of the items that are processed in one call, ordered by their first ones."""
        groups: dict[object, list[int]] = {}
        for index, item in enumerate(items):
            is_joint = item.kind != "embeds" and item.modality in self._stages.input_spec.joint
            groups.setdefault(item.modality if is_joint else index, []).append(index)
        return list(groups.values())

    async def _prepare_group(self, items: list[Item], request: _Request) -> list[PreparedItem]:
        params = ", ".join(item.param for item in items)
        with tracing.span("item", param=params, modality=items[0].modality or "prompt"):
            async with request.slots:
                if len(items) == 1:
                    prepared = [await PREPARE[items[0].kind](self, items[0], request)]
                else:
                    prepared = await self._load_and_process(items, request)
            tracing.set_attributes(
                num_bytes=sum(each.num_bytes for each in prepared),
                num_tokens=sum(each.features.num_tokens for each in prepared),
            )
            return prepared

    async def _prepare_data(self, item: Item, request: _Request) -> PreparedItem:
        """Prepares an item whose data came with the request: in one call, if it is small enough."""
        assert item.modality is not None
        if request.options.previews or len(item.data) > _READ_BYTES.get(item.modality, 0):
            return await self._prepare_media(item, request)
        source = await _source(item)
        uuid = request.uuid(item)
        context = request.context(item, _affinity(uuid) or source.sample)
        try:
            done = await self._stages.mm_preprocessor.read(
                source, request.options, request.settings, uuid, context
            )
        except ObjectLost:
            return (await self._load_and_process([item], request))[0]
        except ReplicaDied:
            # The item may be the reason. Another crash costs less in MediaLoader: it starts quickly.
            return (await self._load_and_process([item], request, attempt=2))[0]
        media, features = done.value.media, done.value.features
        request.spend_tokens(item, features.length)
        timings = {"MMPreprocessor": done.timing}
        return PreparedItem(_without_data(item), features, timings, media.num_bytes, media)

    async def _prepare_media(self, item: Item, request: _Request) -> PreparedItem:
        """Prepares an item that MediaLoader loads."""
        return (await self._load_and_process([item], request))[0]

    async def _prepare_embeds(self, item: Item, request: _Request) -> PreparedItem:
        source = await self._embedding_source(item)
        loaded = await self._stages.embedding_loader.load(source, request.context(item))
        timings = {"EmbeddingLoader": loaded.timing}
        return PreparedItem(_without_data(item), loaded.value, timings, item.num_bytes)

    async def _prepare_recalled(self, item: Item, request: _Request) -> PreparedItem:
        uuid = request.uuid(item)
        assert uuid is not None
        context = request.context(item, _affinity(uuid))
        recalled = await self._stages.mm_preprocessor.recall(uuid, request.settings, context)
        media, timings = recalled.value.media, {"MMPreprocessor": recalled.timing}
        return PreparedItem(item, recalled.value.features, timings, media.num_bytes, media)

    async def _load_and_process(
        self, items: list[Item], request: _Request, attempt: int = 1
    ) -> list[PreparedItem]:
        """Loads the items, then processes them in one call.

        Does both again if the decoded arrays are not available for processing, once for each reason.
        """
        reasons: set[type[Exception]] = set()
        while True:
            try:
                return await self._load_and_process_once(items, request, attempt)
            except (ArraysEvicted, ObjectLost) as error:
                if type(error) in reasons:
                    raise
                reasons.add(type(error))
                request = replace(request, options=replace(request.options, decode_again=True))

    async def _load_and_process_once(
        self, items: list[Item], request: _Request, attempt: int
    ) -> list[PreparedItem]:
        loaded = await gather_or_cancel(self._load(item, request, attempt) for item in items)
        medias = [each.value for each in loaded]
        affinity = _affinity(medias[0].uuid) or medias[0].digest
        context = request.context(items[0], affinity, attempt)
        processed = await self._stages.mm_preprocessor.process(medias, request.settings, context)
        prepared = []
        for item, each, features in zip(items, loaded, processed.value, strict=True):
            request.spend_tokens(item, features.length)
            timings = {"MediaLoader": each.timing, "MMPreprocessor": processed.timing}
            media = replace(each.value, payload=None)  # the model does not need the decoded arrays
            prepared.append(PreparedItem(_without_data(item), features, timings, media.num_bytes, media))
        return prepared

    async def _load(self, item: Item, request: _Request, attempt: int) -> Timed[Media]:
        source = await _source(item)
        context = request.context(item, source.url or source.sample, attempt)
        loaded = await self._stages.media_loader.load(source, request.options, context)
        if item.kind == "url":
            request.spend_bytes(item, loaded.value.num_bytes)
        return replace(loaded, value=replace(loaded.value, uuid=request.uuid(item)))

    def _check(self, parsed: ParsedChat) -> None:
        """Refuses what can be refused before any work is done."""
        for item in parsed.items:
            self._check_modality(item)
        self._check_text(parsed.chat.num_text_bytes)
        spec = self._stages.input_spec
        decoding = ("fps", "num_frames") if Modality.VIDEO in spec.modalities else ()
        check_settings(parsed.settings, spec.settings, decoding)

    def _check_modality(self, item: Item) -> None:
        spec = self._stages.input_spec
        if item.kind == "embeds":
            self._embeds_form(item)
        elif item.kind == "uuid" and item.modality in spec.joint:
            raise InvalidRequest(
                f"{item.param}: this model processes all {item.modality} items of a request together, so none"
                " can be recalled by its uuid. Send it again.",
                item.param,
            )
        elif item.modality not in spec.modalities:
            accepted = ", ".join(spec.modalities) or "text only"
            raise UnsupportedMedia(
                f"{item.param}: this model does not accept {item.modality}; it accepts {accepted}.",
                item.param,
            )

    def _embeds_form(self, item: Item) -> EmbedsForm:
        plain = EmbedsForm(self._stages.tokenizer_spec.plain_token_id)
        form = self._stages.input_spec.embeds.get(item.modality) if item.modality else plain
        if form is None or self.limits.hidden_size is None:
            raise UnsupportedMedia(
                f"{item.param}: this model does not accept {embeds_name(item.modality)}. Send the media.",
                item.param,
            )
        return form

    async def _embedding_source(self, item: Item) -> EmbeddingSource:
        """Leaves out tensors that the model does not use."""
        form = self._embeds_form(item)
        used = {embeds_name(item.modality), form.grid, *(SECONDS_PER_GRID if form.seconds else ())}
        sent = {name: await _as_sent(tensor) for name, tensor in item.tensors.items() if name in used}
        assert self.limits.hidden_size is not None
        return EmbeddingSource(item.modality, sent, form, self.limits.hidden_size)

    def _check_text(self, num_bytes: int, param: str = "messages") -> None:
        """Refuses a text that cannot fit, since encoding it would hold up other prompts."""
        limit = self.limits.max_model_len
        most = limit * self._stages.tokenizer_spec.max_token_length
        if num_bytes > most:
            raise PromptTooLong(
                f"The text has {num_bytes} bytes, and the model's context of {limit} tokens holds at most"
                f" {most}. Send less.",
                param,
            )

    def _check_length(self, num_tokens: int, items: list[PreparedItem]) -> None:
        limit = self.limits.max_model_len
        if num_tokens >= limit:
            largest = sorted(items, key=lambda p: -p.features.num_tokens)[:_NAMED_ITEMS]
            named = "".join(f", {p.item.param} has {p.features.num_tokens} of them" for p in largest)
            raise PromptTooLong(
                f"The prompt has {num_tokens} tokens{named}; the model's context of {limit} leaves no room"
                " for an answer. Send less.",
                "messages",
            )


PREPARE: dict[str, Callable[[FanOut, Item, _Request], Awaitable[PreparedItem]]] = {
    "url": FanOut._prepare_media,
    "data": FanOut._prepare_data,
    "embeds": FanOut._prepare_embeds,
    "uuid": FanOut._prepare_recalled,
}


async def gather_or_cancel(coroutines: Iterable[Awaitable[T]]) -> list[T]:
    """Returns the results in order, like `asyncio.gather`, but leaves nothing running.

    If one fails, the others are cancelled and awaited. Raises the earliest real failure in the order of the
    arguments, whichever came first in time.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        settled = await asyncio.gather(*tasks, return_exceptions=True)
        caller = asyncio.current_task()
        if caller and caller.cancelling():  # a failure must not replace the caller's cancellation
            raise asyncio.CancelledError from None
        for result in settled:
            if isinstance(result, Exception):
                raise result from None
        raise


async def _gather_two(first: Awaitable[A], second: Awaitable[B]) -> tuple[A, B]:
    both: list[A | B] = await gather_or_cancel([first, second])
    return cast(A, both[0]), cast(B, both[1])


def _without_gaps(start: float, prepared: PreparedItem) -> PreparedItem:
    timings = without_gaps(start, prepared.timings.values())
    return replace(prepared, timings=dict(zip(prepared.timings, timings, strict=True)))


def _without_data(item: Item) -> Item:
    """Frees the item's data: the item itself lives as long as the answer."""
    return replace(item, data=b"", tensors={})


def _affinity(uuid: MediaUUID | None) -> str:
    return "\0".join(uuid) if uuid else ""


def _sample(data: bytes | LongString) -> str:
    """Digests the length and the beginning: equal for equal data, in whatever pieces it came.

    Different data with the same sample only share a replica, which does no harm.
    """
    head = data.head(_SAMPLE_BYTES) if isinstance(data, LongString) else data[:_SAMPLE_BYTES]
    return digest(str(len(data)), head)


async def _source(item: Item) -> MediaSource:
    assert item.modality is not None
    if item.kind == "url":
        return MediaSource(item.modality, "url", url=item.url)
    payloads, sample = await _payloads(item.data), _sample(item.data)
    return MediaSource(item.modality, "data", header=item.header, payloads=payloads, sample=sample)


async def _as_sent(tensor: bytes | LongString | InlineTensor) -> list[Payload] | npt.NDArray[np.generic]:
    return np.array(tensor) if isinstance(tensor, list) else await _payloads(tensor)


async def _payloads(data: bytes | LongString) -> list[Payload]:
    long = data if isinstance(data, LongString) else LongString((data,))
    return await long.pack()
