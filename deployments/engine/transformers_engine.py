"""The plain engine: requests run one after another through `model.generate`, whatever the family."""

from __future__ import annotations

import copy
import inspect
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from deployments.engine.assemble import assemble
from deployments.engine.base import EngineStats
from deployments.engine.inputs import embedded, hidden_size, is_embedded
from deployments.engine.sampler import SamplerState, sample
from deployments.engine.threaded import (
    Request,
    ThreadedEngine,
    as_serving_error,
    default_sampling,
    eos_token_ids,
)
from deployments.errors import ServingError
from deployments.types import Delta, ModelSpec


class TransformersEngine(ThreadedEngine):
    """First come, first served; greedy output is that of `model.generate` on the same inputs.

    A request that breaks inside the model fails alone.
    """

    def __init__(self, model: Any, max_model_len: int | None = None, max_open: int = 256) -> None:
        self._model = model
        self._eos = eos_token_ids(model.generation_config)
        text = model.config.get_text_config()
        context = text.max_position_embeddings
        spec = ModelSpec(
            max_model_len=min(context, max_model_len or context),
            hidden_size=hidden_size(model),
            default_sampling=default_sampling(model.generation_config),
            device=model.device.type,
            dtype=str(model.dtype).removeprefix("torch."),
            vocab_size=text.vocab_size,
        )
        super().__init__(spec, max_open)
        self._accepts = frozenset(inspect.signature(model.forward).parameters)
        self._waiting: deque[Request] = deque()
        self._stats = EngineStats()
        self._thread.start()

    def stats(self) -> EngineStats:
        return replace(self._stats, waiting=len(self._waiting) + self._inbox.qsize())

    def _run(self) -> None:
        while True:
            for request in self._arrivals(wait=not self._waiting):
                if request is None:
                    return
                self._waiting.append(request)
            request = None  # its arrays are in the object store as long as they are referred to
            self._serve(self._waiting.popleft())
            self._deliver()

    def _serve(self, request: Request) -> None:
        self._stats.running = 1
        try:
            for index in range(request.sampling.n):
                if not request.cancelled:
                    self._generate(request, index)
        except Exception as error:  # noqa: BLE001  # a border: whatever breaks in here, breaks one request
            self._tell(request, as_serving_error(error))
        self._stats.running = 0

    def _generate(self, request: Request, index: int) -> None:
        started = time.perf_counter()
        sampling = request.sampling
        if any(is_embedded(item) for item in request.items):
            inputs = embedded(self._model, request.prompt, request.items, self._accepts)
        else:
            inputs = assemble(request.prompt, request.items, self._accepts, self._model.dtype)
        token_ids = inputs["input_ids"][0].tolist()
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos)
        limit = min(sampling.max_tokens, self._spec.max_model_len - len(token_ids))
        state = SamplerState(sampling, index, token_ids, ends)
        reason: Literal["stop", "length"] | None = None

        def pick(logits: torch.Tensor) -> int:
            """Called by `generate` for every token."""
            nonlocal reason
            (token,) = sample(logits, [state])
            if token.token_id is None:
                raise ServingError("The model made no numbers of this request.")
            first = {} if state.num_tokens else self._first(request, started)
            ended = token.token_id in ends
            reason = "stop" if ended else None
            if not ended:
                state.add(token.token_id)
                self._stats.generated_tokens += 1
                reason = "length" if state.num_tokens == limit else None
            logprobs = [token.logprob] if token.logprob and not ended else []
            self._tell(request, Delta([] if ended else [token.token_id], reason, index, logprobs, **first))
            self._deliver()
            return token.token_id

        self._stats.prompt_tokens += len(token_ids)
        self._model.generate(
            **{name: tensor.to(self._model.device, non_blocking=True) for name, tensor in inputs.items()},
            generation_config=self._config(limit),
            logits_processor=LogitsProcessorList([_Pick(pick)]),
            stopping_criteria=StoppingCriteriaList([_Ended(request, index, ends)]),
        )
        if not reason and index in request.ended:
            self._tell(request, Delta([], "stop", index))
            self._deliver()  # the next answer's first token may be long in coming

    def _first(self, request: Request, started: float) -> dict[str, Any]:
        """What the first delta of an answer tells besides."""
        return {
            "queue_ms": (started - request.submitted) * 1000,
            "prefill_ms": (time.perf_counter() - started) * 1000,
        }

    def _config(self, limit: int) -> GenerationConfig:
        """Tokens are picked by our own sampler, and ended by our own criterion."""
        config = copy.deepcopy(self._model.generation_config)
        config.max_length = None
        config.max_new_tokens = limit
        if config.pad_token_id is None:
            config.pad_token_id = 0  # one sequence needs no padding; transformers would warn every time
        # `generate` would put the default back for None; this id is never drawn.
        config.eos_token_id = [self._spec.vocab_size]
        config.num_beams = config.num_return_sequences = 1
        config.do_sample = False
        config.temperature = config.top_p = config.top_k = config.min_p = None
        config.repetition_penalty = 1.0
        return config


class _Pick(LogitsProcessor):  # type: ignore[misc]
    """Leaves `generate` one token to choose from."""

    def __init__(self, pick: Callable[[torch.Tensor], int]) -> None:
        self._pick = pick

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token_id = self._pick(scores.clone())
        only = torch.full_like(scores, -torch.inf)
        only[:, token_id] = 0
        return only


class _Ended(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, request: Request, index: int, ends: frozenset[int]) -> None:
        self._request, self._index, self._ends = request, index, ends

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        request = self._request
        left = request.cancelled or self._index in request.ended
        ended = left or int(input_ids[0, -1]) in self._ends
        return torch.full((len(input_ids),), ended, device=input_ids.device)
