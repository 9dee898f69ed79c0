"""API keys and CORS: which requests need a key, and that no log and no setting contains one."""

from __future__ import annotations

import hashlib
import hmac
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from fastapi import FastAPI, Request
from selenium.webdriver import Keys
from starlette.types import Message

from app.config import AppConfig
from app.http.auth import ENVIRONMENT, ApiKeys, key_digests, protect
from tests.support.browser import Browser
from tests.support.cluster import ServeConfig, Server
from tests.support.raw_http import connect
from tests.support.requests import chat

FIRST, SECOND, FROM_ENVIRONMENT = "sk-first-0123456789", "sk-second+/=._~-", "sk-environment-42"
ORIGIN = "https://chat.example.org"


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.txt"
    path.write_text(f"# for the team\n{FIRST}\n\n  {SECOND}  # for the dashboard\r\n")
    return path


def digests(*keys: str) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def test_keys_come_from_the_file_and_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert key_digests("") == ()
    assert key_digests(str(file)) == digests(FIRST, SECOND)
    monkeypatch.setenv(ENVIRONMENT, f" {FROM_ENVIRONMENT},{FIRST},")
    assert key_digests("") == digests(FROM_ENVIRONMENT, FIRST)
    assert AppConfig(api_keys_file=str(file)).api.api_keys == digests(FIRST, SECOND, FROM_ENVIRONMENT, FIRST)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "holds no key"),
        (b"# none yet\n", "holds no key"),
        (b"sk-secret\nsk secret\n", "key 2 in"),
        ("sk-s\u00e9cret".encode(), "key 1 in"),
        (b"sk-secret\xff", "is not UTF-8 text"),
    ],
)
def test_a_file_that_protects_nothing_is_refused_at_start(
    content: bytes | None, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=problem) as caught:
        AppConfig.model_validate({"api_keys_file": str(path)})
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize("value", ["", " , ", "sk-secret,sk secret"])
def test_an_environment_that_protects_nothing_is_refused_at_start(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, value)
    with pytest.raises(ValueError, match=ENVIRONMENT) as caught:
        AppConfig.model_validate({})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("origin", ["chat.example.org", "https://chat.example.org/", "ftp://x", ""])
def test_an_origin_that_no_browser_sends_is_refused_at_start(origin: str) -> None:
    with pytest.raises(ValueError, match="cors_allow_origins"):
        AppConfig.model_validate({"cors_allow_origins": [origin]})


def small_app() -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    @app.get("/")
    async def unprotected() -> str:
        return "open"

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> int:
        return len(await http.body())

    return app


def client_of(keys: tuple[bytes, ...] = (), origins: tuple[str, ...] = ()) -> httpx.AsyncClient:
    app = small_app()
    protect(app, keys, origins)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://headrace")


@pytest.mark.parametrize("header", [f"Bearer {FIRST}", f"bearer {SECOND}", f"BEARER  {FIRST} "])
async def test_each_of_the_keys_is_accepted(header: str) -> None:
    async with client_of(digests(FIRST, SECOND)) as client:
        response = await client.post(
            "/v1/chat/completions", headers={"Authorization": header}, content=b"123"
        )
    assert (response.status_code, response.json()) == (200, 3)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {FIRST}x",
        f"Bearer {FIRST[:-1]}",
        f"Basic {FIRST}",
        FIRST,
        "Bearer \xff",
    ],
)
async def test_no_key_or_a_wrong_one_is_a_401(header: str) -> None:
    async with client_of(digests(FIRST, SECOND)) as client:
        headers = [(b"Authorization", header.encode("latin-1"))] if header else []
        response = await client.post("/v1/chat/completions", headers=headers, content=b"123")
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        None,
        "invalid_api_key",
    )
    assert FIRST[:-1] not in response.text


@pytest.mark.parametrize(
    ("path", "status"), [("/", 200), ("/health", 200), ("/health/", 401), ("//", 401), ("/nothing", 401)]
)
async def test_the_page_and_the_health_need_no_key(path: str, status: int) -> None:
    async with client_of(digests(FIRST)) as client:
        assert (await client.get(httpx.URL("http://headrace").copy_with(path=path))).status_code == status


@pytest.mark.parametrize(("path", "status"), [("/llm/health", 200), ("/llm/", 200), ("/llm/v1/models", 401)])
async def test_a_route_prefix_changes_nothing(path: str, status: int) -> None:
    middleware = ApiKeys(small_app(), digests(FIRST))
    transport = httpx.ASGITransport(middleware, root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://headrace") as client:
        assert (await client.get(path)).status_code == status


async def test_the_body_of_a_request_without_a_key_is_not_read() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("it was read")

    async def send(message: Message) -> None:
        sent.append(message)

    middleware = ApiKeys(FastAPI(), digests(FIRST))
    await middleware({"type": "http", "method": "POST", "path": "/v1/models", "headers": []}, receive, send)
    assert sent[0]["status"] == 401


async def test_each_request_is_compared_with_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    real = hmac.compare_digest

    def noting(a: bytes, b: bytes) -> bool:
        compared.append(b)
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", noting)
    async with client_of(digests(FIRST, SECOND, FROM_ENVIRONMENT)) as client:
        for key in (FIRST, "wrong"):
            compared.clear()
            await client.post("/v1/chat/completions", headers={"Authorization": f"Bearer {key}"})
            assert compared == list(digests(FIRST, SECOND, FROM_ENVIRONMENT))


PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


async def test_cross_origin_requests_are_refused_by_default() -> None:
    async with client_of(digests(FIRST)) as client:
        response = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert response.status_code == 401
        assert not [name for name in response.headers if name.startswith("access-control")]


async def test_a_configured_origin_may_send_requests_and_read_errors() -> None:
    async with client_of(digests(FIRST), (ORIGIN,)) as client:
        preflight = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        for _ in range(2):
            refused = await client.post("/v1/chat/completions", headers={"Origin": ORIGIN})
            assert refused.status_code == 401
            assert refused.headers["access-control-allow-origin"] == ORIGIN
            assert refused.headers["vary"] == "Origin"  # once, although the middleware appends
        other = await client.options(
            "/v1/chat/completions", headers=PREFLIGHT | {"Origin": "https://evil.org"}
        )
        assert "access-control-allow-origin" not in other.headers


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("locked")
    keys = folder / "keys.txt"
    keys.write_text(f"{FIRST}\n")

    def change(config: ServeConfig) -> None:
        config["applications"][0]["args"] |= {"api_keys_file": str(keys), "cors_allow_origins": [ORIGIN]}

    with Server.start(folder, change, {ENVIRONMENT: FROM_ENVIRONMENT}) as running:
        yield running


cluster = [pytest.mark.cluster, pytest.mark.timeout(180)]


def status(server: Server, path: str, key: str = "") -> int:
    request = urllib.request.Request(
        server.url + path, headers={"Authorization": f"Bearer {key}"} if key else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


class TestServer:
    pytestmark = cluster

    def test_both_kinds_of_keys_reach_a_real_ingress(self, locked: Server) -> None:
        for key in (FIRST, FROM_ENVIRONMENT):
            assert status(locked, "/v1/models", key) == 200
            with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0) as client:
                assert client.chat.completions.create(
                    model="tiny-omni", messages=[{"role": "user", "content": "hello"}], max_tokens=2
                )
        with (
            openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError) as caught,
        ):
            client.models.list()
        assert caught.value.code == "invalid_api_key"

    def test_only_the_page_and_the_health_are_open(self, locked: Server) -> None:
        open_paths = [
            path
            for path in ("/", "/health", "/version", "/v1/models", "/stages", "/docs")
            if status(locked, path) == 200
        ]
        assert open_paths == ["/", "/health"]

    def test_a_request_without_a_key_is_refused_before_its_body(self, locked: Server) -> None:
        with connect(locked) as connection:
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\n"
            )
            assert b" 401 " in connection.recv(1000)

    def test_cors_through_the_proxy(self, locked: Server) -> None:
        answer = httpx.options(f"{locked.url}/v1/chat/completions", headers=PREFLIGHT)
        assert answer.headers["access-control-allow-origin"] == ORIGIN

    def test_no_key_is_in_any_log_nor_in_the_clusters_settings(self, locked: Server) -> None:
        """Wrong keys are not logged either: they may be valid for another server."""
        assert locked.post("/v1/chat/completions", chat("hello", max_tokens=1)).status == 401
        assert status(locked, "/v1/models", "sk-of-somewhere-else") == 401
        assert status(locked, "/v1/models", FROM_ENVIRONMENT) == 200
        logs = [path for path in locked.logs.rglob("*") if path.is_file()]
        assert any("/v1/models" in path.read_text(errors="replace") for path in logs)
        for key in (FIRST, FROM_ENVIRONMENT, "sk-of-somewhere-else"):
            assert [path for path in logs if key in path.read_text(errors="replace")] == []

    def test_the_page_asks_for_the_key(self, locked: Server, browser: Browser) -> None:
        browser.open(locked.url)
        browser.wait("document.activeElement.id === 'key-input'")
        browser.write("wrong")
        browser.press(Keys.ENTER)
        browser.wait("document.querySelector('#key-problem').textContent")
        assert browser.text("#key-problem") == "This key is not accepted."
        browser.script("document.querySelector('#key-input').select()")
        browser.write(FROM_ENVIRONMENT)
        browser.press(Keys.ENTER)
        browser.wait("document.querySelector('#model').textContent === 'tiny-omni'")
        assert browser.script("return document.activeElement.id") == "text"
        browser.write("hello")
        browser.press(Keys.ENTER)
        browser.wait("document.querySelector('article .waterfall')")
        assert browser.text(".answer")
        assert browser.script("return [localStorage.length, document.cookie, location.search]") == [0, "", ""]
