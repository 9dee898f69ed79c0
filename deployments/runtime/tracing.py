"""OpenTelemetry spans of a request in every process that it passes, as one trace. Off by default.

Between processes the trace context travels in the CallHeader. Serve's own tracing is not used: it keeps one
stack of spans per request, which concurrent calls of that request mix up, and it starts new traces for calls
of a request that is not sampled.

Spans contain names, sizes and errors, never the content of an item, a prompt or an answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from opentelemetry import propagate, trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes, AttributeValue

from deployments.errors import ServingError
from deployments.runtime.pool import lower_priority
from deployments.types import Delta

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger("ray.serve")

Carrier = Mapping[str, str]  # W3C's traceparent and tracestate

provider: TracerProvider | None = None  # None: tracing is off
_tracer: Tracer | None = None
_OFF = nullcontext(trace.INVALID_SPAN)
_W3C = TraceContextTextMapPropagator()
_SIZES = (
    "modality",
    "mime",
    "num_bytes",
    "num_tokens",
    "cached",
)  # fields of a result that become attributes


def start(endpoint: str, stage: str) -> None:
    """Sends this process's spans to the OTLP/HTTP collector at `endpoint`. An empty endpoint: tracing stays
    off.

    OpenTelemetry's own variables apply: OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER and so on.
    """
    global provider, _tracer
    if not endpoint:
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # Every second: Serve kills a replica once its work is done, and spans that were not sent by then are
    # lost.
    os.environ.setdefault("OTEL_BSP_SCHEDULE_DELAY", "1000")
    resource = Resource.create(
        {"service.namespace": "headrace", "service.name": stage, "process.pid": os.getpid()}
    )
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
    _tracer = provider.get_tracer("headrace")
    propagate.set_global_textmap(_W3C)  # the default also handles baggage, and logs it if it is too long


def _exporter(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http import trace_exporter
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult

    class Exporter(trace_exporter.OTLPSpanExporter):
        """Logs once that the collector cannot be reached. Runs at low priority, as other heavy work does."""

        lost = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            lower_priority(19)
            result = super().export(spans)
            lost = result is not SpanExportResult.SUCCESS
            if lost and not self.lost:
                logger.warning("no spans can be sent to %s; until they can, they are lost", endpoint)
            self.lost = lost
            return result

    logging.getLogger(trace_exporter.__name__).disabled = True  # it would log every attempt
    return Exporter(f"{endpoint.rstrip('/')}/v1/traces")


def span(name: str, **attributes: AttributeValue) -> AbstractContextManager[Span]:
    """Opens a child of the current span and makes it the current one. For a coroutine or a thread."""
    return _current(name, SpanKind.INTERNAL, attributes) if _tracer else _OFF


def calling(stage: str) -> AbstractContextManager[Carrier | None]:
    """Opens the client's span of a call. Yields its trace context, or None if tracing is off."""
    return _calling(stage) if _tracer else nullcontext()


@contextmanager
def _calling(stage: str) -> Iterator[Carrier]:
    carrier: dict[str, str] = {}
    with _span(f"call {stage}", SpanKind.CLIENT, {"stage": stage}) as client:
        _W3C.inject(carrier, set_span_in_context(client))
        yield carrier


@contextmanager
def serving(stage: str, trace_context: Carrier | None) -> Iterator[Callable[[object], None]]:
    """Opens the server's span of a call; yields a function that sets attributes from the call's result."""
    if trace_context is None:
        yield lambda value: None
        return
    parent = _W3C.extract(trace_context, Context())
    with _current(stage, SpanKind.SERVER, {"stage": stage}, parent) as server:
        yield partial(_set_sizes, server)


def _set_sizes(server: Span, value: object) -> None:
    sizes = {name: getattr(value, name, None) for name in _SIZES}
    server.set_attributes({name: size for name, size in sizes.items() if size is not None})


@contextmanager
def serving_stream(stage: str, trace_context: Carrier | None) -> Iterator[StreamSpan]:
    """Opens the server's span of a stream, which is not made the current span."""
    parent = _W3C.extract(trace_context or {}, Context())
    with _span(stage, SpanKind.SERVER, {"stage": stage}, parent) as server:
        stream = StreamSpan(server)
        try:
            yield stream
        finally:
            stream.close()


class StreamSpan:
    """A span with the engine's queue, prefill and decode time as children."""

    def __init__(self, server: Span) -> None:
        self._server = server
        self._first_ns = 0  # when the first delta came
        self._num_tokens = 0

    def observe(self, delta: Delta) -> None:
        if not self._first_ns:
            self._first_ns = time.time_ns()
            prefill_ns = self._first_ns - int(delta.prefill_ms * 1e6)
            _child(self._server, "queue", prefill_ns - int(delta.queue_ms * 1e6), prefill_ns)
            _child(self._server, "prefill", prefill_ns, self._first_ns)
        self._num_tokens += len(delta.token_ids)

    def close(self) -> None:
        if self._first_ns:
            _child(self._server, "decode", self._first_ns, time.time_ns())
        self._server.set_attribute("num_tokens", self._num_tokens)


def traced(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates a function whose calls are spans."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with span(name):
                return function(*args, **kwargs)

        return run

    return decorate


def set_attributes(**attributes: AttributeValue) -> None:
    """Sets attributes of the current span."""
    trace.get_current_span().set_attributes(attributes)


def record_error(error: BaseException, part: Span | None = None) -> None:
    """Ends the span, by default the current one, with this error."""
    part = part or trace.get_current_span()
    if isinstance(error, asyncio.CancelledError):
        part.set_attribute("cancelled", True)
    elif not isinstance(error, GeneratorExit):
        part.set_attribute("error.type", type(error).__name__)
        message = error.message if isinstance(error, ServingError) else None
        part.set_status(Status(StatusCode.ERROR, message))


@contextmanager
def _span(name: str, kind: SpanKind, attributes: Attributes, parent: Context | None = None) -> Iterator[Span]:
    """Opens a span; `parent` None: a child of the current one."""
    part = _tracer.start_span(name, parent, kind, attributes) if _tracer else trace.INVALID_SPAN
    try:
        yield part
    except BaseException as error:
        record_error(error, part)
        raise
    finally:
        part.end()


@contextmanager
def _current(
    name: str, kind: SpanKind, attributes: Attributes, parent: Context | None = None
) -> Iterator[Span]:
    with _span(name, kind, attributes, parent) as part:
        token = attach(set_span_in_context(part))
        try:
            yield part
        finally:
            detach(token)


def _child(parent: Span, name: str, start_ns: int, end_ns: int) -> None:
    if _tracer:
        _tracer.start_span(name, set_span_in_context(parent), start_time=start_ns).end(end_ns)
