"""JSON responses, and errors as responses."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from starlette.responses import Response

from app.openai.errors import error_envelope
from deployments.errors import ServingError

INTERNAL_ERROR = ServingError("Internal error. The server's log has the details.")


class Json(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return orjson.dumps(content)


def error_response(error: ServingError, headers: Mapping[str, str] | None = None) -> Json:
    retry = {"Retry-After": "1"} if error.status == 503 else {}
    return Json(error_envelope(error), error.status, {**retry, **(headers or {})})
