"""Items that were processed before, by content, and the names that clients gave them."""

from __future__ import annotations

from collections import OrderedDict

from deployments.types import Media, MediaUUID, MMItem

MAX_NAMES = 100_000  # the name that was used longest ago goes first
_OVERHEAD = 4096  # bytes of an entry beside its arrays: records, run lengths, keys


class FeatureCache:
    """At most `max_bytes` of features; what was used longest ago goes first. One loop's, not a thread's."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, MMItem] = OrderedDict()
        self._names: OrderedDict[MediaUUID, Media] = OrderedDict()
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.bytes = 0

    def find(self, digest: str) -> MMItem | None:
        kept = self._kept.get(digest)
        if kept:
            self._kept.move_to_end(digest)
        self.hits += kept is not None
        self.misses += kept is None
        return kept

    def store(self, kept: MMItem) -> None:
        """Keeps it unless it is more than a quarter of all."""
        self._drop(kept.features.digest)
        if _num_bytes(kept) * 4 > self._max_bytes:
            return
        self._kept[kept.features.digest] = kept
        self.bytes += _num_bytes(kept)
        while self.bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))
            self.evictions += 1

    def name(self, name: MediaUUID, media: Media) -> None:
        """From now on `name` means this content."""
        self._names[name] = media
        self._names.move_to_end(name)
        if len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)

    def named(self, name: MediaUUID) -> Media | None:
        """Its features may be gone by now."""
        return self._names.get(name)

    def clear(self) -> None:
        self._kept.clear()
        self._names.clear()
        self.bytes = 0

    def _drop(self, digest: str) -> None:
        if kept := self._kept.pop(digest, None):
            self.bytes -= _num_bytes(kept)


def _num_bytes(kept: MMItem) -> int:
    return kept.features.nbytes + _OVERHEAD
