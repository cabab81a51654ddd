"""Whether a server kept up: the number of requests in flight, and those that ended against those that came."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.loadtest.max_rate.queue_growth import Backlog, backlog_of, filling_s


def test_the_server_falls_behind_by_numbers_that_can_tell():
    assert Backlog(0, 0, 0, came=400, ended=379).falls_behind(0.05)
    assert not Backlog(0, 0, 0, came=400, ended=380).falls_behind(0.05)
    assert not Backlog(0, 0, 0, came=399, ended=300).falls_behind(0.05)  # too few: their number swings by more
    starts = np.arange(40.0)
    kept_up = backlog_of(starts, starts + 3)  # settled at 9.75 s
    assert (kept_up.came, kept_up.ended) == (30, 30)
    slow = backlog_of(starts, starts + np.where(starts % 5 == 0, 21, 3))
    assert (slow.came, slow.ended) == (0, 0)  # the number in flight climbs for over half of the run
    behind = backlog_of(starts, np.where(starts < 10, starts + 3, starts * 2))
    assert (behind.came, behind.ended) == (30, 13)  # 7, 8, 9 and those that came at 10 to 19


def queue(rate, n, service_s, servers, seed):
    """Starts and ends of an M/D/c queue, first come first served."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.exponential(1 / rate, n))
    free = np.zeros(servers)
    ends = []
    for t in starts:
        k = int(np.argmin(free))
        free[k] = max(t, free[k]) + service_s
        ends.append(free[k])
    return starts, np.array(ends)


def test_a_backlog_is_the_time_average_of_the_requests_in_flight():
    starts, ends = np.arange(17.0), np.arange(17.0) + 3.0  # 3 in flight at any time from t = 3 on
    backlog = backlog_of(starts, ends)  # settled from t = 4 on, thirds of 4 s
    assert backlog.early == pytest.approx(3) and backlog.late == pytest.approx(3) and backlog.arrivals == 8
    stuck = np.where(starts < 4, starts + 1, np.nan)  # from t = 4 on nothing ends: all that came are in flight
    grown = backlog_of(starts, stuck)
    assert grown.early == pytest.approx(2.5) and grown.late == pytest.approx(10.5) and grown.grows


def test_a_run_that_was_over_before_the_first_answers_tells_nothing_of_a_backlog():
    starts = np.arange(40.0)
    assert filling_s(starts, starts + 7) == 7
    assert backlog_of(starts, starts + 19) is not None and not backlog_of(starts, starts + 19).grows
    assert backlog_of(starts, starts + 21) is None  # it fills up to 21 in flight, all through the run
    assert backlog_of([1.0] * 20, [2.0] * 20) is None and backlog_of([1, 2, 3], [2, 3, 4]) is None


@pytest.mark.parametrize("servers", [1, 8])
def test_a_growing_backlog_is_told_from_a_queue_that_keeps_up(servers):
    capacity = servers / 0.1
    grows = {
        load: sum(backlog_of(*queue(load * capacity, 300, 0.1, servers, seed)).grows for seed in range(40))
        for load in (0.5, 0.8, 1.25, 2.0)
    }
    assert grows[0.5] == 0 and grows[0.8] <= 1
    assert grows[1.25] >= 34 and grows[2.0] == 40


def test_growth_must_be_beyond_chance_and_a_share_of_what_came():
    assert Backlog(100, 140, 200).grows
    assert not Backlog(5, 8, 20).grows  # 15 % of the arrivals, and well within what 5 in flight swing by
    assert not Backlog(400, 470, 4000).grows  # beyond chance, and under 2 % of the arrivals: all but kept up
