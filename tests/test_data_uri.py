import base64
from urllib.parse import quote_from_bytes, unquote_to_bytes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import InvalidMedia, MediaTooLarge
from deployments.multimodal import data_uri
from deployments.multimodal.data_uri import decode

DATA = bytes(range(256)) * 3 + b"\xfb\xff"  # its base64 has + and / and padding
BASE64 = base64.b64encode(DATA)


def uri(header: str, data: bytes, max_bytes: int = 1 << 20) -> bytes:
    return decode(header, np.frombuffer(data, np.uint8), max_bytes)


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
def test_base64_is_recognised_whatever_stands_around_it(header: str) -> None:
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
def test_base64_in_its_usual_disguises(data: bytes) -> None:
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
def test_what_is_not_base64_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidMedia, match=message):
        uri("image/png;base64", data)


def test_percent_encoding() -> None:
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
    assert decode("a/b;base64", data, 100) == base64.b64decode(b"QUJD+/8=")
    assert data.tobytes() == b"QUJD-_8="


@given(st.binary(min_size=1, max_size=200))
def test_every_byte_string_survives(data: bytes) -> None:
    assert uri(";base64", base64.b64encode(data)) == data
    assert uri("", quote_from_bytes(data, safe="").encode()) == data


@given(st.text(max_size=20), st.binary(max_size=100))
def test_nothing_but_the_declared_errors(header: str, data: bytes) -> None:
    try:
        uri(header, data)
    except InvalidMedia as error:
        assert len(error.message) > 10  # noqa: PT017


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_percent_signs_at_the_borders_of_slices(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_uri, "_SLICE", 8)
    text = b"a" * shift + b"%41b%2542%20" * 5
    assert uri("", text) == unquote_to_bytes(text)
