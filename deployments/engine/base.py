"""What an engine is to the rest of Headrace: requests go in, tokens come out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from deployments.types import Arrays, Delta, MMFeatures, ModelSpec, Prompt, SamplingParams


@dataclass(frozen=True, slots=True)
class EngineItem:
    """One media item of a request, with its arrays at hand (possibly read-only)."""

    features: MMFeatures
    arrays: Arrays


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and what holds at this moment."""

    running: int = 0  # answers that get a token in each step, or whose prompt is being read
    waiting: int = 0  # answers
    max_running: int = 1
    kv_tokens: int = 0  # that the cache holds; 0 where the engine has no cache of its own
    kv_tokens_used: int = 0  # by running answers
    steps: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0  # of `prompt_tokens`, found in the cache
    prefix_evictions: int = 0  # blocks
    generated_tokens: int = 0
    preemptions: int = 0
    encoder_hits: int = 0  # items
    encoder_misses: int = 0
    encoder_evictions: int = 0
    encoder_bytes: int = 0


class Engine(Protocol):
    @property
    def spec(self) -> ModelSpec: ...

    def submit(
        self,
        prompt: Prompt,
        items: Sequence[EngineItem],
        sampling: SamplingParams,
        ended: Set[int] = frozenset(),
    ) -> AsyncGenerator[Delta, None]:
        """The answers as they are generated; `items` are in the order of `prompt.placeholders`.

        `ended`: answers, by index, that have all they need. The caller adds to it meanwhile; such an answer
        gets a last delta, with "stop", within a token.

        The request joins the queue at the first step of the generator. Closing the generator cancels it:
        a request that waits never starts, one that runs stops within a token. Raises Overloaded where the
        queue is full, and ServingError.
        """
        ...

    def stats(self) -> EngineStats: ...

    def check_health(self) -> None:
        """Raises StageUnavailable if the engine can never answer again."""
        ...

    def close(self) -> None:
        """Stops the engine; open requests fail with StageUnavailable."""
        ...
