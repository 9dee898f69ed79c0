"""OpenAI's error object. Every error that Python code of the server sends is built here."""

from __future__ import annotations

from typing import TypedDict

from deployments.errors import ServingError


class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None  # the place of the item or field in the request
    code: str | None


class ErrorEnvelope(TypedDict):
    error: ErrorBody


def error_envelope(error: ServingError) -> ErrorEnvelope:
    """The error as a client gets it. Its message names the item too, since many clients print it alone."""
    message, param = error.message, error.param or ""
    if param.startswith("messages[") and param not in message:
        message = f"{param}: {message}"
    return envelope(message, error.status, error.param, error.code)


def envelope(message: str, status: int, param: str | None = None, code: str | None = None) -> ErrorEnvelope:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
