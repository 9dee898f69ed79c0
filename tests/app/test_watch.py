"""Who is at what, and who keeps the engine waiting. Stages answer here as replicas do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from app.watch import Watch
from deployments.runtime.metrics import CALLS_OPEN, PREPARING, STARVATION
from deployments.types import Activity

STEPS = ("intake", "tokenize", "load", "embeddings", "preprocess")


class Handle:
    """Replicas that answer at once, or never."""

    def __init__(self, *replicas: list[Activity] | None) -> None:
        self.replicas = replicas
        self.asked = 0

    def broadcast(self, method: str) -> Any:
        assert method == "activity"
        return self

    async def results_async(self) -> list[list[Activity]]:
        self.asked += 1
        if None in self.replicas:
            await asyncio.Event().wait()
        return [each for each in self.replicas if each is not None]


def model(room: int) -> Handle:
    return Handle([Activity("model", 0, 1, 0, room=room)])


def loader(fetching: int, decoding: int) -> Handle:
    return Handle([Activity("fetch", 0, fetching, 0), Activity("decode", decoding, 0, 0)])


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    yield
    for step in STEPS:
        PREPARING.set(0, step)


async def test_seconds_go_to_what_is_waited_for_by_share() -> None:
    watch = Watch({"MediaLoader": loader(0, 2), "Model": model(room=3)})
    PREPARING.set(3, "preprocess")
    PREPARING.set(1, "load")
    before = STARVATION.value("preprocess")
    assert await watch._starved(2.0) == {"preprocess": 1.5, "decode": 0.5}
    assert STARVATION.value("preprocess") == before + 1.5


async def test_loading_is_fetching_or_decoding_as_the_loader_says() -> None:
    watch = Watch({"MediaLoader": loader(3, 1), "Model": model(room=3)})
    PREPARING.set(8, "load")
    assert await watch._starved(1.0) == {"fetch": 0.75, "decode": 0.25}


async def test_a_full_engine_does_not_starve() -> None:
    watch = Watch({"Model": model(room=0)})
    PREPARING.set(3, "preprocess")
    assert await watch._starved(1.0) == {}


async def test_nobody_is_asked_when_nobody_waits() -> None:
    engine = model(room=3)
    assert await Watch({"Model": engine})._starved(1.0) == {}
    assert engine.asked == 0


async def test_replicas_count_together_and_who_waits_for_them_here_waits_too() -> None:
    CALLS_OPEN.set(7, "MMPreprocessor", "image")
    try:
        stage = Handle(*([Activity("preprocess", 1, 1, 10, 3, 1)] for _ in range(2)))
        told = (await Watch({"MMPreprocessor": stage}).told())["stages"]
    finally:
        CALLS_OPEN.set(0, "MMPreprocessor", "image")
    intake, preprocess = told
    assert intake["name"] == "intake"
    assert preprocess == {
        "name": "preprocess",
        "queued": 5,
        "in_flight": 2,
        "rate_per_s": 0.0,
        "cache_hit_rate": 0.75,
    }


async def test_a_silent_stage_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.watch.PATIENCE_S", 0.01)
    told = await Watch({"Model": Handle(None)}).told()
    assert [step["name"] for step in told["stages"]] == ["intake", "Model"]


async def test_many_who_ask_are_one_question() -> None:
    engine = model(room=3)
    watch = Watch({"Model": engine})
    await asyncio.gather(*(watch.told() for _ in range(10)))
    await watch.told()
    assert engine.asked == 1


async def test_what_starved_lately_is_named() -> None:
    watch = Watch({})
    assert (watch.starved_by, watch.starvation()) == (None, {})
    watch._recent += [{"fetch": 1.0}, {"fetch": 0.5, "decode": 0.5}]
    assert (watch.starved_by, watch.starvation()) == ("fetch", {"fetch": 1.5, "decode": 0.5})
    watch._recent += [{}] * 10
    assert watch.starved_by is None
