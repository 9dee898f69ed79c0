"""Records how long requests take, and how they end."""

from __future__ import annotations

import time

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http import gate
from app.observe import CURRENT_REQUEST, GENERATES, CurrentRequest, Traffic
from deployments.errors import ServingError
from deployments.runtime.metrics import REQUEST_SECONDS

ENDPOINTS = frozenset({GENERATES, f"{GENERATES}/render", "/tokenize", "/detokenize"})


class RequestTimes:
    """ASGI middleware: records how long each request took, and how it ended.

    An answer without its own `Server-Timing` header, such as an error, gets one with the total.
    """

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self._app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else None
        if path not in ENDPOINTS:
            await self._app(scope, receive, send)
            return
        request = CurrentRequest(self._traffic, path, gate.arrival(scope) or time.perf_counter())
        CURRENT_REQUEST.set(request)

        async def observed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                total_ms = (time.perf_counter() - request.started) * 1000
                message.setdefault("headers", [])
                MutableHeaders(scope=message).setdefault("Server-Timing", f"total;dur={total_ms:.1f}")
            await send(message)
            if message["type"] == "http.response.start":
                request.status = message["status"]
            elif not message.get("more_body", False):
                request.complete = True

        try:
            await self._app(scope, receive, observed_send)
        except Exception:  # an outer middleware turns it into an answer
            request.status, request.complete = ServingError.status, True
            raise
        finally:
            REQUEST_SECONDS.observe(time.perf_counter() - request.started, request.endpoint, request.outcome)
