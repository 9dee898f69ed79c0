"""Stages in the test's own process: endpoints as plain methods, and the seam's Protocols over stages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Generic, TypeVar

from app.stages import CallContext, Stages, Timed, Timing
from deployments.processor.settings import ProcessorSettings
from deployments.stages.base import Stage
from deployments.stages.embedding_loader import EmbeddingLoader
from deployments.stages.media_loader import MediaLoader
from deployments.stages.mm_preprocessor import MMPreprocessor
from deployments.stages.model import Model
from deployments.stages.tokenizer import Tokenizer
from deployments.types import (
    Affixes,
    CallHeader,
    Chat,
    Delta,
    EmbeddingSource,
    Media,
    MediaOptions,
    MediaSource,
    MediaUUID,
    MMFeatures,
    MMItem,
    Prompt,
    Reply,
    SamplingParams,
    Text,
)

S = TypeVar("S", bound=Stage)


class Direct(Generic[S]):
    """A stage whose endpoints take no header and return the value of their reply."""

    def __init__(self, stage: S, timeout_s: float = 30) -> None:
        self.stage = stage
        self._header = CallHeader(timeout_s)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.stage, name)
        if not hasattr(method, "__wrapped__"):  # not an endpoint
            return method

        async def call(*args: object, **kwargs: object) -> Any:
            return (await method(self._header, *args, **kwargs)).value

        return call

    async def process_one(self, media: Media, settings: ProcessorSettings | None = None) -> MMFeatures:
        """`MMPreprocessor.process` for a single item."""
        features: list[MMFeatures] = await self.process([media], settings)
        return features[0]


def header(context: CallContext) -> CallHeader:
    return CallHeader(context.deadline.left_s(), context.param)


def timed(reply: Reply[Any], start: float, context: CallContext) -> Timed[Any]:
    return Timed(reply.value, Timing.of(start, context.deadline.ms(), reply.service_ms, reply.fetch_ms))


class InProcessTokenizer:
    def __init__(self, stage: Tokenizer) -> None:
        self._stage = stage

    async def encode(self, chat: Chat, affixes: Sequence[Affixes], context: CallContext) -> Timed[Prompt]:
        start = context.deadline.ms()
        return timed(await self._stage.encode(header(context), chat, affixes), start, context)

    async def encode_text(self, text: str, add_special_tokens: bool, context: CallContext) -> Timed[Prompt]:
        start = context.deadline.ms()
        return timed(await self._stage.encode_text(header(context), text, add_special_tokens), start, context)

    async def decode(self, token_ids: list[int], context: CallContext) -> Timed[Text]:
        start = context.deadline.ms()
        return timed(await self._stage.decode(header(context), token_ids), start, context)


class InProcessMediaLoader:
    def __init__(self, stage: MediaLoader) -> None:
        self._stage = stage

    async def load(self, source: MediaSource, options: MediaOptions, context: CallContext) -> Timed[Media]:
        start = context.deadline.ms()
        return timed(await self._stage.load(header(context), source, options), start, context)

    async def reset_cache(self) -> None:
        await self._stage.reset_cache()


class InProcessEmbeddingLoader:
    def __init__(self, stage: EmbeddingLoader) -> None:
        self._stage = stage

    async def load(self, source: EmbeddingSource, context: CallContext) -> Timed[MMFeatures]:
        start = context.deadline.ms()
        return timed(await self._stage.load(header(context), source), start, context)


class InProcessMMPreprocessor:
    def __init__(self, stage: MMPreprocessor) -> None:
        self._stage = stage

    async def process(
        self, items: list[Media], settings: ProcessorSettings, context: CallContext
    ) -> Timed[list[MMFeatures]]:
        start = context.deadline.ms()
        return timed(await self._stage.process(header(context), items, settings), start, context)

    async def read(
        self,
        source: MediaSource,
        options: MediaOptions,
        settings: ProcessorSettings,
        uuid: MediaUUID | None,
        context: CallContext,
    ) -> Timed[MMItem]:
        start = context.deadline.ms()
        reply = await self._stage.read(header(context), source, options, settings, uuid)
        return timed(reply, start, context)

    async def recall(
        self, uuid: MediaUUID, settings: ProcessorSettings, context: CallContext
    ) -> Timed[MMItem]:
        start = context.deadline.ms()
        return timed(await self._stage.recall(header(context), uuid, settings), start, context)

    async def reset_cache(self) -> None:
        await self._stage.reset_cache()


class InProcessModel:
    def __init__(self, stage: Model) -> None:
        self._stage = stage

    def generate(
        self,
        prompt: Prompt,
        features: list[MMFeatures],
        sampling: SamplingParams,
        key: str,
        context: CallContext,
    ) -> AsyncGenerator[Delta]:
        return self._stage.generate(header(context), prompt, features, sampling, key)

    async def end(self, key: str, index: int) -> None:
        await self._stage.end(key, index)


async def in_process(
    tokenizer: Tokenizer,
    media_loader: MediaLoader,
    embedding_loader: EmbeddingLoader,
    mm_preprocessor: MMPreprocessor,
    model: Model,
) -> Stages:
    return Stages(
        InProcessTokenizer(tokenizer),
        InProcessMediaLoader(media_loader),
        InProcessEmbeddingLoader(embedding_loader),
        InProcessMMPreprocessor(mm_preprocessor),
        InProcessModel(model),
        await tokenizer.describe(),
        await mm_preprocessor.describe(),
        await model.describe(),
    )
