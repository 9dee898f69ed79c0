"""The tokenizer stage: a conversation becomes token ids with one placeholder for each media item."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Concatenate, ParamSpec, TypeVar

from pydantic import Field

from deployments.processor.chat_encoder import ChatEncoder
from deployments.processor.checkpoint import load_prompting
from deployments.runtime.metrics import publish, report_activity
from deployments.runtime.pool import WorkPool
from deployments.runtime.tracing import served, traced
from deployments.stages.base import StageConfig, begin
from deployments.types import Activity, Affixes, Chat, Prompt, Text, TokenizerSpec

P = ParamSpec("P")
T = TypeVar("T")


class TokenizerConfig(StageConfig):
    model: str = "tiny-omni"  # name of a bundled checkpoint, folder, or hub id
    chat_template: str = ""  # a file; empty: the checkpoint's own
    threads: int = Field(default=1, ge=1)
    niceness: int = Field(default=0, ge=0, le=19)  # text is the fast lane: it does not step back


class Tokenizer:
    """Renders the checkpoint's chat template and encodes it."""

    def __init__(self, config: TokenizerConfig) -> None:
        begin(self, config)
        self._pool = WorkPool(config.threads, config.niceness)
        # Fast tokenizers must not be used from several threads at once: each call borrows one.
        self._idle: SimpleQueue[ChatEncoder] = SimpleQueue()
        for _ in range(config.threads):
            encoder = ChatEncoder(load_prompting(config.model, config.chat_template))
            self._idle.put(encoder)
        self._spec = encoder.spec
        self._done = 0
        publish(lambda: report_activity(self._activity()))

    @served
    async def encode(self, chat: Chat, affixes: list[Affixes] | None = None) -> Prompt:
        """The ids of `processor.apply_chat_template(tokenize=True)`, before it expands the placeholders.

        `affixes`: of each item, in their order; none where all are empty. Raises InvalidRequest where the
        template refuses the conversation, with the template's words.
        """
        prompt, ms = await self._pool.run(self._borrow, ChatEncoder.encode, chat, affixes or [])
        self._done += 1
        return Prompt(prompt.token_ids, prompt.placeholders, service_ms=ms)

    @served
    async def encode_text(self, text: str, add_special_tokens: bool) -> Prompt:
        """The ids of a bare text, in which the names of control tokens mean those tokens."""
        token_ids, ms = await self._pool.run(self._borrow, ChatEncoder.encode_text, text, add_special_tokens)
        self._done += 1
        return Prompt(token_ids, [], service_ms=ms)

    @served
    async def decode(self, token_ids: list[int]) -> Text:
        """The text with its control tokens. Raises InvalidRequest for an id that is no token."""
        (text, tokens), ms = await self._pool.run(self._borrow, ChatEncoder.decode, token_ids)
        return Text(text, tokens, service_ms=ms)

    async def describe(self) -> TokenizerSpec:
        return self._spec

    async def activity(self) -> list[Activity]:
        return self._activity()

    def _activity(self) -> list[Activity]:
        return [Activity("tokenize", self._pool.queued, self._pool.in_flight, self._done)]

    @traced("tokenize")
    def _borrow(
        self, method: Callable[Concatenate[ChatEncoder, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        encoder = self._idle.get()
        try:
            return method(encoder, *args, **kwargs)
        finally:
            self._idle.put(encoder)
