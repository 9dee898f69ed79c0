from blake3 import blake3

from deployments.runtime.hashing import digest


def test_a_digest_is_64_hex_characters_and_stable() -> None:
    assert digest(b"abc", "image") == digest(b"abc", "image")
    assert len(digest(b"")) == 64
    assert int(digest(b"abc"), 16)


def test_parts_are_framed_by_their_length() -> None:
    assert (
        len({digest("ab", "c"), digest("a", "bc"), digest("abc"), digest("abc", ""), digest("", "abc")}) == 5
    )


def test_text_bytes_and_views_of_equal_content_are_equal() -> None:
    assert digest("abc") == digest(b"abc") == digest(memoryview(b"abc"))


def test_the_framing_is_eight_bytes_little_endian() -> None:
    assert digest(b"xyz") == blake3((3).to_bytes(8, "little") + b"xyz").hexdigest()
