"""Server-sent events: a stream of JSON objects that ends with [DONE] or with an error."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import orjson
from starlette.responses import StreamingResponse

from app import observe
from app.http.responses import INTERNAL_ERROR
from app.openai.errors import error_envelope
from app.openai.responses import JsonObject
from deployments.errors import ServingError
from deployments.runtime import tracing

logger = logging.getLogger("ray.serve")

_NO_BUFFERING = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event_stream(
    first: JsonObject, rest: AsyncGenerator[JsonObject], headers: dict[str, str]
) -> StreamingResponse:
    return StreamingResponse(
        _events(first, rest), media_type="text/event-stream", headers=_NO_BUFFERING | headers
    )


async def _events(first: JsonObject, rest: AsyncGenerator[JsonObject]) -> AsyncGenerator[bytes]:
    async with aclosing(rest):
        yield _event(first)
        try:
            async for content in rest:
                yield _event(content)
        except ServingError as error:
            yield _failure(error, error)
            return
        except (
            Exception
        ) as error:  # the border of a stream: the status was sent, so the error becomes an event
            logger.exception("a stream failed")
            yield _failure(error, INTERNAL_ERROR)
            return
    yield b"data: [DONE]\n\n"


def _failure(cause: Exception, error: ServingError) -> bytes:
    tracing.record_error(cause)
    observe.stream_failed(error.status)
    return _event(error_envelope(error))


def _event(content: object) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"
