"""Drawing of tokens from logits, row by row."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from deployments.engine.sampler import SamplerState, sample
from deployments.types import SamplingParams

PLAIN = SamplingParams(max_tokens=10)
LOGITS = [0.0, 1.0, 2.0, 3.0, -1.0]


def state(
    index: int = 0, prompt: tuple[int, ...] = (), ends: tuple[int, ...] = (), **fields: Any
) -> SamplerState:
    return SamplerState(replace(PLAIN, **fields), index, prompt, frozenset(ends))


def one(logits: list[float], of: SamplerState) -> int | None:
    (token,) = sample(torch.tensor([logits]), [of])
    return token.token_id


def drawn(logits: list[float], n: int = 400, **fields: Any) -> Counter[int | None]:
    rows = [state(seed=seed, temperature=1.0, **fields) for seed in range(n)]
    return Counter(token.token_id for token in sample(torch.tensor([logits] * n), rows))


def test_greedy() -> None:
    assert one(LOGITS, state()) == 3
    assert one(LOGITS, state(temperature=1e-6, seed=1)) == 3


def test_draws_follow_the_distribution() -> None:
    counts = drawn(LOGITS, 4000)
    for token, share in enumerate(torch.tensor(LOGITS).softmax(-1).tolist()):
        assert counts[token] / 4000 == pytest.approx(share, abs=0.025)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 2}, {2, 3}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.7}, {2, 3}),
        ({"top_p": 1e-6}, {3}),
        ({"top_k": 3, "top_p": 0.7}, {2, 3}),
        ({"min_p": 0.3}, {2, 3}),
        ({"min_p": 1.0}, {3}),
    ],
)
def test_tokens_that_are_cut_off_are_never_drawn(fields: dict[str, Any], kept: set[int]) -> None:
    assert set(drawn(LOGITS, **fields)) == kept


def test_a_seed_gives_one_answer_in_any_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(16, 500)
    alone = [sample(row[None].clone(), [state(seed=i, temperature=1.0)])[0] for i, row in enumerate(logits)]
    rows = [state(seed=i, temperature=1.0) for i in range(16)]
    assert sample(logits + 1e-7 * torch.randn(16, 500), rows) == alone


def test_answers_to_one_request_differ() -> None:
    rows = [state(index, seed=5, temperature=1.0) for index in range(20)]
    assert len({token.token_id for token in sample(torch.zeros(20, 1000), rows)}) > 15


@pytest.mark.parametrize("seed", [0, -1, 2**64 - 1, -(2**63)])
def test_every_seed_of_the_api_is_accepted(seed: int) -> None:
    first, second = (one([0.0] * 1000, state(seed=seed, temperature=1.0)) for _ in range(2))
    assert first == second


def test_unseeded_draws_differ() -> None:
    assert len({one([0.0] * 1000, state(temperature=1.0)) for _ in range(20)}) > 15


def test_penalties_and_bias() -> None:
    sampler = state(presence_penalty=1.5)
    sampler.add(3)
    assert one(LOGITS, sampler) == 2
    sampler = state(frequency_penalty=0.6)
    sampler.add(3)
    assert one(LOGITS, sampler) == 3
    sampler.add(3)
    assert one(LOGITS, sampler) == 2
    assert one(LOGITS, state(prompt=(3,), repetition_penalty=1.6)) == 2
    assert one([-1.0, -1.5], state(prompt=(0,), repetition_penalty=1.6)) == 1
    assert one(LOGITS, state(logit_bias={0: 3.5})) == 0
    assert one(LOGITS, state(logit_bias={3: -100.0})) == 2


def test_no_end_token_before_min_tokens() -> None:
    sampler = state(ends=(3, 2), min_tokens=1)
    assert one(LOGITS, sampler) == 1
    sampler.add(1)
    assert one(LOGITS, sampler) == 3


def test_logprobs_are_those_of_the_unchanged_logits() -> None:
    rows = [state(top_logprobs=2, logit_bias={0: 9.0}), state(), state(top_logprobs=0)]
    first, second, third = sample(torch.tensor([LOGITS] * 3), rows)
    bare = torch.tensor(LOGITS).log_softmax(-1)
    assert first.token_id == 0
    assert first.logprob is not None
    assert first.logprob.logprob == pytest.approx(float(bare[0]))
    assert [token for token, _ in first.logprob.top] == [3, 2]
    assert second.logprob is None
    assert third.logprob is not None
    assert third.logprob.top == []
    assert third.logprob.logprob == pytest.approx(float(bare[3]))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_or_infinite_logits_affect_only_their_row(value: float, temperature: float) -> None:
    logits = torch.tensor([LOGITS] * 3)
    logits[1, 2] = value
    rows = [state(temperature=temperature, top_p=0.01, top_k=3, seed=0) for _ in range(3)]
    assert [token.token_id for token in sample(logits, rows)] == [3, None, 3]
