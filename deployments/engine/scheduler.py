"""Who computes how many tokens in the next step. Knows no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count, islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from deployments.engine.blocks import BLOCK, BlockPool
from deployments.engine.sampler import SamplerState
from deployments.engine.threaded import Request

READING = 2
LEAST_READ = 64  # tokens; fewer at a time would cost much more each
PATIENCE = 64  # short prompts that a longer one lets pass
AHEAD = 4  # prompts whose items are being encoded
REFRESHED = 16  # steps; then one reads nothing, for the time that answers take by themselves

if TYPE_CHECKING:
    import torch

    from deployments.engine.base import EngineItem


@dataclass(slots=True)
class MediaSpan:
    """An item in a prompt."""

    item: EngineItem
    key: bytes  # equal for equal embeddings and positions
    offset: int  # in the prompt
    embeds: torch.Tensor | None = None  # [length, hidden], once it is encoded

    @property
    def end(self) -> int:
        return self.offset + self.item.features.length


class Sequence:
    """One answer: its tokens, and how far they are in the cache."""

    _numbers = count()

    def __init__(
        self,
        request: Request,
        index: int,
        token_ids: list[int],
        spans: list[MediaSpan],
        positions: npt.NDArray[np.int64],
        delta: int,
        sampler: SamplerState,
        limit: int,
        leader: Sequence | None = None,
    ) -> None:
        self.number = next(self._numbers)  # no other answer's
        self.request = request
        self.index = index
        self.token_ids = token_ids  # prompt and answer
        self.num_prompt = len(token_ids)
        self.spans = spans  # in the order of the prompt
        self.positions = positions  # [rows, num_prompt]: as the family counts, 1 row or 3
        self.delta = delta  # between a position in the answer and the index of the token
        self.sampler = sampler
        self.limit = limit  # tokens of the answer
        self.leader = leader  # the first answer to the same prompt; the others wait until it has read it
        self.computed = 0  # tokens whose keys and values are in the cache
        self.blocks: list[int] = []
        self.names: list[bytes] = []  # of the blocks that are full, see BlockPool
        self._next_span = 0  # the first that does not end before the next block to be named
        self.has_read = False  # whether the prompt was computed once
        self.cached_tokens = 0  # of the prompt, found in the cache
        self.started = 0.0  # time.perf_counter() of the first admission
        self.passed = 0  # so many short prompts came later and are in front of it

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def is_answering(self) -> bool:
        """Whether only its next token is to be computed."""
        return self.has_read and self.computed == len(self) - 1

    @property
    def missing(self) -> MediaSpan | None:
        """The first item that has to be encoded before all of the prompt can be read."""
        if self.computed >= self.num_prompt:
            return None
        return next((each for each in self.spans if each.embeds is None and each.end > self.computed), None)

    def readable(self, end: int) -> int:
        """How far the prompt can be read now, up to `end` at most. For the few tokens before an item that is
        being encoded there is no step of their own."""
        missing = self.missing
        if missing is None:
            return min(end, len(self))
        return self.computed if missing.offset - self.computed < LEAST_READ else min(end, missing.offset)

    @property
    def is_short(self) -> bool:
        """Whether one step reads all of its prompt that is left, in about the time of an answer's token."""
        return not self.is_answering and len(self) - self.computed <= LEAST_READ and self.missing is None

    def may_pass(self, other: Sequence) -> bool:
        """In the queue, where it came later. Nobody passes one that ran before and had to give way."""
        return self.is_short and not (other.is_short or other.started) and other.passed < PATIENCE

    def name(self, block: int) -> bytes:
        """Of a block whose tokens are all known. An image counts as what is in it, not as its placeholder."""
        while len(self.names) <= block:
            start = len(self.names) * BLOCK
            end = start + BLOCK
            hashed = blake2b(self.names[-1] if self.names else b"", digest_size=16)
            hashed.update(np.array(self.token_ids[start:end], np.int64).tobytes())
            while self._next_span < len(self.spans) and self.spans[self._next_span].end <= start:
                self._next_span += 1
            for span in islice(self.spans, self._next_span, None):
                if span.offset >= end:
                    break
                hashed.update(span.key)
            self.names.append(hashed.digest())
        return self.names[block]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence that one step computes."""

    sequence: Sequence
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def spans(self) -> list[MediaSpan]:
        """Media with a part in it."""
        if self.start >= self.sequence.num_prompt:
            return []
        return [span for span in self.sequence.spans if span.offset < self.end and self.start < span.end]

    @property
    def is_last(self) -> bool:
        """Whether the next token comes out of it."""
        return self.end == len(self.sequence)


class Scheduler:
    """First come, first served. Whoever runs and has read its prompt gets one token in each step; besides,
    prompts are read in order, up to `step_tokens` in a step, as far as their media are encoded.

    Short prompts count as answers do: each is read at once, and beside them little else is. They pass longer
    ones in the queue, of which each is passed PATIENCE times at most. Who waits for an item, or would only
    wait for one, holds nobody up.

    A sequence is admitted when the cache has room for all it has so far. When room for more runs out, the
    last come goes back to the head of the queue, and reads all its tokens again later.
    """

    def __init__(self, pool: BlockPool, max_running: int, step_tokens: int) -> None:
        self.pool = pool
        self.max_running = max_running
        self.pace = Pace(step_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.preemptions = 0

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def add(self, sequence: Sequence) -> None:
        place = len(self.waiting)
        while place and sequence.may_pass(self.waiting[place - 1]):
            place -= 1
            self.waiting[place].passed += 1
        self.waiting.insert(place, sequence)

    def schedule(self) -> list[Chunk]:
        """What to compute next; empty when there is nothing to do before some item is encoded."""
        has_room = self._grow_all()
        while has_room and (head := self._head()) and head.is_short and self._admit(head):
            pass
        hurried = any(sequence.is_answering or sequence.is_short for sequence in self.running)
        budget = _Budget(self.pace.most, self.pace.tokens(hurried))
        chunks = [chunk for sequence in self.running for chunk in budget.chunk(sequence)]
        while has_room and budget.long > 0 and (head := self._head()) and self._admit(head):
            chunks += budget.chunk(head)
        return chunks

    def commit(self, chunk: Chunk) -> None:
        """The chunk is in the cache; blocks that it filled may be shared from now on."""
        sequence = chunk.sequence
        sequence.computed = chunk.end
        for block in range(chunk.start // BLOCK, chunk.end // BLOCK):
            self.pool.name(sequence.blocks[block], sequence.name(block))
        sequence.has_read = sequence.has_read or sequence.computed >= sequence.num_prompt

    def remove(self, sequence: Sequence) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)
        if not sequence.has_read:
            for other in self.waiting:
                other.leader = None if other.leader is sequence else other.leader

    def discard(self, sequence: Sequence) -> list[int]:
        """Removes a sequence that broke; its blocks, but for those that others share, are to be cleared."""
        broken = self.pool.exclusive(sequence.blocks)
        for block in broken:
            self.pool.forget(block)
        self.remove(sequence)
        return broken

    def _grow_all(self) -> bool:
        """Room for everyone's next token; False where some had to give way to others."""
        before = self.preemptions
        for sequence in list(self.running):
            if not self._grow(sequence) or sequence is self.running[-1]:
                break  # those behind it are out
        return self.preemptions == before

    def _grow(self, sequence: Sequence) -> bool:
        """False where the sequence itself had to give way."""
        while len(sequence) > len(sequence.blocks) * BLOCK:
            if self.pool.num_free:
                sequence.blocks.append(self.pool.allocate())
                continue
            last = self.running.pop()
            self._release(last)
            self.waiting.appendleft(last)
            self.preemptions += 1
            if last is sequence:
                return False
        return True

    def _head(self) -> Sequence | None:
        """Who is the next to be admitted."""
        if not self.waiting:
            return None
        is_full = sum(each.missing is not None for each in self.running) >= AHEAD
        return next(
            (
                each
                for each in self.waiting
                if not (is_full and each.missing) and (each.leader is None or each.leader.has_read)
            ),
            None,
        )

    def _admit(self, sequence: Sequence) -> bool:
        """Whether there is room for it."""
        if len(self.running) == self.max_running:
            return False
        # The last token is computed in any case: its logits are wanted.
        names = [sequence.name(block) for block in range((len(sequence) - 1) // BLOCK)]
        found = self.pool.find(names)
        missing = -(-len(sequence) // BLOCK) - len(found)
        # One block each is left for those that run to grow; else the next step would send this one back.
        if self.pool.num_free - self.pool.num_unused(found) < missing + len(self.running):
            return False
        for block in found:
            self.pool.share(block)
        sequence.blocks = found + [self.pool.allocate() for _ in range(missing)]
        sequence.computed = len(found) * BLOCK
        if not sequence.started:  # later on it may find what it computed itself
            sequence.cached_tokens = sequence.computed
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0


class Pace:
    """How many tokens of prompts a step reads. Beside answers as many as take READING times as long as the
    answers' own next tokens do, going by what the last steps took: with the context, and from one device to
    another, a token's time changes by orders of magnitude.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._tokens = LEAST_READ
        self._answers_s = 0.0  # a step's time without reading
        self._steps = 0  # since that was taken

    def tokens(self, hurried: bool) -> int:
        """Of prompts that are not short; `hurried`: beside answers, or prompts that are."""
        if not hurried:
            return self.most
        return min(self.most, self._tokens) if self._steps < REFRESHED else 0

    def took(self, seconds: float, num_read: int) -> None:
        """Of one step."""
        self._steps += 1
        if not num_read:
            self._answers_s, self._steps = seconds, 0
        elif num_read >= LEAST_READ:
            wanted = READING * self._answers_s
            reading_s = max(seconds - self._answers_s, wanted / 2)  # at most twice as many the next time
            self._tokens = max(LEAST_READ, int(num_read * wanted / reading_s)) if wanted else LEAST_READ


@dataclass(slots=True)
class _Budget:
    """Tokens of prompts that a step may read."""

    tokens: int
    long: int  # of those, of prompts that are not short

    def chunk(self, sequence: Sequence) -> list[Chunk]:
        """One chunk, or none where the budget is spent or an item comes next that is not encoded."""
        start, end = sequence.computed, len(sequence)
        if sequence.is_short:
            end = min(end, start + self.tokens)
        elif not sequence.is_answering:
            end = sequence.readable(start + min(self.tokens, self.long))
            self.long -= end - start
        if not sequence.is_answering:
            self.tokens -= end - start
        return [Chunk(sequence, start, end)] if end > start else []
