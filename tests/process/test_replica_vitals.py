"""Who hangs, and how long to wait before the next start: decided on explicit times."""

from __future__ import annotations

import pytest

from weightcast.engines.embedded.messages import BEATS
from weightcast.engines.embedded.replica.backoff import Backoff
from weightcast.engines.embedded.replica.vitals import PATIENCE, STARTING_PERIODS, TICKS, Attention, Vitals


def serving(ranks: int = 1) -> Vitals:
    vitals = Vitals(ranks, still_s=2.0)
    for rank in range(ranks):
        vitals.ready(rank, 0.0)
    return vitals


def test_a_rank_that_beats_and_moves_or_idles_lives():
    vitals = serving()
    for quarter in range(100):
        now = quarter / 2
        vitals.beat(0, progress=quarter // 4, busy=quarter % 8 < 4, now=now)
        assert vitals.hanging(now) == {}


def test_silence_longer_than_a_period_is_a_hang():
    vitals = serving(3)
    vitals.beat(1, progress=1, busy=True, now=1.0)
    assert vitals.hanging(2.0) == {}
    assert vitals.hanging(2.1).keys() == {0, 2}
    assert vitals.hanging(3.1) == {rank: f"no heartbeat for {said} s" for rank, said in ((0, "3.1"), (1, "2.1"), (2, "3.1"))}


def test_being_busy_without_progress_for_a_period_is_a_hang_though_the_heart_beats():
    vitals = serving()
    for now in (1.0, 1.5, 2.0, 2.5, 3.0):
        vitals.beat(0, progress=7, busy=True, now=now)
        assert vitals.hanging(now) == {}
    assert vitals.hanging(3.1) == {0: "busy without progress for 2.1 s (stands at 7)"}


@pytest.mark.parametrize(("progress", "busy"), [(8, True), (7, False), (6, True)])
def test_any_change_while_busy_is_a_sign_of_life(progress, busy):
    vitals = serving()
    vitals.beat(0, progress=7, busy=True, now=1.0)
    vitals.beat(0, progress=progress, busy=busy, now=2.9)
    assert vitals.hanging(4.8) == {}
    assert vitals.hanging(5.0).keys() == {0}


def test_becoming_busy_starts_the_period_anew():
    vitals = serving()
    vitals.beat(0, progress=7, busy=False, now=1.0)
    vitals.beat(0, progress=7, busy=True, now=1.5)
    vitals.beat(0, progress=7, busy=True, now=3.4)
    assert vitals.hanging(3.5) == {}
    assert vitals.hanging(3.6).keys() == {0}


def test_a_rank_that_starts_has_more_time_and_none_is_counted_before_its_first_heartbeat():
    vitals = Vitals(2, still_s=2.0)
    assert vitals.hanging(1000.0) == {}
    vitals.beat(0, progress=0, busy=True, now=1000.0)
    vitals.beat(0, progress=0, busy=True, now=1005.0)
    assert vitals.hanging(1005.0 + STARTING_PERIODS * 2.0) == {}
    assert vitals.hanging(1005.1 + STARTING_PERIODS * 2.0) == {0: "no heartbeat for 10.1 s while starting"}
    vitals.ready(0, 1006.0)
    assert vitals.hanging(1008.1) == {0: "no heartbeat for 2.1 s"}


def test_time_in_which_nobody_looked_does_not_count():
    attention = Attention(100.0, heartbeat_s=4.0)
    assert attention.at(100.2) == pytest.approx(0.2)
    assert attention.at(100.6) == pytest.approx(0.6)
    assert attention.missed_s == 0
    assert attention.at(3700.6) == pytest.approx(1.1)
    assert attention.missed_s == pytest.approx(3599.5)
    assert attention.at(3700.5) == pytest.approx(1.1)  # clocks that go back change nothing
    assert attention.at(3700.7) == pytest.approx(1.2)


def test_after_a_stall_of_the_front_end_a_rank_still_has_what_it_had_left():
    vitals, attention = Vitals(1, still_s=2.0), Attention(0.0, heartbeat_s=2.0)
    vitals.ready(0, attention.at(0.0))
    assert vitals.hanging(attention.at(0.1)) == {}
    assert vitals.hanging(attention.at(60.0)) == {}
    for tick in range(13):
        assert vitals.hanging(attention.at(60.0 + tick / 8)) == {}
    for tick in range(13, 17):
        attention.at(60.0 + tick / 8)
    assert vitals.hanging(attention.at(62.0)).keys() == {0}


def test_delays_double_up_to_the_longest_and_begin_anew_after_health():
    backoff = Backoff()
    assert [backoff.next_s() for _ in range(9)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    backoff.was_healthy(59.9)
    assert backoff.next_s() == 30.0
    backoff.was_healthy(60.0)
    assert [backoff.next_s(), backoff.next_s()] == [0.0, 0.5]
    for _ in range(2000):
        backoff.next_s()
    assert backoff.next_s() == 30.0


def test_a_hang_is_noticed_within_one_heartbeat_period():
    """A rank stands still right after a beat that told of progress; the next beat, then patience, then the next look."""
    assert 1 / BEATS + PATIENCE + 1 / TICKS < 1
