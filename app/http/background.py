"""Work that goes on after the request that started it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


class BackgroundWork:
    """Keeps references to tasks until they end: the event loop itself keeps only weak ones."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
