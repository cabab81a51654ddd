"""What ``--find-max-rate`` measures: bounds, how long a run is, and the load at another rate."""

from __future__ import annotations

import math

import pytest

from kvbench.common.errors import UsageError
from kvbench.metrics.model import Distribution, LoadMetrics
from kvbench.sweep.rate_run import RunLength, SearchPlan, at_rate, mean_rate, patience_s
from kvbench.sweep.rate_search import arrivals_to_detect, detectable_share, parse_conditions
from kvbench.workload.load_section import LoadConfig, Slo

CLASSES = [{"name": "a", "share": 1.0, "prompt_tokens": 8, "output_tokens": 4}]
OPEN = {
    "mode": "open", "request_rate": 4, "num_requests": 10, "prompts": {"kind": "synthetic", "classes": CLASSES},
}  # fmt: skip


@pytest.mark.parametrize(
    ("length", "rate", "slo", "requests"),
    [
        (RunLength(48, 20.0), 2.0, "p95_ttft<=1s", 130),
        (RunLength(48, 20.0), 2.0, "p95_ttft<=1s,p99_e2el<=9s", 662),
        (RunLength(48, 20.0), 50.0, "p95_ttft<=1s", 1000),
        (RunLength(30, 2.0, enough=False), 5.0, "p99_e2el<=9s", 30),
        (RunLength(1, 20.0, overload=0.05, patience_s=5.0), 4.0, "p95_ttft<=5s", 400),  # 5 s of wait at 5 % more
        (RunLength(1, 20.0, overload=0.05, patience_s=5.0), 40.0, "p95_ttft<=5s", 1200),  # by number: 3 / 0.05^2
        (RunLength(1, 20.0, overload=0.1), 1.0, "p95_ttft<=5s", 300),
        (RunLength(50, 0.0, enough=False, overload=0.05, patience_s=5.0), 4.0, "p95_ttft<=5s", 50),
        (RunLength(77, 20.0, overload=0.05, fixed=True), 40.0, "p95_ttft<=5s", 77),
    ],
)
def test_a_run_has_enough_requests_for_its_percentiles_its_seconds_and_an_overload(length, rate, slo, requests):
    assert length.requests(rate, parse_conditions(slo)) == requests
    assert length.seconds_of(rate, parse_conditions(slo)) == requests / rate


def test_the_least_overload_that_a_run_shows():
    waiting = RunLength(1, 20.0, overload=0.05, patience_s=5.0)
    assert waiting.detectable_overload(4.0, 400) == pytest.approx(0.05)
    assert waiting.detectable_overload(4.0, 100) == pytest.approx(math.sqrt(3 / 100))  # by number, sooner than by 20 %
    assert detectable_share(round(arrivals_to_detect(0.03))) == pytest.approx(0.03, rel=1e-3)


@pytest.mark.parametrize(
    ("slo", "limits", "seconds"),
    [
        ("p50_ttft<=2s", None, 4),
        ("p95_ttft<=2s,p99_e2el<=99s,p99_tpot<=9ms", None, 2 / 0.95),
        ("p95_tpot<=50ms,p95_ttft_send<=1s", None, math.inf),
        ("goodput>=80%", Slo(ttft_ms=4000, tpot_ms=9), 5),
        ("goodput>=80%", Slo(tpot_ms=9), math.inf),
    ],
)
def test_how_long_a_queue_takes_to_break_the_slo(slo, limits, seconds):
    """At an overload x the last of T seconds waits x T, and a percentile q of all waits is q x T."""
    assert patience_s(parse_conditions(slo), limits) == pytest.approx(seconds)


def test_a_load_at_another_rate_is_the_same_but_for_rate_and_number():
    load = LoadConfig.model_validate(OPEN)
    changed = at_rate(load, 7.5, 33)
    assert changed.request_rate == (7.5,) and changed.count_for(7.5) == 33
    assert changed.prompts == load.prompts
    timed = LoadConfig.model_validate({**OPEN, "num_requests": None, "duration_s": 20})
    assert at_rate(timed, 7.5, 33).count_for(7.5) == 33 and not at_rate(timed, 7.5, 33).counted_by_time
    talk = LoadConfig.model_validate({**OPEN, "num_requests": None, "sessions": {"num_sessions": 4, "turns": 2}})
    assert at_rate(talk, 7.5, 33).sessions.num_sessions == (33,)


def test_a_trace_is_played_faster(tmp_path):
    trace = {"kind": "trace", "path": str(tmp_path / "t.csv"), "rate_scale": 2.0}
    load = LoadConfig.model_validate({"mode": "open", "arrivals": "trace", "prompts": trace})
    assert at_rate(load, 6.0, 99, native_rate=4.0).prompts.rate_scale == pytest.approx(3.0)
    arrivals = [type("R", (), {"arrival_s": t})() for t in (0.0, None, 1.0, 2.0)]
    assert mean_rate(arrivals) == pytest.approx(1.0)
    with pytest.raises(UsageError, match="all at once"):
        mean_rate(arrivals[:1])


def plan(slo="p95_ttft<=1s", start=None, low=None, high=None):
    return SearchPlan(slo, start, low, high, 0.05, 9, 20.0, None, 60.0)


@pytest.mark.parametrize(
    ("options", "own", "start", "low", "high"),
    [
        ({}, 4.0, 4.0, 4.0 / 64, 4096.0),
        ({}, None, 1.0, 1 / 64, 1024.0),
        ({"low": 6.0, "high": 8.0}, 4.0, 6.0, 6.0, 8.0),  # what is given wins over the workload's own rate
        ({"low": 6.0, "high": 8.0}, 40.0, 8.0, 6.0, 8.0),
    ],
)
def test_bounds_follow_from_the_first_rate_and_the_options(options, own, start, low, high):
    bounds = plan(**options).bounds(own)
    assert (bounds.start, bounds.low, bounds.high, bounds.max_runs) == (start, low, high, 9)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"start": 5.0, "high": 2.0}, "--request-rate 5 is above --max-rate 2"),
        ({"start": 1.0, "low": 2.0}, "--min-rate 2 is above --request-rate 1"),
        ({"low": 5.0, "high": 2.0}, "--min-rate 5 is above --max-rate 2"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_options_that_were_given(options, named):
    with pytest.raises(UsageError, match=f"^{named}"):
        plan(**options).bounds(4.0)


@pytest.mark.parametrize(("without", "met"), [(0, True), (4, True), (5, False), (100, False)])
def test_requests_without_an_output_wait_for_ever_for_it(without, met):
    (condition,) = parse_conditions("p95_ttfo<=500ms")
    metrics = LoadMetrics(ttfo_ms=Distribution(p95=100.0), completed=100, without_output=without)
    assert condition.met(metrics) == met
