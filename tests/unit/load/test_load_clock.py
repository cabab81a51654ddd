"""Clocks of several machines: simulated ones with a known offset, drift and way, against what is measured of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.load.multi.merge import Reading, best_of, clock_map, clock_reasons, exchange

delays = st.floats(1e-6, 0.5)


def exchanged(start: float, offset: float, there: float, thinking: float, back: float) -> Reading:
    """What is read when the worker's clock is ``offset`` ahead."""
    arrives = start + there
    return exchange(start, arrives + offset, arrives + thinking + offset, arrives + thinking + back)


@given(st.floats(0, 1e5), st.floats(-1e4, 1e4), delays, st.floats(0, 0.5), delays)
def test_the_true_offset_lies_within_half_the_round_trip(
    start: float, offset: float, there: float, thinking: float, back: float
) -> None:
    one = exchanged(start, offset, there, thinking, back)
    assert one.error == pytest.approx((there + back) / 2, abs=1e-9)
    assert abs(one.offset - offset) <= one.error + 1e-9


def test_the_exchange_with_the_smallest_round_trip_is_taken() -> None:
    """The quick way is even; the slow ones are lopsided, as queues make them."""
    seen = [exchanged(k, 2.5, 0.001 + 0.02 * (k != 3), 0.0, 0.001) for k in range(8)]
    best = best_of(seen)
    assert best.offset == pytest.approx(2.5, abs=1e-9)
    assert best.error == pytest.approx(0.001, abs=1e-9)


@given(st.floats(-100, 100), st.floats(-2e-4, 2e-4), st.lists(st.floats(0, 60), min_size=1, max_size=20))
def test_a_drifting_clock_is_mapped_back(offset: float, rate: float, moments: list[float]) -> None:
    """The worker's clock shows (1 + rate) t + offset; it is looked at before, during and after a load of 60 s."""

    def shown(t: float) -> float:
        return (1 + rate) * t + offset

    looks = [Reading(shown(t), shown(t) - t, 1e-4) for t in (0.0, 30.0, 60.0)]
    clock = clock_map(looks[0], "a", "b").with_reading(looks[1]).with_reading(looks[2])
    assert not clock.same_clock
    mapped = clock.to_master(np.array([shown(t) for t in moments]))
    assert mapped == pytest.approx(moments, abs=1e-6)
    assert clock.drift_s == pytest.approx(abs(rate) * 30, abs=1e-9)
    assert clock.error_s == pytest.approx(1e-4 + abs(rate) * 30, abs=1e-9)


def test_a_reading_that_a_busy_worker_blurred_is_passed_over_but_never_the_first_or_the_last() -> None:
    clock = clock_map(Reading(0.0, 5.0, 2e-5), "a", "b")
    blurred = clock.with_reading(Reading(10.0, 5.003, 4e-3)).with_reading(Reading(20.0, 5.0, 3e-5))
    assert blurred.error_s == pytest.approx(3e-5)
    assert blurred.to_master(np.array([15.0])) == pytest.approx([10.0])
    assert clock.with_reading(Reading(10.0, 5.003, 4e-3)).error_s == pytest.approx(4e-3 + 3e-3)
    stepped = clock.with_reading(Reading(10.0, 5.003, 3e-5)).with_reading(Reading(20.0, 5.003, 3e-5))
    assert stepped.error_s == pytest.approx(3e-5 + 3e-3)


def test_one_kernel_is_one_clock_only_where_the_readings_agree() -> None:
    near = Reading(10.0, 4e-5, 5e-5)
    assert clock_map(near, "boot", "boot").same_clock
    assert clock_map(near, "boot", "boot").to_master(np.array([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert not clock_map(near, "boot", "other").same_clock
    assert not clock_map(near, None, None).same_clock  # a system that does not tell its boot
    shifted = clock_map(Reading(10.0, 3600.0, 5e-5), "boot", "boot")  # a container with a clock of its own
    assert not shifted.same_clock
    assert shifted.to_master(np.array([3700.0])) == pytest.approx([100.0])
    assert shifted.from_master(100.0) == pytest.approx(3700.0)
    assert not clock_map(near, "boot", "boot").with_reading(Reading(20.0, 0.5, 5e-5)).same_clock


@pytest.mark.parametrize(
    ("round_trip_ms", "itl_ms", "good"),
    [(1.9, None, True), (2.1, None, False), (3.9, 100.0, True), (4.1, 100.0, False)],
)
def test_a_clock_that_is_known_too_badly_invalidates(round_trip_ms: float, itl_ms: float | None, good: bool) -> None:
    """Half the round trip may be 1 ms, or 2 % of the median ITL."""
    clock = clock_map(Reading(0.0, 5.0, round_trip_ms / 2000), "a", "b")
    reasons = clock_reasons("worker 2", clock, itl_ms)
    assert (not reasons) is good
    if not good:
        assert "worker 2" in reasons[0] and "limit" in reasons[0]
