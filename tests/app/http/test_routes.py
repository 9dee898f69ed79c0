"""The HTTP API over the real stages in local mode: answers, streams, errors."""

import asyncio
import base64
import dataclasses
import gzip
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from PIL import Image

from app import __version__
from app.config import AppConfig
from app.fanout import FanOut
from deployments.errors import ServingError, StageUnavailable
from deployments.types import Delta
from tests.support.local_graph import LocalGraph, local
from tests.support.requests import COMPLETIONS, chat, data_uri, events, image_part

# What it would say is made so unlikely that it says something else each time.
DREAMING = {"temperature": 2, "seed": 7, "repetition_penalty": 10, "ignore_eos": True}


@pytest.fixture(scope="module")
def graph() -> LocalGraph:
    return LocalGraph(AppConfig(max_body_bytes=1_000_000))


@pytest.fixture
async def api(graph: LocalGraph) -> AsyncIterator[httpx.AsyncClient]:
    async with await graph.client() as client:
        yield client


async def test_a_completion(api: httpx.AsyncClient) -> None:
    response = await api.post(COMPLETIONS, json=chat("hello"))
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny-omni"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "stop"
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_a_stream_says_the_same_as_a_whole_answer(api: httpx.AsyncClient) -> None:
    whole = (await api.post(COMPLETIONS, json=chat(image_part(), "what is this?"))).json()
    request = chat(image_part(), "what is this?", stream=True, stream_options={"include_usage": True})
    response = await api.post(COMPLETIONS, json=request)
    *chunks, usage = events(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert usage["choices"] == []
    for counts in (usage["usage"], whole["usage"]):
        counts["prompt_tokens_details"].pop("cached_tokens")  # the second one finds some
    assert usage["usage"] == whole["usage"]
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1


async def test_usage_comes_only_when_asked_for(api: httpx.AsyncClient) -> None:
    response = await api.post(COMPLETIONS, json=chat("hello", stream=True))
    assert all("usage" not in chunk for chunk in events(response.text))


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens(api: httpx.AsyncClient, stream: bool) -> None:
    response = await api.post(
        COMPLETIONS, json=chat("hello", max_tokens=1, stream=stream, stream_options={"include_usage": True})
    )
    final = events(response.text) if stream else [response.json()]
    assert final[-1]["usage"]["completion_tokens"] == 1
    assert "length" in [c["finish_reason"] for chunk in final for c in chunk["choices"]]


async def test_usage_in_every_chunk(api: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = chat("hello", max_tokens=4, ignore_eos=True, stream=True)
    chunks = events((await api.post(COMPLETIONS, json=request | {"stream_options": options})).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[-1] == 4
    assert counts == sorted(counts)
    only_in_chunks = await api.post(
        COMPLETIONS, json=request | {"stream_options": {"continuous_usage_stats": True}}
    )
    assert not any("usage" in chunk for chunk in events(only_in_chunks.text))


async def test_a_stop_string_ends_the_answer_and_is_left_out(api: httpx.AsyncClient) -> None:
    whole = (await api.post(COMPLETIONS, json=chat("hello"))).json()["choices"][0]["message"]["content"]
    stop = whole[4:7]
    response = await api.post(COMPLETIONS, json=chat("hello", stop=stop))
    (choice,) = response.json()["choices"]
    assert choice["message"]["content"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"


async def test_the_same_seed_gives_the_same_text(api: httpx.AsyncClient) -> None:
    request = chat("hello", temperature=1.5, seed=7, max_tokens=20)
    first, second = [(await api.post(COMPLETIONS, json=request)).json() for _ in range(2)]
    assert first["choices"] == second["choices"]


async def test_several_answers(api: httpx.AsyncClient) -> None:
    request = chat("hello", n=3, **DREAMING, max_tokens=8)
    whole = (await api.post(COMPLETIONS, json=request)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert len(set(texts)) == 3
    assert whole["usage"]["completion_tokens"] == 24
    one = (await api.post(COMPLETIONS, json=request | {"n": 1})).json()
    assert one["choices"] == whole["choices"][:1]

    chunks = events((await api.post(COMPLETIONS, json=request | {"stream": True})).text)
    streamed = ["", "", ""]
    reasons: list[list[str | None]] = [[], [], []]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["delta"].get("content", "")
        reasons[choice["index"]].append(choice["finish_reason"])
    assert streamed == texts
    assert all(each == [None] * (len(each) - 1) + ["length"] for each in reasons)


async def test_one_of_several_answers_reaches_a_stop_string(api: httpx.AsyncClient) -> None:
    request = chat("hello", n=2, **DREAMING, max_tokens=12)
    whole = (await api.post(COMPLETIONS, json=request)).json()["choices"]
    first, second = (choice["message"]["content"] for choice in whole)
    stop = next(first[i : i + 3] for i in range(len(first) - 3) if first[i : i + 3] not in second)
    body = (await api.post(COMPLETIONS, json=request | {"stop": stop})).json()
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    assert [choice["message"]["content"] for choice in body["choices"]] == [
        first[: first.index(stop)],
        second,
    ]
    assert body["usage"]["completion_tokens"] < 24


async def test_the_other_answers_do_not_wait_until_the_engine_knows_of_it(
    api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = chat("hello", n=2, **DREAMING, max_tokens=12)
    whole = (await api.post(COMPLETIONS, json=request)).json()["choices"]
    first, second = (choice["message"]["content"] for choice in whole)
    stop = next(first[i : i + 3] for i in range(len(first) - 3) if first[i : i + 3] not in second)

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(FanOut, "end", never)
    body = (await api.post(COMPLETIONS, json=request | {"stop": stop})).json()
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]


async def test_the_engine_spares_what_follows_a_stop_string(
    graph: LocalGraph, api: httpx.AsyncClient
) -> None:
    request = chat("hello", n=2, **DREAMING, max_tokens=12)
    first = (await api.post(COMPLETIONS, json=request)).json()["choices"][0]["message"]["content"]
    before = (await graph.handles["Model"].stats.remote()).generated_tokens
    body = (await api.post(COMPLETIONS, json=request | {"stop": first[3:6], "max_tokens": 800})).json()
    generated = (await graph.handles["Model"].stats.remote()).generated_tokens - before
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] <= generated < body["usage"]["completion_tokens"] + 400


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(api: httpx.AsyncClient, stream: bool) -> None:
    request = chat("hello", logprobs=True, top_logprobs=2, max_tokens=6, stream=stream)
    response = await api.post(COMPLETIONS, json=request)
    choices = [
        c for body in (events(response.text) if stream else [response.json()]) for c in body["choices"]
    ]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert 0 < len(entries) <= 6
    for entry in entries:
        assert entry["logprob"] <= 0
        assert entry["top_logprobs"][0]["token"] == entry["token"]  # it is greedy
        assert len(entry["top_logprobs"]) == 2
    text = "".join(c["delta"].get("content", "") if stream else c["message"]["content"] for c in choices)
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == text


async def test_no_logprobs_unless_asked_for(api: httpx.AsyncClient) -> None:
    (choice,) = (await api.post(COMPLETIONS, json=chat("hello"))).json()["choices"]
    assert choice["logprobs"] is None


async def test_usage_tells_what_was_cached(api: httpx.AsyncClient) -> None:
    request = chat(image_part((1, 2, 3)), "what is this, once more and once again?")
    first, second = [(await api.post(COMPLETIONS, json=request)).json()["usage"] for _ in range(2)]
    assert second["prompt_tokens_details"]["cached_tokens"] == (second["prompt_tokens"] - 1) // 16 * 16
    assert first["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens_details"]["cached_tokens"]


async def test_a_token_that_the_model_does_not_have(api: httpx.AsyncClient) -> None:
    response = await api.post(COMPLETIONS, json=chat("hello", logit_bias={"999999": 1}))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logit_bias"


async def test_render_says_what_the_model_would_get(api: httpx.AsyncClient) -> None:
    document = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": ["first", image_part((255, 0, 0)), "then"]},
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": [image_part((0, 0, 255), (96, 48)), image_part((0, 255, 0))]},
        ]
    }
    response = await api.post(f"{COMPLETIONS}/render", json=document)
    body = response.json()
    assert response.status_code == 200, body
    assert body["object"] == "chat.render"
    assert body["num_prompt_tokens"] == len(body["prompt_token_ids"])
    assert [(i["index"], i["param"], i["modality"]) for i in body["items"]] == [
        (0, "messages[1].content[1]", "image"),
        (1, "messages[3].content[0]", "image"),
        (2, "messages[3].content[1]", "image"),
    ]
    assert [i["media"]["original_width"] for i in body["items"]] == [48, 96, 48]
    ends = 0
    for item in body["items"]:
        span = item["placeholder"]
        ids = body["prompt_token_ids"][span["offset"] : span["offset"] + span["length"]]
        assert span["offset"] >= ends
        assert len(set(ids)) == 1  # one id, repeated
        assert item["num_tokens"] == span["length"] == len(ids)
        ends = span["offset"] + span["length"]
    first = body["items"][0]
    assert first["source"]["kind"] == "data"
    assert first["source"]["mime"] == "image/png"
    assert set(first["timings_ms"]) == {"MMPreprocessor"}
    assert "pixel_values" in first["features"]
    assert len({i["digest"] for i in body["items"]}) == 3


async def test_previews_show_what_the_model_sees(api: httpx.AsyncClient) -> None:
    buffer = io.BytesIO()
    Image.new("RGBA", (20, 10), (255, 0, 0, 0)).save(buffer, "png")
    clear = {"type": "image_url", "image_url": {"url": data_uri("image/png", buffer.getvalue())}}
    background = {"image": {"rgba_background_color": [0, 0, 255]}}
    document = chat(clear, previews=True, media_io_kwargs=background)
    (item,) = (await api.post(f"{COMPLETIONS}/render", json=document)).json()["items"]
    (uri,) = item["previews"]
    shown = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
    assert (shown.size, shown.getpixel((0, 0))) == ((20, 10), (0, 0, 255))
    (item,) = (await api.post(f"{COMPLETIONS}/render", json=chat(clear))).json()["items"]
    assert "previews" not in item


async def test_usage_counts_the_tokens_of_media(api: httpx.AsyncClient) -> None:
    document = chat(image_part(), "what is this?")
    rendered = (await api.post(f"{COMPLETIONS}/render", json=document)).json()
    usage = (await api.post(COMPLETIONS, json=document)).json()["usage"]
    details = usage["prompt_tokens_details"]
    assert usage["prompt_tokens"] == rendered["num_prompt_tokens"]
    assert details["image_tokens"] == rendered["items"][0]["num_tokens"]
    assert details["text_tokens"] + details["image_tokens"] == usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b"hello", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"messages": [}', "not valid JSON"),
        (b'\xff\xfe{"a": 1}', "not valid JSON"),
        (b"{}", "messages"),
        (b'{"messages": []}', "messages"),
    ],
)
async def test_bodies_that_are_no_request(api: httpx.AsyncClient, body: bytes, words: str) -> None:
    response = await api.post(COMPLETIONS, content=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_broken_item_is_named(api: httpx.AsyncClient, stream: bool) -> None:
    broken = {"type": "image_url", "image_url": {"url": data_uri("image/png", b"not an image")}}
    response = await api.post(COMPLETIONS, json=chat("see", image_part(), broken, stream=stream))
    error = response.json()["error"]
    assert response.status_code in (415, 422)
    assert error["param"] == "messages[0].content[2]"
    assert error["type"] == "invalid_request_error"


async def test_a_body_over_the_limit(api: httpx.AsyncClient) -> None:
    response = await api.post(COMPLETIONS, json=chat("x" * 1_000_001))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert response.headers["connection"] == "close"


async def test_a_body_over_the_limit_that_does_not_tell_its_length(api: httpx.AsyncClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b" " * 100_000

    response = await api.post(COMPLETIONS, content=chunks())
    assert response.status_code == 413


async def test_a_compressed_body(api: httpx.AsyncClient) -> None:
    body = gzip.compress(json.dumps(chat("hello")).encode())
    response = await api.post(COMPLETIONS, content=body, headers={"Content-Encoding": "gzip"})
    assert response.status_code == 415
    assert response.json()["error"]["message"] == "Send the body as it is, without a Content-Encoding."
    plain = await api.post(COMPLETIONS, json=chat("hello"), headers={"Content-Encoding": "identity"})
    assert plain.status_code == 200


async def test_a_client_that_leaves_in_its_body(graph: LocalGraph, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ray.serve")
    async with await graph.client() as api:
        app = api._transport.app  # type: ignore[attr-defined]

    async def receive() -> dict[str, object]:
        return {"type": "http.disconnect"}

    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": [], "query_string": b""}
    await app(scope, receive, send)
    assert sent[0]["status"] == 499
    assert "the client disconnected before its request was complete" in caplog.messages
    assert not any(record.exc_info for record in caplog.records)


async def test_a_prompt_that_leaves_no_room(api: httpx.AsyncClient) -> None:
    response = await api.post(COMPLETIONS, json=chat("x?" * 20_000))
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert "tokens" in error["message"]


async def test_an_unknown_model(api: httpx.AsyncClient) -> None:
    response = await api.post(COMPLETIONS, json=chat("hi", model="gpt-7"))
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_the_served_model(api: httpx.AsyncClient) -> None:
    (card,) = (await api.get("/v1/models")).json()["data"]
    assert card["id"] == "tiny-omni"
    assert (await api.get("/v1/models/tiny-omni")).json() == card
    assert (await api.get("/v1/models/other")).status_code == 404


async def test_the_stages_report_their_activity(api: httpx.AsyncClient) -> None:
    assert (await api.post("/v1/chat/completions", json=chat(image_part(), max_tokens=1))).status_code == 200
    body = (await api.get("/stages")).json()
    names = [stage["name"] for stage in body["stages"]]
    assert names == [
        "Ingress",
        "Tokenizer",
        "MediaLoader.fetch",
        "MediaLoader.decode",
        "EmbeddingLoader",
        "MMPreprocessor",
        "Model",
    ]
    assert {(stage["queued"], stage["in_flight"]) for stage in body["stages"]} == {(0, 0)}
    assert (body["starved_by"], body["starvation_s"]) == (None, {})


async def test_health_and_version(api: httpx.AsyncClient) -> None:
    assert (await api.get("/health")).json() == {"status": "ok"}
    assert (await api.get("/version")).json() == {"version": __version__}


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("GET", COMPLETIONS, 405)])
async def test_wrong_routes_speak_the_same_language(
    api: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    response = await api.request(method, path)
    assert response.status_code == status
    assert path in response.json()["error"]["message"]


class Breaks:
    """A stage that fails at a moment of the test's choice, which no real one does."""

    def __init__(self, spec: object, after: int, error: Exception) -> None:
        self._spec, self._after, self._error = spec, after, error

    async def describe(self) -> object:
        return self._spec

    async def generate(self, *_: object) -> AsyncIterator[Delta]:
        for token_id in range(self._after):
            yield Delta([100 + token_id])
        raise self._error

    async def read(self, *_: object) -> None:
        await asyncio.Event().wait()


async def broken(graph: LocalGraph, stage: str, after: int, error: Exception) -> Any:
    """Returns a handle to a `Breaks` that describes itself as the real stage does."""
    return local(Breaks, await graph.handles[stage].describe.remote(), after, error)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (StageUnavailable("The engine has stopped."), "The engine has stopped."),
        (ServingError("The model failed on this request."), "The model failed"),
        (ZeroDivisionError("internal"), "Internal error"),
    ],
)
async def test_an_error_after_the_stream_began_is_an_event(
    graph: LocalGraph, error: Exception, words: str
) -> None:
    async with await graph.client(Model=await broken(graph, "Model", 3, error)) as api:
        response = await api.post(COMPLETIONS, json=chat("hello", stream=True))
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert response.status_code == 200
    assert words in json.loads(lines[-1])["error"]["message"]
    assert any(c["choices"][0]["delta"].get("content") for c in map(json.loads, lines[:-1]))


async def test_an_error_before_the_first_token_has_a_status(graph: LocalGraph) -> None:
    stopped = await broken(graph, "Model", 0, StageUnavailable("The engine has stopped."))
    async with await graph.client(Model=stopped) as api:
        response = await api.post(COMPLETIONS, json=chat("hello", stream=True))
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert response.json()["error"]["type"] == "server_error"


async def test_a_passed_deadline_says_where_the_request_was(graph: LocalGraph) -> None:
    settings = dataclasses.replace(graph.settings, timeout_s=0.3)
    silent = await broken(graph, "MMPreprocessor", 0, ServingError(""))
    async with await graph.client(settings, MMPreprocessor=silent) as api:
        response = await api.post(COMPLETIONS, json=chat(image_part()))
    assert response.status_code == 504
    assert response.json()["error"]["param"] == "messages[0].content[0]"
    assert "still in MMPreprocessor after its 0.3 s" in response.json()["error"]["message"]


async def stalls() -> AsyncIterator[bytes]:
    yield b'{"messages"'
    await asyncio.Event().wait()


async def test_a_body_that_stalls_is_not_waited_for(graph: LocalGraph) -> None:
    settings = dataclasses.replace(graph.settings, timeout_s=0.1)
    async with await graph.client(settings) as api:
        response = await api.post(COMPLETIONS, content=stalls())
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "request_timeout"


async def test_a_body_that_stalls_is_timed_out_long_before_the_deadline(graph: LocalGraph) -> None:
    settings = dataclasses.replace(graph.settings, body_idle_timeout_s=0.05)
    async with await graph.client(settings) as api:
        response = await api.post(COMPLETIONS, content=stalls())
    assert response.status_code == 408
    assert response.headers["connection"] == "close"  # the rest of the body would be taken for a request


async def test_bodies_beyond_the_limit_in_flight_are_refused_with_a_503(graph: LocalGraph) -> None:
    is_held, may_end = asyncio.Event(), asyncio.Event()

    async def held() -> AsyncIterator[bytes]:
        yield b"{" + b" " * 700
        is_held.set()
        await may_end.wait()
        yield b"}"

    settings = dataclasses.replace(graph.settings, max_inflight_body_bytes=1000)
    async with await graph.client(settings) as api:
        first = asyncio.create_task(api.post(COMPLETIONS, content=held()))
        await is_held.wait()
        small, large = chat("hello", max_tokens=1), chat("x" * 300)
        refused = await api.post(COMPLETIONS, json=large)
        assert (await api.post(COMPLETIONS, json=small)).status_code == 200
        may_end.set()
        assert (await first).status_code == 400
        assert (await api.post(COMPLETIONS, json=large)).status_code == 200
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert refused.headers["connection"] == "close"
    assert refused.json()["error"]["code"] == "overloaded"


async def test_text_that_can_not_fit_is_not_even_encoded(graph: LocalGraph) -> None:
    unused = await broken(graph, "Tokenizer", 0, ServingError("not to be called"))
    async with await graph.client(Tokenizer=unused) as api:
        response = await api.post(COMPLETIONS, json=chat("hello world " * 50_000))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "600000 bytes" in response.json()["error"]["message"]


async def test_load_balancers_may_ask_for_the_head_alone(api: httpx.AsyncClient) -> None:
    assert (await api.head("/health")).status_code == 200


async def test_a_wrong_method_gets_the_right_one(api: httpx.AsyncClient) -> None:
    assert (await api.get(COMPLETIONS)).headers["allow"] == "POST"


async def test_a_text_to_tokens_and_back(api: httpx.AsyncClient) -> None:
    text = "<|im_start|>user\nwhat is this?<|im_end|>"
    answer = (await api.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["token_strs"][0] == "<|im_start|>"
    assert answer["max_model_len"] == 4096
    back = await api.post("/detokenize", json={"tokens": answer["tokens"], "model": "tiny-omni"})
    assert back.json() == {"prompt": text}


async def test_a_conversation_to_the_tokens_that_the_model_gets(api: httpx.AsyncClient) -> None:
    request = chat(image_part(), "what is this?")
    tokens = (await api.post("/tokenize", json=request)).json()
    rendered = (await api.post(f"{COMPLETIONS}/render", json=request)).json()
    assert tokens["tokens"] == rendered["prompt_token_ids"]
    assert tokens["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "hi", "messages": []}, 400, "prompt"),
        ("/tokenize", {"prompt": "hi", "model": "gpt-7"}, 404, "model"),
        ("/tokenize", {"prompt": "a" * 900_000}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/detokenize", {"tokens": "abc"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens[0]"),
    ],
)
async def test_what_can_not_be_tokenized_is_named(
    api: httpx.AsyncClient, path: str, body: dict[str, object], status: int, param: str
) -> None:
    answer = await api.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(("page", "status"), [(True, 200), (False, 404)])
async def test_the_page_can_be_switched_off(graph: LocalGraph, page: bool, status: int) -> None:
    async with await graph.client(dataclasses.replace(graph.settings, page=page)) as client:
        assert (await client.get("/")).status_code == status


async def test_a_web_page_cannot_post_without_being_asked_for(api: httpx.AsyncClient) -> None:
    """A browser sends text/plain to any server; JSON it sends only where CORS lets it."""
    body = json.dumps(chat("hi", max_tokens=1))
    for headers, status in (
        ({"Origin": "http://evil.example", "Content-Type": "text/plain"}, 400),
        ({"Origin": "http://evil.example", "Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 200),  # what curl sends
    ):
        assert (await api.post(COMPLETIONS, content=body, headers=headers)).status_code == status


async def test_many_items_are_refused_before_all_were_seen(api: httpx.AsyncClient) -> None:
    images = [image_part((i % 256, i // 256, 7), (280, 280)) for i in range(300)]
    response = await api.post(f"{COMPLETIONS}/render", json=chat(*images))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].startswith("256 of the items alone have 4096 tokens")
