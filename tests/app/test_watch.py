"""GET /stages: the activity of all stages, and the stage that keeps the engine waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from app.observe import Traffic
from app.watch import Watch
from deployments.runtime.metrics import STARVATION
from deployments.types import Activity


class WatchedStage:
    """Replicas that answer at once; without replicas it is a stage that does not answer."""

    def __init__(self, name: str, *replicas: list[Activity], parts: Sequence[str] = ()) -> None:
        self.name = name
        self.parts = parts or (name,)
        self.replicas = list(replicas)
        self.asked = 0

    async def activity(self, timeout_s: float) -> list[list[Activity]]:
        assert timeout_s <= 1
        self.asked += 1
        await asyncio.sleep(0)
        return self.replicas


def model(room: int) -> WatchedStage:
    return WatchedStage("Model", [Activity("Model", 0, 1, 0, room=room)])


def loader(fetching: int, decoding: int) -> WatchedStage:
    fetch, decode = "MediaLoader.fetch", "MediaLoader.decode"
    activity = [Activity(fetch, 0, fetching, 0), Activity(decode, decoding, 0, 0)]
    return WatchedStage("MediaLoader", activity, parts=(fetch, decode))


def traffic(**preparing: int) -> Traffic:
    made = Traffic()
    made.preparing.update(preparing)
    return made


async def test_starved_seconds_are_divided_by_the_number_of_waiting_calls() -> None:
    watch = Watch([loader(0, 2), model(room=3)], traffic(MMPreprocessor=3, MediaLoader=1))
    before = STARVATION.value("MMPreprocessor")
    assert await watch.measure_starvation(2.0) == {"MMPreprocessor": 1.5, "MediaLoader.decode": 0.5}
    assert STARVATION.value("MMPreprocessor") == before + 1.5


async def test_waiting_for_the_loader_is_divided_into_fetching_and_decoding() -> None:
    watch = Watch([loader(3, 1), model(room=3)], traffic(MediaLoader=8))
    assert await watch.measure_starvation(1.0) == {"MediaLoader.fetch": 0.75, "MediaLoader.decode": 0.25}


async def test_a_full_engine_does_not_starve() -> None:
    watch = Watch([model(room=0)], traffic(MMPreprocessor=3))
    assert await watch.measure_starvation(1.0) == {}


async def test_the_model_is_not_asked_while_no_request_waits() -> None:
    engine = model(room=3)
    assert await Watch([engine], Traffic()).measure_starvation(1.0) == {}
    assert engine.asked == 0


async def test_replicas_are_summed_and_calls_on_their_way_count_as_queued() -> None:
    calls = Traffic()
    calls.open_calls["MMPreprocessor", "image"] = 7
    stage = WatchedStage("MMPreprocessor", *([Activity("MMPreprocessor", 1, 1, 10, 3, 1)] for _ in range(2)))
    intake, preprocessor = (await Watch([stage], calls).snapshot())["stages"]
    assert intake["name"] == "Ingress"
    assert preprocessor == {
        "name": "MMPreprocessor",
        "queued": 5,
        "in_flight": 2,
        "rate_per_s": 0.0,
        "cache_hit_rate": 0.75,
    }


async def test_a_silent_stage_is_shown_as_it_was_last_seen() -> None:
    stage = model(room=2)
    watch = Watch([stage], Traffic())
    await watch.snapshot()
    stage.replicas = []
    await watch._look()
    assert [(part["name"], part["in_flight"]) for part in (await watch.snapshot())["stages"]] == [
        ("Ingress", 0),
        ("Model", 1),
    ]


async def test_a_stage_that_never_answered_has_all_its_parts_at_zero() -> None:
    silent = WatchedStage("MediaLoader", parts=("MediaLoader.fetch", "MediaLoader.decode"))
    names = [part["name"] for part in (await Watch([silent], Traffic()).snapshot())["stages"]]
    assert names == ["Ingress", "MediaLoader.fetch", "MediaLoader.decode"]


async def test_many_readers_share_one_look() -> None:
    engine = model(room=3)
    watch = Watch([engine], Traffic())
    await asyncio.gather(*(watch.snapshot() for _ in range(10)))
    await watch.snapshot()
    assert engine.asked == 1


async def test_the_stage_that_starved_the_engine_lately_is_named() -> None:
    watch = Watch([], Traffic())
    assert (watch.starved_by, watch.starvation()) == (None, {})
    watch._recent += [{"MediaLoader.fetch": 1.0}, {"MediaLoader.fetch": 0.5, "MediaLoader.decode": 0.5}]
    assert watch.starved_by == "MediaLoader.fetch"
    assert watch.starvation() == {"MediaLoader.fetch": 1.5, "MediaLoader.decode": 0.5}
    watch._recent += [{}] * 10
    assert watch.starved_by is None
