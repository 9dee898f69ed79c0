"""The parts that all engines with a thread share: requests into the thread, deltas and errors out of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence, Set
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from deployments.engine.base import EngineItem, EngineStats
from deployments.engine.inputs import hidden_size
from deployments.errors import Overloaded, ServingError, StageUnavailable
from deployments.types import Delta, ModelSpec, Prompt, SamplingParams

logger = logging.getLogger("ray.serve")

_STOPPED = "The engine has stopped."

M = TypeVar("M")  # messages to the thread that a subclass adds


class Request:
    """One submission. The event loop that reads it and the engine's thread share it."""

    def __init__(
        self,
        prompt: Prompt,
        items: Sequence[EngineItem],
        sampling: SamplingParams,
        ended: Set[int] = frozenset(),
    ) -> None:
        self.prompt = prompt
        self.items = items
        self.sampling = sampling
        self.output = Output(sampling.n)
        self.submitted_at = time.perf_counter()
        # The loop sets both; the thread checks them before each step.
        self.cancelled = False
        self.ended = ended  # indices of answers that need no more tokens


class Output:
    """The reader's side of a request. Only its event loop touches it, so it needs no lock."""

    def __init__(self, n: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.num_open = n  # answers without a finish reason
        self._pending: dict[int, Delta] = {}  # one delta per answer that the reader has not taken yet
        self._error: ServingError | None = None
        self._is_ready = asyncio.Event()

    async def next(self) -> Delta:
        """Waits for the next delta. Raises the request's error after the deltas before it."""
        await self._is_ready.wait()
        if not self._pending:
            assert self._error
            raise self._error
        delta = self._pending.pop(next(iter(self._pending)))
        if not self._pending and not self._error:
            self._is_ready.clear()
        self.num_open -= delta.finish_reason is not None
        return delta

    def add(self, event: Delta | ServingError) -> None:
        """Adds a delta to the pending one of its answer, so that a slow reader gets few large deltas."""
        self._is_ready.set()
        if isinstance(event, ServingError):
            self._error = event
        elif earlier := self._pending.get(event.index):
            self._pending[event.index] = replace(
                earlier,
                token_ids=earlier.token_ids + event.token_ids,
                logprobs=earlier.logprobs + event.logprobs,
                finish_reason=event.finish_reason,
            )
        else:
            self._pending[event.index] = event


class ThreadedEngine(Generic[M]):
    """Runs a subclass's `_run` in a thread.

    The thread ends only by `close()` or by a bug or device failure in the engine. In both cases every open
    request fails with StageUnavailable.
    """

    def __init__(self, spec: ModelSpec, max_open_requests: int) -> None:
        self._spec = spec
        self._max_open_requests = max_open_requests  # running and waiting
        self._inbox: SimpleQueue[Request | M | None] = SimpleQueue()  # None ends the thread
        self._unsent: list[tuple[Output, Delta | ServingError]] = []  # only the thread touches it
        self._open: set[Request] = set()
        self._lock = threading.Lock()  # guards _open and _stopped
        self._stopped = False
        self._thread = threading.Thread(target=self._run_until_end, name="engine", daemon=True)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def stats(self) -> EngineStats:
        raise NotImplementedError

    async def submit(
        self,
        prompt: Prompt,
        items: Sequence[EngineItem],
        sampling: SamplingParams,
        ended: Set[int] = frozenset(),
    ) -> AsyncGenerator[Delta, None]:
        request = Request(prompt, items, sampling, ended)
        with self._lock:
            if self._stopped:
                raise StageUnavailable(_STOPPED)
            if len(self._open) >= self._max_open_requests:
                raise Overloaded("Too many requests are waiting for the model. Try again later.")
            self._open.add(request)
        self._inbox.put(request)
        try:
            while request.output.num_open:
                yield await request.output.next()
        finally:
            request.cancelled = True
            with self._lock:
                self._open.discard(request)

    def check_health(self) -> None:
        if not self._thread.is_alive():
            raise StageUnavailable(_STOPPED)

    def close(self) -> None:
        with self._lock:
            for request in self._open:
                request.cancelled = True
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        """Serves requests. Returns when the inbox gives None."""
        raise NotImplementedError

    def _run_until_end(self) -> None:
        try:
            with torch.inference_mode():
                self._run()
        finally:
            with self._lock:
                self._stopped = True
                self._unsent += [(request.output, StageUnavailable(_STOPPED)) for request in self._open]
            self._deliver()

    def _messages(self, wait: bool) -> Iterator[Request | M | None]:
        """Yields all messages in the inbox. With `wait`, blocks until there is one."""
        if wait:
            yield self._inbox.get()
        with contextlib.suppress(Empty):
            while True:
                yield self._inbox.get_nowait()

    def _send(self, request: Request, event: Delta | ServingError) -> None:
        """Queues the event; `_deliver` sends it."""
        self._unsent.append((request.output, event))

    def _deliver(self) -> None:
        """Sends the queued events. Wakes each event loop once, whatever the number of its readers."""
        unsent, self._unsent = self._unsent, []
        for loop in {output.loop for output, _ in unsent}:
            batch = [(output, event) for output, event in unsent if output.loop is loop]
            with contextlib.suppress(RuntimeError):  # a closed loop has no readers
                loop.call_soon_threadsafe(_add_all, batch)


def _add_all(batch: list[tuple[Output, Delta | ServingError]]) -> None:
    for output, event in batch:
        output.add(event)


def as_serving_error(error: Exception) -> ServingError:
    """Maps an error of the model's code to the one that the client gets. Re-raises errors of the device."""
    if isinstance(error, ServingError):
        return error
    if isinstance(error, torch.AcceleratorError):
        raise error  # the device is lost: this ends the engine, and Serve replaces the replica
    if isinstance(error, torch.OutOfMemoryError):
        logger.error("out of memory", exc_info=error)
        torch.cuda.empty_cache()
        return ServingError("The model ran out of memory on this request.")
    logger.error("the model failed on a request", exc_info=error)
    return ServingError("The model failed on this request.")


def not_finite_error() -> ServingError:
    return ServingError("The model produced NaN or infinite logits for this request.")


def model_spec(model: Any, max_model_len: int | None) -> ModelSpec:
    text = model.config.get_text_config()
    context: int = text.max_position_embeddings
    return ModelSpec(
        max_model_len=min(context, max_model_len or context),
        hidden_size=hidden_size(model),
        default_sampling=_default_sampling(model.generation_config),
        device=model.device.type,
        dtype=str(model.dtype).removeprefix("torch."),
        vocab_size=text.vocab_size,
    )


def _default_sampling(generation_config: Any) -> dict[str, Any]:
    """Returns the checkpoint's defaults for settings that a request omits, by the names of SamplingParams."""
    config = generation_config
    defaults = {"max_tokens": config.max_new_tokens, "repetition_penalty": config.repetition_penalty}
    if config.do_sample:
        defaults |= {name: getattr(config, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    given = {name: value for name, value in defaults.items() if value is not None}
    return {"temperature": 1.0 if config.do_sample else 0.0} | given


def end_token_ids(generation_config: Any, sampling: SamplingParams) -> frozenset[int]:
    """Returns the tokens that end an answer: the request's and, unless it ignores them, the checkpoint's."""
    ends = frozenset(sampling.stop_token_ids)
    eos = generation_config.eos_token_id
    if sampling.ignore_eos or eos is None:
        return ends
    return ends | frozenset([eos] if isinstance(eos, int) else eos)
