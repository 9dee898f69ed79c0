"""What attention reads of the cache, kept from step to step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deployments.engine.blocks import BLOCK
from deployments.engine.runner import _PagedCache, _Rows
from deployments.engine.scheduler import Chunk

BLOCKS = 6


@pytest.fixture
def blocks() -> torch.Tensor:
    return torch.rand(BLOCKS, BLOCK, 2, 1, 4)


def chunk(number: int, start: int, *blocks: int) -> Chunk:
    sequence: Any = SimpleNamespace(number=number, blocks=list(blocks))
    return Chunk(sequence, start, start + 1)


def test_only_a_new_row_is_copied_from_the_blocks(blocks: torch.Tensor) -> None:
    rows = _Rows([blocks], 1024)
    assert rows.aim([chunk(1, 3, 0), chunk(2, 5, 1)])
    added = torch.rand(2, 2, 1, 4)
    before = blocks.clone()
    blocks[:2] = torch.nan  # who looks again would find this
    rows.update(0, added)
    assert rows.aim([chunk(1, 4, 0), chunk(3, 2, 2)])
    read = rows.update(0, torch.ones(2, 2, 1, 4))
    assert torch.equal(read[0, :3], before[0, :3])
    assert torch.equal(read[0, 3], added[0])
    assert torch.equal(read[1, :2], before[2, :2])
    assert (read[[0, 1], [4, 2]] == 1).all()


def test_a_row_that_missed_a_token_is_copied_again(blocks: torch.Tensor) -> None:
    rows = _Rows([blocks], 1024)
    assert rows.aim([chunk(1, 3, 0)])
    rows.update(0, torch.ones(1, 2, 1, 4))
    assert rows.aim([chunk(1, 5, 0)])
    assert torch.equal(rows.update(0, torch.ones(1, 2, 1, 4))[0, :5], blocks[0, :5])


def test_rows_stay_where_they_are_when_others_leave_and_come(blocks: torch.Tensor) -> None:
    rows = _Rows([blocks], 1024)
    rows.aim([chunk(number, 3, 0) for number in (1, 2, 3)])
    arranged = rows.arranged([chunk(4, 1, 0), chunk(3, 4, 0), chunk(1, 4, 0)])
    assert [each.sequence.number for each in arranged] == [1, 4, 3]
    arranged = rows.arranged([chunk(3, 4, 0), chunk(2, 4, 0)])
    assert [each.sequence.number for each in arranged] == [3, 2]


def test_too_many_tokens_find_no_room(blocks: torch.Tensor) -> None:
    rows = _Rows([blocks], 2 * BLOCK)
    assert rows.aim([chunk(1, 3, 0), chunk(2, 3, 1)])
    assert not rows.aim([chunk(number, 3, 0) for number in (1, 2, 3)])
    assert not rows.aim([chunk(1, 2 * BLOCK + 3, 1, 1, 1)])


def test_what_is_no_number_is_gone_when_the_rows_are_cleared(blocks: torch.Tensor) -> None:
    rows = _Rows([blocks], 1024)
    rows.aim([chunk(1, 20, 0, 1)])
    rows.update(0, torch.full((1, 2, 1, 4), torch.nan))
    rows.clear()
    rows.aim([chunk(2, 3, 2)])
    rows.aim([chunk(2, 20, 2, 3)])
    assert rows.update(0, torch.ones(1, 2, 1, 4)).isfinite().all()


def test_chunks_of_about_one_length_are_one_group_and_single_tokens_the_first() -> None:
    text = SimpleNamespace(num_hidden_layers=1, num_attention_heads=1, hidden_size=4)
    model: Any = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: text), device=torch.device("cpu"), dtype=torch.float32
    )
    chunks = [Chunk(chunk(n, 0).sequence, 8, 8 + n) for n in (30, 1, 2, 16, 1, 3, 31)]
    groups = _PagedCache(model, BLOCKS).grouped(chunks)
    assert [[each.num_tokens for each in group] for group in groups] == [[1, 1], [2, 3], [16, 30, 31]]
