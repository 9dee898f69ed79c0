"""Bookkeeping of the KV cache's blocks: their users and the prompt prefixes that they hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_SIZE = 16  # tokens
NULL_BLOCK = 0  # never allocated: padding in a block table points to it


def num_blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


class BlockPool:
    """Blocks with reference counts. A block without users keeps its tokens until it is allocated again.

    A block's hash covers its tokens and all tokens before them, so equal hashes mean equal contents.
    """

    def __init__(self, num_blocks: int) -> None:
        """The blocks are 1 to `num_blocks`; NULL_BLOCK is not one of them."""
        self.evictions = 0  # blocks that lost a prefix which could have been reused
        self._num_users = [0] * (1 + num_blocks)
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        # Blocks without users. The first one is allocated next.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, 1 + num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Returns the blocks of the longest run of leading hashes that are cached."""
        found = []
        for block_hash in hashes:
            if block_hash not in self._block_of:
                break
            found.append(self._block_of[block_hash])
        return found

    def num_unused(self, blocks: Sequence[int]) -> int:
        return sum(self._num_users[block] == 0 for block in blocks)

    def exclusive(self, blocks: Sequence[int]) -> list[int]:
        """Returns the blocks that have exactly one user."""
        return [block for block in blocks if self._num_users[block] == 1]

    def share(self, block: int) -> None:
        self._num_users[block] += 1
        self._free.pop(block, None)

    def allocate(self) -> int:
        block, _ = self._free.popitem(last=False)
        self.evictions += block in self._hash_of
        self.forget(block)
        self._num_users[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one user of each block of a sequence.

        Blocks without a hash are allocated again first, since no prompt can reuse them. The end of a prompt
        goes before its beginning, which more prompts share.
        """
        for block in reversed(blocks):
            self._num_users[block] -= 1
            if not self._num_users[block]:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, block_hash: bytes) -> None:
        """Makes the block findable. If another block has this hash already, that one stays registered."""
        if block_hash not in self._block_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
