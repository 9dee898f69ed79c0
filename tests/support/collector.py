"""A collector of traces: receives OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.cluster import wait_until

ERROR = 2  # status code of the protocol


@dataclass
class Span:
    process: str
    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    failed: bool
    start: int
    end: int


@dataclass
class Collector:
    url: str = ""
    spans: list[Span] = field(default_factory=list)

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
            (process,) = [a.value.string_value for a in sent.resource.attributes if a.key == "service.name"]
            self.spans += [_span(process, span) for scope in sent.scope_spans for span in scope.spans]

    def of(self, trace: str) -> list[Span]:
        return [span for span in self.spans if span.trace == trace]

    def whole(self, trace: str) -> list[Span]:
        """Waits for all spans of a request. Spans of other processes may arrive after the root span."""

        def is_whole() -> bool:
            spans = self.of(trace)
            # A cancelled call may never have reached its stage.
            calls = [
                span.id
                for span in spans
                if span.name.startswith("call ") and not span.attributes.get("cancelled")
            ]
            served = {span.parent for span in spans}
            return any(span.name.startswith("POST") for span in spans) and served >= set(calls)

        wait_until(is_whole, why=lambda: str(Counter(span.name for span in self.of(trace))))
        return self.of(trace)


def _span(process: str, span: Any) -> Span:
    attributes = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
    ids = (each.hex() for each in (span.trace_id, span.span_id, span.parent_span_id))
    failed = span.status.code == ERROR
    times = span.start_time_unix_nano, span.end_time_unix_nano
    trace_id, span_id, parent_id = ids
    return Span(process, span.name, trace_id, span_id, parent_id, attributes, failed, *times)


@contextmanager
def listening(collector: Collector, port: int) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
