import base64
from collections.abc import Iterable
from itertools import pairwise
from urllib.parse import quote_from_bytes, unquote_to_bytes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import InvalidMedia, MediaTooLarge
from deployments.media import base64_stream, data_uri
from deployments.media.data_uri import decode

DATA = bytes(range(256)) * 3 + b"\xfb\xff"  # its base64 has + and / and padding
BASE64 = base64.b64encode(DATA)


def uri(header: str, data: bytes, max_bytes: int = 1 << 20, cuts: Iterable[int] = ()) -> bytes:
    borders = [0, *sorted(cut for cut in cuts if cut <= len(data)), len(data)]
    whole = np.frombuffer(data, np.uint8)
    return decode(header, [whole[start:stop] for start, stop in pairwise(borders)], max_bytes)


@pytest.mark.parametrize(
    "header",
    [
        "image/png;base64",
        "IMAGE/PNG;BASE64",
        ";base64",
        "base64",
        "a/b;charset=utf-8;name=a.png; base64 ;x=y",
    ],
)
def test_base64_is_recognised_among_other_parameters(header: str) -> None:
    assert uri(header, BASE64) == DATA


@pytest.mark.parametrize(
    "data",
    [
        base64.encodebytes(DATA),
        BASE64[:99] + b" \r\n\t " + BASE64[99:] + b"\n",
        base64.urlsafe_b64encode(DATA),
        BASE64.rstrip(b"="),
        base64.urlsafe_b64encode(DATA).rstrip(b"="),
        quote_from_bytes(BASE64, safe="").encode(),
        BASE64.replace(b"=", b"%3d"),
    ],
    ids=["lines", "whitespace", "url-safe", "unpadded", "url-safe unpadded", "quoted", "quoted padding"],
)
def test_lenient_base64_is_accepted(data: bytes) -> None:
    assert uri("image/png;base64", data) == DATA


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"AAAAA", "cut short"),
        (b"AA!A", "not valid base64"),
        (b"AA=A", "not valid base64"),
        ("ÄÖÜ".encode(), "not valid base64"),
        (b"AA%3", "percent-encoding is cut short"),
        (b"", "no data"),
        (b" \n", "no data"),
    ],
)
def test_invalid_base64_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidMedia, match=message):
        uri("image/png;base64", data)


def test_percent_encoding_is_decoded() -> None:
    assert uri("image/svg+xml", b"%00a%fF%20+") == b"\x00a\xff +"
    assert uri("", quote_from_bytes(DATA).encode()) == DATA


@pytest.mark.parametrize("data", [b"a%", b"a%4", b"%zz", b"%%41", b"%4%41"])
def test_broken_percent_encoding_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidMedia, match="percent-encoding"):
        uri("image/png", data)


@pytest.mark.parametrize(("header", "data"), [("a/b;base64", BASE64), ("a/b", DATA.replace(b"%", b"x"))])
def test_the_limit_is_exact(header: str, data: bytes) -> None:
    size = len(uri(header, data))
    assert len(uri(header, data, size)) == size
    with pytest.raises(MediaTooLarge, match=f"limit of {size - 1} bytes"):
        uri(header, data, size - 1)


def test_read_only_arrays_are_not_written_to() -> None:
    data = np.frombuffer(b"QUJD-_8=", np.uint8)
    assert not data.flags.writeable
    assert decode("a/b;base64", [data], 100) == base64.b64decode(b"QUJD+/8=")
    assert data.tobytes() == b"QUJD-_8="


def broken_into_lines(text: bytes) -> bytes:
    return b"\n".join(text[start : start + 5] for start in range(0, len(text), 5))


cuts = st.lists(st.integers(0, 300), max_size=8)


@given(st.binary(min_size=1, max_size=200), cuts)
def test_any_bytes_survive_any_cuts(data: bytes, cuts: list[int]) -> None:
    text = base64.b64encode(data)
    for written in (text, broken_into_lines(text), text.rstrip(b"="), quote_from_bytes(text, "").encode()):
        assert uri(";base64", written, cuts=cuts) == data
    assert uri("", quote_from_bytes(data, safe="").encode(), cuts=cuts) == data


@given(st.lists(st.sampled_from([b"A", b"/", b"=", b" ", b"%", b"%3d", b"-", b"!"]), max_size=12), cuts)
def test_cuts_make_no_difference(parts: list[bytes], cuts: list[int]) -> None:
    text = b"".join(parts)
    assert outcome(";base64", text, cuts) == outcome(";base64", text, [])
    assert outcome("", text, cuts) == outcome("", text, [])


def outcome(header: str, data: bytes, cuts: list[int]) -> bytes | type[Exception]:
    try:
        return uri(header, data, cuts=cuts)
    except InvalidMedia as error:
        return type(error)


@given(st.text(max_size=20), st.binary(max_size=100), cuts)
def test_only_declared_errors_are_raised(header: str, data: bytes, cuts: list[int]) -> None:
    try:
        uri(header, data, cuts=cuts)
    except InvalidMedia as error:
        assert len(error.message) > 10  # noqa: PT017


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_escapes_across_slices_are_decoded(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base64_stream, "_SLICE", 8)
    text = b"a" * shift + b"%41b%2542%20" * 5
    assert uri("", text) == unquote_to_bytes(text)


def test_escapes_are_limited_and_ordinary_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_uri, "_MAX_ESCAPES", 4)
    assert decode("image/png", [np.frombuffer(b"%41b%43d%45f%47", np.uint8)], 100) == b"AbCdEfG"
    with pytest.raises(InvalidMedia, match="more than 4 percent escapes"):
        decode("image/png", [np.frombuffer(b"%41%42%43%44%45", np.uint8)], 100)
