"""Requests that end early: the client leaves, or the deadline passes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.support.cluster import MediaServer, ServeConfig, Server, wait_until
from tests.support.media_files import encoded, noise
from tests.support.raw_http import connect, send
from tests.support.requests import COMPLETIONS, ENDLESS, chat, data_uri, media

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


@pytest.mark.parametrize("reused", [False, True], ids=["fresh", "reused"])
@pytest.mark.parametrize("padding", [0, 20_000, 200_000])
def test_a_client_that_leaves_while_loading_cancels_every_fetch(
    server: Server, remote: MediaServer, six_items: list[dict[str, object]], reused: bool, padding: int
) -> None:
    asked = threading.Event()

    async def never(_: object) -> None:
        if len(remote.asked) >= 6:
            asked.set()
        await asyncio.Event().wait()

    remote.handlers = dict.fromkeys(remote.content, never)
    connection = connect(server, reused=reused)
    send(connection, chat(*six_items, user="x" * padding))
    assert asked.wait(10)
    connection.close()
    wait_until(lambda: len(remote.left) == 6, why=lambda: f"still loading: {remote.left}")


@pytest.mark.parametrize("reused", [False, True], ids=["fresh", "reused"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("size", [48, 600], ids=["in-band", "by-reference"])
def test_a_client_that_leaves_while_generating_frees_the_engine(
    server: Server, reused: bool, stream: bool, size: int
) -> None:
    request_id = f"leaves-{reused}-{stream}-{size}-{time.time_ns()}"
    connection = connect(server, reused=reused)
    item = media("image", data_uri("image/png", encoded(noise(size, size), "png")))
    send(connection, chat(item, "go on", stream=stream, **ENDLESS), request_id)
    wait_until(lambda: server.log_lines("Model", request_id), why=lambda: "generation did not begin")
    connection.close()
    wait_until(
        lambda: any("cancelled" in line for line in server.log_lines("Model", request_id)),
        why=lambda: str(server.log_lines("Model", request_id)),
    )
    # The engine is free again at once: another answer does not wait for the rest of this one.
    start = time.monotonic()
    assert server.post(COMPLETIONS, chat("hello", max_tokens=1)).status == 200
    assert time.monotonic() - start < 3


def test_a_deadline_that_passes_frees_the_engine(tmp_path: Path) -> None:
    def change(config: ServeConfig) -> None:
        config["applications"][0]["args"] |= {"timeout_s": 2}

    with Server.start(tmp_path, change) as server, server.engine() as stats:
        whole = server.post(COMPLETIONS, chat("go on", n=3, **ENDLESS))
        assert whole.status == 504
        assert "still in Model after its 2 s" in whole.body["error"]["message"]
        stream = urllib.request.Request(
            server.url + COMPLETIONS, json.dumps(chat("go on", stream=True, **ENDLESS)).encode()
        )
        with urllib.request.urlopen(stream, timeout=30) as response:
            events = response.read().decode().strip().split("\n\n")
        assert "still in Model" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
        wait_until(lambda: not stats()["running"], why=lambda: str(stats()))
        left = stats()
        assert (left["running"], left["waiting"], left["kv_tokens_used"]) == (0, 0, 0)
        assert left["generated_tokens"] < 4 * 3000
