"""When a load was steady: hand-made schedules, plain counting, and queues whose behaviour is known."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.metrics.steady_window import LEAST_ARRIVALS, at_target, in_system, steady_state


def queue(rate: float, servers: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Arrivals and departures of an M/M/c queue, first come first served, with services of 1 s in the mean."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    free, ends = [0.0] * servers, []
    for t in arrivals:
        done = max(t, heapq.heappop(free)) + rng.exponential(1.0)
        heapq.heappush(free, done)
        ends.append(done)
    return arrivals, np.array(ends)


def test_closed_loop_is_the_time_at_target_concurrency() -> None:
    """Two users. In flight: 1 from 0, 2 from 1, 1 at 4 for an instant and again 2, 1 from 7 to 9."""
    ts, ends = [0.0, 1.0, 4.001], [4.0, 7.0, 9.0]
    two = {"mode": "closed", "concurrency": 2}
    assert steady_state(ts, ts, ends, two).window == (1.0, 7.0)
    never = steady_state(ts, ts, ends, {"mode": "closed", "concurrency": 3})
    assert never.window is None
    assert "3 users were never all busy" in never.why
    assert steady_state([], [], [], two).window is None


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), min_size=1, max_size=20), st.integers(1, 6))
def test_at_target_against_counting(spans: list[tuple[int, int]], target: int) -> None:
    starts = np.array([a for a, _ in spans], dtype=float)
    ends = np.array([a + b for a, b in spans], dtype=float)
    middles = np.arange(0, 40, 0.5) + 0.25
    busy = [m for m in middles if ((starts <= m) & (ends >= m)).sum() >= target]
    window = at_target(starts, ends, target)
    if busy:
        assert window[0] <= busy[0]
        assert window[1] >= busy[-1]
    if window is not None:
        at = [((starts <= x) & (ends >= x)).sum() for x in window]  # intervals are closed
        assert min(at) >= target
        assert not [m for m in busy if not window[0] <= m <= window[1]]
    assert at_target(np.array([0.0, 4.0, 6.0]), np.array([4.0, 9.0, 8.0]), 2) == (4.0, 8.0)  # one ends as one starts


def test_a_conversation_that_thinks_keeps_its_user_busy() -> None:
    """Two users with a conversation of two turns each; between the turns nobody is in flight."""
    ts, ends = [0.0, 1.0, 5.0, 6.0], [2.0, 3.0, 8.0, 7.0]
    load = {"mode": "closed", "concurrency": 2}
    assert steady_state(ts, ts, ends, load, [0, 1, 0, 1]).window == (1.0, 7.0)
    assert steady_state(ts, ts, ends, load).window == (1.0, 7.0)  # as it happens
    apart = [0.0, 2.5, 5.0, 7.5], [2.0, 3.0, 6.0, 8.0]
    assert steady_state(apart[0], *apart, load, [0, 1, 0, 1]).window == (2.5, 6.0)
    assert steady_state(apart[0], *apart, load).window is None
    mixed = steady_state(apart[0], *apart, load, [0, None, 0, np.nan])
    assert mixed.window == (2.5, 3.0)


def test_in_system_is_the_mean_number_over_time() -> None:
    got = in_system(np.array([0.0, 1.0]), np.array([3.0, 1.5]), np.array([0.0, 1.0, 2.0, 4.0]))
    assert got == pytest.approx([1.0, 1.5, 0.5])


def test_open_loop_starts_when_the_system_has_filled() -> None:
    """10 requests/s that take 5 s each: the number in the system climbs to 50 for 5 s and stays."""
    t0 = np.arange(0, 40, 0.1)
    start, end = steady_state(t0, t0, t0 + 5.0, {"mode": "open"}).window
    assert start == pytest.approx(5.0, abs=1.0)
    assert end == t0[-1]


def test_stable_queues_have_a_window_and_overloaded_ones_none() -> None:
    def share(load: float, count: int) -> float:
        found = []
        for seed in range(60):
            arrivals, ends = queue(8 * load, 8, count, seed)
            found.append(steady_state(arrivals, arrivals, ends, {"mode": "open"}).window is not None)
        return float(np.mean(found))

    assert share(0.5, 300) >= 0.95
    assert share(1.2, 300) <= 0.2
    assert share(0.9, 1000) >= 0.8
    assert share(1.1, 1000) <= 0.2


def test_a_slower_server_is_one_that_keeps_up() -> None:
    """10 requests/s that take 5 s each, 20 more at 12 s; from 30 s on they take 1 % or 10 % longer."""
    t0 = np.sort(np.concatenate([np.arange(0, 60, 0.1), np.full(20, 12.0)]))
    for growth, steady in ((1.01, True), (1.10, False)):
        ends = t0 + np.where(t0 > 30, 5.0 * growth, 5.0)
        assert (steady_state(t0, t0, ends, {"mode": "open"}).window is not None) is steady


def test_without_a_window_it_says_why() -> None:
    def why(t0: np.ndarray, ends: np.ndarray, **load: object) -> str:
        state = steady_state(t0, t0, ends, {"mode": "open"} | load)
        assert state.window is None
        return state.why

    few = np.arange(LEAST_ARRIVALS - 1) * 1.0
    assert f"{LEAST_ARRIVALS - 1} arrivals are too few" in why(few, few + 0.1)
    many = np.arange(100) * 1.0
    assert "did not keep up" in why(many, 3.0 * (many + 1))  # one at a time, 3 s each
    assert "arrived at once" in why(np.zeros(30), np.arange(30) + 1.0)
    assert "changed all the time" in why(many, many + 0.1, notes={"plateaus": []})


def test_all_at_once_under_a_cap_is_a_closed_loop() -> None:
    """12 requests at 0, 4 places, 2 s each: 4 in flight from 0 to 6."""
    ts = np.repeat([0.0, 2.0, 4.0], 4) + np.tile([0.0, 0.1, 0.2, 0.3], 3)
    got = steady_state(np.zeros(12), ts, ts + 2.0, {"mode": "open", "max_concurrency": 4})
    assert got.window == pytest.approx((0.3, 6.0))
    over_a_clock = np.tile([0.0, 2.3e-9, 2e-6, 9e-4], 3)  # of workers on other machines
    assert steady_state(over_a_clock, ts, ts + 2.0, {"mode": "open", "max_concurrency": 4}).window == got.window
    uncapped = steady_state(over_a_clock, over_a_clock, ts + 2.0, {"mode": "open"})
    assert uncapped.window is None and "arrived at once" in uncapped.why


def test_a_ramp_that_ends_has_the_window_of_what_follows() -> None:
    ramped = np.sqrt(np.arange(100) * 4.0)  # 0 to 10/s in 20 s
    held = 20.0 + np.arange(400) / 10.0
    t0 = np.concatenate([ramped, held])
    state = steady_state(t0, t0, t0 + 1.0, {"mode": "open", "notes": {"plateaus": [[20.0, 60.0, 10.0]]}})
    assert state.window[0] >= 20.0
    assert state.window[0] < 30.0
    assert state.window[1] == t0[-1]
    assert len(state.plateaus) == 1
