"""Arrival processes against SciPy: distributions of gaps, rates over time, dispersion; exact times without chance."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from kvbench.requests.arrivals import Segment, draw_arrivals, plateaus, ramp, spread_ticks


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def steady(rate: float) -> tuple[Segment, ...]:
    return (Segment(math.inf, rate, rate),)


def rate_at(profile: tuple[Segment, ...], t: float) -> float:
    """The rate that the words of the options promise at ``t``, written anew."""
    for segment in profile:
        if t < segment.seconds:
            part = t / segment.seconds if math.isfinite(segment.seconds) else 0.0
            if segment.strategy == "linear":
                return segment.start_rps + part * (segment.end_rps - segment.start_rps)
            return segment.start_rps * (segment.end_rps / segment.start_rps) ** part
        t -= segment.seconds
    return 0.0


def expected_before(profile: tuple[Segment, ...], t: float) -> float:
    """Arrivals expected before ``t``, by quadrature."""
    corners = np.cumsum([s.seconds for s in profile])
    inside = [c for c in corners if c < t]
    edges = [0.0, *inside, t]
    return sum(
        integrate.quad(lambda x: rate_at(profile, x), a, b, epsabs=1e-10)[0] for a, b in itertools.pairwise(edges)
    )


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_of_the_given_burstiness(shape: float) -> None:
    """burstiness is the gamma's shape, the mean gap 1 / rate, as in vLLM; 1 is a Poisson process."""
    gaps = np.diff(draw_arrivals(steady(5.0), rng(), count=20_001, burstiness=shape))
    assert stats.kstest(gaps, stats.gamma(shape, scale=0.2 / shape).cdf).pvalue > 0.01
    assert stats.kstest(gaps, stats.gamma(shape * 1.2, scale=0.2 / (shape * 1.2)).cdf).pvalue < 1e-6  # it would tell
    if shape == 1.0:
        assert stats.kstest(gaps, stats.expon(scale=0.2).cdf).pvalue > 0.01


@pytest.mark.parametrize("shape", [0.5, 1.0, 4.0])
def test_dispersion_of_counts(shape: float) -> None:
    """Over windows of many gaps, variance / mean of a renewal process's counts is its gaps' squared CV, 1 / shape."""
    times = draw_arrivals(steady(100.0), rng(3), count=200_000, burstiness=shape)
    counts = np.histogram(times, bins=np.arange(0, times[-1] // 1))[0]
    assert counts.mean() == pytest.approx(100.0, rel=0.02)
    assert counts.var() / counts.mean() == pytest.approx(1 / shape, rel=0.15)


RAMPS = [
    ramp(2.0, 20.0, "linear", seconds=400.0),
    ramp(0.0, 10.0, "linear", seconds=500.0),
    ramp(20.0, 1.0, "linear", seconds=300.0),
    ramp(1.0, 20.0, "exponential", seconds=500.0),
    ramp(15.0, 2.0, "exponential", seconds=400.0),
]


@pytest.mark.parametrize("profile", RAMPS)
def test_ramp_has_the_promised_rate_at_every_time(profile: tuple[Segment, ...]) -> None:
    """Of a Poisson process with a changing rate, the times have the cumulated rate as their distribution."""
    end = profile[0].seconds
    whole = expected_before(profile, end)
    times = draw_arrivals(profile, rng(4), duration_s=end)
    assert times.tolist() == draw_arrivals(profile, rng(4), duration_s=end).tolist()
    assert abs(len(times) - whole) < 4 * math.sqrt(whole)
    grid = np.linspace(0, end, 400)
    cdf = np.array([expected_before(profile, t) / whole if t else 0.0 for t in grid])
    assert stats.kstest(times, lambda t: np.interp(t, grid, cdf)).pvalue > 0.01
    flat = stats.kstest(times, lambda t: t / end)
    assert flat.pvalue < 1e-6
    gaps = np.diff([expected_before(profile, t) for t in times[:600]])  # on the process's own clock it is Poisson
    assert stats.kstest(gaps, stats.expon.cdf).pvalue > 0.01


rates = st.floats(0.1, 50.0)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.floats(0.5, 20.0), rates, rates, st.sampled_from(["linear", "exponential"])), max_size=3),
    rates,
)
def test_without_chance_the_kth_arrival_is_where_k_are_expected(pieces: list[tuple], last: float) -> None:
    profile = (*(Segment(*piece) for piece in pieces), Segment(math.inf, last, last))
    times = draw_arrivals(profile, rng(), count=9, burstiness=math.inf)
    for k in (1, 4, 8):
        assert expected_before(profile, float(times[k])) == pytest.approx(k, abs=1e-5)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_ramp_over_the_whole_load_ends_with_its_last_arrival(strategy: str) -> None:
    profile = ramp(2.0, 10.0, strategy, count=120)
    assert expected_before(profile, profile[0].seconds) == pytest.approx(120)
    times = draw_arrivals(profile, rng(), count=120, burstiness=math.inf)
    assert times[-1] < profile[0].seconds < times[-1] + 2 / 10.0


def test_steps_follow_one_another_with_pauses() -> None:
    steps = (Segment(3, 2, 2), Segment(2, 0, 0), Segment(1, 5, 5))
    times = draw_arrivals(steps, rng(), burstiness=math.inf)
    assert times == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5, 5, 5.2, 5.4, 5.6, 5.8])
    late = draw_arrivals((Segment(4, 0, 0), Segment(1, 3, 3)), rng(), burstiness=math.inf)
    assert late == pytest.approx([4, 4 + 1 / 3, 4 + 2 / 3])
    drawn = draw_arrivals((Segment(100, 2, 2), Segment(50, 0, 0), Segment(100, 20, 20)), rng())
    counts = np.histogram(drawn, bins=[0, 100, 150, 250])[0]
    assert counts[1] == 0
    assert abs(counts[0] - 200) < 60
    assert abs(counts[2] - 2000) < 180


@pytest.mark.parametrize("duration", [0.3, 1.0, 7.05])
def test_duration_bounds_the_arrivals(duration: float) -> None:
    even = draw_arrivals(steady(10.0), rng(), duration_s=duration, burstiness=math.inf)
    assert len(even) == math.ceil(duration * 10 - 1e-9)
    assert even[-1] < duration
    counts = [len(draw_arrivals(steady(10.0), rng(seed), duration_s=duration)) - 1 for seed in range(400)]
    mean = duration * 10  # beside the one at 0
    assert abs(np.mean(counts) - mean) < 4 * math.sqrt(mean / 400)


def test_impossible_arrivals_are_refused() -> None:
    for profile, how, words in (
        (steady(1.0), {"count": 0}, "0 arrivals"),
        ((Segment(2, 1, 1),), {"count": 9}, "9"),
        ((Segment(9, 0, 0),), {}, "duration_s or steps"),
        (steady(1000.0), {"duration_s": 1e6}, "10,000,000"),
    ):
        with pytest.raises(ValueError, match=words):
            draw_arrivals(profile, rng(), **how)


def test_plateaus_are_the_stretches_of_one_rate() -> None:
    steps = (Segment(3, 2, 2), Segment(4, 2, 2), Segment(2, 0, 0), Segment(5, 8, 8))
    assert plateaus(steps, 14.0) == [(0, 7, 2), (9, 14, 8)]
    assert plateaus(ramp(1, 5, "linear", seconds=10), 10.0) == []
    assert plateaus(ramp(1, 5, "linear", seconds=10), 16.0) == [(10, 16, 5)]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=40),
    st.sampled_from(["even", "uniform"]),
    st.floats(0.01, 10.0),
)
def test_spread_ticks_stay_in_their_tick_and_in_order(stamps: list[int], how: str, tick: float) -> None:
    times = np.sort(np.array(stamps) * tick)
    got = spread_ticks(times, how, rng())
    different = np.unique(times)
    if len(different) < 2:
        assert got.tolist() == times.tolist()
        return
    widths = dict(zip(different.tolist(), [*np.diff(different), math.inf], strict=True))
    width = np.quantile(np.diff(different), 0.1, method="lower")
    assert (np.diff(got) >= 0).all()
    assert (got >= times).all()
    assert (got < times + width * (1 + 1e-9)).all()
    for stamp in different:
        mine = got[times == stamp]
        if len(mine) == 1:
            assert mine[0] == stamp
        elif how == "even":
            room = min(width, widths[stamp])
            assert mine == pytest.approx(stamp + np.arange(len(mine)) * room / len(mine))


def test_uniform_spread_is_uniform() -> None:
    times = np.repeat([0.0, 3.0, 6.0], 2000)
    got = spread_ticks(times, "uniform", rng())
    assert stats.kstest((got - times) / 3.0, stats.uniform.cdf).pvalue > 0.01


def test_a_stray_time_between_the_ticks_does_not_stop_the_spreading() -> None:
    times = np.sort(np.concatenate([np.repeat(np.arange(30) * 3.0, 4), [6.001]]))
    got = spread_ticks(times, "even", rng())
    assert got[:4] == pytest.approx([0, 0.75, 1.5, 2.25])
    assert got[8:13] == pytest.approx([6, 6.00025, 6.0005, 6.00075, 6.001])  # none past the next one recorded
    assert (np.diff(got) >= 0).all()
