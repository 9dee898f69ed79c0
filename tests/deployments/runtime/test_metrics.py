"""Values in this process, what Ray gets of them, and what is made of the definitions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray.serve import metrics as serve_metrics

from deployments.runtime import metrics
from deployments.runtime.metrics import ALL, Counter, Gauge, Histogram, Publisher


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    """What a test defines is none of the product's."""
    before = list(ALL)
    yield
    ALL[:] = before


class Told:
    """In the place of Ray's classes, which need a cluster."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, float, dict[str, str]]] = []
        told = self

        class Ray:
            def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
                self.name, self.tag_keys = name, tag_keys

            def _record(self, value: float, tags: dict[str, str]) -> None:
                assert tuple(tags) == self.tag_keys
                told.seen.append((self.name, value, tags))

            set = _record

        monkeypatch.setattr(serve_metrics, "Counter", Ray)
        monkeypatch.setattr(serve_metrics, "Gauge", Ray)

    def take(self) -> list[tuple[str, float, dict[str, str]]]:
        seen, self.seen = self.seen, []
        return seen


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


def test_ray_gets_what_a_counter_gained(told: Told) -> None:
    counter = Counter("x", "calls", "", "stage")
    publisher = Publisher([counter])
    counter.add(2, "a")
    publisher.push()
    counter.add(3, "a")
    publisher.push()
    publisher.push()
    assert told.take() == [("headrace_x", 2, {"stage": "a"}), ("headrace_x", 3, {"stage": "a"})]


def test_a_zero_is_told_so_that_the_first_increase_is_seen(told: Told) -> None:
    counter = Counter("x", "calls", "")
    counter.set_total(0)
    Publisher([counter]).push()
    assert told.take() == [("headrace_x", 0, {})]


def test_ray_gets_a_gauge_again_and_again(told: Told) -> None:
    """It forgets what it is not told."""
    gauge = Gauge("x", "calls", "")
    publisher = Publisher([gauge])
    gauge.set(5)
    publisher.push()
    gauge.add(-2)
    publisher.push()
    publisher.push()
    assert told.take() == [("headrace_x", 5, {}), ("headrace_x", 3, {}), ("headrace_x", 3, {})]


def test_a_histogram_is_its_exact_sum_and_a_counter_for_each_bucket(told: Told) -> None:
    histogram = Histogram("x", "s", "", "stage")
    publisher = Publisher([histogram])
    histogram.observe(0.02, "a")  # a bound belongs to its bucket
    histogram.observe(0.3, "a", count=2)
    histogram.observe(1000, "a")
    publisher.push()
    total, *buckets = told.take()
    name, seconds, tags = total
    assert (name, tags) == ("headrace_x_sum", {"stage": "a"})
    assert seconds == pytest.approx(1000.62)
    counts = {tags["le"]: value for _, value, tags in buckets}
    assert (counts["0.01"], counts["0.02"], counts["0.2"], counts["0.5"]) == (0, 1, 1, 3)
    assert (counts["120"], counts["+Inf"]) == (3, 4)
    assert histogram.count() == 4

    histogram.observe(0.3, "a")
    publisher.push()
    assert {tags.get("le") for _, value, tags in told.take() if value == 1} >= {"0.5", "+Inf"}


def test_outside_of_a_replica_nothing_is_published() -> None:
    metrics.publish(lambda: pytest.fail("nobody asked"))
