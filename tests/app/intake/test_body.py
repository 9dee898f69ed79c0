from __future__ import annotations

import asyncio
import json
import string
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.intake import body as intake
from app.intake import scanner as scanning
from app.intake.body import InFlight, read_body
from app.intake.long_string import LongString, Segment
from app.intake.scanner import LONG_STRING_BYTES, Body, Scanner
from deployments.errors import InvalidRequest, Overloaded, RequestTimeout, RequestTooLarge
from deployments.runtime.memory import release_on_error
from deployments.runtime.payload import unpack_pieces
from deployments.types import Payload


def scanner_of(threshold: int = LONG_STRING_BYTES) -> Scanner:
    def upload(pieces: list[bytes]) -> Segment:
        raise AssertionError("no string here has a segment")

    return Scanner(upload, threshold)


def scan(data: bytes, cuts: list[int] | None = None, threshold: int = 8) -> Body:
    scanner = scanner_of(threshold)
    borders = [0, *sorted(min(cut, len(data)) for cut in cuts or []), len(data)]
    for start, stop in pairwise(borders):
        for _ in scanner.feed(data[start:stop]):
            pass
    return scanner.finish()


def scan_bytewise(data: bytes, threshold: int = 8) -> Body:
    return scan(data, list(range(len(data))), threshold)


def put_back(value: Any, body: Body) -> Any:
    """The parsed document with the content of every long string in place of its token."""
    match value:
        case dict():
            return {key: put_back(member, body) for key, member in value.items()}
        case list():
            return [put_back(element, body) for element in value]
        case str() if value in body.strings:
            return body.strings[value].join().decode()
        case _:
            return value


async def chunks_of(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


# Pieces of JSON strings as they stand in a body, escapes in every form, which json.dumps would not write.
raw_pieces = st.one_of(
    st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters='"\\'), max_size=12),
    st.sampled_from(
        [rf"\{c}" for c in '"\\/bfnrt'] + [r"\u0041", r"\ud83d\uDE00", r"\u20ac", r"\\ud83d", "\x7f"]
    ),
    st.text(string.ascii_letters, min_size=20, max_size=60),
)
raw_strings = st.lists(raw_pieces, max_size=8).map(lambda pieces: '"' + "".join(pieces) + '"')
keys = st.text(string.ascii_lowercase + '"\\é', max_size=2).map(json.dumps)
spaces = st.sampled_from(["", " ", "\n", "\t \r\n"])
scalars = st.one_of(
    raw_strings,
    st.sampled_from(["null", "true", "false"]),
    st.integers(-(2**53), 2**53).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
)


def containers(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    members = st.tuples(keys, spaces, spaces, values).map(lambda m: f"{m[0]}{m[1]}:{m[2]}{m[3]}")
    arrays = st.tuples(spaces, st.lists(values, max_size=4)).map(lambda a: f"[{a[0]}{','.join(a[1])}]")
    return arrays | objects(members)


def objects(members: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(spaces, st.lists(members, max_size=4)).map(lambda o: "{" + o[0] + ",".join(o[1]) + "}")


documents = objects(
    st.tuples(keys, spaces, st.recursive(scalars, containers, max_leaves=12)).map(
        lambda m: f"{m[0]}{m[1]}:{m[2]}"
    )
)


@given(documents, st.lists(st.integers(0, 400), max_size=12), st.integers(12, 80))
@example('{"a":"' + "x" * 20 + r"\ud83d\ude00" + '"}', [26, 27, 31, 32, 33, 34, 37], 12)
@example('{"a":"' + "\\" * 20 + '"}', [10, 11, 12], 12)
def test_put_back_together_it_is_what_json_reads(document: str, cuts: list[int], threshold: int) -> None:
    body = scan(document.encode(), cuts, threshold)
    assert put_back(body.parse(), body) == json.loads(document)


@given(documents, st.integers(12, 30))
def test_the_same_byte_by_byte(document: str, threshold: int) -> None:
    body = scan_bytewise(document.encode(), threshold)
    assert put_back(body.parse(), body) == json.loads(document)


@given(documents, st.lists(st.integers(0, 400), max_size=12), st.integers(12, 40), st.integers(1, 60))
async def test_the_same_with_long_strings_in_segments(
    document: str, cuts: list[int], threshold: int, segment_bytes: int
) -> None:
    data = document.encode()
    borders = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [data[start:stop] for start, stop in pairwise(borders)]
    with patch.multiple(scanning, SEGMENT_BYTES=segment_bytes, _PIECE=5):
        body = await read_body(chunks_of(*chunks), max_bytes=10**6, threshold=threshold)
    whole = {token: LongString((await sent(string),)) for token, string in body.strings.items()}
    assert {token: len(string) for token, string in body.strings.items()} == {
        token: len(string) for token, string in whole.items()
    }
    assert put_back(body.parse(), replace(body, strings=whole)) == json.loads(document)


async def sent(string: LongString) -> bytes:
    """As a stage gets it."""
    return b"".join(piece.tobytes() for piece in await unpack_pieces(await string.pack()))


@given(documents, st.integers(12, 30), st.data())
def test_what_is_broken_fails_as_a_bad_request_or_is_valid_json(
    document: str, threshold: int, data: st.DataObject
) -> None:
    broken = bytearray(document.encode())
    broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    try:
        body = scan(bytes(broken), data.draw(st.lists(st.integers(0, 200), max_size=5)), threshold)
        value = put_back(body.parse(), body)
    except InvalidRequest:
        return
    assert value == json.loads(bytes(broken))


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_a_long_string_is_valid_exactly_where_json_says_so(content: bytes, cuts: list[int]) -> None:
    data = b'{"a":"' + b"x" * 20 + content + b'"}'
    try:
        expected = json.loads(data)
        json.dumps(expected, ensure_ascii=False).encode()  # json lets lone surrogates pass
    except (ValueError, UnicodeError):
        with pytest.raises(InvalidRequest):
            scan(data, cuts).parse()
    else:
        body = scan(data, cuts)
        assert put_back(body.parse(), body) == expected


def test_only_strings_over_the_threshold_are_moved_out() -> None:
    body = scan(b'{"a":"%s","b":"%s"}' % (b"x" * 8, b"y" * 9))
    assert [string.join() for string in body.strings.values()] == [b"y" * 9]
    assert body.parse()["a"] == "x" * 8


def test_a_token_cannot_be_foreseen() -> None:
    tokens = {next(iter(scan(b'{"a":"123456789"}').strings)) for _ in range(3)}
    assert len(tokens) == 3


def test_a_clients_own_token_like_string_stays_a_string() -> None:
    mine = next(iter(scan(b'{"a":"123456789"}').strings))
    body = scan(b'{"a":"%s"}' % mine.encode(), threshold=100)
    assert body.parse() == {"a": mine}
    assert not body.strings


def test_whole_chunks_of_a_plain_string_are_not_copied() -> None:
    chunk = b"A" * 100_000
    body = scan_chunks(b'{"a":"' + b"A" * 70_000, chunk, b'"}')
    (long,) = body.strings.values()
    assert any(piece is chunk for piece in long.pieces)


def scan_chunks(*chunks: bytes) -> Body:
    scanner = scanner_of()
    for chunk in chunks:
        for _ in scanner.feed(chunk):
            pass
    return scanner.finish()


def test_a_client_that_sends_byte_by_byte_does_not_cost_an_object_per_byte() -> None:
    content = b"A" * 100_000
    scanner = scanner_of(8)
    for byte in b'{"a":"' + content + b'"}':
        for _ in scanner.feed(bytes([byte])):
            pass
    (long,) = scanner.finish().strings.values()
    assert long.join() == content
    assert len(long.pieces) < 5


@pytest.mark.parametrize(
    "content", [b"A" * 63 + rb"\/", rb"\"", rb"\\", rb"\u0041", rb"\ud83d\ude00", "é😀".encode(), b'","']
)
def test_no_step_scans_more_than_a_slice(content: bytes) -> None:
    data = b'{"a":["' + content * (250_000 // len(content)) + b'"]}'
    scanner = scanner_of()
    seen = 0
    steps = []
    for _ in scanner.feed(data):
        done = scanner._base + scanner._pos
        steps.append(done - seen)
        seen = done
    assert max(steps) <= scanning._SLICE
    body = scanner.finish()
    if content != b'","':
        assert put_back(body.parse(), body) == json.loads(data)


def test_head_tail_and_join_of_a_long_string() -> None:
    long = LongString((b"data:", b"image/png,", b"AAAA"))
    assert len(long) == 19
    assert (long.head(0), long.head(7), long.head(99)) == (b"", b"data:im", b"data:image/png,AAAA")
    assert long.tail(15).pieces == (b"AAAA",)
    assert (long.tail(17).join(), long.tail(19).join(), long.tail(50).join()) == (b"AA", b"", b"")
    assert long.tail(0).join() == long.join() == b"data:image/png,AAAA"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "The body is empty"),
        (b" \n ", "The body is empty"),
        (b"[]", "must be a JSON object"),
        (b'"123456789"', "must be a JSON object"),
        (b'{"a": NaN}', "line 1 column 7 (byte 6)"),
        (b'{"a": -Infinity}', "line 1 column 8 (byte 7)"),
        (b'{"a": 1e999}', "infinity"),
        (b'{"a": 1', "unexpected end of data at line 1 column 8 (byte 7)"),
        (b'{"a": "123', "unexpected end of data at line 1 column 11 (byte 10)"),
        (b'{"a": "1234567890', "unterminated string starting at line 1 column 7 (byte 6)"),
        (b'{"a":\n "1234567890\\', "unterminated string starting at line 2 column 2 (byte 7)"),
        (b'{"a": "1234567890",\n "b": "1234567890", "c": x}', "line 2 column 26 (byte 45)"),
        (b'{"a": "1234567890\x01"}', "control character in string at line 1 column 18 (byte 17)"),
        (b'{"a": "\x01"}', "control character in string at line 1 column 8 (byte 7)"),
        (b'{"a": "1234567890\\x"}', "escape"),
        (b'{"a": "1234567890\\ud800"}', "invalid escape in a string at line 1 column 18 (byte 17)"),
        (b'{"a": "1234567890\\ud800\\n1234567890123456"}', "invalid escape in a string at line 1 column 18"),
        (b'{"a": "1234567890\\udc00"}', "surrogate"),
        (b'{"a": "1234567890\xff"}', "invalid UTF-8 at line 1 column 18 (byte 17)"),
        (b'{"a": "\xc3"}', "invalid UTF-8 at line 1 column 8 (byte 7)"),
        ('{"é": "1234567890", x}'.encode(), "line 1 column 22 (byte 21)"),
        (b'{"1234567890" : 1}', "A key of a JSON object is longer than 8 bytes"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
    ],
)
@pytest.mark.parametrize("scanned", [scan, scan_bytewise])
def test_what_is_wrong_is_said_at_its_place(data: bytes, message: str, scanned: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        scanned(data).parse()
    assert message in str(caught.value)


def test_of_equal_keys_the_last_one_counts() -> None:
    assert scan(b'{"a": 1, "a": 2}').parse() == {"a": 2}


def test_nesting_is_bounded_and_brackets_in_strings_do_not_count() -> None:
    deep = scanning.MAX_DEPTH - 1
    assert scan(b'{"a":' + b"[" * deep + b'"[{[{"' + b"]" * deep + b"}").parse()
    with pytest.raises(InvalidRequest, match="nested deeper than 64"):
        scan(b'{"a":' + b"[" * (deep + 1))


def test_the_number_of_values_is_bounded_and_commas_in_strings_do_not_count() -> None:
    commas = b"," * (scanning.MAX_VALUES + 1)
    assert scan(b'{"a":"' + commas + b'"}').strings
    with pytest.raises(InvalidRequest, match="more than 100000 JSON values"):
        scan(b'{"a":[1' + commas)


def test_the_number_of_long_strings_is_bounded() -> None:
    with pytest.raises(InvalidRequest, match="more than 4096 long strings"):
        scan(b"[" + b",".join([b'"123456789"'] * (scanning.MAX_LONG_STRINGS + 1)))


def test_the_document_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "MAX_DOCUMENT_BYTES", 1000)
    assert scan(b'{"a": "' + b"x" * 2000 + b'"}').strings
    with pytest.raises(RequestTooLarge, match="without its long strings is over 1000 bytes"):
        scan(b'{"a": "1",' + b" " * 1000)


async def test_reads_a_body() -> None:
    body = await read_body(chunks_of(b'{"a":"', b"", b"x" * 20, b'"}'), max_bytes=28, threshold=8)
    assert put_back(body.parse(), body) == {"a": "x" * 20}
    assert body.num_bytes == 28


async def test_a_body_over_the_limit_is_refused_with_the_chunk_that_passes_it() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"x" * 6
        yield b"x" * 5
        pytest.fail("read on")

    with pytest.raises(RequestTooLarge, match="over the limit of 10 bytes"):
        await read_body(chunks(), max_bytes=10)


async def test_a_client_that_stalls_is_timed_out() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"a":'
        await asyncio.Event().wait()

    with pytest.raises(RequestTimeout) as caught:
        await read_body(chunks(), max_bytes=100, timeout_s=0.01)
    assert caught.value.status == 408


async def test_other_tasks_run_between_the_chunks_of_a_queue_that_is_never_empty() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    chunks = [b'{"a":"', *[b"A" * 1000] * 100, b'"}']
    await read_body(chunks_of(*chunks), max_bytes=10**6)
    task.cancel()
    assert turns >= len(chunks)


async def test_segments_leave_while_the_rest_still_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "SEGMENT_BYTES", 200_000)
    chunk = b"A" * 100_000
    chunks = chunks_of(b'{"a":"data:x/y;base64,' + chunk, *[chunk] * 5, b'"}')
    body = await read_body(chunks, max_bytes=10**6)
    (long,) = body.strings.values()
    assert [type(piece) for piece in long.pieces] == [bytes, Segment, Segment, bytes]
    assert long.head(9) == b"data:x/y;"
    assert len(long) == 600_016
    assert await sent(long.tail(16)) == chunk * 6


async def test_a_client_waits_while_segments_are_slow_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "SEGMENT_BYTES", 100_000)
    may_leave, taken, stuck = asyncio.Event(), 0, asyncio.Event()

    async def pack_pieces(pieces: list[bytes]) -> Payload:
        stuck.set()
        await may_leave.wait()
        return Payload(sum(map(len, pieces)))

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal taken
        yield b'{"a":"'
        for taken in range(20):  # noqa: B007
            yield b"A" * 100_000
        yield b'"}'

    monkeypatch.setattr(intake, "pack_pieces", pack_pieces)
    reading = asyncio.create_task(read_body(chunks(), max_bytes=10**7))
    await stuck.wait()
    for _ in range(200):
        await asyncio.sleep(0)
    assert taken == intake._MAX_UPLOADS + 1  # the first chunk stays, and one more is in hand
    may_leave.set()
    assert (await reading).num_bytes == 2_000_008


async def test_a_body_that_fails_cancels_the_segments_that_are_on_their_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scanning, "SEGMENT_BYTES", 100_000)
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def pack_pieces(pieces: list[bytes]) -> Payload:
        started.set()
        try:
            return await asyncio.Future()
        finally:
            cancelled.set()

    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"a":"'
        yield b"A" * 100_000
        yield b"A" * 100_000
        await started.wait()
        raise ConnectionResetError

    monkeypatch.setattr(intake, "pack_pieces", pack_pieces)
    with pytest.raises(ConnectionResetError):
        await read_body(chunks(), max_bytes=10**6)
    assert cancelled.is_set()


async def test_all_segments_have_arrived_when_the_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "SEGMENT_BYTES", 100_000)
    body = await read_body(chunks_of(b'{"a":"', *[b"A" * 100_000] * 3, b'"}'), max_bytes=10**6)
    (long,) = body.strings.values()
    segments = [piece for piece in long.pieces if isinstance(piece, Segment)]
    assert len(segments) == 2
    assert all(segment.payload.done() for segment in segments)


async def test_a_client_that_stalls_between_chunks_is_not_waited_for_to_the_end() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"a":'
        await asyncio.Event().wait()

    with pytest.raises(RequestTimeout, match=r"within 100 s, or nothing of it for 0\.01 s"):
        await read_body(chunks(), max_bytes=100, timeout_s=100, idle_timeout_s=0.01)


async def test_bytes_in_flight_are_bounded_and_come_back() -> None:
    in_flight = InFlight(100)
    with in_flight.share() as hold:
        await read_body(chunks_of(b'{"a":"', b"x" * 50, b'"}'), max_bytes=100, hold=hold)
        assert in_flight.num_bytes == 58
        in_flight.check(42)
        with pytest.raises(Overloaded), in_flight.share() as second:
            await read_body(chunks_of(b'{"a":"', b"x" * 50, b'"}'), max_bytes=100, hold=second)
        assert in_flight.num_bytes == 58
    assert in_flight.num_bytes == 0


async def test_a_client_that_leaves_takes_its_buffers_with_it() -> None:
    chunk = b"A" * 100_000
    before = sys.getrefcount(chunk)

    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"a":"'
        for _ in range(5):
            yield chunk
        raise ConnectionResetError

    error = None
    try:
        with release_on_error():
            await read_body(chunks(), max_bytes=10**6)
    except ConnectionResetError as caught:
        error = caught  # Serve keeps it, too
    assert error is not None
    assert sys.getrefcount(chunk) == before


async def test_what_the_transport_raises_passes_through() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"{"
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await read_body(chunks(), max_bytes=100)
