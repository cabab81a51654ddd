"""What ``--find-max-rate`` is asked: bounds, how long a run is, and the load at another rate."""

from __future__ import annotations

import pytest

from kvbench.common.errors import UsageError
from kvbench.loadtest.max_rate.plan import SearchPlan, Sizes, at_rate, mean_rate, require_searchable
from kvbench.loadtest.max_rate.search import parse_conditions
from kvbench.workload.load_section import LoadConfig


def test_a_run_has_enough_requests_for_its_percentiles_and_its_seconds():
    p95, p99 = parse_conditions("p95_ttft<=1s"), parse_conditions("p95_ttft<=1s,p99_e2el<=9s")
    assert Sizes(48, 20.0).requests(2.0, p95) == 130
    assert Sizes(48, 20.0).requests(2.0, p99) == 662
    assert Sizes(48, 20.0).requests(50.0, p95) == 1000
    assert Sizes(200, 20.0).requests(2.0, p95) == 200
    assert Sizes(30, 2.0, enough=False).requests(5.0, p99) == 30


def test_why_a_run_is_longer_than_its_seconds_is_what_made_it_so():
    p95 = parse_conditions("p95_ttft<=1s")
    assert "p95 needs 130" in Sizes(48, 20.0).why_longer(2.0, p95)
    assert "the workload has 200" in Sizes(200, 20.0).why_longer(2.0, p95)
    assert Sizes(200, 20.0, enough=False).why_longer(2.0, p95) == ""  # --num-prompts is the user's own word
    patient = Sizes(1, 20.0, tolerance=0.05, patience_s=5.0)  # 100 s, or 3 / 0.05^2 arrivals
    assert "an overload of 5% shows after 300" in patient.why_longer(3.0, p95)
    assert "shows after 1200" in patient.why_longer(50.0, p95)
    assert Sizes(48, 20.0).why_longer(50.0, p95) == "" and Sizes(48, 1.0, fixed=True).why_longer(2.0, p95) == ""


CLASSES = [{"name": "a", "share": 1.0, "prompt_tokens": 8, "output_tokens": 4}]
OPEN = {
    "mode": "open", "request_rate": 4, "num_requests": 10, "prompts": {"kind": "synthetic", "classes": CLASSES},
}  # fmt: skip


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


def test_loads_without_one_rate_are_refused():
    ramp = {"arrivals": "ramp", "ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 9}
    load = LoadConfig.model_validate({**OPEN, "request_rate": None, **ramp})
    with pytest.raises(UsageError, match="arrivals are a ramp"):
        require_searchable(load, parse_conditions("p95_ttft<=1s"))
    with pytest.raises(UsageError, match="needs an SLO"):
        require_searchable(LoadConfig.model_validate(OPEN), parse_conditions("goodput>=90%"))


def test_bounds_follow_from_the_first_rate_and_what_is_given_wins():
    plan = SearchPlan("p95_ttft<=1s", None, None, None, 0.05, 9, 20.0, None, 60.0)
    bounds = plan.bounds(4.0)
    assert (bounds.start, bounds.low, bounds.high, bounds.max_runs) == (4.0, 4.0 / 64, 4096.0, 9)
    assert plan.bounds(None).start == 1.0
    tight = SearchPlan("p95_ttft<=1s", None, 6.0, 8.0, 0.05, 9, 20.0, None, 60.0)
    assert tight.bounds(4.0).start == 6.0 and tight.bounds(40.0).start == 8.0
    low = SearchPlan("p95_ttft<=1s", None, None, 0.01, 0.05, 9, 20.0, None, 60.0).bounds(4.0)
    assert (low.start, low.low, low.high) == (0.01, 0.01 / 64, 0.01)
    with pytest.raises(UsageError, match="--find-max-rate: 'p95' is no condition"):
        _ = SearchPlan("p95", None, None, None, 0.05, 9, 20.0, None, 60.0).parsed


@pytest.mark.parametrize(
    ("start", "low", "high", "said"),
    [
        (5.0, None, 2.0, "--request-rate 5 is above --max-rate 2"),
        (1.0, 2.0, None, "--min-rate 2 is above --request-rate 1"),
        (None, 5.0, 2.0, "--min-rate 5 is above --max-rate 2"),
    ],
)
def test_rates_that_do_not_fit_are_refused_by_the_words_that_were_given(start, low, high, said):
    plan = SearchPlan("p95_ttft<=1s", start, low, high, 0.05, 9, 20.0, None, 60.0)
    with pytest.raises(UsageError, match=f"^{said}: change one of them$"):
        plan.bounds(4.0)
