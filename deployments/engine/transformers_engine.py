"""The plain engine: runs one request after another through `model.generate`. Serves every family."""

from __future__ import annotations

import copy
import inspect
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Never

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from deployments.engine.base import EngineStats
from deployments.engine.config import EngineConfig
from deployments.engine.inputs import assemble, embedded, is_embedded
from deployments.engine.sampler import SamplerState, sample
from deployments.engine.threaded import (
    Request,
    ThreadedEngine,
    as_serving_error,
    end_token_ids,
    model_spec,
    not_finite_error,
)
from deployments.types import Delta


class TransformersEngine(ThreadedEngine[Never]):
    """First come, first served. Greedy output equals that of `model.generate` on the same inputs.

    A request that fails inside the model fails alone.
    """

    def __init__(self, model: Any, config: EngineConfig = EngineConfig()) -> None:  # noqa: B008  # not mutated
        super().__init__(model_spec(model, config.max_model_len), 1 + config.max_waiting_requests)
        self._model = model
        self._accepts = frozenset(inspect.signature(model.forward).parameters)
        self._waiting: deque[Request] = deque()
        self._stats = EngineStats()
        self._thread.start()

    def stats(self) -> EngineStats:
        return replace(self._stats, waiting=len(self._waiting) + self._inbox.qsize())

    def _run(self) -> None:
        while True:
            for request in self._messages(wait=not self._waiting):
                if request is None:
                    return
                self._waiting.append(request)
            request = None  # a reference to a request would keep its arrays in the object store
            self._serve(self._waiting.popleft())
            self._deliver()

    def _serve(self, request: Request) -> None:
        self._stats.running = 1
        try:
            for index in range(request.sampling.n):
                if not request.cancelled:
                    self._generate(request, index)
        except Exception as error:  # noqa: BLE001  # any error of the model's code fails this request only
            self._send(request, as_serving_error(error))
        self._stats.running = 0

    def _generate(self, request: Request, index: int) -> None:
        started_at = time.perf_counter()
        sampling = request.sampling
        if any(is_embedded(item) for item in request.items):
            inputs = embedded(self._model, request.prompt, request.items, self._accepts)
        else:
            inputs = assemble(request.prompt, request.items, self._accepts, self._model.dtype)
        token_ids = inputs["input_ids"][0].tolist()
        ends = end_token_ids(self._model.generation_config, sampling)
        max_new_tokens = min(sampling.max_tokens, self._spec.max_model_len - len(token_ids))
        state = SamplerState(sampling, index, token_ids, ends)
        reason: Literal["stop", "length"] | None = None

        def pick(logits: torch.Tensor) -> int:
            """Draws and sends a token. `generate` calls this for every token."""
            nonlocal reason
            (token,) = sample(logits, [state])
            if token.token_id is None:
                raise not_finite_error()
            is_first = state.num_tokens == 0
            is_end = token.token_id in ends
            reason = "stop" if is_end else None
            if not is_end:
                state.add(token.token_id)
                self._stats.generated_tokens += 1
                reason = "length" if state.num_tokens == max_new_tokens else None
            delta = Delta(
                token_ids=[] if is_end else [token.token_id],
                finish_reason=reason,
                index=index,
                logprobs=[token.logprob] if token.logprob and not is_end else [],
                queue_ms=(started_at - request.submitted_at) * 1000 if is_first else 0.0,
                prefill_ms=(time.perf_counter() - started_at) * 1000 if is_first else 0.0,
            )
            self._send(request, delta)
            self._deliver()
            return token.token_id

        self._stats.prompt_tokens += len(token_ids)
        self._model.generate(
            **{name: tensor.to(self._model.device, non_blocking=True) for name, tensor in inputs.items()},
            generation_config=self._config(max_new_tokens),
            logits_processor=LogitsProcessorList([_Pick(pick)]),
            stopping_criteria=StoppingCriteriaList([_Ended(request, index, ends)]),
        )
        if not reason and index in request.ended:
            self._send(request, Delta([], "stop", index))
            self._deliver()  # now, since the next answer's first token may take long

    def _config(self, max_new_tokens: int) -> GenerationConfig:
        """Turns off what `_Pick` and `_Ended` do instead: sampling and the end of the answer."""
        config = copy.deepcopy(self._model.generation_config)
        config.max_length = None
        config.max_new_tokens = max_new_tokens
        if config.pad_token_id is None:
            config.pad_token_id = 0  # one sequence needs no padding; transformers would warn every time
        # None would bring the checkpoint's ids back. This id is outside of the vocabulary, so it never ends.
        config.eos_token_id = [self._spec.vocab_size]
        config.num_beams = config.num_return_sequences = 1
        config.do_sample = False
        config.temperature = config.top_p = config.top_k = config.min_p = None
        config.repetition_penalty = 1.0
        return config


class _Pick(LogitsProcessor):  # type: ignore[misc]
    """Leaves `generate` only the token that our sampler has drawn."""

    def __init__(self, pick: Callable[[torch.Tensor], int]) -> None:
        self._pick = pick

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token_id = self._pick(scores.clone())
        only = torch.full_like(scores, -torch.inf)
        only[:, token_id] = 0
        return only


class _Ended(StoppingCriteria):  # type: ignore[misc]
    """Stops `generate` at an end token, or if the client needs no more tokens."""

    def __init__(self, request: Request, index: int, ends: frozenset[int]) -> None:
        self._request, self._index, self._ends = request, index, ends

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        request = self._request
        left = request.cancelled or self._index in request.ended
        ended = left or int(input_ids[0, -1]) in self._ends
        return torch.full((len(input_ids),), ended, device=input_ids.device)
