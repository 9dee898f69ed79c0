"""What local mode hides: processes, references, HTTP through HAProxy, cancellation, replica death."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
import soundfile
from aiohttp import web
from PIL import Image

from tests.deployments.media.test_fetch import targets
from tests.support.cluster import IDLE_S, Answer, MediaServer, Server, chat, media, media_server, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

COMPLETIONS = "/v1/chat/completions"
RENDER = f"{COMPLETIONS}/render"
ENDLESS = {"ignore_eos": True, "max_tokens": 3000}


@pytest.fixture
def remote() -> Iterator[MediaServer]:
    with media_server() as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def png(shade: int = 128, size: tuple[int, int] = (48, 48)) -> bytes:
    return encoded(Image.new("RGB", size, (shade, 255 - shade, 0)), "png")


def encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def wav(seconds: float) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, [0.0] * int(16000 * seconds), 16000, format="wav")
    return buffer.getvalue()


def gif(frames: int) -> bytes:
    first, *rest = (Image.new("RGB", (48, 48), (8 * i, 0, 0)) for i in range(frames))
    buffer = io.BytesIO()
    first.save(buffer, "gif", save_all=True, append_images=rest, duration=100)
    return buffer.getvalue()


def data_uri(mime: str, data: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def six_items(remote: MediaServer) -> list[dict[str, object]]:
    """Two of each modality, all distinct, interleaved."""
    remote.content = {
        "/0.png": png(10),
        "/1.wav": wav(0.5),
        "/2.gif": gif(4),
        "/3.wav": wav(1.0),
        "/4.png": png(200, (96, 48)),
        "/5.gif": gif(9),
    }
    kinds = {"png": "image", "wav": "audio", "gif": "video"}
    return [media(kinds[path[-3:]], remote.url + path) for path in remote.content]


def test_an_answer_through_the_official_client(server: Server, client: openai.OpenAI) -> None:
    content = [media("image", data_uri("image/png", png())), {"type": "text", "text": "what is this?"}]
    messages = [{"role": "user", "content": content}]
    whole = client.chat.completions.create(model="tiny-omni", messages=messages, max_tokens=30)
    stream = client.chat.completions.create(
        model="tiny-omni",
        messages=messages,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    for usage in (chunks[-1].usage, whole.usage):
        usage.prompt_tokens_details.cached_tokens = 0  # the second finds what the first left
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens_details.image_tokens == 9
    assert [card.id for card in client.models.list()] == ["tiny-omni"]


def test_errors_reach_the_official_client_as_its_own(client: openai.OpenAI) -> None:
    broken = [media("image", data_uri("image/png", b"no image at all"))]
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model="tiny-omni", messages=[{"role": "user", "content": broken}])
    assert caught.value.status_code in (415, 422)
    assert caught.value.param == "messages[0].content[0]"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-7", messages=[{"role": "user", "content": "hi"}])


def test_all_items_are_in_flight_at_once_and_keep_their_order(server: Server, remote: MediaServer) -> None:
    items = six_items(remote)
    everyone = asyncio.Barrier(6)
    gates = [asyncio.Event() for _ in range(7)]

    def held(i: int):  # type: ignore[no-untyped-def]
        async def handler(_: object) -> None:
            await everyone.wait()  # nobody is answered before all six were asked for
            if i < 5:
                await gates[i + 1].wait()  # and the last item is answered first
            gates[i].set()

        return handler

    remote.handlers = {path: held(i) for i, path in enumerate(remote.content)}
    rendered = server.render(*items, "what do you see and hear?")
    assert [i["param"] for i in rendered["items"]] == [f"messages[0].content[{i}]" for i in range(6)]
    assert [i["modality"] for i in rendered["items"]] == ["image", "audio", "video"] * 1 + [
        "audio",
        "image",
        "video",
    ]
    facts = [i["media"] for i in rendered["items"]]
    assert facts[0]["width"] == 48
    assert facts[1]["duration_s"] == pytest.approx(0.5)
    assert facts[2]["num_frames"] == 4
    assert facts[3]["duration_s"] == pytest.approx(1.0)
    assert facts[4]["width"] == 96
    assert facts[5]["num_frames"] == 8
    offsets = [i["placeholder"]["offset"] for i in rendered["items"]]
    assert offsets == sorted(offsets)
    assert sorted(remote.asked) == sorted(remote.content)


def test_a_failing_item_cancels_its_siblings_and_is_named(server: Server, remote: MediaServer) -> None:
    items = six_items(remote)
    others_are_in = asyncio.Barrier(6)

    async def never(_: object) -> None:
        await others_are_in.wait()
        await asyncio.Event().wait()

    async def fails(_: object) -> None:
        await others_are_in.wait()

    remote.handlers = dict.fromkeys(remote.content, never) | {"/3.wav": fails}
    del remote.content["/3.wav"]
    start = time.monotonic()
    answer = server.post(COMPLETIONS, chat(*items))
    assert answer.status == 422
    assert answer.body["error"]["param"] == "messages[0].content[3]"
    assert time.monotonic() - start < 5
    wait_until(lambda: len(remote.left) == 5, why=lambda: f"still loading: {remote.left}")


@pytest.mark.parametrize("reused", [False, True], ids=["fresh", "reused"])
@pytest.mark.parametrize("padding", [0, 20_000, 200_000])
def test_a_client_that_leaves_while_loading(
    server: Server, remote: MediaServer, reused: bool, padding: int
) -> None:
    items = six_items(remote)
    asked = threading.Event()

    async def never(_: object) -> None:
        if len(remote.asked) >= 6:
            asked.set()
        await asyncio.Event().wait()

    remote.handlers = dict.fromkeys(remote.content, never)
    connection = connect(server, reused)
    send(connection, chat(*items, user="x" * padding))
    assert asked.wait(10)
    connection.close()
    wait_until(lambda: len(remote.left) == 6, why=lambda: f"still loading: {remote.left}")


@pytest.mark.parametrize("reused", [False, True], ids=["fresh", "reused"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("size", [48, 600], ids=["in-band", "by-reference"])
def test_a_client_that_leaves_while_generating(server: Server, reused: bool, stream: bool, size: int) -> None:
    request_id = f"leaves-{reused}-{stream}-{size}-{time.time_ns()}"
    connection = connect(server, reused)
    item = media("image", data_uri("image/png", encoded(noise(size), "png")))
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
    def change(config: dict[str, Any]) -> None:
        config["applications"][0]["args"] |= {"timeout_s": 2}

    with Server.start(tmp_path, change) as server, server.engine() as stats:
        whole = server.post(COMPLETIONS, chat("go on", n=3, **ENDLESS))
        assert whole.status == 504
        assert "still in Model when its 2 s were over" in whole.body["error"]["message"]
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


def noise(size: int) -> Image.Image:
    return Image.effect_noise((size, size), 80).convert("RGB")


def test_many_small_items_together_are_no_small_message(server: Server) -> None:
    """Each travels in-band; together they pass the size of a gRPC message."""
    images = [media("image", data_uri("image/png", png(i, (128, 128)))) for i in range(30)]
    answer = server.post(COMPLETIONS, chat(*images, "what do you see?", max_tokens=1))
    assert answer.status == 200, answer.body


def test_a_text_beyond_a_grpc_message_has_a_clear_error(server: Server) -> None:
    start = time.monotonic()
    answer = server.post(COMPLETIONS, chat("a" * 4_300_000))
    assert answer.status == 400
    assert answer.body["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - start < 5


def test_the_request_id_is_echoed_and_in_every_stages_log(server: Server) -> None:
    request_id = f"trace-{time.time_ns()}"
    items = [media("image", data_uri("image/png", png())), media("audio", data_uri("audio/wav", wav(1.5)))]
    answer = server.post(COMPLETIONS, chat(*items, max_tokens=5), {"x-request-id": request_id})
    assert answer.headers["x-request-id"] == request_id
    for stage in ("Ingress", "Tokenizer", "MediaLoader", "MMPreprocessor", "Model"):
        wait_until(lambda: server.log_lines(stage, request_id), why=lambda: f"nothing of it in {stage}")  # noqa: B023


def test_a_body_over_the_limit_is_refused_before_it_is_sent(server: Server) -> None:
    with connect(server, reused=False) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: h\r\nContent-Length: {10**12}\r\n\r\n"
        connection.sendall(head.encode())
        assert b" 413 " in connection.recv(1000)


def test_a_client_that_sends_all_before_it_reads_gets_its_refusal(server: Server) -> None:
    """As http.client and requests do; closed at once, its connection would break under it."""
    body = b"x" * (20 * 2**20)
    early = {"Content-Encoding": "gzip"}
    for _ in range(3):
        answer = server.post(COMPLETIONS, body, early)
        assert answer.status == 415
        assert answer.body["error"]["code"] == "unsupported_encoding"


def test_a_client_that_leaves_in_its_body_is_one_line_in_the_log(server: Server) -> None:
    request_id = f"half-{time.time_ns()}"
    with connect(server, reused=False) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: h\r\nx-request-id: {request_id}\r\n"
        connection.sendall(f"{head}Content-Length: 99\r\n\r\n{{".encode())
        wait_until(lambda: server.log_text("Ingress"))
    wait_until(lambda: server.log_lines("Ingress", request_id), why=lambda: "nothing of it in the log")
    assert "Traceback" not in server.log_text("Ingress")


def test_a_client_that_stalls_in_its_body_is_told_so(server: Server) -> None:
    start = time.monotonic()
    with connect(server, reused=False) as connection:
        connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: h\r\nContent-Length: 99\r\n\r\n{{".encode())
        assert b" 408 " in connection.recv(1000)
    assert IDLE_S <= time.monotonic() - start < IDLE_S + 5


LARGE = 40 * 2**20  # bytes; several segments


def large_body() -> bytes:
    url = "data:image/png;base64," + base64.b64encode(os.urandom(LARGE)).decode()
    return json.dumps(chat(media("image", url))).encode()


def begin(server: Server, body: bytes, num_bytes: int) -> None:
    """Sends that much of the body and leaves."""
    with connect(server, reused=False) as connection:
        connection.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        connection.sendall(body[:num_bytes])


def test_nothing_stays_of_large_bodies_that_are_refused_or_whose_client_leaves(server: Server) -> None:
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


def test_health_follows_the_stages_and_a_dead_replica_is_replaced(
    server: Server, remote: MediaServer
) -> None:
    """A request whose loader is killed under it is answered all the same."""
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
    seen = []
    wait_until(lambda: seen.append(health(server)) or seen[-1][0] == 503, 30)
    assert "MediaLoader" in seen[-1][1]
    thread.join(60)
    assert [answer.status for answer in answers] == [200], answers
    assert server.replicas("MediaLoader") != [pid]
    wait_until(lambda: health(server)[0] == 200, 30)


@pytest.mark.parametrize(
    ("stage", "item"),
    [
        ("MediaLoader", lambda: media("audio", data_uri("audio/wav", wav(1.6)))),
        ("MMPreprocessor", lambda: media("image", data_uri("image/png", png(77)))),
    ],
    ids=["loader", "preprocessor"],
)
def test_an_item_whose_stage_dies_is_answered_all_the_same(server: Server, stage: str, item: Any) -> None:
    (pid,) = server.replicas(stage)
    os.kill(pid, signal.SIGSTOP)
    request = chat(item(), max_tokens=1)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, COMPLETIONS, request)
        assert server.post(COMPLETIONS, chat("hello", max_tokens=1)).status == 200  # the first is on its way
        os.kill(pid, signal.SIGKILL)
        assert answer.result(60).status == 200, answer.result().body
    wait_until(lambda: health(server)[0] == 200, 30)


def test_a_sound_of_few_bytes_and_much_silence(server: Server) -> None:
    file = io.BytesIO()
    soundfile.write(file, [0.0] * (29 * 16000), 16000, format="FLAC")
    (item,) = server.render(media("audio", data_uri("audio/flac", file.getvalue())))["items"]
    assert item["media"]["duration_s"] == 29
    assert item["num_tokens"] > 0


def test_an_image_of_few_bytes_and_many_pixels(server: Server) -> None:
    image = encoded(Image.new("L", (4000, 4000)), "png")
    (item,) = server.render(media("image", data_uri("image/png", image)))["items"]
    assert item["media"]["width"] == 4000
    assert item["num_tokens"] > 0


def test_who_waits_for_a_model_that_dies_is_told_and_it_is_replaced(server: Server) -> None:
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


def test_a_missing_ingress_is_no_http_500(server: Server) -> None:
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


def test_a_client_that_does_not_send_a_head_is_not_waited_for(server: Server) -> None:
    with connect(server, reused=False) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost")
        assert client.recv(65536).startswith(b"HTTP/1.1 408 ")


def health(server: Server) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def connect(server: Server, reused: bool) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    if reused:
        send(connection, chat("hello", max_tokens=1), path=RENDER)
        received = b""
        while b"prompt_token_ids" not in received or not received.rstrip().endswith(b"}"):
            received += connection.recv(65536)
    return connection


def send(connection: socket.socket, body: object, request_id: str = "", path: str = COMPLETIONS) -> None:
    data = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {len(data)}"]
    if request_id:
        head.append(f"x-request-id: {request_id}")
    connection.sendall("\r\n".join([*head, "", ""]).encode() + data)


def test_no_hostile_url_makes_a_connection(server: Server, remote: MediaServer) -> None:
    """Each spelling by itself, and at the end of a redirect from a host that is allowed."""

    async def redirects(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": urls[int(request.path[1:])]})

    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        listener.setblocking(False)
        # A lone surrogate is no JSON, and refused as that.
        urls = [url for url in targets(listener.getsockname()[1]) if "\ud800" not in url]
        in_header = [
            i for i, url in enumerate(urls) if url.isprintable() and url.isascii() and len(url) < 4000
        ]
        remote.handlers = {f"/{i}": redirects for i in in_header}
        assert len(urls) > 120
        assert len(in_header) > 100
        for url in [*urls, *(f"{remote.url}/{i}" for i in in_header)]:
            answer = server.post(RENDER, chat("look:", media("image", url)))
            message = answer.body["error"]["message"]
            assert answer.body["error"]["param"] in ITEM_OR_URL, (url, message)
            # A resolver that fails is the one thing that is nobody's fault.
            assert answer.status in (400, 422) or "cannot be resolved" in message, (url, message)
        with pytest.raises(BlockingIOError):
            listener.accept()
        assert remote.handlers.keys() <= set(remote.asked)  # each was there to be followed


ITEM_OR_URL = ("messages[0].content[1]", "messages[0].content[1].image_url.url")
