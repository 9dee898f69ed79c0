"""Access control: API keys as bearer tokens, and web pages of other origins (CORS). Both are off by default.

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
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.responses import error_response
from deployments.errors import Unauthorized

ENVIRONMENT = "HEADRACE_API_KEYS"
OPEN_PATHS = frozenset({"/", "/health"})  # the page holds no data; load balancers have no key

_KEY = re.compile(r"[A-Za-z0-9._~+/=-]+")  # RFC 6750: the characters of a bearer token


def key_digests(file: str) -> tuple[bytes, ...]:
    """SHA-256 of every key in the file and in the environment. Without any, requests need no key.

    Raises ValueError for a file or variable without a valid key. Its message contains no key.
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
        raise ValueError(f"{file} is not UTF-8 text. Save it as UTF-8") from None


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
        # Before the keys are checked: preflights carry no key, and a page may then read why it was refused.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "server-timing"],
        )


class ApiKeys:
    """Refuses requests without a valid key before the first byte of the body is read."""

    def __init__(self, app: ASGIApp, digests: Sequence[bytes]) -> None:
        self._app = app
        self._digests = digests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope) or self._has_valid_key(Headers(scope=scope)):
            await self._app(scope, receive, send)
        else:
            await _refusal()(scope, receive, send)

    def _has_valid_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        # Every digest is compared, so that the time reveals nothing; `any` would stop at the first match.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _refusal() -> Response:
    error = Unauthorized("Send one of this server's API keys as `Authorization: Bearer <key>`.")
    # Without `close` the client would send its whole body before it reads the answer.
    return error_response(error, {"WWW-Authenticate": "Bearer", "Connection": "close"})


def _is_open(scope: Scope) -> bool:
    """The path begins with `root_path`, which is Serve's route_prefix."""
    return scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS
