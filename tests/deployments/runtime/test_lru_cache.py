from deployments.runtime.lru_cache import CountingLRUCache


def test_the_least_recently_used_value_makes_room() -> None:
    cache: CountingLRUCache[str, bytes] = CountingLRUCache(10, len)
    cache.store("a", b"1234")
    cache.store("b", b"5678")
    assert cache.find("a") == b"1234"
    cache.store("c", b"9012")
    assert (cache.find("b"), cache.find("a"), cache.find("c")) == (None, b"1234", b"9012")
    assert (cache.hits, cache.misses, cache.evictions, cache.currsize) == (3, 1, 1, 8)


def test_a_value_that_is_too_large_is_not_kept_and_replaces_nothing() -> None:
    cache: CountingLRUCache[str, bytes] = CountingLRUCache(10, len, max_value_size=4)
    cache.store("a", b"1234")
    cache.store("b", b"12345")
    assert (cache.find("b"), cache.find("a"), cache.evictions) == (None, b"1234", 0)
    cache.store("a", b"12345")
    assert cache.find("a") is None  # the old value is not what the key means any more


def test_a_cache_of_size_zero_keeps_nothing() -> None:
    cache: CountingLRUCache[str, bytes] = CountingLRUCache(0, len)
    cache.store("a", b"1")
    assert cache.find("a") is None


def test_without_sizes_entries_are_counted() -> None:
    cache: CountingLRUCache[int, object] = CountingLRUCache(2)
    for key in range(3):
        cache.store(key, object())
    assert (0 in cache, 1 in cache, 2 in cache, cache.evictions) == (False, True, True, 1)
