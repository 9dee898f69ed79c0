"""Fan-out: order, failure, cancellation. Calls go to real deployments in Serve's local mode."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from ray import serve
from ray.exceptions import ActorDiedError, OwnerDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError

from app.calls import (
    Deadline,
    ObjectLost,
    ReplicaDied,
    Timing,
    _mapped,
    gather_or_cancel,
    retry_once,
    stream,
    without_gaps,
)
from deployments.errors import InvalidMedia, Overloaded, ServingError, StageTimeout
from deployments.types import Delta


async def test_results_keep_the_order_of_the_arguments() -> None:
    gates = [asyncio.Event() for _ in range(4)]

    async def item(i: int) -> int:
        await gates[i].wait()
        if i:
            gates[i - 1].set()  # the last finishes first
        return i

    gates[3].set()
    assert await gather_or_cancel(item(i) for i in range(4)) == [0, 1, 2, 3]


async def test_a_failure_cancels_the_siblings_and_waits_for_them() -> None:
    log, started = [], asyncio.Event()

    async def slow() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # settling takes a moment, and is waited for
            log.append("settled")

    async def fails() -> None:
        await started.wait()
        raise InvalidMedia("broken")

    with pytest.raises(InvalidMedia, match="broken"):
        await gather_or_cancel([slow(), fails()])
    assert log == ["settled"]


async def test_the_earliest_failure_by_input_order_is_raised() -> None:
    second_failed = asyncio.Event()

    async def first() -> None:
        try:
            await second_failed.wait()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise InvalidMedia("first") from None  # a failure that only shows when it is settled

    async def second() -> None:
        second_failed.set()
        raise InvalidMedia("second")

    with pytest.raises(InvalidMedia, match="first"):
        await gather_or_cancel([first(), second()])


async def test_cancelling_the_fan_out_cancels_all_and_stays_a_cancellation() -> None:
    cancelled, started = [], asyncio.Barrier(4)

    async def item(i: int) -> None:
        try:
            await started.wait()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(i)
            raise

    task = asyncio.create_task(gather_or_cancel(item(i) for i in range(3)))  # type: ignore[arg-type]
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(cancelled) == [0, 1, 2]


async def test_one_retry_and_no_more() -> None:
    attempts = []

    async def dies() -> None:
        attempts.append(1)
        raise ReplicaDied("gone")

    with pytest.raises(ReplicaDied):
        await retry_once(dies, on=ReplicaDied)
    assert len(attempts) == 2


async def test_other_errors_are_not_retried() -> None:
    attempts = []

    async def fails() -> None:
        attempts.append(1)
        raise InvalidMedia("broken")

    with pytest.raises(InvalidMedia):
        await retry_once(fails, on=ReplicaDied)
    assert len(attempts) == 1


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
        (wrapped(KeyError("secret")), ServingError, "MediaLoader failed on this request"),
    ],
)
def test_foreign_errors_become_our_own(error: Exception, expected: type[Exception], words: str) -> None:
    mapped = _mapped(error, "MediaLoader")
    assert type(mapped) is expected
    assert words in str(mapped)


def test_times_of_a_call_add_up() -> None:
    assert Timing.of(2.0, 12.0, 4.0) == Timing(start=2.0, queue=6.0, service=4.0)
    assert Timing.of(2.0, 12.0, 4.0, 5.0) == Timing(start=2.0, queue=1.0, service=4.0, fetch=5.0)
    assert Timing.of(2.0, 12.0, 4.0, 5.0).end == 12.0


def test_who_joins_work_under_way_waits_for_the_rest_of_it() -> None:
    assert Timing.of(0.0, 3.0, 4.0, 50.0) == Timing(start=0.0, queue=0.0, service=3.0)
    assert Timing.of(0.0, 10.0, 4.0, 50.0) == Timing(start=0.0, queue=0.0, service=4.0, fetch=6.0)


def test_what_passes_between_calls_is_waiting_for_the_next() -> None:
    load, preprocess = Timing(5.0, 1.0, 2.0, 3.0), Timing(12.0, 1.0, 4.0)
    assert without_gaps(2.0, [load, preprocess]) == [Timing(2.0, 4.0, 2.0, 3.0), Timing(11.0, 2.0, 4.0)]


def test_one_call_that_did_two_things_is_told_as_two() -> None:
    first, second = Timing(start=5.0, queue=1.0, service=6.0).split(2.0)
    assert (first, second) == (Timing(5.0, 1.0, 2.0), Timing(8.0, 0.0, 4.0))
    joined, nothing = Timing(start=5.0, queue=1.0, service=6.0).split(20.0)  # another's work, its end
    assert (joined, nothing) == (Timing(5.0, 1.0, 6.0), Timing(12.0, 0.0, 0.0))


class Stage:
    async def count(self, n: int) -> AsyncIterator[Delta]:
        for i in range(n):
            yield Delta([i])
        await asyncio.Event().wait()


@pytest.fixture
def stage() -> object:
    deployment = serve.deployment(Stage)
    return serve.run(deployment.bind(), _local_testing_mode=True)


async def test_a_stream_past_its_deadline_says_which_stage_it_was_in(stage) -> None:  # type: ignore[no-untyped-def]
    counts = stream(stage.options(stream=True).count, 2, stage="Model", deadline=Deadline(0.2))
    assert [await anext(counts), await anext(counts)] == [Delta([0]), Delta([1])]
    with pytest.raises(StageTimeout, match=r"still in Model when its 0\.2 s were over"):
        await anext(counts)


class Responses:
    """Of a call whose stage has more to say than anybody reads."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    def remote(self) -> "Responses":
        return self

    async def __anext__(self) -> Delta:
        return Delta([1])

    def cancel(self) -> None:
        self.cancelled.set()


async def test_the_deadline_ends_a_stream_that_nobody_reads() -> None:
    responses = Responses()
    deltas = stream(responses, stage="Model", deadline=Deadline(0.2))
    assert await anext(deltas) == Delta([1])
    async with asyncio.timeout(20):
        await responses.cancelled.wait()
    with pytest.raises(StageTimeout, match="still in Model"):
        await anext(deltas)
