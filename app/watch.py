"""Shows what the stages are doing, and which of them keeps the engine waiting: GET /stages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol, TypedDict

from app.observe import INGRESS, Traffic
from deployments.runtime.metrics import LOOP_LAG, STARVATION
from deployments.types import Activity

logger = logging.getLogger("ray.serve")

PATIENCE_S = 1.0  # a stage that does not answer in time is shown as it was last seen
FRESH_S = 0.5  # age up to which an answer is given again
_TICK_S = 0.05  # timer with which the event loop's lag is measured
_PERIOD_S = 1.0
_RECENT = 10  # periods that `starvation` covers
_STARVED_S = 2.0  # of these, from which on `starved_by` names a stage
_LAG_PERIODS = 15  # a peak stays visible for a scraper


class WatchedStage(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def parts(self) -> Sequence[str]:
        """Names of its activities: the stage's own name, or several."""
        ...

    async def activity(self, timeout_s: float) -> list[list[Activity]]:
        """Returns the snapshots of all replicas; nothing if one of them does not answer in time."""
        ...


class StageSnapshot(TypedDict):
    name: str
    queued: int
    in_flight: int
    rate_per_s: float
    cache_hit_rate: float | None


class Snapshot(TypedDict):
    """The answer of GET /stages."""

    stages: list[StageSnapshot]
    starved_by: str | None
    starvation_s: dict[str, float]


class Watch:
    """Asks the stages for their activity, but only while /stages is read or requests wait.

    A slow stage delays nothing for long: its last known activity is used instead.
    """

    def __init__(self, stages: Sequence[WatchedStage], traffic: Traffic) -> None:
        """`stages`: in the order of a request's way; the last one is the model."""
        self._stages = {stage.name: stage for stage in stages}
        self._traffic = traffic
        self._known: dict[str, list[Activity]] = {}
        self._looked_at = -FRESH_S
        self._looking: asyncio.Task[None] | None = None
        self._done: dict[str, int] = {}  # by part of a stage, at the last look
        self._rates: dict[str, float] = {}
        self._recent: deque[dict[str, float]] = deque(maxlen=_RECENT)  # starvation of each period
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Starts to measure starvation and the event loop's lag."""
        for part in self._parts():
            STARVATION.add(0, part.name)  # without a first 0 Prometheus would miss the first increase
        self._tasks = [asyncio.create_task(self._watch_engine()), asyncio.create_task(_watch_loop())]

    async def snapshot(self) -> Snapshot:
        if time.monotonic() - self._looked_at >= FRESH_S:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look())
            await asyncio.shield(self._looking)
        starvation = self.starvation()
        return {
            "stages": [self._shown(part) for part in self._parts()],
            "starved_by": self.starved_by,
            "starvation_s": {name: round(seconds, 2) for name, seconds in starvation.items()},
        }

    @property
    def starved_by(self) -> str | None:
        """The stage that the engine waited for most lately, if it waited for a good part of the time."""
        starvation = self.starvation()
        worst = max(starvation, key=lambda name: starvation[name], default=None)
        return worst if sum(starvation.values()) >= _STARVED_S else None

    def starvation(self) -> dict[str, float]:
        """Seconds of the last ten in which the engine had room while requests waited, by stage."""
        total: dict[str, float] = {}
        for period in self._recent:
            for name, seconds in period.items():
                total[name] = total.get(name, 0.0) + seconds
        return total

    def _parts(self) -> list[Activity]:
        """The intake and all parts of all stages. A stage's queue includes the calls on their way to it."""
        traffic = self._traffic
        parts = [Activity(INGRESS, 0, traffic.preparing[INGRESS], traffic.bodies_read)]
        for name, stage in self._stages.items():
            *others, last = self._known.get(name) or [Activity(part, 0, 0, 0) for part in stage.parts]
            at_work = last.in_flight + sum(part.in_flight for part in others)
            queued = max(last.queued, traffic.calls_to(name) - at_work)
            parts += [*others, replace(last, queued=queued)]
        return parts

    def _shown(self, part: Activity) -> StageSnapshot:
        looked_up = part.hits + part.misses
        return {
            "name": part.name,
            "queued": part.queued,
            "in_flight": part.in_flight,
            "rate_per_s": round(self._rates.get(part.name, 0.0), 2),
            "cache_hit_rate": round(part.hits / looked_up, 3) if looked_up else None,
        }

    async def _look(self) -> None:
        await asyncio.gather(*map(self._ask, self._stages))
        elapsed, self._looked_at = time.monotonic() - self._looked_at, time.monotonic()
        before, self._done = self._done, {part.name: part.done for part in self._parts()}
        self._rates = {
            name: max(0, done - before.get(name, done)) / elapsed for name, done in self._done.items()
        }

    async def _ask(self, name: str) -> list[Activity]:
        """Returns the parts of a stage, summed over its replicas; the last known ones if it is silent."""
        replicas = await self._stages[name].activity(PATIENCE_S)
        if replicas:
            self._known[name] = [_sum(parts) for parts in zip(*replicas, strict=True)]
        return self._known.get(name, [])

    async def _watch_engine(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(_PERIOD_S)
            now = time.monotonic()
            try:
                self._recent.append(await self.measure_starvation(now - before))
            except Exception:  # the server works on without this figure
                logger.exception("starvation could not be measured")
            before = now

    async def measure_starvation(self, seconds: float) -> dict[str, float]:
        """Divides the last `seconds` among the stages that requests wait for, if the engine has room."""
        waiting: dict[str, float] = {name: count for name, count in self._traffic.preparing.items() if count}
        if not waiting:
            return {}
        *_, model_name = self._stages
        model = await self._ask(model_name)
        if not model or not model[-1].room:
            return {}
        shares: dict[str, float] = {}
        for name, count in waiting.items():
            parts = await self._ask(name) if name in self._stages else []
            for part, share in _split(name, parts).items():
                shares[part] = seconds * share * count / sum(waiting.values())
        for part, share in shares.items():
            STARVATION.add(share, part)
        return shares


def _split(name: str, parts: Sequence[Activity]) -> dict[str, float]:
    """Divides what waits in a stage among its parts, by their items: MediaLoader fetches and decodes."""
    if len(parts) <= 1:
        return {name: 1.0}
    items = {part.name: part.queued + part.in_flight for part in parts}
    total = sum(items.values())
    if not total:
        return {parts[-1].name: 1.0}
    return {part: count / total for part, count in items.items() if count}


async def _watch_loop() -> None:
    worst: deque[float] = deque(maxlen=_LAG_PERIODS)
    while True:
        lag, end = 0.0, time.monotonic() + _PERIOD_S
        while (now := time.monotonic()) < end:
            await asyncio.sleep(_TICK_S)
            lag = max(lag, time.monotonic() - now - _TICK_S)
        worst.append(lag)
        LOOP_LAG.set(max(worst))


def _sum(replicas: Iterable[Activity]) -> Activity:
    first, *others = replicas
    for other in others:
        first = Activity(
            first.name,
            first.queued + other.queued,
            first.in_flight + other.in_flight,
            first.done + other.done,
            first.hits + other.hits,
            first.misses + other.misses,
            first.room + other.room,
        )
    return first
