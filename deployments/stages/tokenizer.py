"""The tokenizer stage: turns a conversation into token ids with one placeholder for each item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Concatenate, ParamSpec, TypeVar

from pydantic import Field

from deployments.processor.chat_encoder import ChatEncoder
from deployments.processor.checkpoint import load_prompting
from deployments.runtime.pool import WorkPool
from deployments.runtime.tracing import traced
from deployments.stages.base import CheckpointConfig, Stage, endpoint, pool_activity
from deployments.types import Activity, Affixes, Chat, Prompt, Text, TokenizerSpec

P = ParamSpec("P")
T = TypeVar("T")


class TokenizerConfig(CheckpointConfig):
    threads: int = Field(default=1, ge=1, description="Prompts that a replica encodes at once.")
    niceness: int = Field(
        default=0,
        ge=0,
        le=19,
        description="Scheduling priority of these threads, from 0 (normal) to 19 (lowest). Text must not wait"
        " for media, so the default is 0.",
    )


class Tokenizer(Stage):
    """Renders the checkpoint's chat template and encodes the result."""

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__(config)
        self._pool = WorkPool(config.threads, config.niceness)
        # A fast tokenizer must not be used from several threads at once, so each job borrows one.
        self._idle: SimpleQueue[ChatEncoder] = SimpleQueue()
        for _ in range(config.threads):
            encoder = ChatEncoder(load_prompting(config.model, config.chat_template))
            self._idle.put(encoder)
        self._spec = encoder.spec
        self.ready()

    @endpoint
    async def encode(self, chat: Chat, affixes: Sequence[Affixes] = ()) -> Prompt:
        """Returns the ids of `processor.apply_chat_template(tokenize=True)` with unexpanded placeholders.

        `affixes`: one pair for each item in order; empty if all are empty. Raises InvalidRequest, with the
        template's own message, if the template refuses the conversation.
        """
        return await self._pool.run(self._borrow, ChatEncoder.encode, chat, affixes)

    @endpoint
    async def encode_text(self, text: str, add_special_tokens: bool) -> Prompt:
        """Returns the ids of a plain text, in which the names of control tokens mean these tokens."""
        token_ids = await self._pool.run(self._borrow, ChatEncoder.encode_text, text, add_special_tokens)
        return Prompt(token_ids, [])

    @endpoint
    async def decode(self, token_ids: list[int]) -> Text:
        """Returns the text, control tokens included. Raises InvalidRequest for an id that is not a token."""
        text, tokens = await self._pool.run(self._borrow, ChatEncoder.decode, token_ids)
        return Text(text, tokens)

    async def describe(self) -> TokenizerSpec:
        return self._spec

    def _activity(self) -> list[Activity]:
        return pool_activity(self, self._pool)

    @traced("tokenize")
    def _borrow(
        self, method: Callable[Concatenate[ChatEncoder, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        encoder = self._idle.get()
        try:
            return method(encoder, *args, **kwargs)
        finally:
            self._idle.put(encoder)
