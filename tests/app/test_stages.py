"""Times of calls, as the seam defines them."""

from app.stages import Timing, without_gaps


def test_times_of_a_call_add_up() -> None:
    assert Timing.of(2.0, 12.0, 4.0) == Timing(start=2.0, queue=6.0, service=4.0)
    assert Timing.of(2.0, 12.0, 4.0, 5.0) == Timing(start=2.0, queue=1.0, service=4.0, fetch=5.0)
    assert Timing.of(2.0, 12.0, 4.0, 5.0).end == 12.0


def test_reported_times_never_exceed_the_call() -> None:
    assert Timing.of(0.0, 3.0, 4.0, 50.0) == Timing(start=0.0, queue=0.0, service=3.0)
    assert Timing.of(0.0, 10.0, 4.0, 50.0) == Timing(start=0.0, queue=0.0, service=4.0, fetch=6.0)


def test_time_between_calls_is_queue_time_of_the_next() -> None:
    load, preprocess = Timing(5.0, 1.0, 2.0, 3.0), Timing(12.0, 1.0, 4.0)
    assert without_gaps(2.0, [load, preprocess]) == [Timing(2.0, 4.0, 2.0, 3.0), Timing(11.0, 2.0, 4.0)]


def test_two_calls_for_one_thing_are_joined() -> None:
    first, second = Timing(start=5.0, queue=1.0, service=6.0), Timing(start=14.0, queue=3.0, service=1.0)
    assert first.then(second) == Timing(start=5.0, queue=6.0, service=7.0)
    assert first.then(second).end == second.end
