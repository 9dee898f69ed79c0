"""The stages over Serve handles: the only module of the app that calls one.

For each call it decides between message and reference, sets the affinity key, opens a span, records the call,
keeps the deadline, cancels what is unfinished, turns foreign errors into ServingErrors, and retries by the
table RETRIES.

Cancelling an awaiting task does not cancel a Serve call, only `response.cancel()` does. `_guard` does it for
every call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import Enum
from typing import Any, ClassVar, Protocol, TypeVar

import grpc
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from app.observe import ObservedCall, Traffic
from app.stages import CallContext, Deadline, Stages, Timed, Timing
from deployments.errors import (
    InvalidMedia,
    ObjectLost,
    Overloaded,
    ReplicaDied,
    ServingError,
    StageUnavailable,
)
from deployments.processor.settings import ProcessorSettings
from deployments.runtime import tracing
from deployments.runtime.memory import collect_soon
from deployments.runtime.metrics import CALL_RETRIES
from deployments.types import (
    Activity,
    Affixes,
    CallHeader,
    Chat,
    Delta,
    EmbeddingSource,
    InputSpec,
    Media,
    MediaOptions,
    MediaSource,
    MediaUUID,
    MMFeatures,
    MMItem,
    Prompt,
    Reply,
    SamplingParams,
    Text,
)

T = TypeVar("T")
logger = logging.getLogger("ray.serve")

# gRPC is faster than a call by reference, but its messages hold 4 MiB and no references to the object store.
_MESSAGE_BYTES = 2**20
_MESSAGE_TOKENS = 8192  # whose text, twice, surely fits into a message
_SMALL_IMAGE_BYTES = 32 * 1024  # as text; larger ones rarely have features that fit into a message

_BROADCAST_S = 1.0  # a replica that does not answer a broadcast holds up the others for this long at most
_TIMER_S = 0.001  # a timer may fire this long before its time
_READER_GRACE_S = 0.1  # after the deadline: a reader that is waiting has had its StageTimeout by then


class OnReplicaDeath(Enum):
    """The rule for a call during which its replica died."""

    RETRY = "the call is idempotent: one more replica may try it"
    RETRY_THEN_REFUSE = "as RETRY; if the second replica dies too, the item is what kills them"


# Calls that are not in this table are not retried here. `MMPreprocessor.read` is not, because the item may
# have killed the replica: the fan-out then loads it with MediaLoader, which is quicker to replace.
# `Model.generate` is not, because its client may have seen tokens.
RETRIES = {
    "Tokenizer.encode": OnReplicaDeath.RETRY,
    "Tokenizer.encode_text": OnReplicaDeath.RETRY,
    "Tokenizer.decode": OnReplicaDeath.RETRY,
    "MediaLoader.load": OnReplicaDeath.RETRY_THEN_REFUSE,
    "EmbeddingLoader.load": OnReplicaDeath.RETRY,
    "MMPreprocessor.process": OnReplicaDeath.RETRY,
    "MMPreprocessor.recall": OnReplicaDeath.RETRY,
}


class Handle(Protocol):
    """The used part of `ray.serve.handle.DeploymentHandle`."""

    def options(self, *, stream: bool = ..., session_id: str = ..., _by_reference: bool = ...) -> Handle: ...

    def broadcast(self, method: str, *args: object) -> Broadcast: ...

    def __getattr__(self, method: str) -> Any: ...  # `.remote(...)` gives a response or a generator of deltas


class Broadcast(Protocol):
    async def results_async(
        self, timeout_s: float | None = None, return_exceptions: bool = False
    ) -> list[Any]: ...


class RayStage:
    """One stage behind its handle."""

    name: ClassVar[str]
    parts: ClassVar[Sequence[str]]  # names of its activities

    def __init__(self, handle: Handle, traffic: Traffic) -> None:
        self._handle = handle
        self._traffic = traffic

    async def activity(self, timeout_s: float) -> list[list[Activity]]:
        """Returns the snapshots of all replicas; nothing if one of them does not answer in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._handle.broadcast("activity").results_async()
        except (TimeoutError, RayError, RayServeException, grpc.RpcError):
            return []

    async def reset_cache(self) -> None:
        """Empties the caches of all replicas."""
        try:
            await self._handle.broadcast("reset_cache").results_async()
        except (RayError, RayServeException, grpc.RpcError) as error:
            raise to_serving_error(error, self.name) from error

    async def _call(
        self,
        method: str,
        *args: object,
        context: CallContext,
        by_reference: bool = True,
        sizes: Callable[[T], tuple[int, int]] | None = None,
    ) -> Timed[T]:
        """Calls an endpoint, with the retries of RETRIES. `sizes`: bytes in and out, for the metrics."""
        then = RETRIES.get(f"{self.name}.{method}")
        handle = self._handle.options(session_id=context.affinity, _by_reference=by_reference)
        try:
            try:
                return await self._attempt(handle, method, args, context, sizes)
            except ReplicaDied as error:
                if then is None or context.attempt > 1:
                    raise
                logger.warning("%s Trying once more.", error.message)
                CALL_RETRIES.add(1, self.name, type(error).__name__)
                return await self._attempt(handle, method, args, context, sizes)
        except ReplicaDied:
            if then is not OnReplicaDeath.RETRY_THEN_REFUSE:
                raise
            raise InvalidMedia(
                "Decoding this item failed twice. Convert it to another format.", context.param or None
            ) from None

    async def _attempt(
        self,
        handle: Handle,
        method: str,
        args: tuple[object, ...],
        context: CallContext,
        sizes: Callable[[T], tuple[int, int]] | None,
    ) -> Timed[T]:
        start = context.deadline.ms()
        with (
            ObservedCall(self._traffic, self.name, context.modality) as call,
            tracing.calling(self.name) as trace,
        ):
            response = getattr(handle, method).remote(self._header(context, trace), *args)
            with _guard(response, self.name, context):
                async with asyncio.timeout(context.deadline.left_s()):
                    reply: Reply[T] = await _own_cancellation(response)
            call.timing = Timing.of(start, context.deadline.ms(), reply.service_ms, reply.fetch_ms)
            if sizes:
                call.bytes_in, call.bytes_out = sizes(reply.value)
            return Timed(reply.value, call.timing)

    def _header(self, context: CallContext, trace: Mapping[str, str] | None) -> CallHeader:
        return CallHeader(context.deadline.left_s(), context.param, trace)


class RayTokenizer(RayStage):
    name = "Tokenizer"
    parts = ("Tokenizer",)

    async def encode(self, chat: Chat, affixes: Sequence[Affixes], context: CallContext) -> Timed[Prompt]:
        # The reply has up to one id for each byte.
        by_reference = chat.num_text_bytes > _MESSAGE_BYTES // 8
        return await self._call("encode", chat, affixes, context=context, by_reference=by_reference)

    async def encode_text(self, text: str, add_special_tokens: bool, context: CallContext) -> Timed[Prompt]:
        by_reference = len(text) > _MESSAGE_BYTES // 8
        return await self._call(
            "encode_text", text, add_special_tokens, context=context, by_reference=by_reference
        )

    async def decode(self, token_ids: list[int], context: CallContext) -> Timed[Text]:
        by_reference = len(token_ids) > _MESSAGE_TOKENS
        return await self._call("decode", token_ids, context=context, by_reference=by_reference)


class RayMediaLoader(RayStage):
    name = "MediaLoader"
    parts = ("MediaLoader.fetch", "MediaLoader.decode")

    async def load(self, source: MediaSource, options: MediaOptions, context: CallContext) -> Timed[Media]:
        return await self._call(
            "load", source, options, context=context, sizes=lambda media: (media.num_bytes, media.nbytes)
        )


class RayEmbeddingLoader(RayStage):
    name = "EmbeddingLoader"
    parts = ("EmbeddingLoader",)

    async def load(self, source: EmbeddingSource, context: CallContext) -> Timed[MMFeatures]:
        num_bytes = source.nbytes
        return await self._call(
            "load", source, context=context, sizes=lambda features: (num_bytes, features.nbytes)
        )


class RayMMPreprocessor(RayStage):
    name = "MMPreprocessor"
    parts = ("MMPreprocessor",)

    def __init__(self, handle: Handle, traffic: Traffic, small_images_inline: bool) -> None:
        """`small_images_inline`: see `InputSpec`."""
        super().__init__(handle, traffic)
        self._small_images_inline = small_images_inline

    async def process(
        self, items: list[Media], settings: ProcessorSettings, context: CallContext
    ) -> Timed[list[MMFeatures]]:
        num_bytes = sum(media.nbytes for media in items)
        return await self._call(
            "process",
            items,
            settings,
            context=context,
            sizes=lambda features: (num_bytes, sum(each.nbytes for each in features)),
        )

    async def read(
        self,
        source: MediaSource,
        options: MediaOptions,
        settings: ProcessorSettings,
        uuid: MediaUUID | None,
        context: CallContext,
    ) -> Timed[MMItem]:
        in_message = self._small_images_inline and source.nbytes <= _SMALL_IMAGE_BYTES
        done = await self._read_by(source, options, settings, uuid, in_message, context)
        if done.value.features.payload is not None:
            return done
        # The features are too large for a message. The stage has cached them; this call only brings them.
        again = await self._read_by(source, options, settings, uuid, False, context)
        features = replace(done.value.features, payload=again.value.features.payload)
        return Timed(replace(done.value, features=features), done.timing.then(again.timing))

    async def _read_by(
        self,
        source: MediaSource,
        options: MediaOptions,
        settings: ProcessorSettings,
        uuid: MediaUUID | None,
        in_message: bool,
        context: CallContext,
    ) -> Timed[MMItem]:
        return await self._call(
            "read",
            source,
            options,
            settings,
            uuid,
            in_message,
            context=context,
            by_reference=not in_message,
            sizes=lambda item: (item.media.num_bytes, item.features.nbytes),
        )

    async def recall(
        self, uuid: MediaUUID, settings: ProcessorSettings, context: CallContext
    ) -> Timed[MMItem]:
        return await self._call("recall", uuid, settings, context=context)


class RayModel(RayStage):
    name = "Model"
    parts = ("Model",)

    async def generate(
        self,
        prompt: Prompt,
        features: list[MMFeatures],
        sampling: SamplingParams,
        key: str,
        context: CallContext,
    ) -> AsyncGenerator[Delta]:
        handle = self._handle.options(stream=True, _by_reference=not _fits_message(prompt, features))
        deadline, start = context.deadline, context.deadline.ms()
        with (
            ObservedCall(self._traffic, self.name, context.modality) as call,
            tracing.calling(self.name) as trace,
        ):
            header = self._header(context, trace)
            deltas = handle.generate.remote(header, prompt, features, sampling, key)
            # The deadline must also end a stream that nobody reads.
            late = asyncio.get_running_loop().call_later(deadline.left_s() + _READER_GRACE_S, deltas.cancel)
            try:
                with _guard(deltas, self.name, context):
                    while (delta := await _next_delta(deltas, deadline)) is not None:
                        if call.timing is None:
                            call.timing = Timing(start, delta.queue_ms, 0.0)
                        yield delta
            finally:
                late.cancel()
                if call.timing:
                    service = deadline.ms() - start - call.timing.queue
                    call.timing = replace(call.timing, service=service)

    async def end(self, key: str, index: int) -> None:
        # Not waited for long: the answer ends anyway, at its token limit at the latest.
        with suppress(TimeoutError, DeploymentUnavailableError):
            broadcast = self._handle.broadcast("end", key, index)
            await broadcast.results_async(timeout_s=_BROADCAST_S, return_exceptions=True)


async def connect(handles: Mapping[str, Handle], traffic: Traffic) -> tuple[Stages, list[RayStage]]:
    """Returns the stages behind `handles`, which are named by stage, once each of them can serve.

    The list has the same stages in the order of a request's way.
    """
    specs = dict(zip(handles, await asyncio.gather(*map(_describe, handles.values())), strict=True))
    input_spec: InputSpec = specs["MMPreprocessor"]
    tokenizer = RayTokenizer(handles["Tokenizer"], traffic)
    media_loader = RayMediaLoader(handles["MediaLoader"], traffic)
    embedding_loader = RayEmbeddingLoader(handles["EmbeddingLoader"], traffic)
    mm_preprocessor = RayMMPreprocessor(handles["MMPreprocessor"], traffic, input_spec.small_images_inline)
    model = RayModel(handles["Model"], traffic)
    stages = Stages(
        tokenizer,
        media_loader,
        embedding_loader,
        mm_preprocessor,
        model,
        specs["Tokenizer"],
        input_spec,
        specs["Model"],
    )
    return stages, [tokenizer, media_loader, embedding_loader, mm_preprocessor, model]


async def _describe(handle: Handle) -> Any:
    return await handle.describe.remote()


def _fits_message(prompt: Prompt, features: Sequence[MMFeatures]) -> bool:
    payloads = [each.payload for each in features]
    num_bytes = 8 * len(prompt.token_ids) + sum(each.nbytes for each in features)
    return num_bytes <= _MESSAGE_BYTES and all(payload is None or payload.ref is None for payload in payloads)


async def _next_delta(deltas: Any, deadline: Deadline) -> Delta | None:
    if not deadline.left_s():
        raise TimeoutError
    async with asyncio.timeout(deadline.left_s()):
        delta: Delta | None = await _own_cancellation(anext(deltas, None))
        return delta


async def _own_cancellation(result: Awaitable[T]) -> T:
    """Re-raises Serve's TaskCancelledError as CancelledError if it was our own task that was cancelled."""
    try:
        return await result
    except TaskCancelledError:
        task = asyncio.current_task()
        if task and task.cancelling():
            raise asyncio.CancelledError from None
        raise


@contextmanager
def _guard(response: Any, stage: str, context: CallContext) -> Iterator[None]:
    """Cancels the call if the block fails, and maps foreign errors to ServingErrors with the item's param."""
    try:
        yield
    except BaseException as error:
        response.cancel()
        collect_soon()  # Serve keeps the call and its arguments in a reference cycle
        if isinstance(error, TimeoutError) and context.deadline.left_s() < _TIMER_S:
            ours: BaseException = context.deadline.passed(stage)
        elif isinstance(error, _FOREIGN):
            ours = to_serving_error(error, stage)
        else:
            ours = error
        if isinstance(ours, ServingError):
            ours.param = ours.param or context.param or None
        if ours is error:
            raise
        raise ours from error


# A TimeoutError before the deadline is a stage's own fault.
_FOREIGN = (RayError, BackPressureError, DeploymentUnavailableError, grpc.RpcError, TimeoutError)


def to_serving_error(error: Exception, stage: str) -> ServingError:
    """Maps an error of Ray, Serve or gRPC. By reference, errors arrive wrapped in RayTaskError."""
    cause = error
    while isinstance(cause, RayTaskError) and isinstance(cause.cause, Exception):
        cause = cause.cause
    match cause:
        case ServingError():
            return cause
        case BackPressureError():
            return Overloaded(f"Too many requests are waiting for {stage}. Try again later.")
        case ObjectLostError():
            return ObjectLost(f"{stage} lost an input of the request. Try again.")
        case RayActorError():
            return ReplicaDied(f"A replica of {stage} ended during the request. Try again.")
        case grpc.aio.AioRpcError() if cause.code() == grpc.StatusCode.UNAVAILABLE:
            return ReplicaDied(f"A replica of {stage} ended during the request. Try again.")
        case DeploymentUnavailableError():
            return StageUnavailable(f"No replica of {stage} is available. Try again later.")
        case TaskCancelledError():
            return StageUnavailable(f"{stage} was stopped during the request. Try again.")
        case _:
            logged = isinstance(error, RayTaskError)  # by the stage itself, with the traceback
            logger.error("%s failed", stage, exc_info=None if logged else error)
            return ServingError(f"{stage} failed on this request. The server's log has the reason.")
