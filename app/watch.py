"""What the stages are at, and which of them keeps the engine waiting."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from app.observe import INTAKE
from deployments.runtime.metrics import CALLS_OPEN, INTAKE_SECONDS, LOOP_LAG, PREPARING, STARVATION
from deployments.types import Activity

logger = logging.getLogger("ray.serve")

PATIENCE_S = 1.0  # with a stage that is asked
FRESH_S = 0.5  # whoever asks again gets the same answer
_TICK_S = 0.05  # of the event loop, to see how late it is
_PERIOD_S = 1.0
_RECENT = 10  # periods
_STARVED_S = 2.0  # in these
_STEPS = (INTAKE, "tokenize", "fetch", "decode", "embeddings", "preprocess")
_LAG_PERIODS = 15  # a peak is seen whenever it is scraped


class Watch:
    """The stages are asked only while somebody looks, or requests wait. Nobody waits long for
    one that is silent: what it said last holds.

    `stages`: handles to all deployments but the ingress, by name, in the order of a request's path.
    """

    def __init__(self, stages: dict[str, Any]) -> None:
        self._stages = stages
        self._known: dict[str, list[Activity]] = {}
        self._at = -FRESH_S
        self._asking: asyncio.Task[None] | None = None
        self._done: dict[str, int] = {}  # by step, when they were looked at last
        self._rates: dict[str, float] = {}
        self._recent: deque[dict[str, float]] = deque(maxlen=_RECENT)  # starvation in each period, by step
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """From now on starvation and the event loop's lag are measured."""
        for step in _STEPS:
            STARVATION.add(0, step)
        self._tasks = [asyncio.create_task(self._watch_engine()), asyncio.create_task(_watch_loop())]

    @property
    def starved_by(self) -> str | None:
        """The step that the engine waited for most lately, if it was for a good part of the time."""
        starved = self.starvation()
        worst = max(starved, key=lambda step: starved[step], default=None)
        return worst if sum(starved.values()) >= _STARVED_S else None

    async def told(self) -> dict[str, Any]:
        """What GET /stages answers."""
        if time.monotonic() - self._at >= FRESH_S:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._look())
            await asyncio.shield(self._asking)
        steps = [_intake(), *(each for stage in self._stages for each in self._seen(stage))]
        return {
            "stages": [
                {
                    "name": step.name,
                    "queued": step.queued,
                    "in_flight": step.in_flight,
                    "rate_per_s": round(self._rates.get(step.name, 0.0), 2),
                    "cache_hit_rate": _hit_rate(step),
                }
                for step in steps
            ],
            "starved_by": self.starved_by,
            "starvation_s": {step: round(seconds, 2) for step, seconds in self.starvation().items()},
        }

    def starvation(self) -> dict[str, float]:
        """Of the last ten seconds, those in which the engine had room while requests waited in a step."""
        total: dict[str, float] = {}
        for period in self._recent:
            for step, seconds in period.items():
                total[step] = total.get(step, 0.0) + seconds
        return total

    async def _look(self) -> None:
        await asyncio.gather(*map(self._ask, self._stages))
        elapsed, self._at = time.monotonic() - self._at, time.monotonic()
        steps = [_intake(), *(step for stage in self._known.values() for step in stage)]
        before, self._done = self._done, {step.name: step.done for step in steps}
        self._rates = {
            name: max(0, done - before.get(name, done)) / elapsed for name, done in self._done.items()
        }

    async def _ask(self, stage: str) -> list[Activity]:
        """Of all replicas together."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                replicas = await self._stages[stage].broadcast("activity").results_async()
        except (TimeoutError, RayError, RayServeException):
            replicas = []
        if replicas:
            self._known[stage] = [_sum(steps) for steps in zip(*replicas, strict=True)]
        return self._known.get(stage, [])

    def _seen(self, stage: str) -> list[Activity]:
        """Besides what waits in the stage there is what waits for it here."""
        *others, last = self._known.get(stage) or [Activity(stage, 0, 0, 0)]
        at_work = last.in_flight + sum(step.in_flight for step in others)
        return [*others, replace(last, queued=max(last.queued, int(CALLS_OPEN.total(stage)) - at_work))]

    async def _watch_engine(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(_PERIOD_S)
            now = time.monotonic()
            try:
                self._recent.append(await self._starved(now - before))
            except Exception:  # a border: the server works on
                logger.exception("starvation could not be measured")
            before = now

    async def _starved(self, seconds: float) -> dict[str, float]:
        """The seconds that just passed, by what requests wait for, if the engine has room."""
        waiting = {step: count for (step,), count in PREPARING.items() if count}
        if not waiting:
            return {}
        (model,) = await self._ask("Model") or [Activity("model", 0, 0, 0)]
        if not model.room:
            return {}
        if loading := waiting.pop("load", 0):
            fetch, decode = await self._ask("MediaLoader") or [Activity("", 0, 1, 0), Activity("", 0, 0, 0)]
            fetching = fetch.in_flight / max(1, fetch.in_flight + decode.in_flight + decode.queued)
            waiting |= {"fetch": loading * fetching, "decode": loading * (1 - fetching)}
        total = sum(waiting.values())
        shares = {step: seconds * count / total for step, count in waiting.items() if count}
        for step, share in shares.items():
            STARVATION.add(share, step)
        return shares


async def _watch_loop() -> None:
    worst: deque[float] = deque(maxlen=_LAG_PERIODS)
    while True:
        lag, end = 0.0, time.monotonic() + _PERIOD_S
        while (now := time.monotonic()) < end:
            await asyncio.sleep(_TICK_S)
            lag = max(lag, time.monotonic() - now - _TICK_S)
        worst.append(lag)
        LOOP_LAG.set(max(worst))


def _intake() -> Activity:
    return Activity(INTAKE, 0, int(PREPARING.value(INTAKE)), int(INTAKE_SECONDS.count()))


def _hit_rate(step: Activity) -> float | None:
    asked = step.hits + step.misses
    return round(step.hits / asked, 3) if asked else None


def _sum(steps: Iterable[Activity]) -> Activity:
    first, *others = steps
    for step in others:
        first = Activity(
            first.name,
            first.queued + step.queued,
            first.in_flight + step.in_flight,
            first.done + step.done,
            first.hits + step.hits,
            first.misses + step.misses,
            first.room + step.room,
        )
    return first
