"""The plain engine: requests run one after another through `model.generate`, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import logging
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from queue import SimpleQueue
from typing import Any, Literal

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from deployments.engine.assemble import assemble
from deployments.engine.base import EngineItem
from deployments.engine.inputs import embedded, hidden_size, is_embedded
from deployments.errors import ServingError, StageUnavailable
from deployments.types import Delta, ModelSpec, Prompt, SamplingParams

logger = logging.getLogger("ray.serve")

FinishReason = Literal["stop", "length"]

COLDEST = 1e-5  # a lower temperature is greedy: dividing by it would overflow

_DIED = "The engine has stopped."


class TransformersEngine:
    """First come, first served; greedy output is that of `model.generate` on the same inputs.

    A request that breaks inside the model fails alone. The thread ends only with `close()` or by a fault
    of the engine itself, and then every open request fails with StageUnavailable.
    """

    def __init__(self, model: Any, max_model_len: int | None = None) -> None:
        self._model = model
        self._defaults: GenerationConfig = model.generation_config
        context = model.config.get_text_config().max_position_embeddings
        self._spec = ModelSpec(
            max_model_len=min(context, max_model_len or context),
            hidden_size=hidden_size(model),
            default_sampling=_default_sampling(self._defaults),
            device=model.device.type,
            dtype=str(model.dtype).removeprefix("torch."),
        )
        self._accepts = frozenset(inspect.signature(model.forward).parameters)
        self._waiting: SimpleQueue[_Request | None] = SimpleQueue()
        self._open: set[_Request] = set()
        self._lock = threading.Lock()  # guards _open and _stopped
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    async def submit(
        self, prompt: Prompt, items: Sequence[EngineItem], sampling: SamplingParams
    ) -> AsyncGenerator[Delta, None]:
        request = _Request(prompt, items, sampling)
        with self._lock:
            if self._stopped:
                raise StageUnavailable(_DIED)
            self._open.add(request)
        self._waiting.put(request)
        try:
            while True:
                delta = await request.output.next()
                yield delta
                if delta.finish_reason:
                    return
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
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while request := self._waiting.get():
                if not request.cancelled:
                    self._serve(request)
                del request  # its arrays are in the object store as long as they are referred to
        finally:
            with self._lock:
                self._stopped = True
                for request in self._open:
                    request.output.fail(StageUnavailable(_DIED))

    def _serve(self, request: _Request) -> None:
        try:
            self._generate(request)
        except ServingError as error:
            request.output.fail(error)
        except torch.OutOfMemoryError:
            logger.exception("out of memory")
            torch.cuda.empty_cache()
            request.output.fail(ServingError("The model ran out of memory on this request."))
        except torch.AcceleratorError:
            request.output.fail(ServingError("The model's device failed on this request."))
            raise  # such a device answers nothing any more: this ends the engine, and Serve replaces it
        except Exception:  # the border of the engine: whatever breaks in here, breaks one request
            logger.exception("a request broke in the model")
            request.output.fail(ServingError("The model failed on this request."))

    @torch.inference_mode()
    def _generate(self, request: _Request) -> None:
        started = time.perf_counter()
        has_embeds = any(is_embedded(item) for item in request.items)
        if has_embeds:
            inputs = embedded(self._model, request.prompt, request.items, self._accepts)
        else:
            inputs = assemble(request.prompt, request.items, self._accepts, self._model.dtype)
        room = self._spec.max_model_len - inputs["input_ids"].shape[1]
        config = self._generation_config(request.sampling, room)
        # What a model makes of very large embeddings may not be finite: a GPU would fail for good at drawing
        # from that.
        config.remove_invalid_values = has_embeds
        # `generate` draws from torch's own generator, as nobody else in this process does.
        if request.sampling.seed is None:
            torch.seed()
        else:
            torch.manual_seed(request.sampling.seed)
        stream = _TokenStream(request, _as_ids(config.eos_token_id), started)
        self._model.generate(
            **{name: tensor.to(self._model.device, non_blocking=True) for name, tensor in inputs.items()},
            generation_config=config,
            streamer=stream,
            stopping_criteria=StoppingCriteriaList([_Cancelled(request)]),
        )
        if not request.cancelled:
            request.output.finish("stop" if stream.reached_eos else "length")

    def _generation_config(self, sampling: SamplingParams, room: int) -> GenerationConfig:
        config = copy.deepcopy(self._defaults)
        config.max_length = None
        if config.pad_token_id is None:
            config.pad_token_id = 0  # one sequence needs no padding; transformers would warn every time
        config.max_new_tokens = min(sampling.max_tokens, room)
        if sampling.ignore_eos:
            # `generate` would put the default back for None; this id is never drawn.
            config.eos_token_id = [self._model.config.get_text_config().vocab_size]
        config.num_beams = config.num_return_sequences = 1
        config.do_sample = sampling.temperature >= COLDEST
        if config.do_sample:
            config.temperature, config.top_p = sampling.temperature, sampling.top_p
            # Zero is no limit: transformers would take 50 where the checkpoint is silent.
            config.top_k = self._defaults.top_k or 0
        else:
            config.temperature = config.top_p = config.top_k = None
        return config


class _Request:
    """One submission, shared by the loop that reads it and the engine's thread that writes it."""

    def __init__(self, prompt: Prompt, items: Sequence[EngineItem], sampling: SamplingParams) -> None:
        self.prompt = prompt
        self.items = items
        self.sampling = sampling
        self.submitted = time.perf_counter()
        self.cancelled = False  # set by the loop, looked at by the thread after each token
        self.output = _Output()


class _Output:
    """From the engine's thread to a loop. What comes while the reader is busy is read as one delta."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._lock = threading.Lock()  # guards what follows
        self._told = False  # the loop has been woken and has not read yet
        self._token_ids: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._error: ServingError | None = None
        self._queue_ms = self._prefill_ms = 0.0

    async def next(self) -> Delta:
        await self._news.wait()
        with self._lock:
            if self._error and not self._token_ids:
                raise self._error
            delta = Delta(self._token_ids, self._finish_reason, self._queue_ms, self._prefill_ms)
            self._token_ids, self._queue_ms, self._prefill_ms = [], 0.0, 0.0
            if not self._error:  # which is raised at the next call
                self._told = False
                self._news.clear()
            return delta

    def start(self, queue_ms: float, prefill_ms: float) -> None:
        with self._lock:
            self._queue_ms, self._prefill_ms = queue_ms, prefill_ms

    def push(self, token_id: int) -> None:
        with self._lock:
            self._token_ids.append(token_id)
            self._tell()

    def finish(self, reason: FinishReason) -> None:
        with self._lock:
            self._finish_reason = reason
            self._tell()

    def fail(self, error: ServingError) -> None:
        with self._lock:
            if self._finish_reason is None:
                self._error = error
                self._tell()

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._news.set)


class _TokenStream(BaseStreamer):  # type: ignore[misc]
    """Called by `generate` with the prompt, then with every token."""

    def __init__(self, request: _Request, eos_token_ids: frozenset[int], started: float) -> None:
        self._request = request
        self._eos_token_ids = eos_token_ids
        self._started = started
        self._seen = 0
        self.reached_eos = False

    def put(self, value: torch.Tensor) -> None:
        self._seen += 1
        if self._seen == 1:
            return
        output = self._request.output
        if self._seen == 2:
            queue_ms = (self._started - self._request.submitted) * 1000
            output.start(queue_ms, (time.perf_counter() - self._started) * 1000)
        token_id = int(value.item())
        self.reached_eos = token_id in self._eos_token_ids
        if not self.reached_eos:
            output.push(token_id)

    def end(self) -> None:
        pass


class _Cancelled(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, request: _Request) -> None:
        self._request = request

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self._request.cancelled, device=input_ids.device)


def _as_ids(token_id: int | list[int] | None) -> frozenset[int]:
    if token_id is None:
        return frozenset()
    return frozenset([token_id] if isinstance(token_id, int) else token_id)


def _default_sampling(config: GenerationConfig) -> dict[str, Any]:
    """What the checkpoint wants where a request is silent: `temperature`, and maybe `top_p`, `max_tokens`."""
    named = {"max_tokens": config.max_new_tokens}
    if config.do_sample:
        named |= {"temperature": config.temperature, "top_p": config.top_p}
    told = {name: value for name, value in named.items() if value is not None}
    return {"temperature": 1.0 if config.do_sample else 0.0} | told
