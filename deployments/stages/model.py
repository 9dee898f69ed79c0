"""The model stage: prompt and features in, tokens out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pydantic import Field

from deployments.engine.base import EngineItem, EngineStats
from deployments.engine.config import EngineConfig
from deployments.engine.load import load_engine
from deployments.errors import PromptTooLong, ServingError
from deployments.runtime.metrics import (
    ENGINE_CAPACITY,
    ENGINE_KV_TOKENS,
    ENGINE_KV_USED,
    ENGINE_PREEMPTIONS,
    ENGINE_PROMPT_TOKENS,
    ENGINE_STEPS,
    ENGINE_TOKENS,
)
from deployments.runtime.payload import unpack
from deployments.stages.base import CacheStats, Stage, StageConfig, stream_endpoint
from deployments.types import Activity, Delta, MMFeatures, ModelSpec, Prompt, SamplingParams

logger = logging.getLogger("ray.serve")


class ModelConfig(StageConfig, EngineConfig):
    model: str = Field(
        default="tiny-omni",
        description="Name of a bundled checkpoint, a folder, or an id on the Hugging Face hub.",
    )


class Model(Stage):
    """Owns the engine, which owns the device."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self._engine = load_engine(config.model, config)
        # For each request in flight, by its key: indices of the answers that need no more tokens.
        self._ended: dict[str, set[int]] = {}
        self.ready()

    @stream_endpoint
    async def generate(
        self, prompt: Prompt, features: list[MMFeatures], sampling: SamplingParams, key: str = ""
    ) -> AsyncGenerator[Delta]:
        """Yields the deltas of all answers.

        Closing the generator ends all answers of the request; `end` ends one of them, by the request's `key`.
        Raises PromptTooLong, Overloaded, ServingError if the model fails, RayError if features are lost.
        """
        start = time.perf_counter()
        length = self._check_length(prompt, features)
        arrays = await asyncio.gather(*(unpack(item.payload) for item in features))
        items = [EngineItem(item, unpacked) for item, unpacked in zip(features, arrays, strict=True)]
        logger.info("generating from %d tokens", length)
        num_tokens, outcomes = 0, ["cancelled"] * sampling.n
        ended = self._ended[key] = set()
        async with aclosing(self._engine.submit(prompt, items, sampling, ended)) as deltas:
            try:
                async for delta in deltas:
                    num_tokens += len(delta.token_ids)
                    outcomes[delta.index] = delta.finish_reason or outcomes[delta.index]
                    yield delta
            except ServingError:
                outcomes = ["failed"]
                raise
            finally:
                self._ended.pop(key, None)
                ms = (time.perf_counter() - start) * 1000
                logger.info("generated %d tokens in %.1f ms: %s", num_tokens, ms, ", ".join(outcomes))

    async def end(self, key: str, index: int) -> None:
        """Ends one answer that has reached a stop string, which the model does not see.

        Does nothing if the request is not in this replica.
        """
        if key in self._ended:
            self._ended[key].add(index)

    async def describe(self) -> ModelSpec:
        return self._engine.spec

    async def stats(self) -> EngineStats:
        return self._engine.stats()

    def _activity(self) -> list[Activity]:
        stats = self._engine.stats()
        # A waiting sequence does not imply a free place: the KV cache may be full.
        room = 0 if stats.waiting else stats.max_num_seqs - stats.running
        prefix = self._caches()["prefix"]
        return [
            Activity(
                self.name,
                stats.waiting,
                stats.running,
                self.calls_done,
                prefix.hits,
                prefix.misses,
                room,
            )
        ]

    def _caches(self) -> dict[str, CacheStats]:
        stats = self._engine.stats()
        hits = stats.prefix_hit_tokens
        return {
            "prefix": CacheStats(hits, stats.prompt_tokens - hits, stats.prefix_evictions),
            "encoder": CacheStats(
                stats.encoder_hits,
                stats.encoder_misses,
                stats.encoder_evictions,
                num_bytes=stats.encoder_bytes,
            ),
        }

    def _report(self) -> None:
        super()._report()
        stats = self._engine.stats()
        ENGINE_CAPACITY.set(stats.max_num_seqs)
        ENGINE_KV_TOKENS.set(stats.kv_tokens)
        ENGINE_KV_USED.set(stats.kv_tokens_used)
        ENGINE_STEPS.set_total(stats.steps)
        ENGINE_PROMPT_TOKENS.set_total(stats.prompt_tokens)
        ENGINE_TOKENS.set_total(stats.generated_tokens)
        ENGINE_PREEMPTIONS.set_total(stats.preemptions)

    def check_health(self) -> None:
        """Raises StageUnavailable if the engine is dead: Serve then replaces this replica."""
        self._engine.check_health()

    def _check_length(self, prompt: Prompt, features: list[MMFeatures]) -> int:
        length = len(prompt.token_ids) + sum(item.length - 1 for item in features)
        limit = self._engine.spec.max_model_len
        if length >= limit:
            raise PromptTooLong(
                f"The prompt has {length} tokens, and the model's context of {limit} leaves no room for an"
                " answer. Send less."
            )
        return length
