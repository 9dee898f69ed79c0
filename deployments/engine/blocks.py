"""Which blocks of the KV cache are whose, and which hold the beginning of what."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 16  # tokens

BLANK, RESERVED = 0, 1  # the first is nobody's: what only fills up a batch is read from it


class BlockPool:
    """Blocks are shared by counting; one that nobody uses keeps its tokens until it is needed for others.

    A block's name is a hash over its tokens and all before them, so that equal names mean equal contents.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks - RESERVED
        self.evictions = 0  # blocks whose tokens might have been found
        self._users = [0] * num_blocks
        self._name: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}
        # Blocks without users: the first is the next to be overwritten.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(RESERVED, num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Blocks for as many of the first names as there are."""
        found = []
        for name in names:
            if name not in self._named:
                break
            found.append(self._named[name])
        return found

    def num_unused(self, blocks: Sequence[int]) -> int:
        return sum(self._users[block] == 0 for block in blocks)

    def exclusive(self, blocks: Sequence[int]) -> list[int]:
        """Those with one user."""
        return [block for block in blocks if self._users[block] == 1]

    def share(self, block: int) -> None:
        self._users[block] += 1
        self._free.pop(block, None)

    def allocate(self) -> int:
        block, _ = self._free.popitem(last=False)
        self.evictions += block in self._name
        self.forget(block)
        self._users[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """The end of a prompt is overwritten before its beginning, and what has no name before all else."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
                if block not in self._name:
                    self._free.move_to_end(block, last=False)

    def name(self, block: int, name: bytes) -> None:
        """The first block of a name keeps it."""
        if name not in self._named:
            self._name[block] = name
            self._named[name] = block

    def forget(self, block: int) -> None:
        name = self._name.pop(block, None)
        if name is not None:
            del self._named[name]
