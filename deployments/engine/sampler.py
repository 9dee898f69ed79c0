"""From logits to tokens, for a batch of answers with settings of their own.

An answer's draw depends on its logits and its own random numbers only, never on who else is in the batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np
import torch

from deployments.types import SamplingParams, TokenLogprob

COLDEST = 1e-5  # a lower temperature is greedy: dividing by it would overflow


class SamplerState:
    """What one answer carries from token to token."""

    def __init__(
        self, sampling: SamplingParams, index: int, prompt_ids: Sequence[int], ends: Set[int]
    ) -> None:
        """`ends`: tokens that end the answer."""
        self.sampling = sampling
        self.greedy = sampling.temperature < COLDEST
        self.ends = ends
        self.num_tokens = 0
        self.seen: set[int] | None = set(prompt_ids) if sampling.repetition_penalty != 1 else None
        self.counts: Counter[int] | None = None
        if sampling.presence_penalty or sampling.frequency_penalty:
            self.counts = Counter()
        self.shapes_logits = bool(
            sampling.logit_bias or sampling.min_tokens or self.seen is not None or self.counts is not None
        )
        # Negative seeds are another 2^64.
        seed = None if sampling.seed is None else [sampling.seed % 2**65, index]
        self._random = np.random.default_rng(seed)

    def draw(self) -> float:
        """The next of the answer's random numbers, in [0, 1)."""
        return float(self._random.random())

    def add(self, token_id: int) -> None:
        self.num_tokens += 1
        if self.seen is not None:
            self.seen.add(token_id)
        if self.counts is not None:
            self.counts[token_id] += 1


class Sampled(NamedTuple):
    token_id: int | None  # None: the logits were no numbers
    logprob: TokenLogprob | None = None  # where asked for


def sample(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[Sampled]:
    """One token for each row of `logits`, [len(states), vocabulary], which may be overwritten."""
    logits = logits.float()
    best, tokens = logits.max(dim=-1)
    sound = map(math.isfinite, best.tolist())
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
    told: dict[int, TokenLogprob] = {}
    if logprobs is not None:
        tops = [states[row].sampling.top_logprobs or 0 for row in wanted]
        told = dict(zip(wanted, _told(logprobs, [token_ids[row] for row in wanted], tops), strict=True))
    return [
        Sampled(token_id if fine else None, told.get(row))
        for row, (token_id, fine) in enumerate(zip(token_ids, sound, strict=True))
    ]


def _shape(logits: torch.Tensor, state: SamplerState) -> None:
    """Bias, penalties and forbidden ends, in place, on one row."""
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
    """By the inverse of the distribution function over the vocabulary in its own order, in float64: another
    last bit in the logits, as from a batch of another size, then as good as never gives another token.
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
        least = ordered.gather(-1, limit - 1)
        ordered = torch.where(ordered >= least, ordered, 0.0)
        before = ordered.cumsum(-1) - ordered  # what the likelier ones have together
        kept = (before < top_p * ordered.sum(-1, keepdim=True)).sum(-1, keepdim=True).clamp(min=1)
        probs = torch.where(probs >= ordered.gather(-1, kept - 1), probs, 0.0)
    if (settings[:, 2] > 0).any():
        probs = torch.where(probs >= min_p * probs.amax(-1, keepdim=True), probs, 0.0)
    total = probs.cumsum(-1)
    tokens = torch.searchsorted(total, draws * total[:, -1:], right=True).squeeze(-1)
    # Rounding may put the very last draw past the end; the likeliest token is never forbidden.
    return torch.where(tokens < probs.shape[-1], tokens, probs.argmax(-1))


def _told(logprobs: torch.Tensor, token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    values, ids = (each.tolist() for each in logprobs.topk(max(max(tops), 1), dim=-1))
    chosen = (
        logprobs.gather(-1, torch.tensor(token_ids, device=logprobs.device)[:, None]).squeeze(-1).tolist()
    )
    return [
        TokenLogprob(logprob, list(zip(row_ids, row_values, strict=True))[:top])
        for logprob, row_ids, row_values, top in zip(chosen, ids, values, tops, strict=True)
    ]
