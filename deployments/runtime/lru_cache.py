"""A least-recently-used cache that counts what it does. Not thread-safe: one event loop or thread owns it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cachetools import LRUCache

K = TypeVar("K")
V = TypeVar("V")


class CountingLRUCache(LRUCache[K, V]):
    """`cachetools.LRUCache` with counters, in whatever unit `getsizeof` gives.

    Without `getsizeof` each value counts as 1, so `maxsize` is a number of entries.
    """

    def __init__(
        self,
        maxsize: int,
        getsizeof: Callable[[V], int] | None = None,
        max_value_size: int | None = None,
    ) -> None:
        """`max_value_size`: a larger value is not kept, so that one value cannot empty the cache."""
        super().__init__(maxsize, getsizeof)
        self._max_value_size = maxsize if max_value_size is None else min(maxsize, max_value_size)
        self.hits = 0
        self.misses = 0
        self.evictions = 0

    def find(self, key: K) -> V | None:
        """Returns the value and counts a hit, or returns None and counts a miss."""
        value = self.get(key)
        if value is None:
            self.misses += 1
        else:
            self.hits += 1
        return value

    def store(self, key: K, value: V) -> None:
        """Keeps the value unless it is too large; an older value of the same key is gone in either case."""
        self.pop(key, None)
        if self.getsizeof(value) <= self._max_value_size:
            self[key] = value

    def popitem(self) -> tuple[K, V]:
        """Removes the least recently used value: cachetools calls this to make room."""
        self.evictions += 1
        return super().popitem()
