"""HTTP over a bare socket, for requests that no client library sends."""

from __future__ import annotations

import json
import socket

from tests.support.cluster import Server
from tests.support.requests import COMPLETIONS, RENDER, chat


def connect(server: Server, *, reused: bool = False) -> socket.socket:
    """Opens a connection; a reused one has already carried a request and its answer."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    if reused:
        send(connection, chat("hello", max_tokens=1), path=RENDER)
        received = b""
        while b"prompt_token_ids" not in received or not received.rstrip().endswith(b"}"):
            received += connection.recv(65536)
    return connection


def send_head(
    connection: socket.socket, num_bytes: int, request_id: str = "", path: str = COMPLETIONS
) -> None:
    """Sends the head of a request whose body has `num_bytes`."""
    head = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {num_bytes}"]
    if request_id:
        head.append(f"x-request-id: {request_id}")
    connection.sendall("\r\n".join([*head, "", ""]).encode())


def send(connection: socket.socket, body: object, request_id: str = "", path: str = COMPLETIONS) -> None:
    data = json.dumps(body).encode()
    send_head(connection, len(data), request_id, path)
    connection.sendall(data)
