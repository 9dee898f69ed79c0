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
from deployments.runtime.memory import freeze_start_up, release_on_error
from deployments.runtime.metrics import (
    ENGINE_CAPACITY,
    ENGINE_KV_TOKENS,
    ENGINE_KV_USED,
    ENGINE_PREEMPTIONS,
    ENGINE_PROMPT_TOKENS,
    ENGINE_STEPS,
    ENGINE_TOKENS,
    publish,
    report_activity,
    report_cache,
)
from deployments.runtime.payload import unpack
from deployments.runtime.tracing import served_deltas
from deployments.stages.base import StageConfig, begin
from deployments.types import Activity, Delta, MMFeatures, ModelSpec, Prompt, SamplingParams

logger = logging.getLogger("ray.serve")


class ModelConfig(StageConfig, EngineConfig):
    model: str = Field(
        default="tiny-omni",
        description="Name of a bundled checkpoint, a folder, or an id on the Hugging Face hub.",
    )


class Model:
    """Owns the engine, which owns the device."""

    def __init__(self, config: ModelConfig) -> None:
        begin(self, config)
        self._engine = load_engine(config.model, config)
        self._ended: dict[str, set[int]] = {}  # of each request that runs, answers that need no more tokens
        self._done = 0
        publish(self._report)
        freeze_start_up()

    @served_deltas
    async def generate(
        self, prompt: Prompt, features: list[MMFeatures], sampling: SamplingParams, key: str = ""
    ) -> AsyncGenerator[Delta, None]:
        """Deltas of the answers; closing the generator ends them, `end` one of them by the request's `key`.

        Raises PromptTooLong, ServingError where the model fails, RayError where features are lost.
        """
        with release_on_error():
            start = time.perf_counter()
            length = self._check_length(prompt, features)
            arrays = await asyncio.gather(*(unpack(item.payload) for item in features))
            items = [EngineItem(item, unpacked) for item, unpacked in zip(features, arrays, strict=True)]
            logger.info("generating from %d tokens", length)
            num_tokens, outcomes = 0, [""] * sampling.n
            ended = self._ended[key] = set()
            async with aclosing(self._engine.submit(prompt, items, sampling, ended)) as deltas:
                try:
                    async for delta in deltas:
                        num_tokens += len(delta.token_ids)
                        outcomes[delta.index] = delta.finish_reason or ""
                        yield delta
                except ServingError:
                    outcomes = ["failed"]
                    raise
                finally:
                    self._done += 1
                    self._ended.pop(key, None)
                    ms = (time.perf_counter() - start) * 1000
                    told = ", ".join(outcome or "cancelled" for outcome in outcomes)
                    logger.info("generated %d tokens in %.1f ms: %s", num_tokens, ms, told)

    async def end(self, key: str, index: int) -> None:
        """The answer has reached a stop string, which the model does not see. Not known here: nothing."""
        if key in self._ended:
            self._ended[key].add(index)

    async def describe(self) -> ModelSpec:
        return self._engine.spec

    async def stats(self) -> EngineStats:
        return self._engine.stats()

    async def activity(self) -> list[Activity]:
        return self._activity(self._engine.stats())

    def _activity(self, stats: EngineStats) -> list[Activity]:
        """What waits has not always a place to take: of the cache there may be none left."""
        room = 0 if stats.waiting else stats.max_num_seqs - stats.running
        hits, misses = stats.prefix_hit_tokens, stats.prompt_tokens - stats.prefix_hit_tokens
        return [Activity("model", stats.waiting, stats.running, self._done, hits, misses, room)]

    def _report(self) -> None:
        stats = self._engine.stats()
        (activity,) = self._activity(stats)
        report_activity([activity])
        report_cache("prefix", hits=activity.hits, misses=activity.misses, evictions=stats.prefix_evictions)
        report_cache(
            "encoder",
            hits=stats.encoder_hits,
            misses=stats.encoder_misses,
            evictions=stats.encoder_evictions,
            num_bytes=stats.encoder_bytes,
        )
        ENGINE_CAPACITY.set(stats.max_num_seqs)
        ENGINE_KV_TOKENS.set(stats.kv_tokens)
        ENGINE_KV_USED.set(stats.kv_tokens_used)
        ENGINE_STEPS.set_total(stats.steps)
        ENGINE_PROMPT_TOKENS.set_total(stats.prompt_tokens)
        ENGINE_TOKENS.set_total(stats.generated_tokens)
        ENGINE_PREEMPTIONS.set_total(stats.preemptions)

    def check_health(self) -> None:
        """Called by Serve, which replaces a replica that raises here."""
        self._engine.check_health()

    def _check_length(self, prompt: Prompt, features: list[MMFeatures]) -> int:
        length = len(prompt.token_ids) + sum(item.length - 1 for item in features)
        limit = self._engine.spec.max_model_len
        if length >= limit:
            raise PromptTooLong(
                f"The prompt has {length} tokens; the model's context of {limit} leaves no room to answer."
            )
        return length
