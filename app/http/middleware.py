"""ASGI middleware between uvicorn and the application.

Serve installs it in every replica and in its own proxy: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names
`middlewares`.
"""

from __future__ import annotations

from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.gate import GateMiddleware
from app.http.responses import error_response
from deployments.errors import StageUnavailable

_NOT_READY = error_response(
    StageUnavailable("No replica of Ingress is ready. Try again."), {"Connection": "close"}
)


def middlewares() -> list[Middleware]:
    """The middleware of this process; the last one is the outermost."""
    try:
        serve.get_replica_context()
    except RayServeException:
        return [Middleware(NoIngressMiddleware), Middleware(GateMiddleware)]
    return [Middleware(GateMiddleware)]


class NoIngressMiddleware:
    """Answers 503 in Serve's own proxy, to which HAProxy falls back while no ingress is ready.

    The proxy would keep requests and their bodies until one is. HAProxy's health checks are under /-/.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_request = scope["type"] == "http" and not scope["path"].startswith("/-/")
        await (_NOT_READY if is_request else self._app)(scope, receive, send)
