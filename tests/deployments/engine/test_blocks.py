"""Blocks of the KV cache: sharing, prefix reuse and the order of eviction."""

from __future__ import annotations

from deployments.engine.blocks import BlockPool


def pool(blocks: int = 4) -> BlockPool:
    return BlockPool(blocks)


def test_a_released_block_can_be_found_until_it_is_evicted() -> None:
    blocks = pool(2)
    first, second = blocks.allocate(), blocks.allocate()
    assert blocks.num_free == 0
    blocks.register(first, b"1")
    blocks.register(second, b"2")
    blocks.release([first, second])
    assert blocks.num_free == 2
    assert blocks.find_prefix([b"1", b"2", b"3"]) == [first, second]
    assert blocks.allocate() == second  # the end of a prompt is evicted first
    assert blocks.find_prefix([b"1", b"2"]) == [first]


def test_a_shared_block_is_free_after_its_last_user() -> None:
    blocks = pool()
    block = blocks.allocate()
    blocks.share(block)
    blocks.release([block])
    assert blocks.num_free == 3
    assert blocks.exclusive([block]) == [block]
    blocks.release([block])
    assert blocks.num_free == 4
    assert blocks.num_unused([block]) == 1


def test_blocks_without_a_hash_are_allocated_first() -> None:
    blocks = pool(3)
    hashed, plain, _ = (blocks.allocate() for _ in range(3))
    blocks.register(hashed, b"1")
    blocks.release([hashed])
    blocks.release([plain])
    assert blocks.allocate() == plain
    assert blocks.find_prefix([b"1"]) == [hashed]


def test_the_first_block_with_a_hash_stays_registered() -> None:
    blocks = pool()
    first, second = blocks.allocate(), blocks.allocate()
    blocks.register(first, b"1")
    blocks.register(second, b"1")
    assert blocks.find_prefix([b"1"]) == [first]
    blocks.forget(second)
    assert blocks.find_prefix([b"1"]) == [first]
    blocks.forget(first)
    assert blocks.find_prefix([b"1"]) == []
