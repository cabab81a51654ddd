"""The search for the highest rate that meets an SLO, against synthetic servers whose capacity is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvbench.backlog import Backlog, backlog_of, filling_s
from kvbench.rate_search import (
    ALWAYS,
    FOUND,
    INVALID,
    NEVER,
    OUT_OF_RUNS,
    Answer,
    Ask,
    Bounds,
    Trial,
    advance,
    bracket,
    parse_conditions,
    unmet,
)


def search(verdict, bounds):
    """Runs to the answer; ``verdict(rate, n)``: of the n-th run, True, False or None."""
    trials: list[Trial] = []
    while isinstance(step := advance(trials, bounds), Ask):
        trials.append(Trial(step.rate, verdict(step.rate, len(trials)), ("because",)))
        assert len(trials) <= bounds.max_runs
    return step, trials


@pytest.mark.parametrize("start", [0.25, 1.0, 5.0, 7.3, 100.0])
@pytest.mark.parametrize("tolerance", [0.05, 0.01])
def test_a_capacity_is_found_within_the_tolerance_from_wherever_it_starts(start, tolerance):
    capacity = 7.31
    answer, trials = search(lambda rate, _: rate <= capacity, Bounds(start, 0.01, 1000, tolerance))
    assert answer.outcome == FOUND and answer.confirmed
    assert answer.met <= capacity < answer.unmet <= answer.met * (1 + tolerance)
    # doublings or halvings to the bracket, bisections of ratio 2 down to the tolerance, one confirmation
    bisections = math.ceil(math.log2(math.log(2) / math.log(1 + tolerance)))
    assert len(trials) <= math.ceil(abs(math.log2(capacity / start))) + 1 + bisections + 1
    assert sum(t.rate == answer.met for t in trials) == 2


def test_bounds_that_are_met_or_not_met_throughout_are_said_so():
    answer, trials = search(lambda rate, _: True, Bounds(1, 0.5, 12))
    assert answer == Answer(ALWAYS, 12, None, confirmed=True)
    assert [t.rate for t in trials] == [1, 2, 4, 8, 12, 12]  # never above the highest rate allowed
    answer, trials = search(lambda rate, _: False, Bounds(1, 0.3, 12))
    assert answer == Answer(NEVER, None, 0.3, confirmed=False)
    assert [t.rate for t in trials] == [1, 0.5, 0.3]


def test_an_answer_that_fails_its_confirmation_is_none():
    seen: dict[float, int] = {}

    def lucky(rate, _):
        seen[rate] = seen.get(rate, 0) + 1
        return rate <= 6 or (rate <= 7.5 and seen[rate] == 1)  # luck at the first go only

    answer, trials = search(lucky, Bounds(1, 0.1, 100, 0.05))
    assert answer.outcome == FOUND and answer.confirmed and answer.met <= 6
    assert any(t.rate > 6 and t.met for t in trials)  # there was luck, and it is not the answer
    assert not any(t.met is False and t.rate <= answer.met for t in trials)


def test_noise_leaves_the_answer_near_the_capacity_and_its_runs_consistent():
    misses = []
    for seed in range(60):
        rng = np.random.default_rng(seed)

        def noisy(rate, _, rng=rng):
            return rate * rng.lognormal(0, 0.03) <= 10

        answer, trials = search(noisy, Bounds(1, 0.1, 1000, 0.05))
        assert answer.outcome == FOUND and answer.confirmed
        assert all(t.met for t in trials if t.rate == answer.met)
        assert min(t.rate for t in trials if t.met is False) == answer.unmet > answer.met
        misses.append(abs(math.log(answer.met / 10)))
    assert np.median(misses) < 0.06 and max(misses) < 0.2


def test_a_met_rate_above_one_that_was_not_is_luck():
    trials = [Trial(2, True), Trial(4, True), Trial(8, False), Trial(4, False), Trial(16, True)]
    assert bracket(trials) == (2, 4)
    assert bracket([]) == (None, None)


def test_an_invalid_run_is_repeated_once_and_then_ends_the_search_with_its_reason():
    bounds = Bounds(1, 0.1, 100)
    once = [Trial(1, True), Trial(2, None, ("foreign work",))]
    assert advance(once, bounds) == Ask(2)
    assert advance([*once, Trial(2, True)], bounds) == Ask(4)
    answer = advance([*once, Trial(2, None, ("the client lagged",))], bounds)
    assert answer.outcome == INVALID and answer.met == 1 and "the client lagged" in answer.reason
    apart = [*once, Trial(2, True), Trial(4, None, ("x",))]  # one invalid run at each of two rates is no end
    assert advance(apart, bounds) == Ask(4)


def test_the_number_of_runs_is_bounded_and_the_bracket_so_far_is_told():
    answer, trials = search(lambda rate, _: rate <= 7, Bounds(1, 0.1, 100, 0.001, max_runs=6))
    assert answer.outcome == OUT_OF_RUNS and len(trials) == 6 and "--max-runs" in answer.reason
    assert answer.met <= 7 < answer.unmet and not answer.confirmed


def test_a_search_goes_on_from_its_runs():
    bounds = Bounds(1, 0.1, 100)
    _, trials = search(lambda rate, _: rate <= 7, bounds)
    for done in range(len(trials)):
        assert advance(trials[:done], bounds).rate == trials[done].rate


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"start": 5, "low": 6, "high": 9}, "--min-rate"),
        ({"start": 5, "low": 1, "high": 4}, "--max-rate"),
        ({"start": 1, "low": 0, "high": 4}, "rates do not fit"),
        ({"start": 1, "low": 1, "high": 4, "tolerance": 0}, "tolerance 0"),
        ({"start": 1, "low": 1, "high": 4, "max_runs": 0}, "least is 1"),
    ],
)
def test_impossible_bounds_are_refused(fields, word):
    with pytest.raises(ValueError, match=word):
        Bounds(**fields)


def test_conditions_are_read_with_their_units():
    ttft, itl, e2el, share, part = parse_conditions(
        "p95_ttft<=500ms, P99_itl_ms <= 50,median_e2el<2s,goodput>=95%,goodput>=0.9"
    )
    assert (ttft.metric, ttft.stat, ttft.limit) == ("ttft_ms", "p95", 500)
    assert (itl.metric, itl.stat, itl.limit) == ("itl_ms", "p99", 50)
    assert (e2el.metric, e2el.stat, e2el.limit) == ("e2el_ms", "p50", 2000)
    assert (share.metric, share.limit, part.limit) == ("goodput", 0.95, 0.9)
    assert (ttft.samples_needed, itl.samples_needed, e2el.samples_needed) == (130, 1, 11)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no condition"),
        ("p95_ttft", "'p95_ttft' is no condition"),
        ("p95_ttft>=3", "no condition"),
        ("p97_ttft<=3", "no statistic 'p97'"),
        ("p95_tttf<=3", "no latency 'tttf'"),
        ("p95_ttft<=0ms", "not a number above 0"),
        ("p95_ttft<=1.2.3ms", "not a number above 0"),
        ("goodput>=120%", "at most 1"),
    ],
)
def test_conditions_that_mean_nothing_are_refused_by_their_text(text, words):
    with pytest.raises(ValueError, match=words):
        parse_conditions(text)


def metrics(**values):
    return {"ttft_ms": {"p95": 400.0}, "completed": 200, "failed": 0, "goodput_share": 0.97} | values


def test_a_run_meets_the_slo_only_with_every_condition_and_almost_no_failure():
    conditions = parse_conditions("p95_ttft<=500ms,goodput>=95%")
    assert unmet(conditions, metrics(), None) == []
    assert unmet(conditions, metrics(ttft_ms={"p95": 500.0}, goodput_share=0.95), None) == []
    assert unmet(conditions, metrics(ttft_ms={"p95": 500.1}), None) == ["p95_ttft<=500ms: 500.1 ms"]
    assert unmet(conditions, metrics(goodput_share=0.9), None) == ["goodput>=95%: 90.0%"]
    assert unmet(conditions, metrics(ttft_ms={"p95": None}), None) == ["p95_ttft<=500ms: not measured"]
    assert unmet(conditions, metrics(completed=198, failed=2), None) == []  # 1 % is allowed
    assert unmet(conditions, metrics(completed=197, failed=3), None) == ["3 of 200 requests failed"]
    assert "backlog" in unmet(conditions, metrics(), Backlog(2, 40, 100))[0]


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
