"""Answers in OpenAI's format, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.openai.detokenize import LogprobEntry
from deployments.types import Modality

JsonObject = dict[str, object]
Logprobs = Sequence[LogprobEntry] | None  # one entry for each token; None: the request asks for none


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    media_tokens: dict[Modality, int]
    completion_tokens: int = 0
    cached_tokens: int = 0  # part of prompt_tokens

    def to_json(self) -> JsonObject:
        media = {f"{modality}_tokens": self.media_tokens.get(modality, 0) for modality in Modality}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {
                "text_tokens": self.prompt_tokens - sum(media.values()),
                **media,
                "cached_tokens": self.cached_tokens,
            },
        }


@dataclass(slots=True)
class ChatWriter:
    """Writes one answer under one id."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, choices: Sequence[JsonObject], usage: Usage) -> JsonObject:
        return self._object("chat.completion", choices) | {"usage": usage.to_json()}

    def choice(self, index: int, text: str, finish_reason: str, logprobs: Logprobs) -> JsonObject:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._choice(index, {"message": message}, finish_reason, logprobs)

    def chunk(
        self, index: int, delta: JsonObject, finish_reason: str | None = None, logprobs: Logprobs = None
    ) -> JsonObject:
        choice = self._choice(index, {"delta": delta}, finish_reason, logprobs)
        return self._object("chat.completion.chunk", [choice])

    def usage_chunk(self, usage: Usage) -> JsonObject:
        return self._object("chat.completion.chunk", []) | {"usage": usage.to_json()}

    def _choice(
        self, index: int, content: JsonObject, finish_reason: str | None, logprobs: Logprobs
    ) -> JsonObject:
        content_logprobs = None if logprobs is None else {"content": logprobs, "refusal": None}
        return {"index": index, **content, "logprobs": content_logprobs, "finish_reason": finish_reason}

    def _object(self, kind: str, choices: Sequence[JsonObject]) -> JsonObject:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
