"""Tasks whose start a test can await."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def started(work: Awaitable[T]) -> asyncio.Task[T]:
    """Starts a task, and returns when it is done or has come to its first wait."""
    has_begun = asyncio.Event()

    async def run() -> T:
        has_begun.set()  # wakes the caller only when this task waits
        return await work

    task = asyncio.create_task(run())
    await has_begun.wait()
    return task
