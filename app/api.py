"""HTTP: routes, server-sent events, errors to statuses. Knows the pipeline, not Ray."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from tokenizers import Tokenizer

from app import __version__
from app.calls import Deadline
from app.chat import (
    ChatWriter,
    Logprobs,
    ParsedChat,
    Usage,
    check_short,
    media_options,
    parse_chat,
    sampling_params,
)
from app.detokenize import TextStream, logprob_entries
from app.intake import Body, parse, read_body
from app.pipeline import Pipeline, Prepared
from app.protocol import ChatRequest, error_envelope, parse_chat_request
from deployments.errors import ModelNotFound, RequestTooLarge, ServingError
from deployments.types import Delta, Modality

logger = logging.getLogger("ray.serve")

# The reason why the server can not serve, or None.
Unready = Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class ApiSettings:
    model_name: str
    timeout_s: float  # a request's deadline
    max_body_bytes: int
    limit_mm_per_prompt: dict[Modality, int] = field(default_factory=dict)  # none where not named


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def create_app(pipeline: Pipeline, tokenizer: Tokenizer, unready: Unready, settings: ApiSettings) -> FastAPI:
    app = FastAPI(title="Headrace", openapi_url=None, redirect_slashes=False)
    started = int(time.time())
    model_card = {
        "id": settings.model_name,
        "object": "model",
        "created": started,
        "owned_by": "headrace",
        "max_model_len": pipeline.limits.max_model_len,
    }

    async def read_request(http: Request, deadline: Deadline) -> tuple[ChatRequest, ParsedChat]:
        body = await _body(http, settings.max_body_bytes, deadline)
        request = parse_chat_request(parse(body))
        check_short(request, body.strings)
        if request.model not in (None, settings.model_name):
            raise ModelNotFound(
                f"The model {request.model!r} is not served here; it is {settings.model_name!r}.", "model"
            )
        return request, parse_chat(request, body.strings, settings.limit_mm_per_prompt)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        deadline = Deadline(settings.timeout_s)
        request, parsed = await read_request(http, deadline)
        prepared = await pipeline.prepare(parsed, media_options(request, pipeline.media_options), deadline)
        answer = Answer(pipeline, prepared, request, tokenizer, deadline, settings.model_name)
        if not request.stream:
            return Json(await answer.whole())
        events = answer.events()
        first = await anext(events)  # what fails before the first token still gets a status of its own
        return StreamingResponse(_sse(first, events), media_type="text/event-stream", headers=_NO_BUFFERING)

    @app.post("/v1/chat/completions/render")
    async def render(http: Request) -> Response:
        start = time.perf_counter()
        deadline = Deadline(settings.timeout_s)
        request, parsed = await read_request(http, deadline)
        intake_ms = (time.perf_counter() - start) * 1000
        prepared = await pipeline.prepare(parsed, media_options(request, pipeline.media_options), deadline)
        total_ms = (time.perf_counter() - start) * 1000
        timings = {
            "intake": round(intake_ms, 3),
            "tokenize": asdict(prepared.tokenize),
            "total": round(total_ms, 3),
        }
        return Json(rendered(prepared, settings.model_name, timings))

    @app.get("/v1/models")
    async def models() -> Response:
        return Json({"object": "list", "data": [model_card]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        if model != settings.model_name:
            raise ModelNotFound(
                f"The model {model!r} is not served here; it is {settings.model_name!r}.", "model"
            )
        return Json(model_card)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        reason = unready()
        return Json({"status": "ok"}) if reason is None else Json({"status": reason}, 503)

    @app.get("/version")
    async def version() -> Response:
        return Json({"version": __version__})

    @app.exception_handler(ServingError)
    async def serving_error(http: Request, error: ServingError) -> Response:
        return _error_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(http: Request, error: HTTPException) -> Response:
        message = f"{http.method} {http.url.path}: {error.detail}."
        envelope = error_envelope(message, "invalid_request_error", None, None)
        return Json(envelope, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def bug(http: Request, error: Exception) -> Response:
        return _error_response(_BUG)

    return app


class Answer:
    """The answers to one request on their way from tokens to OpenAI's JSON, whole or as events."""

    def __init__(
        self,
        pipeline: Pipeline,
        prepared: Prepared,
        request: ChatRequest,
        tokenizer: Tokenizer,
        deadline: Deadline,
        model: str,
    ) -> None:
        room = pipeline.limits.max_model_len - len(prepared.token_ids)
        self._sampling = sampling_params(request, room, pipeline.limits)
        self._pipeline = pipeline
        self._prepared = prepared
        self._request = request
        self._tokenizer = tokenizer
        self._deadline = deadline
        self._texts = [TextStream(tokenizer, request.stop, request.min_tokens) for _ in range(request.n)]
        self._writer = ChatWriter(model)
        self._usage = Usage(len(prepared.token_ids), prepared.media_tokens())

    async def whole(self) -> dict[str, Any]:
        parts: list[list[_Piece]] = [[] for _ in self._texts]
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                parts[piece.index].append(piece)
        choices = [self._choice(part) for part in parts]
        return self._writer.completion(choices, self._usage)

    def _choice(self, part: list[_Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in part)
        logprobs = None
        if self._request.logprobs:
            logprobs = [entry for piece in part for entry in piece.logprobs or ()]
        return self._writer.choice(part[-1].index, text, part[-1].finish_reason or "stop", logprobs)

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """Chunks in OpenAI's order: the role, the text, the finish reason, the usage if asked for."""
        writer, begun = self._writer, set()
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                index = piece.index
                if index not in begun:
                    begun.add(index)
                    yield writer.chunk(index, {"role": "assistant", "content": ""})
                if piece.text or piece.logprobs:
                    yield writer.chunk(index, {"content": piece.text}, logprobs=piece.logprobs)
                if piece.finish_reason:
                    yield writer.chunk(index, {}, piece.finish_reason)
        if self._request.stream_options.include_usage:
            yield writer.usage_chunk(self._usage)

    async def _pieces(self) -> AsyncGenerator[_Piece]:
        """Text as it becomes certain; the last piece of each answer has its finish reason."""
        left = set(range(len(self._texts)))
        stream = self._pipeline.generate(self._prepared, self._sampling, self._deadline)
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                self._usage.cached_tokens = max(self._usage.cached_tokens, delta.cached_tokens)
                if delta.index not in left:
                    continue  # what comes after a stop string, while other answers go on
                piece = self._piece(delta)
                if piece.finish_reason:
                    left.remove(piece.index)
                yield piece
                if not left:
                    return

    def _piece(self, delta: Delta) -> _Piece:
        stream = self._texts[delta.index]
        text, reason, used = "", delta.finish_reason, 0
        for token_id in delta.token_ids:
            text += stream.push(token_id)
            used += 1
            if stream.stopped:
                reason = "stop"
                break
        if reason:
            text += stream.finish()
        self._usage.completion_tokens += used
        logprobs = None
        if self._request.logprobs:
            logprobs = logprob_entries(self._tokenizer, delta.token_ids[:used], delta.logprobs[:used])
        return _Piece(delta.index, text, logprobs, reason)


@dataclass(frozen=True, slots=True)
class _Piece:
    index: int  # of the answer
    text: str
    logprobs: Logprobs
    finish_reason: str | None


def rendered(prepared: Prepared, model: str, timings: dict[str, Any]) -> dict[str, Any]:
    """What the model would get, without asking it."""
    items = [
        {
            "index": index,
            "param": entry.item.param,
            "modality": entry.item.modality,
            "digest": entry.features.digest,
            "num_tokens": entry.features.num_tokens,
            "placeholder": {"offset": span.offset, "length": span.length},
            "source": {"kind": entry.item.kind, "bytes": entry.media.num_bytes, "mime": entry.media.mime},
            "media": entry.media.info,
            "features": {
                name: {"shape": shape, "dtype": dtype}
                for name, (shape, dtype) in entry.features.shapes.items()
            },
            "cached": entry.media.cached or entry.features.cached,
            "timings_ms": {stage: asdict(timing) for stage, timing in entry.timings.items()},
        }
        | ({"previews": entry.media.previews} if entry.media.previews else {})
        for index, (entry, span) in enumerate(zip(prepared.items, prepared.spans, strict=True))
    ]
    return {
        "object": "chat.render",
        "model": model,
        "prompt_token_ids": prepared.token_ids,
        "num_prompt_tokens": len(prepared.token_ids),
        "items": items,
        "timings_ms": timings,
    }


_BUG = ServingError("Internal error; the server's log says more.")
_NO_BUFFERING = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def _body(http: Request, max_bytes: int, deadline: Deadline) -> Body:
    """Raises RequestTooLarge before the first byte where the client tells the length."""
    length = http.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise RequestTooLarge(
            f"The body has {length} bytes, the limit is {max_bytes}. Send less, or send URLs."
        )
    return await read_body(http.stream(), max_bytes=max_bytes, timeout_s=deadline.left_s())


async def _sse(first: dict[str, Any], rest: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[bytes]:
    async with aclosing(rest):
        yield _event(first)
        try:
            async for chunk in rest:
                yield _event(chunk)
        except ServingError as error:
            yield _event(_envelope(error))
            return
        except Exception:  # the border of a stream, as `bug` is that of an answer
            logger.exception("a stream broke")
            yield _event(_envelope(_BUG))
            return
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


def _envelope(error: ServingError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return error_envelope(error.message, kind, error.param, error.code)


def _error_response(error: ServingError) -> Response:
    headers = {}
    if error.status == 503:
        headers["Retry-After"] = "1"
    if isinstance(error, RequestTooLarge):
        headers["Connection"] = "close"  # else the client sends the rest before it reads the answer
    return Json(_envelope(error), error.status, headers)
