"""Who may ask: API keys as bearer tokens, and pages of other origins (CORS). Both are off by default.

Only digests of the keys leave this module, so that no log, error or dashboard can show a key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from app.openai.protocol import error_envelope
from deployments.errors import Unauthorized

ENVIRONMENT = "HEADRACE_API_KEYS"
OPEN_PATHS = frozenset({"/", "/health"})  # the page holds no data; load balancers have no key

_KEY = re.compile(r"[A-Za-z0-9._~+/=-]+")  # RFC 6750: what a bearer token may consist of


def key_digests(file: str) -> tuple[bytes, ...]:
    """SHA-256 of every key in the file and in the environment; none: everybody may ask.

    Raises ValueError, without any key in it, for what was meant to protect the server and cannot.
    """
    return tuple(hashlib.sha256(key.encode()).digest() for key in _keys(file))


def _keys(file: str) -> Iterator[str]:
    if file:
        lines = (line.partition("#")[0].strip() for line in _read(file).splitlines())
        yield from _checked(lines, file)
    if ENVIRONMENT in os.environ:
        keys = (key.strip() for key in os.environ[ENVIRONMENT].split(","))
        yield from _checked(keys, f"the environment variable {ENVIRONMENT}")


def _read(file: str) -> str:
    try:
        return Path(file).read_text("utf-8")
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no UTF-8 text") from None


def _checked(candidates: Iterator[str], origin: str) -> list[str]:
    keys = [key for key in candidates if key]
    if not keys:
        raise ValueError(f"{origin} holds no key. Unset it to serve without keys")
    for number, key in enumerate(keys, 1):
        if not _KEY.fullmatch(key):
            raise ValueError(
                f"key {number} in {origin} has characters other than letters, digits and -._~+/="
            )
    return keys


def protect(app: FastAPI, digests: Sequence[bytes], allow_origins: Sequence[str]) -> None:
    if digests:
        app.add_middleware(ApiKeys, digests=digests)
    if allow_origins:
        # Outside of the keys: a browser's preflight carries none, and may read why it was refused.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "server-timing"],
        )


class ApiKeys:
    """Refuses who has no key, before the first byte of the body is read."""

    def __init__(self, app: ASGIApp, digests: Sequence[bytes]) -> None:
        self._app = app
        self._digests = digests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope) or self._knows(Headers(scope=scope)):
            await self._app(scope, receive, send)
        else:
            await _refusal()(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        # All of them are compared, so that the time tells nothing; `any` would stop at the first.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _refusal() -> JSONResponse:
    error = Unauthorized("Send one of this server's API keys as `Authorization: Bearer <key>`.")
    envelope = error_envelope(error.message, "invalid_request_error", None, error.code)
    # Closed, else the client would send all of its body before it reads the answer.
    return JSONResponse(envelope, error.status, {"WWW-Authenticate": "Bearer", "Connection": "close"})


def _is_open(scope: Scope) -> bool:
    """`root_path`: Serve's route_prefix, which the path begins with."""
    return scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS
