"""What a failed request had in hand is freed soon, although its error is kept.

An error keeps the frames that it came through, with all their variables. Serve keeps errors in cycles, and
its own frames have the arguments of the call, with their references to the object store. Only a garbage
collection frees cycles, and an idle process has none. So our own frames are cleared at once, and a collection
comes soon.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

_AT_HAND = 64 * 1024 * 1024
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

_due: tuple[asyncio.AbstractEventLoop, float] | None = None  # the next collection


@contextmanager
def release_on_error(*held: list[Any] | dict[str, Any]) -> Iterator[None]:
    """What is in `held` and in the frames below is freed at once if they fail or are cancelled."""
    try:
        yield
    except BaseException as error:
        for each in held:
            each.clear()
        clear_frames(error)
        collect_soon()
        raise


def clear_frames(error: BaseException | None) -> None:
    """Of the error and of those that it came from."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def collect_soon() -> None:
    """In one to two seconds, when Serve's frames have ended; at most once a second."""
    global _due
    loop = asyncio.get_running_loop()
    at = math.floor(loop.time()) + 2.0
    if _due != (loop, at):
        _due = loop, at
        loop.call_at(at, _collect_now, loop, at)


def reuse_memory() -> None:
    """Freed memory stays at hand up to _AT_HAND bytes, until a collection finds the process quiet.

    By default glibc returns what was freed of a body's last chunks at once, and the next chunks have to be
    mapped again, page by page: a third of what the system does to receive a large body.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_TRIM_THRESHOLD, _AT_HAND)
        mallopt(_M_MMAP_THRESHOLD, _AT_HAND // 2)


def freeze_start_up() -> None:
    """What a replica's start left behind lives as long as the replica: no collection need walk it again."""
    if ray.is_initialized():
        gc.collect()
        gc.freeze()


def _collect_now(loop: asyncio.AbstractEventLoop, at: float) -> None:
    is_quiet = _due == (loop, at)  # else requests keep coming, which use what the allocator keeps
    loop.run_in_executor(None, _collect, is_quiet)


def _collect(give_back: bool) -> None:
    gc.collect()
    # What the allocator keeps goes back to the system.
    if give_back and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):  # glibc's
        trim(0)
