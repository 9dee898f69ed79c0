"""The batched engine: sequences join and leave between steps; a step runs the model for all of them."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

import torch

from deployments.engine.base import EngineStats
from deployments.engine.blocks import BLOCK_SIZE, BlockPool, num_blocks_for
from deployments.engine.config import EngineConfig
from deployments.engine.inputs import is_embedded
from deployments.engine.paged_cache import bytes_per_token
from deployments.engine.runner import Runner
from deployments.engine.sampler import Sampled, SamplerState, sample
from deployments.engine.scheduler import Scheduler
from deployments.engine.sequence import Chunk, MediaSpan, SequenceState
from deployments.engine.threaded import (
    Request,
    ThreadedEngine,
    as_serving_error,
    end_token_ids,
    model_spec,
    not_finite_error,
)
from deployments.errors import ServingError
from deployments.runtime.lru_cache import CountingLRUCache
from deployments.runtime.pool import lower_priority
from deployments.types import Delta

logger = logging.getLogger("ray.serve")

_GPU_SHARE = 0.8  # of the memory that the weights leave, for the KV cache
_MIN_CPU_BYTES = 256 * 2**20  # for the KV cache


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """The encoder's result for an item.

    `embeds` and `error` are both None if all requests for it were cancelled.
    """

    key: bytes
    embeds: torch.Tensor | None = None
    error: BaseException | None = None


class FirstDelta(TypedDict, total=False):
    """Fields that only the first delta of an answer has."""

    cached_tokens: int
    queue_ms: float
    prefill_ms: float


class BatchedEngine(ThreadedEngine[EncodedItem]):
    """Greedy output equals that of `model.generate` on the same inputs, whatever else is in the batch."""

    def __init__(self, model: Any, config: EngineConfig = EngineConfig()) -> None:  # noqa: B008  # not mutated
        wanted = model_spec(model, config.max_model_len)
        num_blocks = _num_blocks(model, config.kv_cache_bytes, wanted.max_model_len)
        spec = replace(wanted, max_model_len=min(wanted.max_model_len, num_blocks * BLOCK_SIZE))
        if spec.max_model_len < wanted.max_model_len:
            logger.warning("the KV cache limits the context to %d tokens", spec.max_model_len)
        super().__init__(spec, config.max_num_seqs + config.max_waiting_requests)
        self._generation_config = model.generation_config
        self._runner = Runner(model, num_blocks)
        self._scheduler = Scheduler(BlockPool(num_blocks), config.max_num_seqs, config.max_num_batched_tokens)
        self._encoder_cache: CountingLRUCache[bytes, torch.Tensor] = CountingLRUCache(
            config.encoder_cache_bytes, lambda embeds: embeds.nbytes
        )
        # Encoding runs in parallel to the steps. On a CPU it only gets the time that they leave.
        niceness = 0 if spec.device == "cuda" else 19
        self._encoder = ThreadPoolExecutor(1, "encoder", lower_priority, (niceness,))
        self._encoding: dict[bytes, list[Request]] = {}  # requests that wait for an item, by its key
        self._is_idle = True
        self._stats = EngineStats(max_num_seqs=config.max_num_seqs, kv_tokens=num_blocks * BLOCK_SIZE)
        self._thread.start()

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return replace(
            self._stats,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_tokens_used=self._stats.kv_tokens - scheduler.pool.num_free * BLOCK_SIZE,
            preemptions=scheduler.preemptions,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            prefix_evictions=scheduler.pool.evictions,
            encoder_bytes=int(self._encoder_cache.currsize),
            encoder_evictions=self._encoder_cache.evictions,
        )

    def close(self) -> None:
        super().close()
        self._encoder.shutdown(cancel_futures=True)

    def _run(self) -> None:
        while True:
            for message in self._messages(wait=self._is_idle):
                if message is None:
                    return
                if isinstance(message, Request):
                    self._add(message)
                else:
                    self._finish_encoding(message)
            message = None  # a reference to a request would keep its arrays in the object store
            self.step()
            self._deliver()

    def step(self) -> None:
        """Gives each decoding sequence a token, and prefills a part of the other prompts."""
        self._remove_ended()
        chunks = self._scheduler.schedule()
        self._start_encoding()
        for computed, logits in self._forward(chunks):
            self._commit(computed)
            self._sample(computed, logits)
        self._stats.steps += 1
        has_work = bool(self._scheduler.running or self._scheduler.waiting)
        waits_for_encoder = not chunks and bool(self._encoding)
        self._is_idle = not has_work or waits_for_encoder

    def _add(self, request: Request) -> None:
        if request.cancelled:
            return
        sampling = request.sampling
        try:
            prompt = self._runner.prepare(request.prompt, request.items)
            for span in prompt.spans:
                span.embeds = self._known_embeds(span)
        except Exception as error:  # noqa: BLE001  # any error of the model's code fails this request only
            self._send(request, as_serving_error(error))
            return
        num_prompt = len(prompt.token_ids)
        self._stats.prompt_tokens += num_prompt
        ends = end_token_ids(self._generation_config, sampling)
        max_new_tokens = min(sampling.max_tokens, self._spec.max_model_len - num_prompt)
        leader = None
        for index in range(sampling.n):
            sampler = SamplerState(sampling, index, prompt.token_ids, ends)
            sequence = SequenceState(request, index, prompt, sampler, max_new_tokens, leader)
            self._scheduler.add(sequence)
            leader = leader or sequence

    def _remove_ended(self) -> None:
        """Removes sequences whose request was cancelled or whose answer needs no more tokens."""
        for sequence in list(self._scheduler):
            request = sequence.request
            if sequence.index in request.ended:
                self._send(request, Delta([], "stop", sequence.index))
            elif not request.cancelled:
                continue
            self._scheduler.remove(sequence)

    def _known_embeds(self, span: MediaSpan) -> torch.Tensor | None:
        """Returns the item's embeddings if the encoder need not run for it."""
        if is_embedded(span.item):
            return self._runner.encode(span.item)
        embeds = self._encoder_cache.get(span.key)
        self._stats.encoder_hits += embeds is not None
        return embeds

    def _start_encoding(self) -> None:
        """Starts the next item of each running prompt. One at a time, so that requests take turns."""
        for sequence in self._scheduler.running:
            if span := sequence.next_unencoded:
                self._encode(sequence.request, span)

    def _encode(self, request: Request, span: MediaSpan) -> None:
        """Ensures that an EncodedItem with the span's key arrives in the inbox."""
        requests = self._encoding.setdefault(span.key, [])
        if request in requests:
            return
        requests.append(request)
        if len(requests) > 1:
            return
        embeds = self._encoder_cache.get(span.key)  # encoded since the request came
        if embeds is not None:
            self._stats.encoder_hits += 1
            self._inbox.put(EncodedItem(span.key, embeds))
        else:
            self._stats.encoder_misses += 1
            self._encoder.submit(self._run_encoder, span, requests)

    def _run_encoder(self, span: MediaSpan, requests: list[Request]) -> None:
        """Runs in the encoder's thread. `requests` may grow meanwhile."""
        encoded = EncodedItem(span.key)
        try:
            if not all(request.cancelled for request in requests):
                with torch.inference_mode():
                    encoded = EncodedItem(span.key, self._runner.encode(span.item))
        except BaseException as error:  # noqa: BLE001  # the engine's thread handles or raises it
            encoded = EncodedItem(span.key, error=error)
        self._inbox.put(encoded)

    def _finish_encoding(self, encoded: EncodedItem) -> None:
        requests = self._encoding.pop(encoded.key)
        if encoded.error:
            if not isinstance(encoded.error, Exception):
                raise encoded.error
            error = as_serving_error(encoded.error)
            for request in requests:
                self._fail(request, error)
        if encoded.embeds is None:
            return
        if encoded.key not in self._encoder_cache:
            self._encoder_cache.store(encoded.key, encoded.embeds)
        for sequence in self._scheduler:
            if sequence.request in requests:
                for span in sequence.prompt.spans:
                    if span.key == encoded.key:
                        span.embeds = encoded.embeds

    def _forward(self, batch: list[Chunk]) -> list[tuple[list[Chunk], torch.Tensor]]:
        """Returns chunks with their logits. If the batch fails, runs each chunk alone to find the culprit."""
        batch = [chunk for chunk in batch if not chunk.sequence.request.cancelled]
        if not batch:
            return []
        try:
            return [(batch, self._runner.forward(batch))]
        except Exception as raised:  # noqa: BLE001  # any error of the model's code fails one request only
            error = as_serving_error(raised)
        if len(batch) > 1:
            return [pair for chunk in batch for pair in self._forward([chunk])]
        self._fail(batch[0].sequence.request, error)
        return []

    def _commit(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            if not chunk.sequence.request.cancelled:  # another answer of the request may have failed
                self._scheduler.commit(chunk)

    def _sample(self, chunks: list[Chunk], logits: torch.Tensor) -> None:
        """Draws the next token of each sequence whose newest token was computed."""
        rows = [row for row, chunk in enumerate(chunks) if chunk.is_last]
        if not rows:
            return
        if len(rows) < len(chunks):
            logits = logits[rows]
        sequences = [chunks[row].sequence for row in rows]
        for sequence, token in zip(sequences, sample(logits, [s.sampler for s in sequences]), strict=True):
            self._extend(sequence, token)

    def _extend(self, sequence: SequenceState, token: Sampled) -> None:
        request = sequence.request
        if token.token_id is None:  # also for a cancelled request: other sequences will get its blocks
            self._fail(request, not_finite_error())
            return
        if request.cancelled:
            return
        first = FirstDelta() if sequence.num_generated else _first_delta(sequence)
        if token.token_id in sequence.sampler.ends:
            self._send(request, Delta([], "stop", sequence.index, **first))
            self._scheduler.remove(sequence)
            return
        sequence.token_ids.append(token.token_id)
        sequence.sampler.add(token.token_id)
        self._stats.generated_tokens += 1
        is_full = sequence.num_generated == sequence.max_new_tokens
        reason: Literal["length"] | None = "length" if is_full else None
        logprobs = [token.logprob] if token.logprob else []
        self._send(request, Delta([token.token_id], reason, sequence.index, logprobs, **first))
        if reason:
            self._scheduler.remove(sequence)

    def _fail(self, request: Request, error: ServingError) -> None:
        """Ends the request. Its cache blocks may hold NaN, so no other sequence may find them."""
        request.cancelled = True
        for sequence in [each for each in self._scheduler if each.request is request]:
            self._runner.zero(self._scheduler.discard(sequence))
        self._send(request, error)


def _first_delta(sequence: SequenceState) -> FirstDelta:
    return {
        "cached_tokens": (sequence.prefix_leader or sequence).cached_tokens,
        "queue_ms": (sequence.admitted_at - sequence.request.submitted_at) * 1000,
        "prefill_ms": (time.perf_counter() - sequence.admitted_at) * 1000,
    }


def _num_blocks(model: Any, kv_cache_bytes: int | None, max_model_len: int) -> int:
    per_block = bytes_per_token(model) * BLOCK_SIZE
    if kv_cache_bytes:
        return max(1, kv_cache_bytes // per_block)
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
        return int(free * _GPU_SHARE) // per_block
    return max(_MIN_CPU_BYTES // per_block, num_blocks_for(max_model_len))
