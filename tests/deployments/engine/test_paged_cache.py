"""The KV cache's blocks and the grouping of chunks, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deployments.engine.blocks import BLOCK_SIZE, NULL_BLOCK
from deployments.engine.paged_cache import PagedCache, group_by_length
from deployments.engine.sequence import Chunk


@pytest.fixture
def cache() -> PagedCache:
    text = SimpleNamespace(num_hidden_layers=2, num_attention_heads=1, hidden_size=4)
    config = SimpleNamespace(get_text_config=lambda: text)
    model = SimpleNamespace(config=config, device=torch.device("cpu"), dtype=torch.float32)
    return PagedCache(model, num_blocks=5)


def test_gathers_what_was_written_in_the_order_of_the_block_table(cache: PagedCache) -> None:
    states = torch.rand(BLOCK_SIZE + 2, 2, 1, 4)
    blocks = [4, 2]
    slots = torch.tensor([blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(len(states))])
    cache.write(1, slots, states)
    gathered = cache.gather_kv(1, torch.tensor([[4, 2], [2, NULL_BLOCK]]))
    assert torch.equal(gathered[0, : len(states)], states)
    assert torch.equal(gathered[1, :2], states[BLOCK_SIZE:])
    assert not gathered[1, 2:].any()
    assert not cache.gather_kv(0, torch.tensor([blocks])).any()  # the other layer


def test_zeroed_blocks_hold_no_nan(cache: PagedCache) -> None:
    cache.write(0, torch.arange(BLOCK_SIZE, 3 * BLOCK_SIZE), torch.full((2 * BLOCK_SIZE, 2, 1, 4), torch.nan))
    cache.zero([1])
    assert not cache.gather_kv(0, torch.tensor([[1]])).any()
    assert cache.gather_kv(0, torch.tensor([[2]])).isnan().all()


def test_chunks_of_similar_length_form_a_group() -> None:
    sequence: Any = None
    chunks = [Chunk(sequence, 8, 8 + n) for n in (30, 1, 2, 16, 1, 3, 31)]
    groups = group_by_length(chunks)
    assert [[each.num_tokens for each in group] for group in groups] == [[1, 1], [2, 3], [16, 30, 31]]


def test_a_group_gathers_a_bounded_number_of_tokens() -> None:
    sequence: Any = None
    groups = group_by_length([Chunk(sequence, 50_000, 50_001) for _ in range(5)])
    assert [len(group) for group in groups] == [2, 2, 1]
