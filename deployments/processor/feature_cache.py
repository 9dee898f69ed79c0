"""Items that were processed before, by digest, and the uuids that clients gave to their media."""

from __future__ import annotations

from deployments.runtime.lru_cache import CountingLRUCache
from deployments.types import Media, MediaUUID, MMItem

MAX_UUIDS = 100_000
_MAX_AWAITED = 16  # items whose second call has not come yet; more only pile up if clients go away
_OVERHEAD = 4096  # bytes of an entry besides its arrays: records, run lengths, keys


class FeatureCache:
    """Keeps up to `max_bytes` of features and evicts the least recently used. One event loop owns it."""

    def __init__(self, max_bytes: int) -> None:
        # An item of more than a quarter of the cache would evict too many others.
        self._items: CountingLRUCache[str, MMItem] = CountingLRUCache(max_bytes, _num_bytes, max_bytes // 4)
        self._media_of_uuid: CountingLRUCache[MediaUUID, Media] = CountingLRUCache(MAX_UUIDS)
        self._awaited: CountingLRUCache[str, MMItem] = CountingLRUCache(_MAX_AWAITED)

    def find(self, digest: str) -> MMItem | None:
        awaited: MMItem | None = self._awaited.pop(digest, None)
        return awaited or self._items.find(digest)

    def store(self, item: MMItem) -> None:
        """Keeps the item unless it is more than a quarter of the cache."""
        self._items.store(item.features.digest, item)

    def keep_for_next_call(self, item: MMItem) -> None:
        """Keeps an item, even if the cache is off, until it is found once.

        The features were left out of a message that could not hold them, so a second call will ask for them.
        """
        if item.features.digest not in self._items:
            self._awaited.store(item.features.digest, item)

    def remember_uuid(self, uuid: MediaUUID, media: Media) -> None:
        """From now on `uuid` refers to this content."""
        self._media_of_uuid.store(uuid, media)

    def media_of_uuid(self, uuid: MediaUUID) -> Media | None:
        """The content that a uuid refers to. Its features may have been evicted."""
        return self._media_of_uuid.find(uuid)

    def clear(self) -> None:
        for cache in (self._items, self._media_of_uuid, self._awaited):
            cache.clear()

    @property
    def hits(self) -> int:
        return self._items.hits

    @property
    def misses(self) -> int:
        return self._items.misses

    @property
    def evictions(self) -> int:
        return self._items.evictions

    @property
    def bytes(self) -> int:
        return int(self._items.currsize)


def _num_bytes(item: MMItem) -> int:
    return item.features.nbytes + _OVERHEAD
