"""Spans of real requests, as a collector gets them from a running server."""

from __future__ import annotations

import base64
import json
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cluster import Server, chat, free_ports, media, media_server, wait_until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from test_embeds_cluster import audio_embeds

ROOT = Path(__file__).parent.parent
SAMPLES = ROOT / "docs" / "samples"
COMPLETIONS = "/v1/chat/completions"
STAGES = {"Ingress", "Tokenizer", "MediaLoader", "EmbeddingLoader", "MMPreprocessor", "Model"}
ERROR = 2  # of the protocol's status codes
EXPORT = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


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
    bodies: list[bytes] = field(default_factory=list)

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        self.bodies.append(body)
        for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
            (process,) = [a.value.string_value for a in sent.resource.attributes if a.key == "service.name"]
            self.spans += [_span(process, span) for scope in sent.scope_spans for span in scope.spans]

    def of(self, trace: str) -> list[Span]:
        return [span for span in self.spans if span.trace == trace]

    def whole(self, trace: str) -> list[Span]:
        """All spans of a request: its own comes last, from the ingress; others may be on their way longer."""

        def is_whole() -> bool:
            spans = self.of(trace)
            calls = [span.id for span in spans if span.name.startswith("call ")]
            served = {span.parent for span in spans}
            return any(span.name.startswith("POST") for span in spans) and served >= set(calls)

        wait_until(is_whole, why=lambda: str(Counter(span.name for span in self.of(trace))))
        return self.of(trace)


def _span(process: str, span: Any) -> Span:
    attributes = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
    ids = (each.hex() for each in (span.trace_id, span.span_id, span.parent_span_id))
    failed = span.status.code == ERROR
    times = span.start_time_unix_nano, span.end_time_unix_nano
    return Span(process, span.name, *ids, attributes, failed, *times)


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


@pytest.fixture(scope="module")
def collector() -> Collector:
    (port,) = free_ports(1)
    return Collector(f"http://127.0.0.1:{port}")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    def change(config: dict[str, Any]) -> None:
        config["applications"][0]["args"]["otlp_endpoint"] = collector.url

    with Server.start(tmp_path_factory.mktemp("traced"), change, EXPORT) as server:
        yield server


@pytest.fixture
def collecting(collector: Collector) -> Iterator[Collector]:
    with listening(collector, int(collector.url.rpartition(":")[2])):
        yield collector


def parent_of(trace: str, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{trace}-00f067aa0ba902b7-{flags}"}


def picture(name: str = "photo.png") -> dict[str, Any]:
    data = base64.b64encode((SAMPLES / name).read_bytes()).decode()
    return media("image", f"data:image/png;base64,{data}")


def test_one_request_is_one_trace_through_all_processes(traced: Server, collecting: Collector) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    request = chat(picture(), audio_embeds(4), "what do you see and hear?")
    answer = traced.post(COMPLETIONS, request, parent_of(trace) | {"x-request-id": "traced-1"})
    assert answer.status == 200, answer.body
    spans = collecting.whole(trace)
    assert {span.process for span in spans} == STAGES
    by_id = {span.id: span for span in spans}
    (root,) = [span for span in spans if span.parent not in by_id]
    assert (root.name, root.parent, root.process) == (f"POST {COMPLETIONS}", "00f067aa0ba902b7", "Ingress")
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["request_id"] == "traced-1"
    assert not any(span.failed for span in spans)
    within = Counter((by_id[span.parent].name, span.name) for span in spans if span is not root)
    assert within == {
        (root.name, "intake"): 1,
        (root.name, "call Tokenizer"): 1,
        ("call Tokenizer", "Tokenizer"): 1,
        ("Tokenizer", "tokenize"): 1,
        (root.name, "item"): 2,
        ("item", "call MediaLoader"): 1,
        ("call MediaLoader", "MediaLoader"): 1,
        ("MediaLoader", "decode"): 1,
        ("item", "call MMPreprocessor"): 1,
        ("call MMPreprocessor", "MMPreprocessor"): 1,
        ("MMPreprocessor", "preprocess"): 1,
        ("item", "call EmbeddingLoader"): 1,
        ("call EmbeddingLoader", "EmbeddingLoader"): 1,
        ("EmbeddingLoader", "embed"): 1,
        (root.name, "call Model"): 1,
        ("call Model", "Model"): 1,
        ("Model", "queue"): 1,
        ("Model", "prefill"): 1,
        ("Model", "decode"): 1,
    }
    for span in spans:
        if span is not root and span.process == "Ingress":
            assert root.start <= span.start <= span.end <= root.end


def test_attributes_tell_sizes_and_never_what_is_in_them(traced: Server, collecting: Collector) -> None:
    """A video by URL, streamed, in a trace that the server begins."""
    before = {span.trace for span in collecting.spans}
    with media_server() as host:
        host.content["/clip.mp4"] = clip = (SAMPLES / "clip.mp4").read_bytes()
        request = chat(media("video", f"{host.url}/clip.mp4"), "what do you see?", stream=True)
        data = json.dumps(request).encode()
        head = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(traced.url + COMPLETIONS, data, head)) as response:
            assert response.read().endswith(b"data: [DONE]\n\n")

    def new() -> set[str]:
        return {span.trace for span in collecting.spans} - before

    wait_until(new)
    (trace,) = new()
    spans = {span.name: span for span in collecting.whole(trace)}
    item = {"param": "messages[0].content[0]", "modality": "video", "num_bytes": len(clip)}
    assert spans["item"].attributes.items() >= item.items()
    assert spans["item"].attributes["num_tokens"] > 0
    assert spans["intake"].attributes == {"num_bytes": len(data)}
    assert spans[f"POST {COMPLETIONS}"].parent == ""
    loaded = {"stage": "MediaLoader", "modality": "video", "mime": "video/mp4", "num_bytes": len(clip)}
    assert spans["MediaLoader"].attributes.items() >= loaded.items()
    assert spans["fetch"].parent == spans["MediaLoader"].id
    assert spans["Model"].attributes["num_tokens"] > 0
    told = [value for span in spans.values() for value in span.attributes.values()]
    assert max(len(str(value)) for value in told) < 50
    assert "what do you see" not in str(told)


def test_an_error_is_marked_where_it_happened(traced: Server, collecting: Collector) -> None:
    trace = "5bf92f3577b34da6a3ce929d0e0e4737"
    broken = media("image", "data:image/png;base64,AAAA")
    answer = traced.post(COMPLETIONS, chat(picture(), broken, "what do you see?"), parent_of(trace))
    assert answer.status == 415
    spans = collecting.whole(trace)
    (decode,) = [span for span in spans if span.name == "decode" and span.failed]
    by_id = {span.id: span for span in spans}
    way = [decode]
    while way[-1].parent in by_id:
        way.append(by_id[way[-1].parent])
    assert [span.name for span in way] == [
        "decode",
        "MediaLoader",
        "call MediaLoader",
        "item",
        f"POST {COMPLETIONS}",
    ]
    assert [span.failed for span in way] == [True] * 4 + [False]  # the client's fault, not the server's
    assert {span.attributes["error.type"] for span in way} == {"UnsupportedMedia"}
    assert way[-2].attributes["param"] == "messages[0].content[1]"
    assert way[-1].attributes["http.response.status_code"] == 415


def test_what_the_caller_does_not_sample_is_not_told(traced: Server, collecting: Collector) -> None:
    unsampled, sampled = "6bf92f3577b34da6a3ce929d0e0e4738", "7bf92f3577b34da6a3ce929d0e0e4739"
    for trace, flags in ((unsampled, "00"), (sampled, "01")):
        traced.post(COMPLETIONS, chat(picture(), "what do you see?"), parent_of(trace, flags))
    collecting.whole(sampled)  # what went before is exported before
    assert collecting.of(unsampled) == []


def test_a_collector_that_is_away_is_told_once_and_costs_no_request(
    traced: Server, collector: Collector
) -> None:
    for _ in range(3):
        assert traced.post(COMPLETIONS, chat(picture(), "what do you see?")).status == 200
        wait_until(lambda: traced.log_lines("Ingress", "no spans can be sent"))
    with listening(collector, int(collector.url.rpartition(":")[2])):
        trace = "8bf92f3577b34da6a3ce929d0e0e473a"
        assert traced.post(COMPLETIONS, chat("hello"), parent_of(trace)).status == 200
        collector.whole(trace)
    assert len(traced.log_lines("Ingress", "no spans can be sent")) == 1
