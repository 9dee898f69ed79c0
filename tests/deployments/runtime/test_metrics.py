"""Metrics in this process, and the values that Ray gets of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray.serve import metrics as serve_metrics

from deployments.runtime import metrics
from deployments.runtime.metrics import ALL, Counter, Gauge, Histogram, Publisher


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    """Removes the metrics that a test defines."""
    before = list(ALL)
    yield
    ALL[:] = before


class Published:
    """Replaces Ray's classes, which need a cluster, and records the values that they get."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, float, dict[str, str]]] = []
        published = self

        class Ray:
            def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
                self.name, self.tag_keys = name, tag_keys

            def _record(self, value: float, tags: dict[str, str]) -> None:
                assert tuple(tags) == self.tag_keys
                published.seen.append((self.name, value, tags))

            set = _record

        monkeypatch.setattr(serve_metrics, "Counter", Ray)
        monkeypatch.setattr(serve_metrics, "Gauge", Ray)

    def take(self) -> list[tuple[str, float, dict[str, str]]]:
        seen, self.seen = self.seen, []
        return seen


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Published:
    return Published(monkeypatch)


def test_ray_gets_the_increase_of_a_counter(published: Published) -> None:
    counter = Counter("x", "calls", "", "stage")
    publisher = Publisher([counter])
    counter.add(2, "a")
    publisher.push()
    counter.add(3, "a")
    publisher.push()
    publisher.push()
    assert published.take() == [("headrace_x", 2, {"stage": "a"}), ("headrace_x", 3, {"stage": "a"})]


def test_a_zero_is_published_so_that_the_first_increase_counts(published: Published) -> None:
    counter = Counter("x", "calls", "")
    counter.set_total(0)
    Publisher([counter]).push()
    assert published.take() == [("headrace_x", 0, {})]


def test_a_gauge_is_published_each_time(published: Published) -> None:
    """Ray drops a gauge that is not set again."""
    gauge = Gauge("x", "calls", "")
    publisher = Publisher([gauge])
    gauge.set(5)
    publisher.push()
    gauge.add(-2)
    publisher.push()
    publisher.push()
    assert published.take() == [("headrace_x", 5, {}), ("headrace_x", 3, {}), ("headrace_x", 3, {})]


def test_a_histogram_is_its_exact_sum_and_a_counter_for_each_bucket(published: Published) -> None:
    histogram = Histogram("x", "s", "", "stage")
    publisher = Publisher([histogram])
    histogram.observe(0.02, "a")  # a bound belongs to its bucket
    histogram.observe(0.3, "a", count=2)
    histogram.observe(1000, "a")
    publisher.push()
    total, *buckets = published.take()
    name, seconds, tags = total
    assert (name, tags) == ("headrace_x_sum", {"stage": "a"})
    assert seconds == pytest.approx(1000.62)
    counts = {tags["le"]: value for _, value, tags in buckets}
    assert (counts["0.01"], counts["0.02"], counts["0.2"], counts["0.5"]) == (0, 1, 1, 3)
    assert (counts["120"], counts["+Inf"]) == (3, 4)

    histogram.observe(0.3, "a")
    publisher.push()
    assert {tags.get("le") for _, value, tags in published.take() if value == 1} >= {"0.5", "+Inf"}


def test_outside_of_a_replica_nothing_is_published() -> None:
    metrics.publish(lambda: pytest.fail("nothing may be published"))
