import pytest

from deployments.processor.feature_cache import _MAX_AWAITED, _OVERHEAD, FeatureCache
from deployments.types import Media, MediaUUID, MMFeatures, MMItem, Modality, Payload

MIB = 2**20


def kept(digest: str, num_bytes: int = MIB) -> MMItem:
    media = Media(Modality.IMAGE, f"media of {digest}", None, {}, 10, "image/png")
    features = MMFeatures(Modality.IMAGE, digest, 1, [(5, 1)], Payload(num_bytes, inline=b""), {})
    return MMItem(media, features)


def test_an_item_is_found_until_it_is_the_least_recently_used() -> None:
    cache = FeatureCache(10 * MIB)
    for i in range(9):
        cache.store(kept(str(i)))
    assert cache.find("0") == kept("0")
    cache.store(kept("9"))  # ten do not fit: each entry has an overhead besides its arrays
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
def test_an_item_of_more_than_a_quarter_of_the_cache_is_not_kept(max_bytes: int) -> None:
    cache = FeatureCache(max_bytes)
    cache.store(kept("0"))
    assert cache.find("0") is None
    assert cache.bytes == 0


def test_uuids_are_scoped_by_salt_and_modality() -> None:
    cache = FeatureCache(10 * MIB)
    uuid = MediaUUID("", Modality.IMAGE, "cat")
    cache.remember_uuid(uuid, kept("0").media)
    assert cache.media_of_uuid(uuid) == kept("0").media
    assert cache.media_of_uuid(uuid._replace(salt="x")) is None
    assert cache.media_of_uuid(uuid._replace(modality=Modality.VIDEO)) is None
    cache.remember_uuid(uuid, kept("1").media)
    assert cache.media_of_uuid(uuid) == kept("1").media


def test_nothing_is_left_after_clearing() -> None:
    cache = FeatureCache(10 * MIB)
    cache.store(kept("0"))
    cache.keep_for_next_call(kept("1"))
    cache.remember_uuid(MediaUUID("", Modality.IMAGE, "cat"), kept("0").media)
    cache.clear()
    assert cache.find("0") is None
    assert cache.find("1") is None
    assert cache.media_of_uuid(MediaUUID("", Modality.IMAGE, "cat")) is None
    assert cache.bytes == 0


def test_an_item_that_awaits_its_second_call_is_found_once_though_the_cache_is_off() -> None:
    cache = FeatureCache(0)
    cache.keep_for_next_call(kept("0"))
    assert cache.find("0") == kept("0")
    assert cache.find("0") is None


def test_items_whose_second_call_never_comes_make_room() -> None:
    cache = FeatureCache(0)
    for i in range(_MAX_AWAITED + 1):
        cache.keep_for_next_call(kept(str(i)))
    assert cache.find("0") is None
    assert cache.find("1") is not None


def test_an_item_in_the_cache_is_not_kept_a_second_time() -> None:
    cache = FeatureCache(10 * MIB)
    cache.store(kept("0"))
    cache.keep_for_next_call(kept("0"))
    for _ in range(2):
        assert cache.find("0") == kept("0")
    assert cache.hits == 2
