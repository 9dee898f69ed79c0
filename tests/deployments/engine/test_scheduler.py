"""Who computes what in the next step, without a model."""

from __future__ import annotations

import numpy as np
import pytest

from deployments.engine.base import EngineItem
from deployments.engine.blocks import BLOCK, RESERVED, BlockPool
from deployments.engine.sampler import SamplerState
from deployments.engine.scheduler import (
    AHEAD,
    LEAST_READ,
    PATIENCE,
    READING,
    REFRESHED,
    MediaSpan,
    Scheduler,
    Sequence,
)
from deployments.engine.threaded import Request
from deployments.types import MMFeatures, Modality, Prompt, SamplingParams

SAMPLING = SamplingParams(max_tokens=100)


def scheduler(blocks: int = 20, max_running: int = 8, step_tokens: int = 32) -> Scheduler:
    return Scheduler(BlockPool(blocks + RESERVED), max_running, step_tokens)


def span(offset: int, length: int, key: bytes = b"key", num_tokens: int = 0) -> MediaSpan:
    features = MMFeatures(Modality.IMAGE, "", num_tokens or length, [(1, length)], None, {})
    return MediaSpan(EngineItem(features, {}), key, offset)


async def sequence(
    length: int, first: int = 0, spans: list[MediaSpan] | None = None, leader: Sequence | None = None
) -> Sequence:
    """A prompt of ids from `first` on."""
    ids = list(range(first, first + length))
    positions = np.arange(length)[None]
    request = Request(Prompt([], []), [], SAMPLING)
    sampler = SamplerState(SAMPLING, 0, ids, frozenset())
    return Sequence(request, 0, ids, spans or [], positions, 0, sampler, 100, leader)


def step(chosen: Scheduler) -> list[tuple[int, int, int]]:
    """One step as the engine takes it; what was computed as (first token id, start, end)."""
    chunks = chosen.schedule()
    for chunk in chunks:
        assert all(item.embeds is not None for item in chunk.spans)
        chosen.commit(chunk)
        if chunk.is_last:
            chunk.sequence.token_ids.append(7)
    for each in chosen.running:
        if item := each.missing:
            item.embeds = True  # type: ignore[assignment]  # encoded
    return [(chunk.sequence.token_ids[0], chunk.start, chunk.end) for chunk in chunks]


async def test_prompts_are_read_in_order_within_the_budget() -> None:
    chosen = scheduler(step_tokens=32)
    chosen.waiting.extend([await sequence(40, 1000), await sequence(20, 2000), await sequence(8, 3000)])
    assert step(chosen) == [(1000, 0, 32)]
    assert step(chosen) == [(1000, 32, 40), (2000, 0, 20), (3000, 0, 4)]
    assert step(chosen) == [(1000, 40, 41), (2000, 20, 21), (3000, 4, 8)]


async def test_answers_go_on_beside_a_long_prompt() -> None:
    chosen = scheduler(step_tokens=16)
    chosen.waiting.append(await sequence(8, 1000))
    step(chosen)
    chosen.waiting.append(await sequence(60, 2000))
    assert [step(chosen) for _ in range(4)] == [
        [(1000, 8, 9), (2000, 0, 16)],
        [(1000, 9, 10), (2000, 16, 32)],
        [(1000, 10, 11), (2000, 32, 48)],
        [(1000, 11, 12), (2000, 48, 60)],
    ]


async def test_beside_answers_prompts_take_a_share_of_the_time() -> None:
    chosen = scheduler(blocks=400, step_tokens=512)
    chosen.waiting.append(await sequence(2000, 1000))
    assert step(chosen) == [(1000, 0, 512)]  # nobody waits for a token
    while not chosen.running[0].has_read:
        step(chosen)
    chosen.waiting.append(await sequence(2000, 2000))
    assert step(chosen)[1] == (2000, 0, LEAST_READ)  # no time is known yet
    chosen.pace.took(seconds=0.010, num_read=0)
    chosen.pace.took(seconds=0.020, num_read=80)
    start = LEAST_READ
    assert step(chosen)[1] == (2000, start, start + 80 * READING)
    chosen.pace.took(seconds=1.0, num_read=160)
    start += 80 * READING
    assert step(chosen)[1] == (2000, start, start + LEAST_READ)
    chosen.pace.took(seconds=0.030, num_read=5000)
    assert step(chosen)[1] == (2000, start + LEAST_READ, start + LEAST_READ + 512)


async def test_beside_answers_reading_pauses_now_and_then_for_the_time_of_the_answers_alone() -> None:
    chosen = scheduler(blocks=400, step_tokens=512)
    chosen.waiting.append(await sequence(8, 1000))
    step(chosen)
    chosen.waiting.append(await sequence(5000, 2000))
    for _ in range(REFRESHED):
        assert len(step(chosen)) == 2
        chosen.pace.took(seconds=0.010, num_read=LEAST_READ)
    assert [start for start, *_ in step(chosen)] == [1000]
    chosen.pace.took(seconds=0.005, num_read=0)
    assert len(step(chosen)) == 2


async def test_a_prompt_is_read_as_far_as_its_items_are_encoded() -> None:
    chosen = scheduler(blocks=100, step_tokens=512)
    chosen.waiting.extend(
        [
            await sequence(300, 1000, [span(70, 10), span(100, 10)]),
            await sequence(100, 2000, [span(LEAST_READ - 1, 4)]),
            await sequence(100, 3000),
        ]
    )
    assert step(chosen) == [(1000, 0, 70), (3000, 0, 100)]
    assert step(chosen) == [(2000, 0, LEAST_READ), (3000, 100, 101)]
    assert step(chosen)[0] == (1000, 70, 70 + LEAST_READ)


async def test_few_prompts_wait_for_items_and_hold_nobody_up() -> None:
    chosen = scheduler(blocks=300, max_running=99, step_tokens=512)
    for first in range(1000, 11000, 1000):
        chosen.add(await sequence(70, first, [span(0, 70)]))
    assert chosen.schedule() == []
    assert len(chosen.running) == AHEAD
    for number in range(2 * PATIENCE):  # more than anybody lets pass
        chosen.add(await sequence(5, 20000 + number))
        (chunk,) = chosen.schedule()
        assert (chunk.sequence.token_ids[0], chunk.num_tokens) == (20000 + number, 5)
        chosen.remove(chunk.sequence)
    chosen.add(await sequence(100, 30000))
    chosen.add(await sequence(5, 40000))
    chunks = chosen.schedule()
    assert [(chunk.sequence.token_ids[0], chunk.num_tokens) for chunk in chunks] == [(40000, 5), (30000, 64)]
    assert len(chosen.running) == AHEAD + 2


async def test_what_was_found_in_the_cache_is_encoded_once_it_must_be_read() -> None:
    chosen = scheduler()
    chosen.add(await sequence(40, 1000, [span(0, 20)]))
    chosen.schedule()
    (item,) = chosen.running[0].spans
    chosen.running[0].computed = 32  # as if found
    step(chosen)
    assert chosen.running[0].has_read
    assert item.embeds is None
    again = chosen.running[0]
    chosen.remove(again)
    chosen.waiting.append(again)  # as one that had to give way
    assert again.missing is item
    assert chosen.schedule() == []


async def test_who_is_removed_keeps_nobody_waiting() -> None:
    chosen = scheduler()
    leader = await sequence(50, 1000)
    chosen.waiting.extend([leader, await sequence(50, 2000, leader=leader), await sequence(3, 3000)])
    chosen.remove(leader)
    assert step(chosen)[0] == (2000, 0, 32)


async def test_a_short_prompt_passes_others_and_little_is_done_beside_it() -> None:
    chosen = scheduler(blocks=100, max_running=2, step_tokens=512)
    for first in (1000, 2000):
        chosen.add(await sequence(600, first))
    step(chosen)
    chosen.add(await sequence(300, 3000, [span(0, 300)]))
    chosen.add(await sequence(LEAST_READ, 4000))
    chosen.add(await sequence(LEAST_READ + 1, 5000))
    chosen.add(await sequence(2, 6000))
    assert [each.token_ids[0] for each in chosen.waiting] == [4000, 6000, 2000, 3000, 5000]
    assert step(chosen) == [(1000, 512, 576), (4000, 0, 64)]
    chosen.max_running = 8
    assert step(chosen) == [(1000, 576, 600), (4000, 64, 65), (6000, 0, 2), (2000, 0, 64)]


async def test_nobody_is_passed_for_ever() -> None:
    chosen = scheduler(max_running=1)
    chosen.add(await sequence(100, 1000))
    for first in range(PATIENCE + 2):
        chosen.add(await sequence(2, 2000 + first))
    assert [each.token_ids[0] for each in chosen.waiting].index(1000) == PATIENCE


async def test_the_last_come_gives_way_and_comes_back_first() -> None:
    chosen = scheduler(blocks=4, step_tokens=100)
    chosen.waiting.extend(
        [await sequence(BLOCK, 1000), await sequence(BLOCK - 1, 2000), await sequence(3, 3000)]
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


async def test_nobody_passes_the_head_of_the_queue() -> None:
    chosen = scheduler(blocks=4)
    chosen.waiting.extend([await sequence(20, 1000), await sequence(60, 2000), await sequence(2, 3000)])
    assert [each for each, *_ in step(chosen)] == [1000]
    assert len(chosen.waiting) == 2


async def test_max_running() -> None:
    chosen = scheduler(max_running=2)
    chosen.waiting.extend([await sequence(2, 1000 * i) for i in range(1, 5)])
    assert [each for each, *_ in step(chosen)] == [1000, 2000]
    chosen.remove(chosen.running[0])
    assert [each for each, *_ in step(chosen)] == [2000, 3000]


async def test_a_known_beginning_is_not_computed_again() -> None:
    chosen = scheduler(step_tokens=100)
    chosen.waiting.append(await sequence(50, 1000))
    step(chosen)
    chosen.waiting.append(await sequence(50, 1000))
    assert step(chosen) == [(1000, 50, 51), (1000, 48, 50)]
    assert chosen.running[1].cached_tokens == 48
    assert chosen.running[0].blocks[:3] == chosen.running[1].blocks[:3]
    assert chosen.running[0].blocks[3] != chosen.running[1].blocks[3]


async def test_the_last_token_is_computed_though_all_are_known() -> None:
    chosen = scheduler(step_tokens=100)
    for _ in range(2):
        chosen.waiting.append(await sequence(2 * BLOCK, 1000))
    assert step(chosen) == [(1000, 0, 32), (1000, 0, 32)]
    chosen.waiting.append(await sequence(2 * BLOCK, 1000))
    assert step(chosen)[-1] == (1000, 16, 32)


@pytest.mark.parametrize(("key", "cached"), [(b"one", 48), (b"other", 16)])
async def test_equal_placeholders_are_equal_only_with_equal_media(key: bytes, cached: int) -> None:
    chosen = scheduler(step_tokens=100)
    chosen.waiting.append(await sequence(50, 1000, [span(20, 10, b"one")]))
    step(chosen)
    step(chosen)
    chosen.waiting.append(await sequence(50, 1000, [span(20, 10, key)]))
    step(chosen)
    assert chosen.running[1].cached_tokens == cached


async def test_answers_to_one_prompt_wait_until_the_first_has_read_it() -> None:
    chosen = scheduler(step_tokens=32)
    leader = await sequence(50, 1000)
    chosen.waiting.extend([leader, await sequence(50, 1000, leader=leader)])
    assert [step(chosen) for _ in range(3)] == [
        [(1000, 0, 32)],
        [(1000, 32, 50)],
        [(1000, 50, 51), (1000, 48, 50)],
    ]


async def test_removal_gives_everything_back() -> None:
    chosen = scheduler(blocks=8)
    chosen.waiting.extend([await sequence(20, 1000), await sequence(20, 1000), await sequence(200, 3000)])
    step(chosen)
    for each in list(chosen):
        chosen.remove(each)
    assert chosen.pool.num_free == 8
    assert chosen.schedule() == []


async def test_what_broke_is_not_found_again() -> None:
    chosen = scheduler(step_tokens=100)
    chosen.waiting.append(await sequence(40, 1000))
    step(chosen)
    broken = chosen.discard(chosen.running[0])
    assert len(broken) == 3
    chosen.waiting.append(await sequence(40, 1000))
    assert step(chosen) == [(1000, 0, 40)]
