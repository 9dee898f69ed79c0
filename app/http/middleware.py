"""What Serve puts between uvicorn and the application, by its RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""

from __future__ import annotations

from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.gate import GateMiddleware
from app.openai.protocol import error_envelope
from deployments.errors import StageUnavailable

_NOT_READY = JSONResponse(
    error_envelope("No replica of Ingress is ready. Try again.", "server_error", None, StageUnavailable.code),
    StageUnavailable.status,
    {"Retry-After": "1", "Connection": "close"},
)


def middlewares() -> list[Middleware]:
    """The last one is the outermost."""
    try:
        serve.get_replica_context()
    except RayServeException:
        return [Middleware(NoIngress), Middleware(GateMiddleware)]
    return [Middleware(GateMiddleware)]


class NoIngress:
    """Serve's own proxy, which HAProxy falls back to while no ingress is ready, says so.

    It would keep requests and their bodies until there is one, and HAProxy has its health checks there.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_request = scope["type"] == "http" and not scope["path"].startswith("/-/")
        await (_NOT_READY if is_request else self._app)(scope, receive, send)
