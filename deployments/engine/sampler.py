"""Draws tokens from logits, for a batch of sequences that each have their own settings.

A draw depends only on the sequence's logits and its own random numbers, never on the rest of the batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np
import torch

from deployments.types import SamplingParams, TokenLogprob

MIN_TEMPERATURE = 1e-5  # a lower one means greedy, since dividing by it would overflow


class SamplerState:
    """The settings and the sampling history of one sequence."""

    def __init__(
        self, sampling: SamplingParams, index: int, prompt_ids: Sequence[int], ends: Set[int]
    ) -> None:
        """`index`: of the answer in its request. `ends`: tokens that end the answer."""
        self.sampling = sampling
        self.greedy = sampling.temperature < MIN_TEMPERATURE
        self.ends = ends
        self.num_tokens = 0
        self.seen: set[int] | None = set(prompt_ids) if sampling.repetition_penalty != 1 else None
        self.counts: Counter[int] | None = None
        if sampling.presence_penalty or sampling.frequency_penalty:
            self.counts = Counter()
        self.shapes_logits = bool(
            sampling.logit_bias or sampling.min_tokens or self.seen is not None or self.counts is not None
        )
        # Maps the API's seeds, -2^63 to 2^64 - 1, to distinct numbers that are not negative.
        seed = None if sampling.seed is None else [sampling.seed % 2**65, index]
        self._random = np.random.default_rng(seed)

    def draw(self) -> float:
        """Returns the next of the sequence's random numbers, in [0, 1)."""
        return float(self._random.random())

    def add(self, token_id: int) -> None:
        self.num_tokens += 1
        if self.seen is not None:
            self.seen.add(token_id)
        if self.counts is not None:
            self.counts[token_id] += 1


class Sampled(NamedTuple):
    token_id: int | None  # None: the logits had NaN or infinity
    logprob: TokenLogprob | None = None  # if the request asked for it


def sample(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[Sampled]:
    """Draws one token for each row of `logits`, [len(states), vocabulary]. May overwrite `logits`."""
    logits = logits.float()
    best, tokens = logits.max(dim=-1)
    is_finite = map(math.isfinite, best.tolist())
    wanted = [row for row, state in enumerate(states) if state.sampling.top_logprobs is not None]
    logprobs = logits[wanted].log_softmax(-1) if wanted else None

    shaped = [row for row, state in enumerate(states) if state.shapes_logits]
    for row in shaped:
        _shape(logits[row], states[row])
    if shaped:
        tokens[shaped] = logits[shaped].argmax(-1)
    drawn = [row for row, state in enumerate(states) if not state.greedy]
    if drawn:
        tokens[drawn] = _draw(logits[drawn], [states[row] for row in drawn])

    token_ids: list[int] = tokens.tolist()
    reported: dict[int, TokenLogprob] = {}
    if logprobs is not None:
        tops = [states[row].sampling.top_logprobs or 0 for row in wanted]
        reported = dict(
            zip(wanted, _token_logprobs(logprobs, [token_ids[row] for row in wanted], tops), strict=True)
        )
    return [
        Sampled(token_id if finite else None, reported.get(row))
        for row, (token_id, finite) in enumerate(zip(token_ids, is_finite, strict=True))
    ]


def _shape(logits: torch.Tensor, state: SamplerState) -> None:
    """Applies penalties, bias and the ban on ends before `min_tokens` to one row, in place."""
    sampling = state.sampling
    if state.seen:
        ids = torch.tensor(list(state.seen), device=logits.device)
        scores = logits[ids]
        factor = sampling.repetition_penalty
        logits[ids] = torch.where(scores < 0, scores * factor, scores / factor)
    if state.counts:
        ids = torch.tensor(list(state.counts), device=logits.device)
        times = torch.tensor(list(state.counts.values()), device=logits.device)
        logits[ids] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(sampling.logit_bias.values()), device=logits.device)
    if state.num_tokens < sampling.min_tokens and state.ends:
        logits[torch.tensor(list(state.ends), device=logits.device)] = -torch.inf


def _draw(logits: torch.Tensor, states: Sequence[SamplerState]) -> torch.Tensor:
    """Draws from each row by inverting the cumulative distribution, in float64 and in vocabulary order.

    The last bits of the logits vary with the size of the batch. This way they almost never change a token.
    """
    device = logits.device
    settings = np.array(
        [
            (s.sampling.temperature, s.sampling.top_p, s.sampling.min_p, s.sampling.top_k, s.draw())
            for s in states
        ]
    )
    temperature, top_p, min_p, top_k, draws = torch.from_numpy(settings).to(device).T[..., None]
    probs = (logits.double() / temperature).softmax(-1)
    if (settings[:, 1] < 1).any() or (settings[:, 3] > 0).any():
        ordered = probs.sort(dim=-1, descending=True).values
        limit = torch.where(top_k > 0, top_k, probs.shape[-1]).long().clamp(max=probs.shape[-1])
        threshold = ordered.gather(-1, limit - 1)
        ordered = torch.where(ordered >= threshold, ordered, 0.0)
        before = ordered.cumsum(-1) - ordered  # probability of all likelier tokens
        kept = (before < top_p * ordered.sum(-1, keepdim=True)).sum(-1, keepdim=True).clamp(min=1)
        probs = torch.where(probs >= ordered.gather(-1, kept - 1), probs, 0.0)
    if (settings[:, 2] > 0).any():
        probs = torch.where(probs >= min_p * probs.amax(-1, keepdim=True), probs, 0.0)
    total = probs.cumsum(-1)
    tokens = torch.searchsorted(total, draws * total[:, -1:], right=True).squeeze(-1)
    # Rounding may put a draw past the end. The likeliest token is always allowed.
    return torch.where(tokens < probs.shape[-1], tokens, probs.argmax(-1))


def _token_logprobs(
    logprobs: torch.Tensor, token_ids: Sequence[int], tops: Sequence[int]
) -> list[TokenLogprob]:
    """`tops`: for each row, the number of likeliest tokens to report."""
    values, ids = (each.tolist() for each in logprobs.topk(max(max(tops), 1), dim=-1))
    chosen = (
        logprobs.gather(-1, torch.tensor(token_ids, device=logprobs.device)[:, None]).squeeze(-1).tolist()
    )
    return [
        TokenLogprob(logprob, list(zip(row_ids, row_values, strict=True))[:top])
        for logprob, row_ids, row_values, top in zip(chosen, ids, values, tops, strict=True)
    ]
