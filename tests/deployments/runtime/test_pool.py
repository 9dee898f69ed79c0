import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Iterator

import pytest
from ray.serve.context import _RequestContext, _serve_request_context

from deployments.runtime.call_record import begin_call
from deployments.runtime.pool import WorkPool


@pytest.fixture
def pool() -> Iterator[WorkPool]:
    pool = WorkPool(1)
    yield pool
    pool.shutdown()


def start(pool: WorkPool, request_id: str, work: object, *args: object) -> asyncio.Task[object]:
    _serve_request_context.set(_RequestContext(request_id=request_id))
    return asyncio.create_task(pool.run(work, *args))  # type: ignore[arg-type]


async def test_the_time_of_each_job_is_added_to_the_call(pool: WorkPool) -> None:
    record = begin_call("")
    assert await pool.run(pow, 2, 5) == 32
    assert 0 < record.service_ms < 1000
    before = record.service_ms
    assert await pool.run(pow, 3, 2) == 9
    assert record.service_ms > before


async def test_an_error_of_the_work_is_raised_by_await(pool: WorkPool) -> None:
    with pytest.raises(ZeroDivisionError):
        await pool.run(divmod, 1, 0)
    assert await pool.run(abs, -1) == 1  # the thread lives


async def test_only_the_pools_threads_step_back(pool: WorkPool) -> None:
    here = os.getpriority(os.PRIO_PROCESS, 0)
    inside = await pool.run(os.getpriority, os.PRIO_PROCESS, 0)
    assert inside == 19
    assert os.getpriority(os.PRIO_PROCESS, 0) == here


async def test_requests_take_turns(pool: WorkPool) -> None:
    """One item of a request with many items runs, then one of each waiting request."""
    order: list[str] = []
    gate, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        gate.wait()

    first = start(pool, "many", hold)
    await asyncio.to_thread(begun.wait)
    many = [start(pool, "many", order.append, f"many {i}") for i in range(4)]
    await asyncio.sleep(0)  # one turn of the loop: all of them are queued first
    single = [start(pool, name, order.append, name) for name in ("single", "another")]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, *many, *single)
    assert order == ["many 0", "single", "another", "many 1", "many 2", "many 3"]


async def test_queued_work_can_be_cancelled(pool: WorkPool) -> None:
    ran: list[int] = []
    gate, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        gate.wait()

    running = start(pool, "a", hold)
    waiting, last = (start(pool, "a", ran.append, i) for i in (1, 2))
    await asyncio.to_thread(begun.wait)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    await asyncio.gather(running, last)
    assert ran == [2]


async def test_a_shutdown_cancels_queued_work(pool: WorkPool) -> None:
    gate, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        gate.wait()

    running, waiting = start(pool, "a", hold), start(pool, "a", abs, 1)
    await asyncio.to_thread(begun.wait)
    pool.shutdown()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    await running


class Large:
    """Stands for an object that must be released."""


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Switches the garbage collector off, as it rarely runs in an idle process."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
async def test_work_that_fails_after_its_cancellation_keeps_nothing(pool: WorkPool) -> None:
    gate, begun = threading.Event(), threading.Event()

    def fail(large: Large) -> None:
        begun.set()
        gate.wait()
        raise ValueError

    large = Large()
    left = weakref.ref(large)
    task = start(pool, "a", fail, large)
    del large
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    gate.set()
    await pool.run(abs, 1)  # after it
    await asyncio.sleep(0)
    assert left() is None


@pytest.mark.usefixtures("no_collections")
async def test_an_error_keeps_no_variables_of_the_work(pool: WorkPool) -> None:
    made: list[weakref.ref[Large]] = []

    def fail() -> None:
        large = Large()
        made.append(weakref.ref(large))
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        await pool.run(fail)
    assert made[0]() is None
