"""Reads the JSON bodies of requests within the server's limits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import Request

from app import observe
from app.http import gate
from app.http.settings import ApiSettings
from app.intake.body import InFlight, read_body
from app.intake.long_string import LongString
from app.intake.precedence import Precedence
from app.intake.scanner import Body
from app.stages import Deadline
from deployments.errors import InvalidRequest, RequestTooLarge, ServingError, UnsupportedEncoding
from deployments.runtime import tracing
from deployments.runtime.memory import release_on_error


@dataclass(frozen=True, slots=True)
class ParsedBody:
    document: Mapping[str, object]
    strings: dict[str, LongString]  # the long strings of the document, by the tokens in their places
    deadline: Deadline
    intake_ms: float  # from the arrival of the request to here


class BodyReader:
    def __init__(self, settings: ApiSettings, precedence: Precedence) -> None:
        self._settings = settings
        self._precedence = precedence
        self._in_flight = InFlight(settings.max_inflight_body_bytes)

    @asynccontextmanager
    async def open(self, http: Request) -> AsyncIterator[ParsedBody]:
        """Reads and parses the body. It counts as in flight until the block ends, and is released then."""
        tracing.set_attributes(request_id=http.headers.get("x-request-id", ""))
        deadline = Deadline(self._settings.timeout_s, gate.arrival(http.scope))
        with self._in_flight.share() as hold, release_on_error():
            parsed = await self._parsed(http, hold, deadline)
            try:
                yield parsed
            finally:
                parsed.strings.clear()  # the caller's frame, and its error, keep `parsed` for longer

    async def _parsed(self, http: Request, hold: Callable[[int], None], deadline: Deadline) -> ParsedBody:
        with tracing.span("intake"), observe.intake():
            body = await self._read(http, hold, deadline)
            tracing.set_attributes(num_bytes=body.num_bytes)
            document = body.parse()
        observe.body(body.num_bytes)
        return ParsedBody(document, body.strings, deadline, deadline.ms())

    async def _read(self, http: Request, hold: Callable[[int], None], deadline: Deadline) -> Body:
        try:
            _check_origin(http)
            _check_encoding(http)
            self._check_length(http)
            return await read_body(
                _chunks(http),
                max_bytes=self._settings.max_body_bytes,
                timeout_s=deadline.left_s(),
                idle_timeout_s=self._settings.body_idle_timeout_s,
                hold=hold,
                pause=self._precedence.throttle().pause,
            )
        except ServingError:
            http.state.is_unread = True
            raise

    def _check_length(self, http: Request) -> None:
        """Refuses a body that declares too many bytes before its first byte is read."""
        if "content-length" not in http.headers:
            return
        length, limit = int(http.headers["content-length"]), self._settings.max_body_bytes
        if length > limit:
            raise RequestTooLarge(
                f"The body has {length} bytes; the limit is {limit}. Send less, or send URLs."
            )
        self._in_flight.check(length)


def is_unread(http: Request) -> bool:
    """Reading the body failed: the client may still be sending it."""
    return getattr(http.state, "is_unread", False)


def _check_origin(http: Request) -> None:
    """Browsers let any web page post plain text to any server. For JSON they ask the server first (CORS)."""
    is_json = http.headers.get("content-type", "").startswith("application/json")
    if "origin" in http.headers and not is_json:
        raise InvalidRequest("A web page must send Content-Type: application/json.")


def _check_encoding(http: Request) -> None:
    if http.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedEncoding("Send the body as it is, without a Content-Encoding.")


async def _chunks(http: Request) -> AsyncIterator[bytes]:
    async for chunk in http.stream():
        gate.taken(http.scope, len(chunk))
        yield chunk
