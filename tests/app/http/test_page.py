"""The page at `/`, as served and in a headless Chromium."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from fastapi import FastAPI
from selenium.webdriver import Keys

from app.http.page import add_page
from tests.support.browser import Browser
from tests.support.cluster import Server, media_server, wait_until
from tests.support.paths import ROOT

SAMPLES = ROOT / "docs" / "samples"
ATTACHED = "document.querySelectorAll('#attached li').length"
ANSWERED = "document.querySelectorAll('article .waterfall').length"
ALL_THREE = "image 1: red circle; audio 1: rising tone; video 1: green square moving right"
ENDLESS = '{"ignore_eos": true, "max_tokens": 3000}'

pytestmark = pytest.mark.timeout(180)
cluster = pytest.mark.cluster


@pytest.fixture
async def client() -> httpx.AsyncClient:
    app = FastAPI()
    add_page(app)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://headrace")


async def test_a_browser_may_run_the_pages_own_script_and_nothing_else(client: httpx.AsyncClient) -> None:
    response = await client.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"].startswith("'sha256-")
    assert policy["style-src"].startswith("'sha256-")
    assert policy["connect-src"] == "'self'"
    assert "://" not in response.text  # nothing from anywhere else


async def test_a_page_that_is_known_is_not_sent_again(client: httpx.AsyncClient) -> None:
    first = await client.get("/")
    again = await client.get("/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert (await client.get("/", headers={"If-None-Match": '"other"'})).content == first.content


@pytest.fixture
def page(server: Server, browser: Browser) -> Browser:
    browser.open(server.url)
    browser.wait("document.querySelector('#model').textContent === 'tiny-omni'")
    return browser


@cluster
def test_a_chat_with_all_three_modalities(page: Browser) -> None:
    page.drop([SAMPLES / "photo.png"])
    page.wait(f"{ATTACHED} === 1")
    page.type("#files", str(SAMPLES / "sound.wav"))
    page.wait(f"{ATTACHED} === 2")
    page.drop([SAMPLES / "clip.mp4"])
    page.wait(f"{ATTACHED} === 3")
    page.type("#text", "what do you see and hear?")
    page.click("#send")
    page.wait(f"{ANSWERED} === 1")
    assert page.text(".answer") == ALL_THREE
    assert page.script(f"return {ATTACHED}") == 0
    rows = page.script(
        """const text = (row) => row.querySelector(".name").textContent;
        const kinds = (row) => [...row.querySelectorAll(".bar i")].map((piece) => piece.className);
        return [...document.querySelectorAll(".waterfall li")].map((row) => [text(row), ...kinds(row)]);"""
    )
    assert [name for name, *_ in rows] == ["request", "prompt", "photo.png", "sound.wav", "clip.mp4", "model"]
    for (_, *kinds), stage in zip(rows[2:5], ["MMPreprocessor", "MediaLoader", "MediaLoader"], strict=True):
        assert {"queue", stage} <= set(kinds)  # a small image is decoded where it is preprocessed
    assert {"join", "queue", "prefill", "decode"} <= set(rows[5])

    page.click(".seen summary")
    page.wait("document.querySelector('.seen .waterfall')")
    assert page.script("return document.querySelectorAll('.seen img').length") == 1 + 8
    assert page.script("return document.querySelectorAll('.seen audio').length") == 1
    page.wait("[...document.querySelectorAll('.seen img')].every((image) => image.naturalWidth)")
    assert page.text(".seen .waterfall .name").split() == [
        "request",
        "prompt",
        "photo.png",
        "sound.wav",
        "clip.mp4",
        "join",
    ]

    page.type("#text", "what is in image 1?" + Keys.ENTER)  # which only the first message shows
    page.wait(f"{ANSWERED} >= 3")
    assert page.text("article:last-child .answer") == "image 1: red circle"
    assert page.console() == []


@cluster
def test_a_pasted_picture_and_a_recorded_sound(page: Browser) -> None:
    picture = base64.b64encode((SAMPLES / "photo.png").read_bytes()).decode()
    page.script(
        """const bytes = Uint8Array.from(atob(arguments[0]), (character) => character.charCodeAt());
        const data = new DataTransfer();
        data.items.add(new File([bytes], "pasted.png", {type: "image/png"}));
        document.querySelector("#text").dispatchEvent(
            new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true}));""",
        picture,
    )
    page.wait(f"{ATTACHED} === 1")
    page.click("#record")
    page.wait("document.querySelector('#record').textContent === 'Stop recording'")
    page.click("#record")
    page.wait(f"{ATTACHED} === 2")
    page.type("#text", "what do you see and hear?" + Keys.ENTER)
    page.wait(f"{ANSWERED} === 1")
    assert page.text(".answer").startswith("image 1: red circle; audio 1: ")


@cluster
def test_an_error_is_shown_at_the_item_that_it_names(page: Browser, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image at all")
    page.drop([SAMPLES / "photo.png", broken, SAMPLES / "sound.wav"])
    page.wait(f"{ATTACHED} === 3")
    page.type("#text", "what do you see and hear?" + Keys.ENTER)
    page.wait("document.querySelector('.error')")
    assert page.text(".item.wrong [role=alert]").startswith("The data is not an image")
    assert page.text(".item.wrong .name") == "broken.png"
    assert "messages[0].content[1]" in page.text(".error")

    page.click(".error button")
    page.wait(f"{ATTACHED} === 3")
    page.click("#attached button[aria-label='Remove broken.png']")
    page.type("#text", Keys.ENTER)
    page.wait(f"{ANSWERED} === 1")
    assert page.text(".answer") == "image 1: red circle; audio 1: rising tone"


@cluster
def test_escape_ends_an_answer_in_the_model_too(server: Server, page: Browser) -> None:
    def cancelled() -> int:
        return len(server.log_lines("Model", "cancelled"))

    before = cancelled()
    page.click("#more summary")
    page.type("#fields", ENDLESS)
    page.type("#text", "go on" + Keys.ENTER)
    page.wait("document.querySelector('.answer').textContent.length > 40")
    page.press(Keys.ESCAPE)
    page.wait(f"{ANSWERED} === 1")
    assert page.text("#status") == "Cancelled."
    assert len(page.text(".answer")) > 40  # what there was stays
    wait_until(lambda: cancelled() > before, why=lambda: "the model goes on")


@cluster
def test_everything_works_from_a_keyboard(page: Browser) -> None:
    def focus() -> str:
        return str(
            page.script("const at = document.activeElement; return at.id || at.ariaLabel || at.tagName")
        )

    page.type("#files", "\n".join(str(SAMPLES / name) for name in ("photo.png", "photo.jpg")))
    page.wait(f"{ATTACHED} === 2")
    assert focus() == "text"
    page.press(Keys.SHIFT, Keys.TAB)
    assert focus() == "Remove photo.jpg"
    page.press(Keys.ENTER)
    page.wait(f"{ATTACHED} === 1")
    assert focus() == "text"
    page.write("what do you see?")
    page.press(Keys.SHIFT, Keys.ENTER)
    assert page.script("return document.querySelector('#text').value") == "what do you see?\n"
    visited = []
    for _ in range(4):
        page.press(Keys.TAB)
        visited.append(focus())
    assert visited == ["choose", "record", "send", "SUMMARY"]
    page.press(Keys.SHIFT, Keys.TAB)
    page.press(Keys.ENTER)
    page.wait(f"{ANSWERED} === 1")
    assert focus() == "text"
    assert page.text(".answer") == "image 1: red circle"

    while focus() != "conversation":
        page.press(Keys.SHIFT, Keys.TAB)
    page.press(Keys.TAB)
    assert focus() == "SUMMARY"
    page.press(Keys.ENTER)
    page.wait("document.querySelectorAll('.seen img').length === 1")
    names = page.script(
        "return [...document.querySelectorAll('button, input, textarea')]"
        ".filter((one) => !(one.ariaLabel || one.textContent || one.labels?.length)).map((one) => one.id)"
    )
    assert names == []  # every control has one


@cluster
def test_what_comes_from_elsewhere_is_text(page: Browser, tmp_path: Path) -> None:
    """A question, a file's name and an error that repeats what was sent."""
    hostile = "<img src=x onerror=alert(1)>"
    picture = tmp_path / f"{hostile}.png"
    picture.write_bytes((SAMPLES / "photo.png").read_bytes())
    page.drop([picture])
    page.wait(f"{ATTACHED} === 1")
    page.click("#more summary")
    page.type("#fields", json.dumps({"model": hostile}))
    page.type("#text", hostile + Keys.ENTER)
    page.wait("document.querySelector('.error')")
    assert page.text("article .text:not(.answer)") == hostile
    assert page.text("article .name") == picture.name
    assert hostile in page.text(".error")
    assert page.script("return document.querySelectorAll('img:not([src^=blob])').length") == 0


@cluster
def test_an_injected_script_does_not_run(page: Browser) -> None:
    page.script(
        """const script = document.createElement("script");
        script.textContent = "document.title = 'taken over'";
        document.body.append(script);"""
    )
    assert page.script("return document.title") == "Headrace"
    assert any("Content Security Policy" in line for line in page.console())


@cluster
@pytest.mark.parametrize("width", [320, 1600])
def test_nothing_is_wider_than_the_screen(page: Browser, width: int) -> None:
    page.resize(width, 700)
    page.drop([SAMPLES / "photo.png", SAMPLES / "sound.wav", SAMPLES / "clip.mp4"])
    page.wait(f"{ATTACHED} === 3")
    page.type("#text", "what do you see and hear?" + "x" * 200 + Keys.ENTER)
    page.wait(f"{ANSWERED} === 1")
    page.script("document.querySelector('.seen').open = true")
    page.wait("document.querySelector('.seen .waterfall')")
    too_wide = page.script(
        "return [document.documentElement, document.querySelector('#conversation')]"
        ".map((box) => box.scrollWidth - box.clientWidth)"
    )
    assert too_wide == [0, 0]


STAGES = [
    {"name": "MediaLoader.decode", "queued": 9, "in_flight": 4, "rate_per_s": 90.0, "cache_hit_rate": 0.5},
    {"name": "MMPreprocessor", "queued": 6, "in_flight": 1, "rate_per_s": 2.0, "cache_hit_rate": None},
    {"name": "Model", "queued": 0, "in_flight": 1, "rate_per_s": 2.0, "cache_hit_rate": None},
]


@pytest.fixture
def busy(browser: Browser) -> Iterator[Browser]:
    """The page of a server whose stages are at work: numbers that no real one has twice."""

    async def html(_: object) -> web.Response:
        return web.Response(body=(ROOT / "app/http/static/index.html").read_bytes(), content_type="text/html")

    with media_server() as stub:
        stub.handlers["/"] = html
        stub.content = {
            "/v1/models": json.dumps({"data": [{"id": "busy"}]}).encode(),
            "/stages": json.dumps({"stages": STAGES}).encode(),
        }
        browser.open(stub.url)
        yield browser


def test_the_stage_that_is_waited_for_longest_is_the_bottleneck(busy: Browser) -> None:
    busy.wait("!document.querySelector('#stages').hidden")
    assert busy.text("#bottleneck") == "MMPreprocessor is the bottleneck"
    assert busy.text("li.bottleneck strong") == "MMPreprocessor"
    loader, preprocessor, model = busy.text("#stage-list .soft").splitlines()
    assert loader == "4 in flight · 9 waiting · 90/s · 50 % from cache"
    assert preprocessor == "1 in flight · 6 waiting · 2/s · ≈ 3.00 s to wait"
    assert model == "1 in flight · 0 waiting · 2/s"


def test_what_starves_the_model_is_the_bottleneck_whatever_the_queues(busy: Browser) -> None:
    busy.wait("!document.querySelector('#stages').hidden")
    busy.script(
        "watching = false; showStages(arguments[0])",
        {"stages": STAGES, "starved_by": "MediaLoader.decode", "starvation_s": {"MediaLoader.decode": 4.5}},
    )
    assert busy.text("#bottleneck") == "the model waits for MediaLoader.decode"
    assert busy.text("li.bottleneck strong") == "MediaLoader.decode"
    assert "kept the model waiting 4.5 of 10 s" in busy.text("li.bottleneck .soft")


@cluster
def test_the_stages_of_a_server_are_shown_as_they_work(page: Browser) -> None:
    page.wait("!document.querySelector('#stages').hidden")
    names = page.script(
        "return [...document.querySelectorAll('#stage-list strong')].map((name) => name.textContent)"
    )
    assert names == [
        "Ingress",
        "Tokenizer",
        "MediaLoader.fetch",
        "MediaLoader.decode",
        "EmbeddingLoader",
        "MMPreprocessor",
        "Model",
    ]
    page.click("#more summary")
    page.type("#fields", ENDLESS)
    page.type("#text", "go on" + Keys.ENTER)
    page.wait("document.querySelector('#stage-list li:last-child').textContent.includes('1 in flight')")
    page.press(Keys.ESCAPE)


TIMINGS: dict[str, Any] = {
    "intake": 6.0,
    "validate": 4.0,
    "Tokenizer": {"start": 10.0, "queue": 1.0, "service": 4.0},
    "items": [
        {
            "param": "messages[0].content[0]",
            "modality": "image",
            "MediaLoader": {"start": 10.0, "queue": 5.0, "fetch": 5.0, "service": 10.0},
            "MMPreprocessor": {"start": 30.0, "queue": 10.0, "service": 10.0},
        }
    ],
    "join": 2.0,
    "Model": {"start": 52.0, "queue": 8.0, "prefill": 15.0, "decode": 24.0},
    "finish": 1.0,
    "total": 100.0,
}


def test_a_waterfall_shows_what_ran_beside_and_after_what(busy: Browser) -> None:
    rows = busy.script(
        """const timings = JSON.parse(arguments[0]);
        const turn = {items: [{name: "photo.png"}]};
        turns.push(turn);
        const place = ({className, style}) => [className, parseFloat(style.left), parseFloat(style.width)];
        return [...waterfall(timings, timings.items, turn).children].map((row) =>
            [row.querySelector(".name").textContent, ...[...row.querySelectorAll(".bar i")].map(place)]);""",
        json.dumps(TIMINGS),  # as text: the driver sorts the keys of objects
    )
    assert rows == [
        ["request", ["intake", 0, 6], ["validate", 6, 4]],
        ["prompt", ["queue", 10, 1], ["Tokenizer", 11, 4]],
        [
            "photo.png",
            ["queue", 10, 5],
            ["fetch", 15, 5],
            ["MediaLoader", 20, 10],
            ["queue", 30, 10],
            ["MMPreprocessor", 40, 10],
        ],
        [
            "model",
            ["join", 50, 2],
            ["queue", 52, 8],
            ["prefill", 60, 15],
            ["decode", 75, 24],
            ["finish", 99, 1],
        ],
    ]
