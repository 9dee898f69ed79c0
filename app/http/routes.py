"""The HTTP application: its routes, and errors as responses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from fastapi import FastAPI, Request, Response
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from tokenizers import Tokenizer

from app import __version__
from app.fanout import FanOut, Prepared
from app.http.answer import Answer
from app.http.auth import protect
from app.http.background import BackgroundWork
from app.http.body_reader import BodyReader, ParsedBody, is_unread
from app.http.page import add_page
from app.http.render import rendered
from app.http.request_times import RequestTimes
from app.http.responses import INTERNAL_ERROR, Json, error_response
from app.http.settings import ApiSettings
from app.http.sse import event_stream
from app.http.timings import Timings, server_timing
from app.observe import Traffic
from app.openai.errors import envelope
from app.openai.parse_chat import media_options, parse_chat, to_text
from app.openai.requests import ChatRequest, DetokenizeRequest, TokenizeRequest, parse_chat_request
from app.openai.validation import parse_as
from app.watch import Watch
from deployments.errors import InvalidRequest, ModelNotFound, ServingError
from deployments.runtime import tracing

logger = logging.getLogger("ray.serve")

Unready = Callable[[], str | None]  # why the server cannot serve, or None


def create_app(
    fan_out: FanOut,
    watch: Watch,
    traffic: Traffic,
    tokenizer: Tokenizer,
    unready: Unready,
    settings: ApiSettings,
) -> FastAPI:
    app = FastAPI(title="Headrace", openapi_url=None, redirect_slashes=False, telemetry=_telemetry())
    bodies = BodyReader(settings, fan_out.precedence)
    chat = ChatRoutes(fan_out, tokenizer, bodies, settings)
    tokens = TokenRoutes(fan_out, chat, bodies, settings)
    server = ServerRoutes(fan_out, watch, unready, settings)

    app.post("/v1/chat/completions")(chat.completions)
    app.post("/v1/chat/completions/render")(chat.render)
    app.post("/tokenize")(tokens.tokenize)
    app.post("/detokenize")(tokens.detokenize)
    app.post("/reset_mm_cache")(server.reset_mm_cache)
    app.get("/v1/models")(server.models)
    app.get("/v1/models/{model:path}")(server.model)
    app.api_route("/health", methods=["GET", "HEAD"])(server.health)
    app.get("/stages")(server.stages)
    app.get("/version")(server.version)
    if settings.page:
        add_page(app)

    app.exception_handler(ServingError)(_serving_error)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(ClientDisconnect)(_client_left)
    app.exception_handler(Exception)(_bug)
    app.add_middleware(RequestTimes, traffic=traffic)
    protect(app, settings.api_keys, settings.cors_allow_origins)
    return app


class ChatRoutes:
    def __init__(
        self, fan_out: FanOut, tokenizer: Tokenizer, bodies: BodyReader, settings: ApiSettings
    ) -> None:
        self._fan_out = fan_out
        self._tokenizer = tokenizer
        self._bodies = bodies
        self._settings = settings
        self._media_defaults = media_options(settings.media_io_kwargs, fan_out.media_options)
        self._background = BackgroundWork()

    async def completions(self, http: Request) -> Response:
        request, timings = await self._prepared(http)
        answer = Answer(
            self._fan_out, timings, request, self._tokenizer, self._settings.model_name, self._background
        )
        if not request.stream:
            whole = await answer.whole()
            return Json(whole, headers=timings.header())
        events = answer.events()
        first = await anext(events)  # an error before the first token still gets a status of its own
        return event_stream(first, events, timings.first_header())

    async def render(self, http: Request) -> Response:
        _, timings = await self._prepared(http)
        return Json(rendered(timings, self._settings.model_name), headers=timings.header())

    async def _prepared(self, http: Request) -> tuple[ChatRequest, Timings]:
        async with self._bodies.open(http) as body:
            request, prepared = await self.prepare(body)
            return request, Timings(body.deadline, body.intake_ms, prepared)

    async def prepare(self, body: ParsedBody) -> tuple[ChatRequest, Prepared]:
        """Returns the request without its messages: it lives as long as the answer, their media must not."""
        settings = self._settings
        request = parse_chat_request(body.document, body.strings)
        check_model(request.model, settings)
        parsed = parse_chat(request, settings.limit_mm_per_prompt, settings.disabled_parts)
        request = request.model_copy(update={"messages": []})
        options = media_options(request.media_io_kwargs, self._media_defaults, request.mm_processor_kwargs)
        options = replace(options, previews=request.previews)
        prepared = await self._fan_out.prepare(parsed, options, body.deadline, settings.max_media_bytes)
        return request, prepared


class TokenRoutes:
    def __init__(self, fan_out: FanOut, chat: ChatRoutes, bodies: BodyReader, settings: ApiSettings) -> None:
        self._fan_out = fan_out
        self._chat = chat
        self._bodies = bodies
        self._settings = settings

    async def tokenize(self, http: Request) -> Response:
        """Tokens of a bare text, or of a conversation as the model gets it, with its media."""
        async with self._bodies.open(http) as body:
            token_ids, wants_strings = await self._encode(body)
        answer = {
            "count": len(token_ids),
            "max_model_len": self._fan_out.limits.max_model_len,
            "tokens": token_ids,
            "token_strs": None,
        }
        if wants_strings:
            answer["token_strs"] = (await self._fan_out.decode(token_ids, body.deadline)).tokens
        total_ms = body.deadline.ms()
        phases = {"intake": body.intake_ms, "tokenize": total_ms - body.intake_ms, "total": total_ms}
        return Json(answer, headers=server_timing(phases))

    async def _encode(self, body: ParsedBody) -> tuple[list[int], bool]:
        if "messages" in body.document:
            if "prompt" in body.document:
                raise InvalidRequest("Send either prompt or messages.", "prompt")
            _, prepared = await self._chat.prepare(body)
            return prepared.token_ids, body.document.get("return_token_strs") is True
        request = parse_as(TokenizeRequest, body.document, body.strings)
        check_model(request.model, self._settings)
        text = to_text(request.prompt, "prompt")
        token_ids = await self._fan_out.encode_text(text, request.add_special_tokens, body.deadline)
        return token_ids, request.return_token_strs

    async def detokenize(self, http: Request) -> Response:
        async with self._bodies.open(http) as body:
            request = parse_as(DetokenizeRequest, body.document, body.strings)
            check_model(request.model, self._settings)
            text = await self._fan_out.decode(request.tokens, body.deadline)
            return Json({"prompt": text.text})


class ServerRoutes:
    def __init__(self, fan_out: FanOut, watch: Watch, unready: Unready, settings: ApiSettings) -> None:
        self._fan_out = fan_out
        self._watch = watch
        self._unready = unready
        self._settings = settings
        self._model_card = {
            "id": settings.model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "headrace",
            "max_model_len": fan_out.limits.max_model_len,
        }

    async def models(self) -> Response:
        return Json({"object": "list", "data": [self._model_card]})

    async def model(self, model: str) -> Response:
        check_model(model, self._settings)
        return Json(self._model_card)

    async def health(self) -> Response:
        reason = self._unready()
        return Json({"status": "ok"}) if reason is None else Json({"status": reason}, 503)

    async def stages(self) -> Response:
        return Json(await self._watch.snapshot())

    async def version(self) -> Response:
        return Json({"version": __version__})

    async def reset_mm_cache(self) -> Response:
        if not self._settings.enable_reset_mm_cache:
            raise HTTPException(404, "Not Found; the setting enable_reset_mm_cache enables it")
        await self._fan_out.reset_caches()
        return Json({})


def check_model(model: str | None, settings: ApiSettings) -> None:
    served = settings.model_name
    if model not in (None, served):
        raise ModelNotFound(
            f"The model {model!r} is not served here. Send {served!r}, or leave model out.",
            "model",
        )


async def _serving_error(http: Request, error: ServingError) -> Response:
    tracing.set_attributes(**{"error.type": type(error).__name__})
    # A client that is still sending reads the answer when the connection closes.
    return error_response(error, {"Connection": "close"} if is_unread(http) else None)


async def _http_error(http: Request, error: HTTPException) -> Response:
    message = f"{http.method} {http.url.path}: {error.detail}."
    return Json(envelope(message, error.status_code), error.status_code, error.headers)


async def _client_left(http: Request, error: ClientDisconnect) -> Response:
    logger.info("the client disconnected before its request was complete")
    return Response(status_code=499)  # no client gets it; the access log shows it


async def _bug(http: Request, error: Exception) -> Response:
    return error_response(INTERNAL_ERROR)


def _telemetry() -> TelemetryConfig:
    """FastAPI's own span for POST requests only: probes and the page would drown them."""
    return {
        "tracing": tracing.provider is not None,
        "tracer_provider": tracing.provider,
        "operation_spans": False,
        "metrics": False,
        "logs": False,
        "exclude": lambda scope: scope.get("method") != "POST",
    }
