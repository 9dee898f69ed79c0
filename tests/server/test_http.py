"""HTTP through HAProxy: heads, bodies, connections and request ids."""

from __future__ import annotations

import base64
import http.client
import json
import os
import time
from urllib.parse import urlsplit

import pytest

from tests.support.cluster import IDLE_S, Answer, Server, wait_until
from tests.support.media_files import png, silence
from tests.support.raw_http import connect
from tests.support.requests import COMPLETIONS, chat, data_uri, media

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def test_a_body_over_the_limit_is_refused_before_it_is_sent(server: Server) -> None:
    with connect(server) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: h\r\nContent-Length: {10**12}\r\n\r\n"
        connection.sendall(head.encode())
        assert b" 413 " in connection.recv(1000)


def test_a_client_that_sends_everything_before_it_reads_gets_its_refusal(server: Server) -> None:
    """http.client and requests do so. If the server closed at once, they would see a broken connection."""
    body = b"x" * (20 * 2**20)
    early = {"Content-Encoding": "gzip"}
    for _ in range(3):
        answer = server.post(COMPLETIONS, body, early)
        assert answer.status == 415
        assert answer.body["error"]["code"] == "unsupported_encoding"


def test_a_client_that_leaves_in_its_body_leaves_no_traceback_in_the_log(server: Server) -> None:
    request_id = f"half-{time.time_ns()}"
    with connect(server) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: h\r\nx-request-id: {request_id}\r\n"
        connection.sendall(f"{head}Content-Length: 99\r\n\r\n{{".encode())
        wait_until(lambda: server.log_text("Ingress"))
    wait_until(lambda: server.log_lines("Ingress", request_id), why=lambda: "nothing of it in the log")
    assert "Traceback" not in server.log_text("Ingress")


def test_a_body_that_stalls_ends_in_a_408(server: Server) -> None:
    start = time.monotonic()
    with connect(server) as connection:
        connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: h\r\nContent-Length: 99\r\n\r\n{{".encode())
        assert b" 408 " in connection.recv(1000)
    assert IDLE_S <= time.monotonic() - start < IDLE_S + 5


def test_an_unfinished_head_ends_in_a_408(server: Server) -> None:
    with connect(server) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost")
        assert client.recv(65536).startswith(b"HTTP/1.1 408 ")


LARGE = 40 * 2**20  # bytes; several segments


def large_body() -> bytes:
    url = "data:image/png;base64," + base64.b64encode(os.urandom(LARGE)).decode()
    return json.dumps(chat(media("image", url))).encode()


def begin(server: Server, body: bytes, num_bytes: int) -> None:
    """Sends that much of the body and leaves."""
    with connect(server) as connection:
        connection.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        connection.sendall(body[:num_bytes])


def test_refused_and_abandoned_large_bodies_leave_no_memory(server: Server) -> None:
    body = large_body()
    assert server.post(COMPLETIONS, body).status == 415  # the first time loads what it needs
    before = {stage: server.own_bytes(stage) for stage in ("Ingress", "MMPreprocessor")}
    with server.object_store() as store:
        idle = store()
        for _ in range(3):
            assert server.post(COMPLETIONS, body).status == 415
            begin(server, body, len(body) // 2)
            begin(server, body, len(body))
        wait_until(lambda: store() <= idle, 30, lambda: f"{store()}, {idle} before")
    grown = {stage: server.own_bytes(stage) - size for stage, size in before.items()}
    assert all(size < 64 * 2**20 for size in grown.values()), grown


GOOD_BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})


BODIES = {
    "half": (b'{"model": "m", "messages": [], x}', 400),
    "text": (b"hi", 400),
    "list": (b"[]", 400),
    "number": (b"7", 400),
    "null": (b"null", 400),
    "empty": (b"", 400),
    "cut": (GOOD_BODY[:-5].encode(), 400),
    "utf-16": (GOOD_BODY.encode("utf-16"), 400),
    "latin-1": ('{"messages": [{"role": "user", "content": "é"}]}'.encode("latin-1"), 400),
    "nan": (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}', 400),
    "nested": (b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", 400),
    "two": (GOOD_BODY.encode() * 2, 400),
    "twice": (b'{"max_tokens": 0, ' + GOOD_BODY[1:].encode(), 200),
    "untyped": (GOOD_BODY.encode(), 200),
}


ODD_TYPES: dict[str, dict[str, str]] = {"untyped": {}, "twice": {"Content-Type": "text/plain"}}


def test_invalid_json_is_refused_and_the_connection_stays_open(server: Server) -> None:
    target = urlsplit(server.url)
    connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
    connection.connect()
    first = connection.sock
    for name, (body, status) in BODIES.items():
        headers = ODD_TYPES.get(name, {"Content-Type": "application/json"})
        connection.request("POST", COMPLETIONS, body, headers)
        response = connection.getresponse()
        answer = Answer(response.status, dict(response.headers), json.loads(response.read()))
        assert answer.status == status, (name, answer.body)
        if status == 400:
            answer.refusal(status=(400,))
        assert connection.sock is first, name
    connection.close()


def test_the_request_id_is_echoed_and_in_the_log_of_every_stage(server: Server) -> None:
    request_id = f"trace-{time.time_ns()}"
    items = [
        media("image", data_uri("image/png", png())),
        media("audio", data_uri("audio/wav", silence(1.5))),
    ]
    answer = server.post(COMPLETIONS, chat(*items, max_tokens=5), {"x-request-id": request_id})
    assert answer.headers["x-request-id"] == request_id
    for stage in ("Ingress", "Tokenizer", "MediaLoader", "MMPreprocessor", "Model"):
        wait_until(lambda: server.log_lines(stage, request_id), why=lambda: f"nothing of it in {stage}")  # noqa: B023
