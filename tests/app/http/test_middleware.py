from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from app.http.middleware import middlewares


async def serve(request: object) -> PlainTextResponse:
    return PlainTextResponse("what Serve says")


@pytest.fixture
def proxy() -> httpx.AsyncClient:
    """Wraps an app in the middlewares as Serve wraps its own proxy, outside of any replica."""
    app: ASGIApp = Starlette(routes=[Route("/{path:path}", serve, methods=["GET", "POST"])])
    for middleware in middlewares():
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy")


async def test_while_there_is_no_ingress_every_request_is_a_503(proxy: httpx.AsyncClient) -> None:
    answer = await proxy.post("/v1/chat/completions", json={})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "stage_unavailable"


async def test_serves_own_pages_stay(proxy: httpx.AsyncClient) -> None:
    assert (await proxy.get("/-/healthz")).text == "what Serve says"
