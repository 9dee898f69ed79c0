"""The protocol between an engine and the rest of Headrace: requests go in, tokens come out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from deployments.types import Arrays, Delta, MMFeatures, ModelSpec, Prompt, SamplingParams


@dataclass(frozen=True, slots=True)
class EngineItem:
    """One media item of a request: its features' description, with the digest, and their arrays.

    The arrays may be read-only.
    """

    features: MMFeatures
    arrays: Arrays


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and gauges of this moment."""

    running: int = 0  # sequences that prefill or decode
    waiting: int = 0  # sequences in the queue
    max_num_seqs: int = 1
    kv_tokens: int = 0  # capacity of the KV cache; 0 if the engine has no cache of its own
    kv_tokens_used: int = 0  # held by running sequences
    steps: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0  # prompt tokens that were found in the KV cache
    prefix_evictions: int = 0  # blocks
    generated_tokens: int = 0
    preemptions: int = 0
    encoder_hits: int = 0  # items
    encoder_misses: int = 0  # items
    encoder_evictions: int = 0  # items
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
        """Yields the deltas of all answers as they are generated.

        `prompt` has one placeholder token per item; `prompt.placeholders` is in the order of `items`. An item
        brings its digest, its replacement (the tokens for the placeholder) and its arrays.

        `ended` holds the indices of answers that need no more tokens. The caller may add to it at any time;
        such an answer gets a last delta with "stop" within one token.

        The request joins the queue when the generator is first advanced. Closing the generator cancels it: a
        waiting request never starts, a running one stops within one token. Raises Overloaded if the queue is
        full, and other ServingErrors.
        """
        ...

    def stats(self) -> EngineStats: ...

    def check_health(self) -> None:
        """Raises StageUnavailable if the engine cannot serve requests any more."""
        ...

    def close(self) -> None:
        """Stops the engine. Open requests fail with StageUnavailable."""
        ...
