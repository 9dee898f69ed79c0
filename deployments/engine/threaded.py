"""What every engine in a thread shares: how requests get into the thread, and deltas out of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Iterable, Sequence, Set
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

import torch

from deployments.engine.base import EngineItem, EngineStats
from deployments.errors import Overloaded, ServingError, StageUnavailable
from deployments.types import Delta, ModelSpec, Prompt, SamplingParams

logger = logging.getLogger("ray.serve")

_DIED = "The engine has stopped."


class Request:
    """One submission, shared by the loop that reads it and the engine's thread that works on it."""

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
        self.submitted = time.perf_counter()
        self.cancelled = False  # set by the loop, looked at by the thread before each step
        self.ended = ended  # answers; likewise


class Output:
    """The reader's side of a request. Only its loop touches it, so there is nothing to lock."""

    def __init__(self, n: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.left = n  # answers that have not ended
        self._ready: dict[int, Delta] = {}  # for each answer, what the reader has not taken yet
        self._error: ServingError | None = None
        self._news = asyncio.Event()

    async def next(self) -> Delta:
        """What came while the reader was busy is one delta. An error comes after the tokens before it."""
        await self._news.wait()
        if not self._ready:
            assert self._error
            raise self._error
        delta = self._ready.pop(next(iter(self._ready)))
        if not self._ready and not self._error:
            self._news.clear()
        self.left -= delta.finish_reason is not None
        return delta

    def add(self, news: Delta | ServingError) -> None:
        self._news.set()
        if isinstance(news, ServingError):
            self._error = news
        elif earlier := self._ready.get(news.index):
            self._ready[news.index] = replace(
                earlier,
                token_ids=earlier.token_ids + news.token_ids,
                logprobs=earlier.logprobs + news.logprobs,
                finish_reason=news.finish_reason,
            )
        else:
            self._ready[news.index] = news


class ThreadedEngine:
    """The thread ends only with `close()` or by a fault of the engine itself, and then every open request
    fails with StageUnavailable. Subclasses serve requests in `_run`.
    """

    def __init__(self, spec: ModelSpec, max_open: int) -> None:
        self._spec = spec
        self._max_open = max_open  # requests that run or wait
        self._inbox: SimpleQueue[Any] = SimpleQueue()  # requests, and what subclasses put there; None: close
        self._news: list[tuple[Output, Delta | ServingError]] = []  # not delivered yet; the thread's alone
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
                raise StageUnavailable(_DIED)
            if len(self._open) >= self._max_open:
                raise Overloaded("Too many requests are waiting for the model. Try again later.")
            self._open.add(request)
        self._inbox.put(request)
        try:
            while request.output.left:
                yield await request.output.next()
        finally:
            request.cancelled = True
            with self._lock:
                self._open.discard(request)

    def check_health(self) -> None:
        if not self._thread.is_alive():
            raise StageUnavailable(_DIED)

    def close(self) -> None:
        with self._lock:
            for request in self._open:
                request.cancelled = True
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        """Returns when the inbox says so."""
        raise NotImplementedError

    def _run_until_end(self) -> None:
        try:
            with torch.inference_mode():
                self._run()
        finally:
            with self._lock:
                self._stopped = True
                self._news += [(request.output, StageUnavailable(_DIED)) for request in self._open]
            self._deliver()

    def _arrivals(self, wait: bool) -> Iterable[Any]:
        """What is in the inbox; with `wait`, at least one."""
        if wait:
            yield self._inbox.get()
        with contextlib.suppress(Empty):
            while True:
                yield self._inbox.get_nowait()

    def _tell(self, request: Request, news: Delta | ServingError) -> None:
        self._news.append((request.output, news))

    def _deliver(self) -> None:
        """Wakes each loop once, whatever the number of its readers."""
        news, self._news = self._news, []
        for loop in {output.loop for output, _ in news}:
            batch = [(output, each) for output, each in news if output.loop is loop]
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
                loop.call_soon_threadsafe(_hand_over, batch)


def _hand_over(news: list[tuple[Output, Delta | ServingError]]) -> None:
    for output, each in news:
        output.add(each)


def as_serving_error(error: Exception) -> ServingError:
    """What a request is told when it breaks. Raises what breaks the engine itself."""
    if isinstance(error, ServingError):
        return error
    if isinstance(error, torch.AcceleratorError):
        raise error  # such a device answers nothing any more: this ends the engine, and Serve replaces it
    if isinstance(error, torch.OutOfMemoryError):
        logger.error("out of memory", exc_info=error)
        torch.cuda.empty_cache()
        return ServingError("The model ran out of memory on this request.")
    logger.error("a request broke in the model", exc_info=error)
    return ServingError("The model failed on this request.")


def default_sampling(config: Any) -> dict[str, Any]:
    """What the checkpoint wants where a request is silent, by the names of SamplingParams."""
    named = {"max_tokens": config.max_new_tokens, "repetition_penalty": config.repetition_penalty}
    if config.do_sample:
        named |= {name: getattr(config, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    told = {name: value for name, value in named.items() if value is not None}
    return {"temperature": 1.0 if config.do_sample else 0.0} | told


def eos_token_ids(config: Any) -> frozenset[int]:
    """Of a GenerationConfig."""
    token_ids = config.eos_token_id
    if token_ids is None:
        return frozenset()
    return frozenset([token_ids] if isinstance(token_ids, int) else token_ids)
