"""The seam between the ingress and the stages: the Protocols that the fan-out calls. Nothing here knows Ray.

`app.ray_stages` implements them over Serve handles. Every method raises the stage's own ServingErrors with
`param` set, StageTimeout at the deadline, Overloaded if the stage's queue is full, and ReplicaDied or
ObjectLost after the retries that the implementation makes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from deployments.errors import StageTimeout
from deployments.processor.settings import ProcessorSettings
from deployments.types import (
    Affixes,
    Chat,
    Delta,
    EmbeddingSource,
    InputSpec,
    Media,
    MediaOptions,
    MediaSource,
    MediaUUID,
    MMFeatures,
    MMItem,
    ModelSpec,
    Prompt,
    SamplingParams,
    Text,
    TokenizerSpec,
)

T = TypeVar("T")


class Deadline:
    """The deadline of one request, and the clock that all its times are read from."""

    def __init__(self, timeout_s: float, arrival: float | None = None) -> None:
        """`arrival`: when the request came, by `time.perf_counter`. The timeout counts from now."""
        self.timeout_s = timeout_s
        self._arrival = time.perf_counter() if arrival is None else arrival
        self._at = time.monotonic() + timeout_s

    def ms(self) -> float:
        """Milliseconds since the request came."""
        return (time.perf_counter() - self._arrival) * 1000

    def left_s(self) -> float:
        return max(0.0, self._at - time.monotonic())

    def passed(self, stage: str) -> StageTimeout:
        return StageTimeout(
            f"The request was still in {stage} after its {self.timeout_s:g} s. Send less, or try again later."
        )


@dataclass(frozen=True, slots=True)
class Timing:
    """The milliseconds of one call. Its three parts add up to the whole call."""

    start: float  # since the request came
    queue: float  # waiting and transport
    service: float  # at work in the stage
    fetch: float = 0.0  # waiting for the item's host

    @classmethod
    def of(cls, start: float, end: float, service_ms: float, fetch_ms: float = 0.0) -> Timing:
        """Splits the call from `start` to `end` by what the stage reported."""
        wall = end - start
        service = min(service_ms, wall)  # parallel work in the stage may add up to more than the call
        fetch = min(fetch_ms, wall - service)
        return cls(start, wall - service - fetch, service, fetch)

    @property
    def end(self) -> float:
        return self.start + self.queue + self.fetch + self.service

    def then(self, following: Timing) -> Timing:
        """Joins two calls, one after the other, that did one thing."""
        gap = following.start - self.end
        return Timing(
            self.start,
            self.queue + gap + following.queue,
            self.service + following.service,
            self.fetch + following.fetch,
        )

    def to_json(self) -> dict[str, float]:
        fetch = {"fetch": self.fetch} if self.fetch else {}
        parts = {"start": self.start, "queue": self.queue, **fetch, "service": self.service}
        return {name: round(ms, 3) for name, ms in parts.items()}


def without_gaps(start: float, timings: Iterable[Timing]) -> list[Timing]:
    """Counts the time between calls, or in a call that failed, as queue time of the next call."""
    closed = []
    for timing in timings:
        closed.append(replace(timing, start=start, queue=timing.queue + timing.start - start))
        start = timing.end
    return closed


@dataclass(frozen=True, slots=True)
class CallContext:
    """The data that a call carries in addition to its arguments."""

    deadline: Deadline
    param: str = ""  # the item's place in the request: "messages[0].content[1]"
    # For the metrics: the item's, "prompt" for prompt embeddings, "text" for a call about no item.
    modality: str = "text"
    affinity: str = ""  # calls with equal keys go to the same replica if possible
    attempt: int = 1  # 2: an earlier call about this item ended with its replica


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """The result of a call, and where its time went."""

    value: T
    timing: Timing


class Tokenizer(Protocol):
    async def encode(self, chat: Chat, affixes: Sequence[Affixes], context: CallContext) -> Timed[Prompt]: ...

    async def encode_text(
        self, text: str, add_special_tokens: bool, context: CallContext
    ) -> Timed[Prompt]: ...

    async def decode(self, token_ids: list[int], context: CallContext) -> Timed[Text]: ...


class MediaLoader(Protocol):
    async def load(
        self, source: MediaSource, options: MediaOptions, context: CallContext
    ) -> Timed[Media]: ...

    async def reset_cache(self) -> None: ...


class EmbeddingLoader(Protocol):
    async def load(self, source: EmbeddingSource, context: CallContext) -> Timed[MMFeatures]: ...


class MMPreprocessor(Protocol):
    async def process(
        self, items: list[Media], settings: ProcessorSettings, context: CallContext
    ) -> Timed[list[MMFeatures]]:
        """Also raises ArraysEvicted: load the items again, with `MediaOptions.decode_again`."""
        ...

    async def read(
        self,
        source: MediaSource,
        options: MediaOptions,
        settings: ProcessorSettings,
        uuid: MediaUUID | None,
        context: CallContext,
    ) -> Timed[MMItem]:
        """Decodes and processes in one call. Is not retried: the item may be what killed the replica."""
        ...

    async def recall(
        self, uuid: MediaUUID, settings: ProcessorSettings, context: CallContext
    ) -> Timed[MMItem]: ...

    async def reset_cache(self) -> None: ...


class Model(Protocol):
    def generate(
        self,
        prompt: Prompt,
        features: list[MMFeatures],
        sampling: SamplingParams,
        key: str,
        context: CallContext,
    ) -> AsyncGenerator[Delta]:
        """Yields deltas; closing the generator ends the generation. `key` names the request for `end`."""
        ...

    async def end(self, key: str, index: int) -> None:
        """Ends one of a request's answers, in whichever replica it is."""
        ...


@dataclass(frozen=True, slots=True)
class Stages:
    """The five stages, and what three of them said about themselves at start."""

    tokenizer: Tokenizer
    media_loader: MediaLoader
    embedding_loader: EmbeddingLoader
    mm_preprocessor: MMPreprocessor
    model: Model
    tokenizer_spec: TokenizerSpec
    input_spec: InputSpec
    model_spec: ModelSpec
