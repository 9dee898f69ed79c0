"""The seam over Serve handles: retries, errors, deadlines, transport. The handles here are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from ray.exceptions import ActorDiedError, OwnerDiedError, RayTaskError, TaskCancelledError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from app.observe import Traffic
from app.ray_stages import (
    RayEmbeddingLoader,
    RayMediaLoader,
    RayMMPreprocessor,
    RayModel,
    RayTokenizer,
    to_serving_error,
)
from app.stages import CallContext, Deadline
from deployments.errors import (
    InvalidMedia,
    ObjectLost,
    Overloaded,
    ReplicaDied,
    ServingError,
    StageTimeout,
    StageUnavailable,
)
from deployments.runtime.metrics import CALL_BYTES_IN, CALL_BYTES_OUT, CALL_RETRIES
from deployments.types import (
    CallHeader,
    Chat,
    Delta,
    Media,
    MediaOptions,
    MediaSource,
    MediaUUID,
    MMFeatures,
    MMItem,
    Modality,
    Payload,
    Prompt,
    Reply,
    SamplingParams,
    Text,
)

IMAGE = MediaSource(Modality.IMAGE, "data", payloads=[Payload(100, inline=b"")])
OPTIONS = MediaOptions()


class Response:
    def __init__(self, outcome: object) -> None:
        self._outcome = outcome
        self.cancelled = False

    def __await__(self) -> Any:
        return self._result().__await__()

    async def _result(self) -> object:
        if self._outcome is None:
            await asyncio.Event().wait()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Gives one outcome after the other, and notes every call. An outcome None: no answer."""

    def __init__(self, *outcomes: object) -> None:
        self.outcomes = list(outcomes)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, object]]] = []
        self.responses: list[Response] = []
        self.called = asyncio.Event()
        self._options: dict[str, object] = {}

    def options(self, **options: object) -> Handle:
        self._options = options
        return self

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        handle = self

        class Method:
            def remote(self, *args: object) -> Response:
                handle.calls.append((method, args, handle._options))
                handle.responses.append(Response(handle.outcomes.pop(0)))
                handle.called.set()
                return handle.responses[-1]

        return Method()


def context(timeout_s: float = 30, **fields: Any) -> CallContext:
    return CallContext(Deadline(timeout_s), **{"param": "messages[0].content[0]", **fields})


def died() -> ActorDiedError:
    return ActorDiedError()


def features(nbytes: int, payload: Payload | None) -> MMFeatures:
    return MMFeatures(Modality.IMAGE, "digest", 1, [(1, 1)], payload, {})


async def test_a_call_returns_the_value_and_where_its_time_went() -> None:
    handle = Handle(Reply(Prompt([1], []), service_ms=0.0))
    timed = await RayTokenizer(handle, Traffic()).encode(Chat([]), [], context())
    assert timed.value == Prompt([1], [])
    assert (timed.timing.service, timed.timing.fetch) == (0.0, 0.0)
    assert timed.timing.queue > 0
    (_, (header, *_), _) = handle.calls[0]
    assert isinstance(header, CallHeader)
    assert 29 < (header.timeout_s or 0) <= 30
    assert (header.param, header.trace) == ("messages[0].content[0]", None)


CALLS: dict[str, Callable[[Handle], Any]] = {
    "Tokenizer.encode": lambda handle: RayTokenizer(handle, Traffic()).encode(Chat([]), [], context()),
    "Tokenizer.encode_text": lambda handle: RayTokenizer(handle, Traffic()).encode_text("a", True, context()),
    "Tokenizer.decode": lambda handle: RayTokenizer(handle, Traffic()).decode([1], context()),
    "MediaLoader.load": lambda handle: RayMediaLoader(handle, Traffic()).load(IMAGE, OPTIONS, context()),
    "EmbeddingLoader.load": lambda handle: RayEmbeddingLoader(handle, Traffic()).load(
        # the fake does not look into it
        IMAGE,  # type: ignore[arg-type]
        context(),
    ),
    "MMPreprocessor.process": lambda handle: RayMMPreprocessor(handle, Traffic(), True).process(
        [Media(Modality.IMAGE, "")], {}, context()
    ),
    "MMPreprocessor.recall": lambda handle: RayMMPreprocessor(handle, Traffic(), True).recall(
        MediaUUID("", Modality.IMAGE, "cat"), {}, context()
    ),
}


@pytest.mark.parametrize("call", CALLS)
async def test_an_idempotent_call_is_retried_once(call: str) -> None:
    stage, _, method = call.partition(".")
    value: object = {"load": Media(Modality.IMAGE, ""), "process": []}.get(method, Text(""))
    before = CALL_RETRIES.value(stage, "ReplicaDied")
    handle = Handle(died(), Reply(value, 1.0))
    assert (await CALLS[call](handle)).value == value
    assert [name for name, *_ in handle.calls] == [method] * 2
    assert handle.responses[0].cancelled
    assert CALL_RETRIES.value(stage, "ReplicaDied") == before + 1


@pytest.mark.parametrize("call", CALLS)
async def test_a_second_death_is_not_retried(call: str) -> None:
    expected = InvalidMedia if call == "MediaLoader.load" else ReplicaDied
    handle = Handle(died(), died())
    with pytest.raises(expected) as caught:
        await CALLS[call](handle)
    assert caught.value.param == "messages[0].content[0]"
    assert handle.outcomes == []


async def test_an_item_that_has_killed_another_replica_is_not_retried() -> None:
    handle = Handle(died())
    with pytest.raises(InvalidMedia, match="failed twice"):
        await RayMediaLoader(handle, Traffic()).load(IMAGE, OPTIONS, context(attempt=2))


async def test_a_read_is_not_retried_here() -> None:
    handle = Handle(died())
    with pytest.raises(ReplicaDied):
        await RayMMPreprocessor(handle, Traffic(), True).read(IMAGE, OPTIONS, {}, None, context())


async def test_other_errors_are_not_retried() -> None:
    handle = Handle(InvalidMedia("broken"))
    with pytest.raises(InvalidMedia, match="broken") as caught:
        await RayMediaLoader(handle, Traffic()).load(IMAGE, OPTIONS, context())
    assert caught.value.param == "messages[0].content[0]"


async def test_the_param_that_a_stage_has_set_is_kept() -> None:
    handle = Handle(InvalidMedia("broken", "messages[7]"))
    with pytest.raises(InvalidMedia) as caught:
        await RayMediaLoader(handle, Traffic()).load(IMAGE, OPTIONS, context())
    assert caught.value.param == "messages[7]"


async def test_a_call_past_its_deadline_is_cancelled_and_names_the_stage() -> None:
    handle, traffic = Handle(None), Traffic()
    with pytest.raises(StageTimeout, match=r"still in MediaLoader after its 0\.05 s"):
        await RayMediaLoader(handle, traffic).load(IMAGE, OPTIONS, context(0.05))
    assert handle.responses[0].cancelled
    assert traffic.calls_to("MediaLoader") == 0


async def test_a_timeout_before_the_deadline_is_a_fault_of_the_stage() -> None:
    handle = Handle(TimeoutError("a socket"))
    with pytest.raises(ServingError, match="MediaLoader failed on this request") as caught:
        await RayMediaLoader(handle, Traffic()).load(IMAGE, OPTIONS, context())
    assert type(caught.value) is ServingError


async def test_a_cancelled_task_cancels_its_call() -> None:
    handle, traffic = Handle(None), Traffic()
    task = asyncio.create_task(RayMediaLoader(handle, traffic).load(IMAGE, OPTIONS, context()))
    await handle.called.wait()
    assert traffic.calls_to("MediaLoader") == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert handle.responses[0].cancelled


async def test_a_call_that_serve_cancelled_is_not_our_cancellation() -> None:
    handle = Handle(TaskCancelledError())
    with pytest.raises(StageUnavailable, match="was stopped"):
        await RayMediaLoader(handle, Traffic()).load(IMAGE, OPTIONS, context())


def wrapped(cause: Exception) -> RayTaskError:
    return RayTaskError("load", "Traceback of the worker", cause).as_instanceof_cause()


def rpc_error(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "at 10.0.0.1:5")


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (wrapped(InvalidMedia("not an image")), InvalidMedia, "not an image"),
        (wrapped(OwnerDiedError("00" * 28, None, "")), ObjectLost, "lost an input"),
        (ActorDiedError(), ReplicaDied, "A replica of MediaLoader ended"),
        (rpc_error(grpc.StatusCode.UNAVAILABLE), ReplicaDied, "A replica of MediaLoader ended"),
        (rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED), ServingError, "MediaLoader failed on this request"),
        (BackPressureError(5, 5), Overloaded, "waiting for MediaLoader"),
        (
            DeploymentUnavailableError(DeploymentID("MediaLoader")),
            StageUnavailable,
            "No replica of MediaLoader",
        ),
        (wrapped(KeyError("secret")), ServingError, "MediaLoader failed on this request"),
    ],
)
def test_foreign_errors_become_serving_errors(
    error: Exception, expected: type[Exception], words: str
) -> None:
    mapped = to_serving_error(error, "MediaLoader")
    assert type(mapped) is expected
    assert words in str(mapped)
    assert "secret" not in str(mapped)
    assert "10.0.0.1" not in str(mapped)


async def test_bytes_in_and_out_of_a_stage_are_counted() -> None:
    before = [metric.value("MediaLoader", "image") for metric in (CALL_BYTES_IN, CALL_BYTES_OUT)]
    media = Media(Modality.IMAGE, "", Payload(300), num_bytes=20)
    handle = Handle(Reply(media, 1.0))
    await RayMediaLoader(handle, Traffic()).load(IMAGE, OPTIONS, context(modality="image"))
    after = [metric.value("MediaLoader", "image") for metric in (CALL_BYTES_IN, CALL_BYTES_OUT)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [20, 300]


@pytest.mark.parametrize(
    ("nbytes", "fits", "in_message"),
    [(100, True, True), (100, False, False), (40_000, True, False)],
)
async def test_a_small_image_travels_in_a_message_if_its_features_will(
    nbytes: int, fits: bool, in_message: bool
) -> None:
    item = MMItem(Media(Modality.IMAGE, ""), features(9, Payload(9, inline=b"")))
    handle = Handle(Reply(item, 1.0))
    source = replace(IMAGE, payloads=[Payload(nbytes, inline=b"")])
    stage = RayMMPreprocessor(handle, Traffic(), small_images_inline=fits)
    await stage.read(source, OPTIONS, {}, None, context(affinity="key"))
    _, args, options = handle.calls[0]
    assert args[-1] is in_message
    assert options == {"session_id": "key", "_by_reference": not in_message}


async def test_features_that_were_left_out_of_a_message_are_asked_for_by_reference() -> None:
    stored = Payload(9, ref="in the store")
    first = MMItem(Media(Modality.IMAGE, "a", mime="image/png"), features(9, None))
    again = replace(first, features=replace(features(9, stored), cached=True))
    handle = Handle(Reply(first, 2.0), Reply(again, 1.0))
    timed = await RayMMPreprocessor(handle, Traffic(), True).read(IMAGE, OPTIONS, {}, None, context())
    assert timed.value == replace(first, features=features(9, stored))  # not reported as cached
    assert [args[-1] for _, args, _ in handle.calls] == [True, False]
    assert timed.timing.end == pytest.approx(timed.timing.start + timed.timing.queue + timed.timing.service)


@pytest.mark.parametrize(
    ("payload", "length", "by_reference"),
    [
        (Payload(9, inline=b""), 9, False),
        (Payload(9, ref="in the store"), 9, True),
        (Payload(2**20, inline=b""), 9, True),
        (None, 2**17 + 1, True),
    ],
)
async def test_references_and_large_prompts_go_by_reference(
    payload: Payload | None, length: int, by_reference: bool
) -> None:
    handle = Handle(StopAsyncIteration())
    deltas = RayModel(handle, Traffic()).generate(
        Prompt([0] * length, []), [features(0, payload)], SamplingParams(1), "key", context()
    )
    with pytest.raises(TypeError):  # the fake's response is not a generator
        await anext(deltas)
    assert handle.calls[0][2] == {"stream": True, "_by_reference": by_reference}


class Stream:
    """Deltas without end; after `count` of them none comes any more."""

    def __init__(self, count: int | None = None) -> None:
        self.cancelled = asyncio.Event()
        self._left = count

    async def __anext__(self) -> Delta:
        if self._left is not None:
            if not self._left:
                await asyncio.Event().wait()
            self._left -= 1
        return Delta([1], queue_ms=0.5)

    def cancel(self) -> None:
        self.cancelled.set()


class StreamingHandle:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def options(self, **_: object) -> StreamingHandle:
        return self

    @property
    def generate(self) -> Any:
        stream = self._stream

        class Method:
            def remote(self, *_: object) -> Stream:
                return stream

        return Method()


def streaming(stream: Stream, timeout_s: float, traffic: Traffic) -> Any:
    model = RayModel(StreamingHandle(stream), traffic)  # type: ignore[arg-type]
    return model.generate(Prompt([1], []), [], SamplingParams(1), "key", CallContext(Deadline(timeout_s)))


async def test_a_stream_past_its_deadline_names_the_stage() -> None:
    deltas = streaming(Stream(2), 0.2, Traffic())
    assert [(await anext(deltas)).token_ids, (await anext(deltas)).token_ids] == [[1], [1]]
    with pytest.raises(StageTimeout, match=r"still in Model after its 0\.2 s"):
        await anext(deltas)


async def test_the_deadline_ends_a_stream_that_nobody_reads() -> None:
    stream = Stream()
    deltas = streaming(stream, 0.2, Traffic())
    await anext(deltas)
    async with asyncio.timeout(20):
        await stream.cancelled.wait()
    with pytest.raises(StageTimeout, match="still in Model"):
        await anext(deltas)


async def test_closing_a_stream_cancels_the_call() -> None:
    stream, traffic = Stream(), Traffic()
    deltas = streaming(stream, 30, traffic)
    await anext(deltas)
    assert traffic.calls_to("Model") == 1
    await deltas.aclose()
    assert stream.cancelled.is_set()
    assert traffic.calls_to("Model") == 0
