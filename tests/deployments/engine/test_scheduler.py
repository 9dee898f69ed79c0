"""Scheduling of steps, without a model."""

from __future__ import annotations

import numpy as np
import pytest

from deployments.engine.base import EngineItem
from deployments.engine.blocks import BLOCK_SIZE, BlockPool
from deployments.engine.sampler import SamplerState
from deployments.engine.scheduler import MAX_PENDING_ENCODES, SHARE_BESIDE_DECODE, Scheduler
from deployments.engine.sequence import (
    MAX_BYPASSED,
    MIN_PREFILL_CHUNK,
    MediaSpan,
    PreparedPrompt,
    SequenceState,
)
from deployments.engine.threaded import Request
from deployments.types import MMFeatures, Modality, Prompt, SamplingParams

SAMPLING = SamplingParams(max_tokens=100)


def scheduler(blocks: int = 20, max_num_seqs: int = 8, max_num_batched_tokens: int = 32) -> Scheduler:
    return Scheduler(BlockPool(blocks), max_num_seqs, max_num_batched_tokens)


def span(offset: int, length: int, key: bytes = b"key", num_tokens: int = 0) -> MediaSpan:
    features = MMFeatures(Modality.IMAGE, "", num_tokens or length, [(1, length)], None, {})
    return MediaSpan(EngineItem(features, {}), key, offset)


async def sequence(
    length: int,
    first: int = 0,
    spans: list[MediaSpan] | None = None,
    leader: SequenceState | None = None,
) -> SequenceState:
    """Makes a sequence whose prompt's token ids count up from `first`."""
    ids = list(range(first, first + length))
    prompt = PreparedPrompt(ids, spans or [], np.arange(length)[None], 0)
    request = Request(Prompt([], []), [], SAMPLING)
    sampler = SamplerState(SAMPLING, 0, ids, frozenset())
    return SequenceState(request, 0, prompt, sampler, 100, leader)


def step(chosen: Scheduler) -> list[tuple[int, int, int]]:
    """Runs one step as the engine does. Returns each chunk as (first token id, start, end)."""
    chunks = chosen.schedule()
    for chunk in chunks:
        assert all(item.embeds is not None for item in chunk.spans)
        chosen.commit(chunk)
        if chunk.is_last:
            chunk.sequence.token_ids.append(7)
    for each in chosen.running:
        if item := each.next_unencoded:
            item.embeds = True  # type: ignore[assignment]  # as if encoded
    return [(chunk.sequence.token_ids[0], chunk.start, chunk.end) for chunk in chunks]


async def test_prompts_are_prefilled_in_order_within_the_budget() -> None:
    chosen = scheduler(max_num_batched_tokens=32)
    chosen.waiting.extend([await sequence(40, 1000), await sequence(20, 2000), await sequence(8, 3000)])
    assert step(chosen) == [(1000, 0, 32)]
    assert step(chosen) == [(1000, 32, 40), (2000, 0, 20), (3000, 0, 4)]
    assert step(chosen) == [(1000, 40, 41), (2000, 20, 21), (3000, 4, 8)]


async def test_sequences_decode_beside_a_long_prompt() -> None:
    chosen = scheduler(max_num_batched_tokens=16)
    chosen.waiting.append(await sequence(8, 1000))
    step(chosen)
    chosen.waiting.append(await sequence(60, 2000))
    assert [step(chosen) for _ in range(4)] == [
        [(1000, 8, 9), (2000, 0, 16)],
        [(1000, 9, 10), (2000, 16, 32)],
        [(1000, 10, 11), (2000, 32, 48)],
        [(1000, 11, 12), (2000, 48, 60)],
    ]


async def test_prefill_beside_decoding_gets_a_share_of_the_budget() -> None:
    chosen = scheduler(blocks=400, max_num_batched_tokens=512)
    share = int(SHARE_BESIDE_DECODE * 512)
    chosen.waiting.append(await sequence(1000, 1000))
    assert step(chosen) == [(1000, 0, 512)]  # no sequence waits for a token
    while not chosen.running[0].prefilled:
        step(chosen)
    chosen.waiting.append(await sequence(1000, 2000))
    assert step(chosen)[1] == (2000, 0, share)
    assert step(chosen)[1] == (2000, share, 2 * share)
    chosen.waiting.append(await sequence(1000, 3000))
    assert [(first, end - start) for first, start, end in step(chosen)[1:]] == [(2000, share)]


async def test_a_prompt_is_prefilled_as_far_as_its_items_are_encoded() -> None:
    chosen = scheduler(blocks=100, max_num_batched_tokens=256)
    chosen.waiting.extend(
        [
            await sequence(300, 1000, [span(70, 10), span(100, 10)]),
            await sequence(100, 2000, [span(MIN_PREFILL_CHUNK - 1, 4)]),
            await sequence(100, 3000),
        ]
    )
    assert step(chosen) == [(1000, 0, 70), (3000, 0, 100)]
    assert step(chosen) == [(2000, 0, MIN_PREFILL_CHUNK), (3000, 100, 101)]
    assert step(chosen)[0] == (1000, 70, 70 + MIN_PREFILL_CHUNK)


async def test_few_prompts_wait_for_the_encoder_and_they_block_no_others() -> None:
    chosen = scheduler(blocks=300, max_num_seqs=99, max_num_batched_tokens=256)
    for first in range(1000, 11000, 1000):
        chosen.add(await sequence(70, first, [span(0, 70)]))
    assert chosen.schedule() == []
    assert len(chosen.running) == MAX_PENDING_ENCODES
    for number in range(2 * MAX_BYPASSED):  # more than may overtake one sequence
        chosen.add(await sequence(5, 20000 + number))
        (chunk,) = chosen.schedule()
        assert (chunk.sequence.token_ids[0], chunk.num_tokens) == (20000 + number, 5)
        chosen.remove(chunk.sequence)
    chosen.add(await sequence(100, 30000))
    chosen.add(await sequence(5, 40000))
    chunks = chosen.schedule()
    assert [(chunk.sequence.token_ids[0], chunk.num_tokens) for chunk in chunks] == [(40000, 5), (30000, 64)]
    assert len(chosen.running) == MAX_PENDING_ENCODES + 2


async def test_an_item_found_in_the_cache_is_encoded_only_if_it_must_be_prefilled() -> None:
    chosen = scheduler()
    chosen.add(await sequence(40, 1000, [span(0, 20)]))
    chosen.schedule()
    (item,) = chosen.running[0].prompt.spans
    chosen.running[0].num_computed = 32  # as if found in the cache
    step(chosen)
    assert chosen.running[0].prefilled
    assert item.embeds is None
    again = chosen.running[0]
    chosen.remove(again)
    chosen.waiting.append(again)  # as if preempted
    assert again.next_unencoded is item
    assert chosen.schedule() == []


async def test_a_removed_leader_does_not_keep_others_waiting() -> None:
    chosen = scheduler()
    leader = await sequence(50, 1000)
    chosen.waiting.extend([leader, await sequence(50, 2000, leader=leader), await sequence(3, 3000)])
    chosen.remove(leader)
    assert step(chosen)[0] == (2000, 0, 32)


async def test_a_short_prompt_overtakes_others_and_gets_most_of_its_step() -> None:
    chosen = scheduler(blocks=100, max_num_seqs=2, max_num_batched_tokens=512)
    for first in (1000, 2000):
        chosen.add(await sequence(600, first))
    step(chosen)
    chosen.add(await sequence(300, 3000, [span(0, 300)]))
    chosen.add(await sequence(MIN_PREFILL_CHUNK, 4000))
    chosen.add(await sequence(MIN_PREFILL_CHUNK + 1, 5000))
    chosen.add(await sequence(2, 6000))
    assert [each.token_ids[0] for each in chosen.waiting] == [4000, 6000, 2000, 3000, 5000]
    assert step(chosen) == [(1000, 512, 600), (4000, 0, 64)]
    chosen.max_num_seqs = 8
    assert step(chosen) == [(1000, 600, 601), (4000, 64, 65), (6000, 0, 2), (2000, 0, 128)]


async def test_a_long_prompt_is_overtaken_a_bounded_number_of_times() -> None:
    chosen = scheduler(max_num_seqs=1)
    chosen.add(await sequence(100, 1000))
    for first in range(MAX_BYPASSED + 2):
        chosen.add(await sequence(2, 2000 + first))
    assert [each.token_ids[0] for each in chosen.waiting].index(1000) == MAX_BYPASSED


async def test_the_last_admitted_is_preempted_and_comes_back_first() -> None:
    chosen = scheduler(blocks=4, max_num_batched_tokens=100)
    chosen.waiting.extend(
        [await sequence(BLOCK_SIZE, 1000), await sequence(BLOCK_SIZE - 1, 2000), await sequence(3, 3000)]
    )
    assert [each for each, *_ in step(chosen)] == [1000, 2000]
    while not chosen.preemptions:
        done = step(chosen)
    assert [each for each, *_ in done] == [1000]
    assert [each.token_ids[0] for each in chosen.running] == [1000]
    assert [each.token_ids[0] for each in chosen.waiting] == [2000, 3000]
    chosen.remove(chosen.running[0])
    computed = step(chosen)
    assert [each for each, *_ in computed] == [2000, 3000]
    assert computed[0][2] == len(chosen.running[0]) - 1


async def test_without_room_for_the_head_of_the_queue_no_sequence_is_admitted() -> None:
    chosen = scheduler(blocks=4)
    chosen.waiting.extend([await sequence(20, 1000), await sequence(60, 2000), await sequence(2, 3000)])
    assert [each for each, *_ in step(chosen)] == [1000]
    assert len(chosen.waiting) == 2


async def test_max_num_seqs() -> None:
    chosen = scheduler(max_num_seqs=2)
    chosen.waiting.extend([await sequence(2, 1000 * i) for i in range(1, 5)])
    assert [each for each, *_ in step(chosen)] == [1000, 2000]
    chosen.remove(chosen.running[0])
    assert [each for each, *_ in step(chosen)] == [2000, 3000]


async def test_a_cached_prefix_is_not_computed_again() -> None:
    chosen = scheduler(max_num_batched_tokens=100)
    chosen.waiting.append(await sequence(50, 1000))
    step(chosen)
    chosen.waiting.append(await sequence(50, 1000))
    assert step(chosen) == [(1000, 50, 51), (1000, 48, 50)]
    assert chosen.running[1].cached_tokens == 48
    assert chosen.running[0].blocks[:3] == chosen.running[1].blocks[:3]
    assert chosen.running[0].blocks[3] != chosen.running[1].blocks[3]


async def test_the_last_token_is_computed_even_if_all_are_cached() -> None:
    chosen = scheduler(max_num_batched_tokens=100)
    for _ in range(2):
        chosen.waiting.append(await sequence(2 * BLOCK_SIZE, 1000))
    assert step(chosen) == [(1000, 0, 32), (1000, 0, 32)]
    chosen.waiting.append(await sequence(2 * BLOCK_SIZE, 1000))
    assert step(chosen)[-1] == (1000, 16, 32)


@pytest.mark.parametrize(("key", "cached"), [(b"one", 48), (b"other", 16)])
async def test_equal_placeholders_are_equal_only_with_equal_media(key: bytes, cached: int) -> None:
    chosen = scheduler(max_num_batched_tokens=100)
    chosen.waiting.append(await sequence(50, 1000, [span(20, 10, b"one")]))
    step(chosen)
    step(chosen)
    chosen.waiting.append(await sequence(50, 1000, [span(20, 10, key)]))
    step(chosen)
    assert chosen.running[1].cached_tokens == cached


async def test_answers_to_one_prompt_wait_until_the_first_is_prefilled() -> None:
    chosen = scheduler(max_num_batched_tokens=32)
    leader = await sequence(50, 1000)
    chosen.waiting.extend([leader, await sequence(50, 1000, leader=leader)])
    assert [step(chosen) for _ in range(3)] == [
        [(1000, 0, 32)],
        [(1000, 32, 50)],
        [(1000, 50, 51), (1000, 48, 50)],
    ]


async def test_removal_releases_all_blocks() -> None:
    chosen = scheduler(blocks=8)
    chosen.waiting.extend([await sequence(20, 1000), await sequence(20, 1000), await sequence(200, 3000)])
    step(chosen)
    for each in list(chosen):
        chosen.remove(each)
    assert chosen.pool.num_free == 8
    assert chosen.schedule() == []


async def test_blocks_of_a_failed_sequence_are_not_reused() -> None:
    chosen = scheduler(max_num_batched_tokens=100)
    chosen.waiting.append(await sequence(40, 1000))
    step(chosen)
    broken = chosen.discard(chosen.running[0])
    assert len(broken) == 3
    chosen.waiting.append(await sequence(40, 1000))
    assert step(chosen) == [(1000, 0, 40)]
