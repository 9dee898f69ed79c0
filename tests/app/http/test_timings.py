"""`timings_ms` and Server-Timing: every millisecond of a request is counted once."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from aiohttp import web

from app.config import AppConfig
from tests.support.cluster import Server, media_server
from tests.support.local_graph import LocalGraph
from tests.support.media_files import sound
from tests.support.paths import SAMPLES
from tests.support.requests import COMPLETIONS, chat, data_uri, events, image_part, media

HELD_S = 0.5
ROUNDING_MS = 0.05  # about forty numbers, each rounded to three decimals


def timings_sum(timings: dict[str, Any]) -> float:
    """Adds up the times as app/http/timings.py defines their sum."""
    ways = [timings["Tokenizer"], *timings.get("items", [])]
    model = timings.get("Model", {})
    alone = (timings.get(name, 0) for name in ("intake", "validate", "join", "finish"))
    return float(sum(alone)) + max(map(way, ways)) + way(model)


def way(timings: dict[str, Any]) -> float:
    stages = [value for value in timings.values() if isinstance(value, dict)] or [timings]
    return float(sum(ms for stage in stages for name, ms in stage.items() if name != "start"))


def phases(header: str) -> dict[str, float]:
    """Parses a Server-Timing header, whose form it checks."""
    assert re.fullmatch(r"[a-z]+;dur=\d+\.\d(, [a-z]+;dur=\d+\.\d)*", header)
    return {name: float(ms) for name, ms in re.findall(r"([a-z]+);dur=([\d.]+)", header)}


@pytest.fixture(scope="module")
def graph() -> LocalGraph:
    return LocalGraph(AppConfig())


@pytest.fixture
async def api(graph: LocalGraph) -> AsyncIterator[httpx.AsyncClient]:
    async with await graph.client() as client:
        yield client


async def test_there_are_no_timings_unless_requested(api: httpx.AsyncClient) -> None:
    assert "timings_ms" not in (await api.post(COMPLETIONS, json=chat("hello"))).json()
    streamed = await api.post(COMPLETIONS, json=chat("hello", stream=True))
    assert not any("timings_ms" in chunk for chunk in events(streamed.text))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("usage", [False, True])
async def test_the_last_chunk_has_the_timings(api: httpx.AsyncClient, usage: bool, n: int) -> None:
    request = chat(image_part(), "what is this?", timings=True, stream=True, n=n)
    response = await api.post(COMPLETIONS, json=request | {"stream_options": {"include_usage": usage}})
    *others, last = events(response.text)
    assert not any("timings_ms" in chunk for chunk in others)
    assert timings_sum(last["timings_ms"]) == pytest.approx(last["timings_ms"]["total"], abs=ROUNDING_MS)
    known = phases(response.headers["server-timing"])
    assert list(known) == ["intake", "validate", "prepare", "join", "queue", "prefill"]
    assert sum(known.values()) < last["timings_ms"]["total"] + ROUNDING_MS * len(known)


async def test_offsets_are_where_the_stages_began(api: httpx.AsyncClient) -> None:
    long_sound = media("audio", data_uri("audio/wav", sound(2)))
    request = chat(image_part((4, 5, 6)), long_sound, "what are these?", timings=True)
    timings = (await api.post(COMPLETIONS, json=request)).json()["timings_ms"]
    begin = timings["intake"] + timings["validate"]
    assert timings["Tokenizer"]["start"] == pytest.approx(begin, abs=ROUNDING_MS)
    image, audio = timings["items"]
    assert image["MMPreprocessor"]["start"] == pytest.approx(begin, abs=ROUNDING_MS)
    assert "MediaLoader" not in image  # a short item is decoded by MMPreprocessor
    assert audio["MediaLoader"]["start"] == pytest.approx(begin, abs=ROUNDING_MS)
    loaded = audio["MediaLoader"]["start"] + way(audio["MediaLoader"])
    assert audio["MMPreprocessor"]["start"] == pytest.approx(loaded, abs=ROUNDING_MS)
    assert audio["MediaLoader"]["service"] > 0 < audio["MMPreprocessor"]["service"]
    ends = [item["MMPreprocessor"]["start"] + way(item["MMPreprocessor"]) for item in (image, audio)]
    end = max(*ends, timings["Tokenizer"]["start"] + way(timings["Tokenizer"]))
    assert timings["Model"]["start"] == pytest.approx(end + timings["join"], abs=ROUNDING_MS)
    assert [item["param"] for item in timings["items"]] == [
        "messages[0].content[0]",
        "messages[0].content[1]",
    ]
    assert [item["modality"] for item in timings["items"]] == ["image", "audio"]


async def test_a_recalled_item_has_one_stage(api: httpx.AsyncClient) -> None:
    named = image_part((1, 2, 3)) | {"uuid": "timed"}
    await api.post(COMPLETIONS, json=chat(named, "what is this?"))
    again = {"type": "image_url", "image_url": None, "uuid": "timed"}
    body = (await api.post(COMPLETIONS, json=chat(again, "what is this?", timings=True))).json()
    (item,) = body["timings_ms"]["items"]
    assert set(item) == {"param", "modality", "MMPreprocessor"}
    assert timings_sum(body["timings_ms"]) == pytest.approx(body["timings_ms"]["total"], abs=ROUNDING_MS)


async def test_every_answer_about_a_prompt_has_the_header(api: httpx.AsyncClient) -> None:
    for path, last in (
        (COMPLETIONS, "finish"),
        (f"{COMPLETIONS}/render", "finish"),
        ("/tokenize", "tokenize"),
    ):
        response = await api.post(path, json=chat(image_part(), "what is this?"))
        timings = phases(response.headers["server-timing"])
        assert list(timings)[-2:] == [last, "total"]
        assert sum(timings.values()) - timings["total"] == pytest.approx(
            timings["total"], abs=ROUNDING_MS * (len(timings) + 1)
        )


@pytest.mark.parametrize("path", [COMPLETIONS, f"{COMPLETIONS}/render", "/tokenize", "/detokenize"])
async def test_so_has_an_error(api: httpx.AsyncClient, path: str) -> None:
    response = await api.post(path, json={"messages": 1, "tokens": 1})
    assert response.status_code == 400
    assert list(phases(response.headers["server-timing"])) == ["total"]


@pytest.mark.cluster
@pytest.mark.timeout(180)
def test_the_times_of_a_mixed_request_are_all_of_it(server: Server) -> None:
    """Over HTTP: structure by the server's own clock, the whole by the client's."""

    async def held(_: object) -> web.Response:
        await asyncio.sleep(HELD_S)
        return web.Response(body=(SAMPLES / "photo.png").read_bytes())

    with media_server() as host:
        host.handlers["/slow.png"] = held
        host.content["/sound.wav"] = (SAMPLES / "sound.wav").read_bytes()
        host.content["/clip.mp4"] = (SAMPLES / "clip.mp4").read_bytes()
        content = [
            media("image", f"{host.url}/slow.png"),
            media("audio", f"{host.url}/sound.wav"),
            media("video", f"{host.url}/clip.mp4"),
            "what do you see and hear?",
        ]
        start = time.perf_counter()
        answer = server.post(COMPLETIONS, chat(*content, timings=True))
        wall_ms = (time.perf_counter() - start) * 1000
    timings = answer.body["timings_ms"]
    assert timings_sum(timings) == pytest.approx(timings["total"], rel=0.05)
    assert timings["total"] < wall_ms < timings["total"] + 2000  # HTTP, HAProxy, a slow client
    slow, *others = timings["items"]
    assert (
        slow["MediaLoader"]["fetch"]
        >= HELD_S * 1000
        > max(item["MediaLoader"].get("fetch", 0) for item in others)
    )
    assert slow["MediaLoader"]["service"] < HELD_S * 1000
    assert all(item["MediaLoader"]["service"] > 0 for item in timings["items"])
    assert timings["Model"]["prefill"] > 0 < timings["Model"]["decode"]
