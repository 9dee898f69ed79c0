"""Blocks of the cache: shared, named, and overwritten in the right order."""

from __future__ import annotations

from deployments.engine.blocks import RESERVED, BlockPool


def pool(blocks: int = 4) -> BlockPool:
    return BlockPool(blocks + RESERVED)


def test_what_is_released_may_be_found_until_it_is_overwritten() -> None:
    blocks = pool(2)
    first, second = blocks.allocate(), blocks.allocate()
    assert blocks.num_free == 0
    blocks.name(first, b"1")
    blocks.name(second, b"2")
    blocks.release([first, second])
    assert blocks.num_free == 2
    assert blocks.find([b"1", b"2", b"3"]) == [first, second]
    assert blocks.allocate() == second  # the end goes first
    assert blocks.find([b"1", b"2"]) == [first]


def test_a_shared_block_is_free_when_nobody_uses_it() -> None:
    blocks = pool()
    block = blocks.allocate()
    blocks.share(block)
    blocks.release([block])
    assert blocks.num_free == 3
    assert blocks.exclusive([block]) == [block]
    blocks.release([block])
    assert blocks.num_free == 4
    assert blocks.num_unused([block]) == 1


def test_blocks_without_a_name_are_overwritten_first() -> None:
    blocks = pool(3)
    named, plain, _ = (blocks.allocate() for _ in range(3))
    blocks.name(named, b"1")
    blocks.release([named])
    blocks.release([plain])
    assert blocks.allocate() == plain
    assert blocks.find([b"1"]) == [named]


def test_the_first_block_of_a_name_keeps_it() -> None:
    blocks = pool()
    first, second = blocks.allocate(), blocks.allocate()
    blocks.name(first, b"1")
    blocks.name(second, b"1")
    assert blocks.find([b"1"]) == [first]
    blocks.forget(second)
    assert blocks.find([b"1"]) == [first]
    blocks.forget(first)
    assert blocks.find([b"1"]) == []
