from __future__ import annotations

import asyncio
import gc
import platform
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from deployments.runtime.memory import clear_frames, collect_soon, release_on_error
from deployments.types import MediaSource, Modality, Payload


class Large:
    """Stands for what is worth letting go of."""


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """But for those that are asked for: an idle process has none."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def fail(made: list[weakref.ref[Large]]) -> None:
    large = Large()
    made.append(weakref.ref(large))
    raise ValueError


async def test_a_kept_error_keeps_no_variables() -> None:
    made: list[weakref.ref[Large]] = []
    source = MediaSource(Modality.IMAGE, "data", payloads=[Payload(1, inline=b"x")])
    error = None
    try:
        with release_on_error(source, "not releasable"):
            fail(made)
    except ValueError as caught:
        error = caught
    assert error is not None
    assert made[0]() is None
    assert source.payloads == []


def test_the_causes_of_a_kept_error_keep_no_variables() -> None:
    made: list[weakref.ref[Large]] = []
    error = None
    try:
        try:
            fail(made)
        except ValueError:
            raise KeyError from None
    except KeyError as caught:
        error = caught
    clear_frames(error)
    assert made[0]() is None


async def test_cycles_are_collected_when_the_frames_above_had_time_to_end() -> None:
    large = Large()
    large.itself = large  # type: ignore[attr-defined]
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    weakref.finalize(large, loop.call_soon_threadsafe, gone.set)
    del large
    start = loop.time()
    collect_soon()
    async with asyncio.timeout(10):
        await gone.wait()
    assert loop.time() - start >= 1


_FAULTS = """
import resource
from deployments.runtime.memory import reuse_memory

reuse_memory()
for repeat in range(12):
    chunks = [bytes(256 * 1024) for _ in range(64)]
    del chunks
    if repeat == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have settings of their own")
def test_freed_memory_is_used_again_without_a_new_mapping() -> None:
    done = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10 * 64  # of 40960 pages
