"""One answer in the engine: its tokens, its progress and the hashes of its blocks. Uses no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from deployments.engine.base import EngineItem
from deployments.engine.blocks import BLOCK_SIZE
from deployments.engine.sampler import SamplerState
from deployments.engine.threaded import Request

if TYPE_CHECKING:
    import torch

MIN_PREFILL_CHUNK = 64  # tokens; smaller chunks would cost much more per token
MAX_BYPASSED = 64  # short prompts that may overtake one longer prompt in the queue


@dataclass(slots=True)
class MediaSpan:
    """An item in a prompt."""

    item: EngineItem
    key: bytes  # equal for equal embeddings and positions
    offset: int  # in the prompt
    embeds: torch.Tensor | None = None  # [length, hidden]; None until the item is encoded

    @property
    def end(self) -> int:
        return self.offset + self.item.features.length


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt with its items' tokens in place."""

    token_ids: list[int]
    spans: list[MediaSpan]  # in the order of the prompt
    positions: npt.NDArray[np.int64]  # [rows, tokens]: 1 row, or 3 for M-RoPE
    mrope_delta: int  # position minus index, for every token of the answer


@dataclass(eq=False, slots=True)
class SequenceState:
    """One sequence: an answer to a request, from the queue to its last token.

    Its first `num_computed` tokens have keys and values in `blocks`. It is prefilling until only the newest
    token is left to compute, and decoding from then on.
    """

    request: Request
    index: int  # of the answer in its request
    prompt: PreparedPrompt
    sampler: SamplerState
    max_new_tokens: int
    # The first answer to the same prompt. The others wait until it is prefilled, and reuse its blocks.
    prefix_leader: SequenceState | None = None

    token_ids: list[int] = field(init=False)  # prompt and answer
    blocks: list[int] = field(default_factory=list, init=False)
    num_computed: int = field(default=0, init=False)
    prefilled: bool = field(default=False, init=False)  # stays true after a preemption
    cached_tokens: int = field(default=0, init=False)  # prompt tokens found in the cache at first admission
    admitted_at: float = field(default=0.0, init=False)  # time.perf_counter(); 0 before the first admission
    num_bypassed: int = field(default=0, init=False)  # short prompts that overtook it in the queue
    _block_hashes: list[bytes] = field(default_factory=list, init=False)
    _first_span: int = field(default=0, init=False)  # the first span that can touch the next block to hash

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt.token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def is_decoding(self) -> bool:
        return self.prefilled and self.num_computed == len(self) - 1

    @property
    def is_short(self) -> bool:
        """True if one chunk prefills all that is left, at about the cost of a decode step."""
        left = len(self) - self.num_computed
        return not self.is_decoding and left <= MIN_PREFILL_CHUNK and self.next_unencoded is None

    @property
    def next_unencoded(self) -> MediaSpan | None:
        """The first item that must be encoded before the rest of the prompt can be prefilled."""
        if self.num_computed >= self.num_prompt:
            return None
        spans = self.prompt.spans
        return next((span for span in spans if span.embeds is None and span.end > self.num_computed), None)

    def prefill_end(self, limit: int) -> int:
        """Returns the index up to which the next chunk may go, at most `limit`."""
        span = self.next_unencoded
        if span is None:
            return min(limit, len(self))
        if span.offset - self.num_computed < MIN_PREFILL_CHUNK:
            return self.num_computed  # the few tokens before the item are prefilled together with it
        return min(limit, span.offset)

    def may_bypass(self, other: SequenceState) -> bool:
        """True if this sequence, which arrived later, may go before `other` in the queue.

        A preempted sequence (one that was admitted before) is never overtaken.
        """
        is_overtakable = not other.is_short and not other.admitted_at and other.num_bypassed < MAX_BYPASSED
        return self.is_short and is_overtakable

    def block_hash(self, block: int) -> bytes:
        """Returns the hash of a full block, given by its index in `blocks`.

        It covers all tokens up to the block's end. An item counts by its key, since the placeholder tokens of
        different images are equal.
        """
        while len(self._block_hashes) <= block:
            start = len(self._block_hashes) * BLOCK_SIZE
            end = start + BLOCK_SIZE
            hashed = blake2b(self._block_hashes[-1] if self._block_hashes else b"", digest_size=16)
            hashed.update(np.array(self.token_ids[start:end], np.int64).tobytes())
            spans = self.prompt.spans
            while self._first_span < len(spans) and spans[self._first_span].end <= start:
                self._first_span += 1
            for span in islice(spans, self._first_span, None):
                if span.offset >= end:
                    break
                hashed.update(span.key)
            self._block_hashes.append(hashed.digest())
        return self._block_hashes[block]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one sequence that one step computes."""

    sequence: SequenceState
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def spans(self) -> list[MediaSpan]:
        """The items that overlap the chunk."""
        if self.start >= self.sequence.num_prompt:
            return []
        spans = self.sequence.prompt.spans
        return [span for span in spans if span.offset < self.end and self.start < span.end]

    @property
    def is_last(self) -> bool:
        """True if the chunk ends with the newest token, so that its logits give the next one."""
        return self.end == len(self.sequence)
