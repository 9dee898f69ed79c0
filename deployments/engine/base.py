"""What an engine is to the rest of Headrace: requests go in, tokens come out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from deployments.types import Arrays, Delta, MMFeatures, ModelSpec, Prompt, SamplingParams


@dataclass(frozen=True, slots=True)
class EngineItem:
    """One media item of a request, with its arrays at hand (possibly read-only)."""

    features: MMFeatures
    arrays: Arrays


class Engine(Protocol):
    @property
    def spec(self) -> ModelSpec: ...

    def submit(
        self, prompt: Prompt, items: Sequence[EngineItem], sampling: SamplingParams
    ) -> AsyncGenerator[Delta, None]:
        """The answer as it is generated; `items` are in the order of `prompt.placeholders`.

        The request joins the queue at the first step of the generator. Closing the generator cancels it:
        a request that waits never starts, one that runs stops within a token. Raises ServingError.
        """
        ...

    def check_health(self) -> None:
        """Raises StageUnavailable if the engine can never answer again."""
        ...

    def close(self) -> None:
        """Stops the engine; open requests fail with StageUnavailable."""
        ...
