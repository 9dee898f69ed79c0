"""OpenTelemetry spans of a request in every process that it comes through, as one trace. Off by default.

Between processes the context travels as a keyword of the call. Serve's own tracing is not used: the calls
that a request makes at once mix up its stack of spans, and those of one that is not sampled begin new traces.

Spans tell names, sizes and errors, never what is in an item, a prompt or an answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from opentelemetry import propagate, trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from deployments.errors import ServingError
from deployments.runtime.pool import lower_priority
from deployments.types import Delta

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger("ray.serve")

Carrier = Mapping[str, str]  # W3C's traceparent and tracestate

provider: Any = None  # None: off, and nothing here does anything
_tracer: Tracer | None = None
_OFF = nullcontext(trace.INVALID_SPAN)
_W3C = TraceContextTextMapPropagator()
_TOLD = ("modality", "mime", "num_bytes", "num_tokens", "cached")  # of a stage's record


def start(endpoint: str, stage: str) -> None:
    """From now on this process's spans go to the OTLP/HTTP collector at `endpoint`; empty: there are none.

    The rest is OpenTelemetry's: OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER and the like.
    """
    global provider, _tracer
    if not endpoint:
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # Every second: Serve kills a replica that has ended its work, and what has not left then is lost.
    os.environ.setdefault("OTEL_BSP_SCHEDULE_DELAY", "1000")
    resource = Resource.create(
        {"service.namespace": "headrace", "service.name": stage, "process.pid": os.getpid()}
    )
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
    _tracer = provider.get_tracer("headrace")
    propagate.set_global_textmap(_W3C)  # by default baggage, too, which is logged where it is too long


def _exporter(endpoint: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http import trace_exporter
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult

    class Exporter(trace_exporter.OTLPSpanExporter):
        """Says once that the collector is not there, and steps back as other work of its kind."""

        lost = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            lower_priority(19)
            result = super().export(spans)
            lost = result is not SpanExportResult.SUCCESS
            if lost and not self.lost:
                logger.warning("no spans can be sent to %s; until they can, they are lost", endpoint)
            self.lost = lost
            return result

    logging.getLogger(trace_exporter.__name__).disabled = True  # it would say so for every try
    return Exporter(f"{endpoint.rstrip('/')}/v1/traces")


def span(name: str, **attributes: Any) -> AbstractContextManager[Span]:
    """A part of the current span, and the current one itself meanwhile. For a coroutine or a thread."""
    return _current(name, SpanKind.INTERNAL, attributes) if _tracer else _OFF


def calling(stage: str) -> AbstractContextManager[dict[str, Any]]:
    """A call of this process to a stage; the keywords for its method, which `served` looks for."""
    return _calling(stage) if _tracer else nullcontext({})


@contextmanager
def _calling(stage: str) -> Iterator[dict[str, Any]]:
    carrier: dict[str, str] = {}
    with _span(f"call {stage}", SpanKind.CLIENT, {"stage": stage}) as client:
        _W3C.inject(carrier, set_span_in_context(client))
        yield {"trace_context": carrier}


def served(method: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """For a stage's method that is called within `calling`: its span is a part of the call's."""
    stage = _stage_of(method)

    @wraps(method)
    async def run(*args: Any, trace_context: Carrier | None = None, **kwargs: Any) -> T:
        if trace_context is None:
            return await method(*args, **kwargs)
        with _current(stage, SpanKind.SERVER, {"stage": stage}, _W3C.extract(trace_context, Context())):
            record = await method(*args, **kwargs)
            told = {name: getattr(record, name, None) for name in _TOLD}
            tell(**{name: value for name, value in told.items() if value is not None})
            return record

    return cast(Callable[P, Awaitable[T]], run)


def served_deltas(
    method: Callable[P, AsyncGenerator[Delta, None]],
) -> Callable[P, AsyncGenerator[Delta, None]]:
    """The same for the model: its span has the engine's queue, the prefill and the decoding as parts."""
    stage = _stage_of(method)

    @wraps(method)
    async def run(
        *args: Any, trace_context: Carrier | None = None, **kwargs: Any
    ) -> AsyncGenerator[Delta, None]:
        parent = _W3C.extract(trace_context or {}, Context())
        # Not the current span: a generator may go on in another context than it began in.
        with _span(stage, SpanKind.SERVER, {"stage": stage}, parent) as server:
            first, num_tokens = 0, 0
            try:
                async with aclosing(method(*args, **kwargs)) as deltas:
                    async for delta in deltas:
                        if not first:
                            first = time.time_ns()
                            begin = first - int(delta.prefill_ms * 1e6)
                            _part(server, "queue", begin - int(delta.queue_ms * 1e6), begin)
                            _part(server, "prefill", begin, first)
                        num_tokens += len(delta.token_ids)
                        yield delta
            finally:
                _part(server, "decode", first, time.time_ns())
                server.set_attribute("num_tokens", num_tokens)

    return cast(Callable[P, AsyncGenerator[Delta, None]], run)


def _stage_of(method: Callable[..., object]) -> str:
    return method.__qualname__.partition(".")[0]


def traced(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """For a function: each of its calls is a span."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with span(name):
                return function(*args, **kwargs)

        return run

    return decorate


def tell(**attributes: Any) -> None:
    """Of the current span."""
    trace.get_current_span().set_attributes(attributes)


def failed(error: BaseException, part: Span | None = None) -> None:
    """The span, by default the current one, ends with this error."""
    part = part or trace.get_current_span()
    if isinstance(error, asyncio.CancelledError):
        part.set_attribute("cancelled", True)
    elif not isinstance(error, GeneratorExit):
        part.set_attribute("error.type", type(error).__name__)
        message = error.message if isinstance(error, ServingError) else None
        part.set_status(Status(StatusCode.ERROR, message))


@contextmanager
def _span(
    name: str, kind: SpanKind, attributes: Mapping[str, Any], parent: Context | None = None
) -> Iterator[Span]:
    """`parent`: the current span where it is None."""
    part = _tracer.start_span(name, parent, kind, attributes) if _tracer else trace.INVALID_SPAN
    try:
        yield part
    except BaseException as error:
        failed(error, part)
        raise
    finally:
        part.end()


@contextmanager
def _current(
    name: str, kind: SpanKind, attributes: Mapping[str, Any], parent: Context | None = None
) -> Iterator[Span]:
    with _span(name, kind, attributes, parent) as part:
        token = attach(set_span_in_context(part))
        try:
            yield part
        finally:
            detach(token)


def _part(of: Span, name: str, start_ns: int, end_ns: int) -> None:
    if _tracer and start_ns:
        _tracer.start_span(name, set_span_in_context(of), start_time=start_ns).end(end_ns)
