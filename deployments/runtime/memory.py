"""Frees the buffers of a failed request soon, although its error is kept.

An error keeps the frames that it passed, with all their variables. Serve keeps errors in reference cycles,
and its own frames hold the arguments of the call, with their references to the object store. Only a garbage
collection frees cycles, and an idle process runs none. So our own frames are cleared at once, and a
collection follows soon.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import ray

_KEPT_BYTES = 64 * 1024 * 1024
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

_due: tuple[asyncio.AbstractEventLoop, float] | None = None  # the next collection


@runtime_checkable
class Releasable(Protocol):
    """An argument whose buffers can be dropped while the argument itself is still referenced."""

    def release(self) -> None: ...


@contextmanager
def release_on_error(*arguments: object) -> Iterator[None]:
    """Frees the buffers of `arguments` and the variables of all frames below if the block fails or is
    cancelled.
    """
    try:
        yield
    except BaseException as error:
        for argument in arguments:
            if isinstance(argument, Releasable):
                argument.release()
        clear_frames(error)
        collect_soon()
        raise


def clear_frames(error: BaseException | None) -> None:
    """Clears the frames of the error and of its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def collect_soon() -> None:
    """Schedules a collection in one to two seconds, when Serve's frames have ended; at most one a second."""
    global _due
    loop = asyncio.get_running_loop()
    at = math.floor(loop.time()) + 2.0
    if _due != (loop, at):
        _due = loop, at
        loop.call_at(at, _collect_now, loop, at)


def reuse_memory() -> None:
    """Makes glibc keep up to _KEPT_BYTES of freed memory, until a collection finds the process quiet.

    By default glibc returns the memory of a body's last chunks at once, and the next chunks have to be mapped
    again, page by page: a third of the system time of receiving a large body.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES // 2)


def freeze_start_up() -> None:
    """Exempts the objects of a replica's start from garbage collection: they live as long as the replica."""
    if ray.is_initialized():
        gc.collect()
        gc.freeze()


def _collect_now(loop: asyncio.AbstractEventLoop, at: float) -> None:
    is_quiet = _due == (loop, at)  # else more requests failed since then, and new ones will reuse the memory
    loop.run_in_executor(None, _collect, is_quiet)


def _collect(give_back: bool) -> None:
    gc.collect()
    # Returns the memory that the allocator keeps to the system.
    if give_back and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):  # glibc's
        trim(0)
