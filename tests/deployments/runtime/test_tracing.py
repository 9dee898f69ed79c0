"""Spans: in one process, and of real requests, as a collector gets them from a running server."""

from __future__ import annotations

import asyncio
import base64
import contextvars
import json
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from opentelemetry import baggage, propagate
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, get_current_span

from deployments.runtime import tracing
from deployments.types import Delta
from tests.support.cluster import ServeConfig, Server, free_ports, media_server, wait_until
from tests.support.collector import Collector, listening
from tests.support.embeddings import audio_embeds
from tests.support.paths import ROOT
from tests.support.requests import chat, media

SAMPLES = ROOT / "docs" / "samples"
COMPLETIONS = "/v1/chat/completions"
STAGES = {"Ingress", "Tokenizer", "MediaLoader", "EmbeddingLoader", "MMPreprocessor", "Model"}
EXPORT = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}

pytestmark = pytest.mark.timeout(180)
cluster = pytest.mark.cluster


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("test"))
    return exporter


@dataclass
class Record:
    num_bytes: int


async def work(trace: Mapping[str, str] | None) -> None:
    with tracing.serving("Stage", trace) as set_sizes:
        with tracing.span("part"):
            pass
        set_sizes(Record(3))


async def wait(trace: Mapping[str, str] | None, started: asyncio.Event) -> None:
    with tracing.serving("Stage", trace):
        started.set()
        await asyncio.Event().wait()


async def test_without_tracing_a_call_carries_no_context() -> None:
    with tracing.calling("Stage") as trace, tracing.span("item") as span:
        assert trace is None
        assert not span.is_recording()
        await work(trace)


async def test_the_server_continues_the_trace_of_its_caller(kept: InMemorySpanExporter) -> None:
    with tracing.calling("Stage") as trace:
        # A call in another process does not inherit this context either.
        await contextvars.Context().run(asyncio.ensure_future, work(trace))
    part, stage, call = kept.get_finished_spans()
    assert (part.name, stage.name, call.name) == ("part", "Stage", "call Stage")
    assert part.parent == stage.context
    assert stage.parent is not None
    assert stage.parent.span_id == call.context.span_id
    assert stage.attributes == {"stage": "Stage", "num_bytes": 3}


async def test_a_cancelled_call_has_not_failed(kept: InMemorySpanExporter) -> None:
    started = asyncio.Event()
    with tracing.calling("Stage") as trace:
        task = asyncio.ensure_future(wait(trace, started))
        await started.wait()
        task.cancel()
        await asyncio.wait([task])
    stage, _ = kept.get_finished_spans()
    assert stage.status.status_code is StatusCode.UNSET
    assert stage.attributes == {"stage": "Stage", "cancelled": True}


def test_a_stream_has_queue_prefill_and_decode_as_children(kept: InMemorySpanExporter) -> None:
    with tracing.calling("Model") as trace, tracing.serving_stream("Model", trace) as stream:
        stream.observe(Delta([1], queue_ms=5, prefill_ms=7))
        stream.observe(Delta([2, 3]))
    spans = {span.name: span for span in kept.get_finished_spans()}
    assert spans["queue"].end_time == spans["prefill"].start_time
    assert spans["prefill"].end_time == spans["decode"].start_time
    assert all(spans[name].parent == spans["Model"].context for name in ("queue", "prefill", "decode"))
    assert spans["Model"].attributes == {"stage": "Model", "num_tokens": 3}


def test_a_clients_baggage_is_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module, name in ((tracing, "provider"), (tracing, "_tracer"), (propagate, "_HTTP_TEXT_FORMAT")):
        monkeypatch.setattr(module, name, getattr(module, name))
    tracing.start("http://127.0.0.1:9", "Ingress")
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    context = propagate.extract(parent_of(trace) | {"baggage": "key=" + "x" * 10_000})
    assert get_current_span(context).get_span_context().trace_id == int(trace, 16)
    assert baggage.get_all(context) == {}
    assert caplog.text == ""
    assert tracing.provider is not None
    tracing.provider.shutdown()


@pytest.fixture(scope="module")
def collector() -> Collector:
    (port,) = free_ports(1)
    return Collector(f"http://127.0.0.1:{port}")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    def change(config: ServeConfig) -> None:
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


def sound() -> dict[str, Any]:
    data = base64.b64encode((SAMPLES / "sound.wav").read_bytes()).decode()
    return media("audio", f"data:audio/wav;base64,{data}")


@cluster
def test_one_request_is_one_trace_through_all_processes(traced: Server, collecting: Collector) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    request = chat(picture(), sound(), audio_embeds(4), "what do you see and hear?")
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
        (root.name, "item"): 3,
        ("item", "call MediaLoader"): 1,
        ("call MediaLoader", "MediaLoader"): 1,
        ("MediaLoader", "decode"): 1,
        ("item", "call MMPreprocessor"): 2,
        ("call MMPreprocessor", "MMPreprocessor"): 2,
        ("MMPreprocessor", "decode"): 1,  # the picture
        ("MMPreprocessor", "preprocess"): 2,
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


@cluster
def test_attributes_have_sizes_and_never_contents(traced: Server, collecting: Collector) -> None:
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
    values = [value for span in spans.values() for value in span.attributes.values()]
    assert max(len(str(value)) for value in values) < 50
    assert "what do you see" not in str(values)


@cluster
def test_an_error_is_marked_at_its_stage(traced: Server, collecting: Collector) -> None:
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
        "MMPreprocessor",
        "call MMPreprocessor",
        "item",
        f"POST {COMPLETIONS}",
    ]
    assert [span.failed for span in way] == [True] * 4 + [False]  # the client's fault, not the server's
    assert {span.attributes["error.type"] for span in way} == {"UnsupportedMedia"}
    assert way[-2].attributes["param"] == "messages[0].content[1]"
    assert way[-1].attributes["http.response.status_code"] == 415


@cluster
def test_an_unsampled_trace_is_not_exported(traced: Server, collecting: Collector) -> None:
    unsampled, sampled = "6bf92f3577b34da6a3ce929d0e0e4738", "7bf92f3577b34da6a3ce929d0e0e4739"
    for trace, flags in ((unsampled, "00"), (sampled, "01")):
        traced.post(COMPLETIONS, chat(picture(), "what do you see?"), parent_of(trace, flags))
    collecting.whole(sampled)  # what went before is exported before
    assert collecting.of(unsampled) == []


@cluster
def test_a_missing_collector_is_logged_once_and_costs_no_request(
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
