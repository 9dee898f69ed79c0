"""HTTP: routes, server-sent events, errors to statuses. Knows the pipeline, not Ray."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from tokenizers import Tokenizer

from app import __version__, observe
from app.calls import Deadline
from app.fanout import Pipeline, Prepared
from app.http import gate
from app.http.auth import protect
from app.http.page import add_page
from app.http.timings import Timings, of_stages, server_timing
from app.intake.body import Body, InFlight, LongString, parse, read_body
from app.openai.chat import (
    ChatWriter,
    Logprobs,
    Usage,
    check_short,
    media_options,
    parse_chat,
    sampling_params,
    whole_text,
)
from app.openai.detokenize import TextStream, logprob_entries
from app.openai.protocol import (
    MM_EMBEDS_TYPES,
    ChatRequest,
    DetokenizeRequest,
    MediaIOKwargs,
    TokenizeRequest,
    error_envelope,
    parse_as,
    parse_chat_request,
)
from deployments.errors import (
    InvalidRequest,
    ModelNotFound,
    RequestTooLarge,
    ServingError,
    UnsupportedEncoding,
)
from deployments.runtime import tracing
from deployments.runtime.memory import release_on_error
from deployments.types import Delta, Modality

logger = logging.getLogger("ray.serve")

T = TypeVar("T")

# The reason why the server can not serve, or None.
Unready = Callable[[], str | None]
Strings = Mapping[str, LongString]
UseBody = Callable[[dict[str, Any], Strings], Awaitable[T]]


@dataclass(frozen=True, slots=True)
class ApiSettings:
    model_name: str
    timeout_s: float  # a request's deadline
    max_body_bytes: int
    max_inflight_body_bytes: int  # of all requests together whose items are not loaded yet
    body_idle_timeout_s: float  # a client that sends nothing of its body for so long is not waited for
    max_media_bytes: int = 2**63  # of all items of a request together, as sent or fetched
    media_io_kwargs: MediaIOKwargs = field(default_factory=MediaIOKwargs)  # where a request says nothing else
    limit_mm_per_prompt: dict[Modality, int] = field(default_factory=dict)  # none where not named
    enable_mm_embeds: bool = False
    enable_prompt_embeds: bool = False
    enable_reset_mm_cache: bool = False
    page: bool = True  # at /
    api_keys: tuple[bytes, ...] = ()  # their digests; none: everybody may ask
    cors_allow_origins: list[str] = field(default_factory=list)
    otlp_endpoint: str = ""  # where spans go; see deployments/runtime/tracing.py

    @property
    def off(self) -> dict[str, str]:
        """Types of parts that are not served -> the setting that would switch them on."""
        off = {} if self.enable_mm_embeds else dict.fromkeys(MM_EMBEDS_TYPES, "enable_mm_embeds")
        return off if self.enable_prompt_embeds else off | {"prompt_embeds": "enable_prompt_embeds"}


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def create_app(pipeline: Pipeline, tokenizer: Tokenizer, unready: Unready, settings: ApiSettings) -> FastAPI:
    app = FastAPI(title="Headrace", openapi_url=None, redirect_slashes=False, telemetry=_telemetry())
    started = int(time.time())
    media_defaults = media_options(settings.media_io_kwargs, pipeline.media_options)
    model_card = {
        "id": settings.model_name,
        "object": "model",
        "created": started,
        "owned_by": "headrace",
        "max_model_len": pipeline.limits.max_model_len,
    }

    in_flight = InFlight(settings.max_inflight_body_bytes)

    def begin(http: Request) -> Deadline:
        tracing.tell(request_id=http.headers.get("x-request-id", ""))
        return Deadline(settings.timeout_s, gate.arrival(http.scope))

    async def with_body(http: Request, deadline: Deadline, use: UseBody[T]) -> tuple[T, float]:
        """What `use` makes of the body, which is let go of here, and the milliseconds until it was there."""
        with in_flight.share() as hold, release_on_error():
            return await read_and_use(http, hold, deadline, use)

    async def read_and_use(
        http: Request, hold: Callable[[int], None], deadline: Deadline, use: UseBody[T]
    ) -> tuple[T, float]:
        with tracing.span("intake"), observe.intake():
            body = await read(http, hold, deadline)
            tracing.tell(num_bytes=body.num_bytes)
            document = parse(body)
        observe.body(body.num_bytes)
        intake_ms = deadline.ms()
        return await use(document, body.strings), intake_ms

    async def read(http: Request, hold: Callable[[int], None], deadline: Deadline) -> Body:
        try:
            check_origin(http)
            check_encoding(http)
            length = declared_length(http)
            with pipeline.precedence.way(length) as way:
                return await read_body(
                    _chunks(http),
                    max_bytes=settings.max_body_bytes,
                    timeout_s=deadline.left_s(),
                    idle_timeout_s=settings.body_idle_timeout_s,
                    hold=hold,
                    give_way=way.give,
                )
        except ServingError:
            http.state.unread = True
            raise

    def check_origin(http: Request) -> None:
        """Browsers let any page post a form or plain text, without asking; JSON they ask for first."""
        is_json = http.headers.get("content-type", "").startswith("application/json")
        if "origin" in http.headers and not is_json:
            raise InvalidRequest("A web page must send Content-Type: application/json.")

    def check_encoding(http: Request) -> None:
        encoding = http.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise UnsupportedEncoding("Send the body as it is, without a Content-Encoding.")

    def declared_length(http: Request) -> float:
        """Infinite where the client tells none. Refuses what is too large before its first byte."""
        if "content-length" not in http.headers:
            return math.inf
        length = int(http.headers["content-length"])
        if length > settings.max_body_bytes:
            limit = settings.max_body_bytes
            raise RequestTooLarge(
                f"The body has {length} bytes, the limit is {limit}. Send less, or send URLs."
            )
        in_flight.check(length)
        return length

    def check_model(model: str | None) -> None:
        if model not in (None, settings.model_name):
            raise ModelNotFound(
                f"The model {model!r} is not served here; it is {settings.model_name!r}.", "model"
            )

    async def prepare(
        deadline: Deadline, document: dict[str, Any], strings: Strings
    ) -> tuple[ChatRequest, Prepared]:
        request = parse_chat_request(document)
        check_short(request, strings)
        check_model(request.model)
        parsed = parse_chat(request, strings, settings.limit_mm_per_prompt, settings.off)
        options = media_options(request.media_io_kwargs, media_defaults, request.mm_processor_kwargs)
        options = replace(options, previews=request.previews)
        return request, await pipeline.prepare(parsed, options, deadline, settings.max_media_bytes)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        deadline = begin(http)
        (request, prepared), intake_ms = await with_body(http, deadline, partial(prepare, deadline))
        timings = Timings(deadline, intake_ms, prepared)
        answer = Answer(pipeline, timings, request, tokenizer, settings.model_name)
        if not request.stream:
            whole = await answer.whole()
            return Json(whole, headers=timings.header())
        events = answer.events()
        first = await anext(events)  # what fails before the first token still gets a status of its own
        headers = _NO_BUFFERING | timings.first_header()
        return StreamingResponse(_sse(first, events), media_type="text/event-stream", headers=headers)

    @app.post("/v1/chat/completions/render")
    async def render(http: Request) -> Response:
        deadline = begin(http)
        (_, prepared), intake_ms = await with_body(http, deadline, partial(prepare, deadline))
        timings = Timings(deadline, intake_ms, prepared)
        return Json(rendered(timings, settings.model_name), headers=timings.header())

    @app.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        """Of a bare text, or of a conversation as the model gets it, its media included."""
        deadline = begin(http)
        (token_ids, wants_strings), intake_ms = await with_body(http, deadline, partial(encode, deadline))
        answer = {
            "count": len(token_ids),
            "max_model_len": pipeline.limits.max_model_len,
            "tokens": token_ids,
            "token_strs": (await pipeline.decode(token_ids, deadline)).tokens if wants_strings else None,
        }
        total_ms = deadline.ms()
        phases = {"intake": intake_ms, "tokenize": total_ms - intake_ms, "total": total_ms}
        return Json(answer, headers=server_timing(phases))

    async def encode(
        deadline: Deadline, document: dict[str, Any], strings: Strings
    ) -> tuple[list[int], bool]:
        if "messages" in document:
            if "prompt" in document:
                raise InvalidRequest("Send either prompt or messages.", "prompt")
            _, prepared = await prepare(deadline, document, strings)
            return prepared.token_ids, document.get("return_token_strs") is True
        request = parse_as(TokenizeRequest, document)
        check_model(request.model)
        text = whole_text(request.prompt, strings, "prompt")
        token_ids = await pipeline.encode_text(text, request.add_special_tokens, deadline)
        return token_ids, request.return_token_strs

    @app.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        deadline = begin(http)
        text, _ = await with_body(http, deadline, partial(decode, deadline))
        return Json({"prompt": text})

    async def decode(deadline: Deadline, document: dict[str, Any], strings: Strings) -> str:
        request = parse_as(DetokenizeRequest, document)
        check_model(request.model)
        return (await pipeline.decode(request.tokens, deadline)).text

    @app.post("/reset_mm_cache")
    async def reset_mm_cache() -> Response:
        if not settings.enable_reset_mm_cache:
            raise HTTPException(404, "Not Found; enable_reset_mm_cache switches it on")
        await pipeline.reset_caches()
        return Json({})

    @app.get("/v1/models")
    async def models() -> Response:
        return Json({"object": "list", "data": [model_card]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        check_model(model)
        return Json(model_card)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        reason = unready()
        return Json({"status": "ok"}) if reason is None else Json({"status": reason}, 503)

    @app.get("/stages")
    async def stages() -> Response:
        return Json(await pipeline.watch.told())

    @app.get("/version")
    async def version() -> Response:
        return Json({"version": __version__})

    @app.exception_handler(ServingError)
    async def serving_error(http: Request, error: ServingError) -> Response:
        tracing.tell(**{"error.type": type(error).__name__})
        response = _error_response(error)
        if getattr(http.state, "unread", False):
            response.headers["Connection"] = "close"  # else the client sends the rest before it reads
        return response

    @app.exception_handler(HTTPException)
    async def http_error(http: Request, error: HTTPException) -> Response:
        message = f"{http.method} {http.url.path}: {error.detail}."
        envelope = error_envelope(message, "invalid_request_error", None, None)
        return Json(envelope, error.status_code, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def client_left(http: Request, error: ClientDisconnect) -> Response:
        logger.info("the client left before its request had come")
        return Response(status_code=499)  # to nobody; the number stands in the log

    @app.exception_handler(Exception)
    async def bug(http: Request, error: Exception) -> Response:
        return _error_response(_BUG)

    if settings.page:
        add_page(app)
    app.add_middleware(observe.RequestTimes)
    protect(app, settings.api_keys, settings.cors_allow_origins)
    return app


class Answer:
    """The answers to one request on their way from tokens to OpenAI's JSON, whole or as events."""

    def __init__(
        self,
        pipeline: Pipeline,
        timings: Timings,
        request: ChatRequest,
        tokenizer: Tokenizer,
        model: str,
    ) -> None:
        prepared = timings.prepared
        room = pipeline.limits.max_model_len - len(prepared.token_ids)
        self._sampling = sampling_params(request, room, pipeline.limits)
        self._pipeline = pipeline
        self._timings = timings
        self._request = request
        self._tokenizer = tokenizer
        self._texts = [TextStream(tokenizer, request.stop, request.min_tokens) for _ in range(request.n)]
        self._writer = ChatWriter(model)
        self._usage = Usage(len(prepared.token_ids), prepared.media_tokens())
        self._left = set(range(request.n))  # answers that have not ended

    async def whole(self) -> dict[str, Any]:
        parts: list[list[_Piece]] = [[] for _ in self._texts]
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                parts[piece.index].append(piece)
        choices = [self._choice(part) for part in parts]
        return self._writer.completion(choices, self._usage) | self._told_timings()

    def _choice(self, part: list[_Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in part)
        logprobs = None
        if self._request.logprobs:
            logprobs = [entry for piece in part for entry in piece.logprobs or ()]
        return self._writer.choice(part[-1].index, text, part[-1].finish_reason or "stop", logprobs)

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """Chunks in OpenAI's order: the role, the text, the finish reason, the usage if asked for.

        Timings are in the very last one.
        """
        begun, usage = set(), self._request.stream_options.include_usage
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                index = piece.index
                if index not in begun:
                    begun.add(index)
                    yield self._chunk(index, {"role": "assistant", "content": ""})
                if piece.text or piece.logprobs:
                    yield self._chunk(index, {"content": piece.text}, logprobs=piece.logprobs)
                if piece.finish_reason:
                    end = self._chunk(index, {}, piece.finish_reason)
                    yield end if usage or self._left else end | self._told_timings()
        if usage:
            yield self._writer.usage_chunk(self._usage) | self._told_timings()

    def _chunk(
        self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Logprobs = None
    ) -> dict[str, Any]:
        chunk, options = self._writer.chunk(index, delta, reason, logprobs), self._request.stream_options
        told = options.include_usage and options.continuous_usage_stats
        return chunk | {"usage": self._usage.to_json()} if told else chunk

    def _told_timings(self) -> dict[str, Any]:
        return {"timings_ms": self._timings.with_items()} if self._request.timings else {}

    async def _pieces(self) -> AsyncGenerator[_Piece]:
        """Text as it becomes certain; the last piece of each answer has its finish reason."""
        left, key = self._left, self._writer.id
        stream = self._pipeline.generate(self._timings.prepared, self._sampling, key, self._timings.clock)
        times = observe.TokenTimes()
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                self._timings.saw(delta)
                times.saw(delta)
                self._usage.cached_tokens = max(self._usage.cached_tokens, delta.cached_tokens)
                if delta.index not in left:
                    continue  # what comes after a stop string, while other answers go on
                piece = self._piece(delta)
                if piece.finish_reason:
                    left.remove(piece.index)
                yield piece
                if not left:
                    return
                if piece.finish_reason and not delta.finish_reason:
                    _tell(self._pipeline.end(key, piece.index))

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


def rendered(timings: Timings, model: str) -> dict[str, Any]:
    """What the model would get, without asking it."""
    prepared = timings.prepared
    items = [
        {
            "index": index,
            "param": entry.item.param,
            "modality": entry.item.modality or "prompt",
            "digest": entry.features.digest,
            "num_tokens": entry.features.num_tokens,
            "placeholder": {"offset": span.offset, "length": span.length},
            "source": {"kind": entry.item.kind, "bytes": entry.num_bytes, "mime": entry.mime},
            "media": entry.media.info if entry.media else {},
            "features": {
                name: {"shape": shape, "dtype": dtype}
                for name, (shape, dtype) in entry.features.shapes.items()
            },
            "cached": (entry.media and entry.media.cached) or entry.features.cached,
            "timings_ms": of_stages(entry.timings),
        }
        | ({"previews": entry.media.previews} if entry.media and entry.media.previews else {})
        for index, (entry, span) in enumerate(zip(prepared.items, prepared.spans, strict=True))
    ]
    return {
        "object": "chat.render",
        "model": model,
        "prompt_token_ids": prepared.token_ids,
        "num_prompt_tokens": len(prepared.token_ids),
        "items": items,
        "timings_ms": timings.to_json(),
    }


def _telemetry() -> TelemetryConfig:
    """FastAPI's own span of what is posted; probes and the page would drown it."""
    return {
        "tracing": tracing.provider is not None,
        "tracer_provider": tracing.provider,
        "operation_spans": False,
        "metrics": False,
        "logs": False,
        "exclude": lambda scope: scope.get("method") != "POST",
    }


_BUG = ServingError("Internal error; the server's log says more.")
_NO_BUFFERING = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def _chunks(http: Request) -> AsyncIterator[bytes]:
    async for chunk in http.stream():
        gate.taken(http.scope, len(chunk))
        yield chunk


async def _sse(first: dict[str, Any], rest: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[bytes]:
    async with aclosing(rest):
        yield _event(first)
        try:
            async for chunk in rest:
                yield _event(chunk)
        except ServingError as error:
            tracing.failed(error)
            observe.stream_failed(error.status)
            yield _event(_envelope(error))
            return
        except Exception as error:  # the border of a stream, as `bug` is that of an answer
            tracing.failed(error)
            logger.exception("a stream broke")
            observe.stream_failed(_BUG.status)
            yield _event(_envelope(_BUG))
            return
    yield b"data: [DONE]\n\n"


_telling: set[asyncio.Task[None]] = set()


def _tell(telling: Coroutine[Any, Any, None]) -> None:
    """Holds nobody up, and is not cancelled with the request: of a broadcast that is, Serve leaves an
    exception behind that nobody reads, and asyncio prints it.
    """
    task = asyncio.create_task(telling)
    _telling.add(task)
    task.add_done_callback(_telling.discard)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


def _envelope(error: ServingError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    message, item = error.message, error.param or ""
    if item.startswith("messages[") and item not in message:  # clients print the message alone
        message = f"{item}: {message}"
    return error_envelope(message, kind, error.param, error.code)


def _error_response(error: ServingError) -> Response:
    headers = {}
    if error.status == 503:
        headers["Retry-After"] = "1"
    return Json(_envelope(error), error.status, headers)
