"""Replicas that die, and what their requests and clients see."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from tests.support.cluster import Answer, MediaServer, Server, wait_until
from tests.support.media_files import png, silence
from tests.support.requests import COMPLETIONS, ENDLESS, RENDER, chat, data_uri, media

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def test_health_follows_the_stages_and_a_dead_replica_is_replaced(
    server: Server, remote: MediaServer
) -> None:
    """A request whose loader is killed under it is answered by its replacement."""
    remote.content = {"/0.png": png()}
    first_try = threading.Event()

    async def once_never(_: object) -> None:
        if not first_try.is_set():
            first_try.set()
            await asyncio.Event().wait()

    remote.handlers = {"/0.png": once_never}
    answers = []
    request = chat(media("image", f"{remote.url}/0.png"), "what is this?", max_tokens=5)
    thread = threading.Thread(target=lambda: answers.append(server.post(COMPLETIONS, request)))
    thread.start()
    assert first_try.wait(10)
    (pid,) = server.replicas("MediaLoader")
    os.kill(pid, signal.SIGKILL)
    seen = [health(server)]

    def is_unhealthy() -> bool:
        seen.append(health(server))
        return seen[-1][0] == 503

    wait_until(is_unhealthy, 30)
    assert "MediaLoader" in seen[-1][1]
    thread.join(60)
    assert [answer.status for answer in answers] == [200], answers
    assert server.replicas("MediaLoader") != [pid]
    wait_until(lambda: health(server)[0] == 200, 30)


@pytest.mark.parametrize(
    ("stage", "item"),
    [
        ("MediaLoader", lambda: media("audio", data_uri("audio/wav", silence(1.6)))),
        ("MMPreprocessor", lambda: media("image", data_uri("image/png", png(77)))),
    ],
    ids=["loader", "preprocessor"],
)
def test_a_call_is_retried_when_its_replica_dies(
    server: Server, stage: str, item: Callable[[], dict[str, object]]
) -> None:
    (pid,) = server.replicas(stage)
    os.kill(pid, signal.SIGSTOP)
    request = chat(item(), max_tokens=1)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, COMPLETIONS, request)
        assert server.post(COMPLETIONS, chat("hello", max_tokens=1)).status == 200  # the first is on its way
        os.kill(pid, signal.SIGKILL)
        assert answer.result(60).status == 200, answer.result().body
    wait_until(lambda: health(server)[0] == 200, 30)


def test_a_stream_ends_with_an_error_when_its_model_dies_and_the_model_is_replaced(server: Server) -> None:
    stream = urllib.request.Request(
        server.url + COMPLETIONS, json.dumps(chat("go on", stream=True, **ENDLESS)).encode()
    )
    (pid,) = server.replicas("Model")
    with urllib.request.urlopen(stream, timeout=30) as response:
        assert response.readline().startswith(b"data: {")
        os.kill(pid, signal.SIGKILL)
        *_, last = response.read().decode().strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["message"].startswith("A replica of Model ended")
    wait_until(lambda: "Model" in health(server)[1] or server.replicas("Model") not in ([], [pid]), 30)
    wait_until(lambda: health(server)[0] == 200, 60, lambda: str(health(server)))
    assert server.post(COMPLETIONS, chat("hello", max_tokens=1)).status == 200


def test_a_missing_ingress_is_a_502_or_503(server: Server) -> None:
    (pid,) = server.replicas("Ingress")
    os.kill(pid, signal.SIGKILL)
    answers: list[Answer] = []

    def is_back() -> bool:
        with suppress(ConnectionError):  # of the one that it was killed under
            answers.append(server.post(RENDER, chat("hello")))
        return bool(answers) and answers[-1].status == 200 and server.replicas("Ingress") not in ([], [pid])

    wait_until(is_back, 60)
    missing = [answer for answer in answers if answer.status != 200]
    assert {answer.status for answer in missing} <= {502, 503}
    assert {answer.body["error"]["code"] for answer in missing} == {"stage_unavailable"}


def health(server: Server) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
