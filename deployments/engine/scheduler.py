"""Chooses the tokens that the next step computes. Uses no tensors."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from deployments.engine.blocks import BLOCK_SIZE, BlockPool, num_blocks_for
from deployments.engine.sequence import MIN_PREFILL_CHUNK, Chunk, SequenceState

MAX_PENDING_ENCODES = 4  # running sequences that wait for an item to be encoded
# Share of the token budget for long prompts while other sequences decode. It makes the gaps between their
# tokens shorter: 33 ms instead of 99 ms in a run of eight small sequences. In return, the steps that prefill
# a prompt of 3,500 tokens take 33 % more CPU time.
SHARE_BESIDE_DECODE = 1 / 4


class Scheduler:
    """First come, first served, with three exceptions that keep latencies low:

    * Each step gives every decoding sequence one token. The rest of the step prefills prompts in order, as
      far as their items are encoded and the token budget allows.
    * A short prompt counts as a decode step: it is prefilled at once, and may overtake longer prompts in the
      queue, each of them up to MAX_BYPASSED times.
    * A sequence that waits for an item to be encoded does not block the others.

    A sequence is admitted when the KV cache has room for all its tokens so far. When the cache is full, the
    sequence that was admitted last is preempted: it returns to the head of the queue and is prefilled again.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []  # in order of admission
        self.preemptions = 0
        self.prefix_hit_tokens = 0

    def __iter__(self) -> Iterator[SequenceState]:
        yield from self.running
        yield from self.waiting

    def add(self, sequence: SequenceState) -> None:
        place = len(self.waiting)
        while place and sequence.may_bypass(self.waiting[place - 1]):
            place -= 1
            self.waiting[place].num_bypassed += 1
        self.waiting.insert(place, sequence)

    def schedule(self) -> list[Chunk]:
        """Returns one chunk per sequence; none if all running sequences wait for the encoder."""
        has_room = self._grow_all()
        while has_room and (head := self._next_waiting()) and head.is_short and self._admit(head):
            pass
        is_urgent = any(sequence.is_decoding or sequence.is_short for sequence in self.running)
        budget = _TokenBudget(self.max_num_batched_tokens, self._long_budget(is_urgent))
        chunks = [budget.take(sequence) for sequence in self.running]
        while has_room and budget.long > 0 and (head := self._next_waiting()) and self._admit(head):
            chunks.append(budget.take(head))
        return [chunk for chunk in chunks if chunk.num_tokens]

    def _long_budget(self, is_urgent: bool) -> int:
        """Returns the tokens of long prompts that a step may prefill.

        `is_urgent`: decoding sequences or short prompts wait for the step.
        """
        most = self.max_num_batched_tokens
        return min(most, max(MIN_PREFILL_CHUNK, int(SHARE_BESIDE_DECODE * most))) if is_urgent else most

    def commit(self, chunk: Chunk) -> None:
        """Records that the chunk is in the cache. Other sequences may reuse the blocks that it filled."""
        sequence = chunk.sequence
        sequence.num_computed = chunk.end
        for block in range(chunk.start // BLOCK_SIZE, chunk.end // BLOCK_SIZE):
            self.pool.register(sequence.blocks[block], sequence.block_hash(block))
        sequence.prefilled = sequence.prefilled or sequence.num_computed >= sequence.num_prompt

    def remove(self, sequence: SequenceState) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)
        if not sequence.prefilled:
            for other in self.waiting:
                if other.prefix_leader is sequence:
                    other.prefix_leader = None

    def discard(self, sequence: SequenceState) -> list[int]:
        """Removes a sequence that failed. Returns its unshared blocks, which must be zeroed."""
        blocks = self.pool.exclusive(sequence.blocks)
        for block in blocks:
            self.pool.forget(block)
        self.remove(sequence)
        return blocks

    def _grow_all(self) -> bool:
        """Makes room for the next token of each running sequence. Returns False if it had to preempt any."""
        before = self.preemptions
        for sequence in list(self.running):
            if not self._grow(sequence) or sequence is self.running[-1]:
                break  # the sequences behind it were preempted
        return self.preemptions == before

    def _grow(self, sequence: SequenceState) -> bool:
        """Returns False if the sequence itself was preempted."""
        while len(sequence) > len(sequence.blocks) * BLOCK_SIZE:
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

    def _next_waiting(self) -> SequenceState | None:
        """Returns the first waiting sequence that need not wait for the encoder or its prefix leader."""
        num_encoding = sum(each.next_unencoded is not None for each in self.running)
        may_encode = num_encoding < MAX_PENDING_ENCODES
        for sequence in self.waiting:
            leader = sequence.prefix_leader
            if (may_encode or not sequence.next_unencoded) and (leader is None or leader.prefilled):
                return sequence
        return None

    def _admit(self, sequence: SequenceState) -> bool:
        """Moves the sequence to `running` if there is room, and reuses the cached blocks of its prefix."""
        if len(self.running) == self.max_num_seqs:
            return False
        # The newest token is always computed, since its logits are needed.
        num_reusable = (len(sequence) - 1) // BLOCK_SIZE
        reused = self.pool.find_prefix([sequence.block_hash(block) for block in range(num_reusable)])
        num_new = num_blocks_for(len(sequence)) - len(reused)
        # One free block stays for each running sequence; without it the next step might preempt this one.
        if self.pool.num_free - self.pool.num_unused(reused) < num_new + len(self.running):
            return False
        for block in reused:
            self.pool.share(block)
        sequence.blocks = reused + [self.pool.allocate() for _ in range(num_new)]
        sequence.num_computed = len(reused) * BLOCK_SIZE
        if not sequence.admitted_at:  # after a preemption, the sequence may find its own blocks
            sequence.admitted_at = time.perf_counter()
            sequence.cached_tokens = sequence.num_computed
            self.prefix_hit_tokens += 0 if sequence.prefix_leader else sequence.cached_tokens
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def _release(self, sequence: SequenceState) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.num_computed = [], 0


@dataclass(slots=True)
class _TokenBudget:
    """Prompt tokens that a step may still prefill."""

    total: int
    long: int  # share of `total` for prompts that are not short

    def take(self, sequence: SequenceState) -> Chunk:
        """Returns the next chunk. It is empty if the budget is spent or the next item is not encoded."""
        start, end = sequence.num_computed, len(sequence)
        if sequence.is_decoding:
            return Chunk(sequence, start, end)
        if sequence.is_short:
            end = min(end, start + self.total)
        else:
            end = sequence.prefill_end(start + min(self.total, self.long))
            self.long -= end - start
        self.total -= end - start
        return Chunk(sequence, start, end)
