"""The batched engine: answers join and leave between steps, and each step runs the model for all of them."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from deployments.engine.base import EngineStats
from deployments.engine.blocks import BLOCK, RESERVED, BlockPool
from deployments.engine.inputs import hidden_size, is_embedded
from deployments.engine.runner import Runner, bytes_per_token
from deployments.engine.sampler import Sampled, SamplerState, sample
from deployments.engine.scheduler import Chunk, MediaSpan, Scheduler, Sequence
from deployments.engine.threaded import (
    Request,
    ThreadedEngine,
    as_serving_error,
    default_sampling,
    eos_token_ids,
)
from deployments.errors import ServingError
from deployments.runtime.pool import lower_priority
from deployments.types import Delta, ModelSpec

logger = logging.getLogger("ray.serve")

_GPU_SHARE = 0.8  # of the memory that the weights leave, for the cache
_CPU_BYTES = 256 * 2**20  # for the cache, or as much as one context needs


@dataclass(frozen=True, slots=True)
class Limits:
    max_model_len: int | None = None  # tokens; None: the model's context
    max_running: int = 64  # answers that get a token in each step
    max_waiting: int = 256  # requests beyond that
    step_tokens: int = 512  # of prompts in a step
    kv_cache_bytes: int | None = None  # None: most of a GPU's free memory, on a CPU _CPU_BYTES
    encoder_cache_bytes: int = 256 * 2**20


class BatchedEngine(ThreadedEngine):
    """Greedy output is that of `model.generate` on the same inputs, whoever else is served."""

    def __init__(self, model: Any, limits: Limits = Limits()) -> None:
        context = model.config.get_text_config().max_position_embeddings
        wanted = min(context, limits.max_model_len or context)
        num_blocks = _num_blocks(model, limits, wanted)
        spec = ModelSpec(
            max_model_len=min(wanted, num_blocks * BLOCK),
            hidden_size=hidden_size(model),
            default_sampling=default_sampling(model.generation_config),
            device=model.device.type,
            dtype=str(model.dtype).removeprefix("torch."),
            vocab_size=model.config.get_text_config().vocab_size,
        )
        if spec.max_model_len < wanted:
            logger.warning("the cache holds %d tokens: that is the longest context", spec.max_model_len)
        super().__init__(spec, limits.max_running + limits.max_waiting)
        self._eos = eos_token_ids(model.generation_config)
        self._runner = Runner(model, num_blocks + RESERVED)
        self._scheduler = Scheduler(BlockPool(num_blocks + RESERVED), limits.max_running, limits.step_tokens)
        self._encoded = EncoderCache(limits.encoder_cache_bytes)
        # Beside the steps. Where they run on cores, what takes long gives way to what does not.
        niceness = 0 if spec.device == "cuda" else 19
        self._encoder = ThreadPoolExecutor(1, "encoder", lower_priority, (niceness,))
        self._encoding: dict[bytes, list[Request]] = {}  # who waits for an item, by its key
        self._is_idle = True
        self._stats = EngineStats(max_running=limits.max_running, kv_tokens=num_blocks * BLOCK)
        self._thread.start()

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return replace(
            self._stats,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_tokens_used=self._stats.kv_tokens - scheduler.pool.num_free * BLOCK,
            preemptions=scheduler.preemptions,
            prefix_evictions=scheduler.pool.evictions,
            encoder_bytes=self._encoded.num_bytes,
            encoder_evictions=self._encoded.evictions,
        )

    def close(self) -> None:
        super().close()
        self._encoder.shutdown(cancel_futures=True)

    def _run(self) -> None:
        while True:
            for news in self._arrivals(wait=self._is_idle):
                if news is None:
                    return
                if isinstance(news, Request):
                    self._join(news)
                else:
                    self._take(news)
            news = None  # its arrays are in the object store as long as they are referred to
            self.step()
            self._deliver()

    def step(self) -> None:
        """A token for everyone who has read its prompt, and some more of the prompts that are being read."""
        self._leave()
        chunks = self._scheduler.schedule()
        self._begin()
        reading = [chunk for chunk in chunks if not chunk.sequence.is_answering]
        num_read = sum(chunk.num_tokens for chunk in reading if not chunk.sequence.is_short)
        start = time.perf_counter()
        for done, logits in self._forward(chunks):
            self._commit(done)
            self._sample(done, logits)
        self._runner.wait()
        if chunks:
            self._scheduler.pace.took(time.perf_counter() - start, num_read)
        self._stats.steps += 1
        has_work = bool(self._scheduler.running or self._scheduler.waiting)
        self._is_idle = not has_work or (not chunks and bool(self._encoding))  # all wait for items

    def _join(self, request: Request) -> None:
        if request.cancelled:
            return
        sampling = request.sampling
        try:
            token_ids, spans, positions, delta = self._runner.read(request.prompt, request.items)
            for span in spans:
                span.embeds = self._at_hand(span)
        except Exception as error:  # noqa: BLE001  # a border: whatever breaks in here, breaks one request
            self._tell(request, as_serving_error(error))
            return
        self._stats.prompt_tokens += len(token_ids)
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos)
        limit = min(sampling.max_tokens, self._spec.max_model_len - len(token_ids))
        leader = None
        for index in range(sampling.n):
            sampler = SamplerState(sampling, index, token_ids, ends)
            sequence = Sequence(
                request, index, list(token_ids), spans, positions, delta, sampler, limit, leader
            )
            self._scheduler.add(sequence)
            leader = leader or sequence

    def _leave(self) -> None:
        for sequence in list(self._scheduler):
            request = sequence.request
            if sequence.index in request.ended:
                self._tell(request, Delta([], "stop", sequence.index))
            elif not request.cancelled:
                continue
            self._scheduler.remove(sequence)

    def _begin(self) -> None:
        """What the step found new, and the next item of each prompt: of many others' come in between."""
        for sequence in self._scheduler.running:
            if not sequence.started:
                sequence.started = time.perf_counter()
                self._stats.prefix_hit_tokens += 0 if sequence.leader else sequence.cached_tokens
            if span := sequence.missing:
                self._encode(sequence.request, span)

    def _at_hand(self, span: MediaSpan) -> torch.Tensor | None:
        """What need not be encoded, or was before."""
        if is_embedded(span.item):
            return self._runner.encode(span.item)
        known = self._encoded.get(span.key)
        self._stats.encoder_hits += known is not None
        return known

    def _encode(self, request: Request, span: MediaSpan) -> None:
        """What comes of it is in the inbox, sooner or later."""
        requests = self._encoding.setdefault(span.key, [])
        if request in requests:
            return
        requests.append(request)
        if len(requests) > 1:
            return
        known = self._encoded.get(span.key)  # since the request came
        if known is not None:
            self._stats.encoder_hits += 1
            self._inbox.put(Encoded(span.key, known))
        else:
            self._stats.encoder_misses += 1
            self._encoder.submit(self._encode_now, span, requests)

    def _encode_now(self, span: MediaSpan, requests: list[Request]) -> None:
        """In the encoder's thread; the list grows meanwhile."""
        embeds: torch.Tensor | None = None
        error: BaseException | None = None
        try:
            if not all(request.cancelled for request in requests):
                with torch.inference_mode():
                    embeds = self._runner.encode(span.item)
        except BaseException as raised:  # noqa: BLE001  # told to the engine's thread
            error = raised
        self._inbox.put(Encoded(span.key, embeds, error))

    def _take(self, done: Encoded) -> None:
        requests = self._encoding.pop(done.key)
        if done.error:
            if not isinstance(done.error, Exception):
                raise done.error
            failure = as_serving_error(done.error)
            for request in requests:
                self._fail(request, failure)
        if done.embeds is None:  # it broke, or nobody waited when its turn came
            return
        self._encoded.put(done.key, done.embeds)
        for sequence in self._scheduler:
            if sequence.request in requests:
                for span in sequence.spans:
                    if span.key == done.key:
                        span.embeds = done.embeds

    def _forward(self, batch: list[Chunk]) -> list[tuple[list[Chunk], torch.Tensor]]:
        """Chunks and their logits. Where the batch breaks each is tried alone, and whoever breaks fails."""
        batch = [chunk for chunk in batch if not chunk.sequence.request.cancelled]
        if not batch:
            return []
        try:
            return [(batch, self._runner.forward(batch))]
        except Exception as error:  # noqa: BLE001  # a border, as above
            failure = as_serving_error(error)
        if len(batch) > 1:
            return [pair for chunk in batch for pair in self._forward([chunk])]
        self._fail(batch[0].sequence.request, failure)
        return []

    def _commit(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            if not chunk.sequence.request.cancelled:  # or failed, for another of its answers
                self._scheduler.commit(chunk)

    def _sample(self, chunks: list[Chunk], logits: torch.Tensor) -> None:
        """The next token for those whose last token so far is in their chunk."""
        rows = [row for row, chunk in enumerate(chunks) if chunk.is_last]
        if not rows:
            return
        if len(rows) < len(chunks):
            logits = logits[rows]
        sequences = [chunks[row].sequence for row in rows]
        for sequence, token in zip(sequences, sample(logits, [s.sampler for s in sequences]), strict=True):
            self._extend(sequence, token)

    def _extend(self, sequence: Sequence, token: Sampled) -> None:
        request = sequence.request
        if token.token_id is None:  # also where nobody waits any more: others get its blocks
            self._fail(request, ServingError("The model made no numbers of this request."))
            return
        if request.cancelled:
            return
        first = {} if sequence.num_generated else _first(sequence)
        if token.token_id in sequence.sampler.ends:
            self._tell(request, Delta([], "stop", sequence.index, **first))
            self._scheduler.remove(sequence)
            return
        sequence.token_ids.append(token.token_id)
        sequence.sampler.add(token.token_id)
        self._stats.generated_tokens += 1
        reason: Literal["length"] | None = "length" if sequence.num_generated == sequence.limit else None
        logprobs = [token.logprob] if token.logprob else []
        self._tell(request, Delta([token.token_id], reason, sequence.index, logprobs, **first))
        if reason:
            self._scheduler.remove(sequence)

    def _fail(self, request: Request, error: ServingError) -> None:
        """What the request left in the cache may be no numbers: nobody must find it there."""
        request.cancelled = True
        for sequence in [each for each in self._scheduler if each.request is request]:
            self._runner.clear(self._scheduler.discard(sequence))
        self._tell(request, error)


@dataclass(frozen=True, slots=True)
class Encoded:
    """What came of an item: embeddings, an error, or nothing, as nobody waited any more."""

    key: bytes
    embeds: torch.Tensor | None
    error: BaseException | None = None


class EncoderCache:
    """Items as the model's encoders made them; the one not used for longest goes first."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self.evictions = 0
        self._max_bytes = max_bytes
        self._items: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def get(self, key: bytes) -> torch.Tensor | None:
        embeds = self._items.get(key)
        if embeds is not None:
            self._items.move_to_end(key)
        return embeds

    def put(self, key: bytes, embeds: torch.Tensor) -> None:
        if key in self._items:
            return
        self._items[key] = embeds
        self.num_bytes += embeds.nbytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._items.popitem(last=False)
            self.num_bytes -= oldest.nbytes
            self.evictions += 1


def _first(sequence: Sequence) -> dict[str, Any]:
    """What the first delta of an answer tells besides."""
    return {
        "cached_tokens": (sequence.leader or sequence).cached_tokens,
        "queue_ms": (sequence.started - sequence.request.submitted) * 1000,
        "prefill_ms": (time.perf_counter() - sequence.started) * 1000,
    }


def _num_blocks(model: Any, limits: Limits, context: int) -> int:
    per_block = bytes_per_token(model) * BLOCK
    if limits.kv_cache_bytes:
        return max(1, limits.kv_cache_bytes // per_block)
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
        return int(free * _GPU_SHARE) // per_block
    return max(_CPU_BYTES // per_block, -(-context // BLOCK))
