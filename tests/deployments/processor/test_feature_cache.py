import pytest

from deployments.processor.feature_cache import _OVERHEAD, FeatureCache
from deployments.types import Media, MediaUUID, MMFeatures, MMItem, Modality, Payload

MIB = 2**20


def kept(digest: str, num_bytes: int = MIB) -> MMItem:
    media = Media(Modality.IMAGE, f"media of {digest}", None, {}, 10, "image/png")
    features = MMFeatures(Modality.IMAGE, digest, 1, [(5, 1)], Payload(num_bytes, inline=b""), {})
    return MMItem(media, features)


def test_what_was_stored_is_found_until_it_is_the_oldest() -> None:
    cache = FeatureCache(10 * MIB)
    for i in range(9):
        cache.store(kept(str(i)))
    assert cache.find("0") == kept("0")
    cache.store(kept("9"))  # with what each entry costs beside its arrays, ten are too many
    assert cache.find("1") is None
    assert cache.find("0") is not None
    assert (cache.hits, cache.misses, cache.evictions) == (2, 1, 1)
    assert cache.bytes == 9 * (MIB + _OVERHEAD)


def test_storing_again_counts_once() -> None:
    cache = FeatureCache(10 * MIB)
    for _ in range(3):
        cache.store(kept("0"))
    assert cache.bytes == (MIB + _OVERHEAD)


@pytest.mark.parametrize("max_bytes", [0, 4 * MIB])
def test_what_would_displace_too_much_is_not_kept(max_bytes: int) -> None:
    cache = FeatureCache(max_bytes)
    cache.store(kept("0"))
    assert cache.find("0") is None
    assert cache.bytes == 0


def test_names_are_scoped() -> None:
    cache = FeatureCache(10 * MIB)
    name = MediaUUID("", Modality.IMAGE, "cat")
    cache.name(name, kept("0").media)
    assert cache.named(name) == kept("0").media
    assert cache.named(name._replace(salt="x")) is None
    assert cache.named(name._replace(modality=Modality.VIDEO)) is None
    cache.name(name, kept("1").media)
    assert cache.named(name) == kept("1").media


def test_nothing_is_left_after_clearing() -> None:
    cache = FeatureCache(10 * MIB)
    cache.store(kept("0"))
    cache.name(MediaUUID("", Modality.IMAGE, "cat"), kept("0").media)
    cache.clear()
    assert cache.find("0") is None
    assert cache.named(MediaUUID("", Modality.IMAGE, "cat")) is None
    assert cache.bytes == 0
