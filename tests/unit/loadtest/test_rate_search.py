"""The search for the highest rate that meets an SLO, against synthetic servers whose capacity is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvbench.loadtest.max_rate.queue_growth import Backlog
from kvbench.loadtest.max_rate.search import (
    ALWAYS,
    CLIENT_LIMIT,
    FOUND,
    INVALID,
    NEVER,
    OUT_OF_RUNS,
    TOO_SHORT,
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
    # doublings or halvings to the bracket, bisections of ratio 2 down to the tolerance, one confirmation of each end
    bisections = math.ceil(math.log2(math.log(2) / math.log(1 + tolerance)))
    assert len(trials) <= math.ceil(abs(math.log2(capacity / start))) + 1 + bisections + 2
    assert [t.rate for t in trials[-2:]] == [answer.met, answer.unmet]
    assert sum(t.rate == answer.met for t in trials) == sum(t.rate == answer.unmet for t in trials) == 2


def test_bounds_that_are_met_or_not_met_throughout_are_said_so():
    answer, trials = search(lambda rate, _: True, Bounds(1, 0.5, 12))
    assert answer == Answer(ALWAYS, 12, None, confirmed=True)
    assert [t.rate for t in trials] == [1, 2, 4, 8, 12, 12]  # never above the highest rate allowed
    answer, trials = search(lambda rate, _: False, Bounds(1, 0.3, 12))
    assert answer == Answer(NEVER, None, 0.3, confirmed=True)
    assert [t.rate for t in trials] == [1, 0.5, 0.3, 0.3]


def test_an_answer_that_fails_its_confirmation_is_none():
    seen: dict[float, int] = {}

    def lucky(rate, _):
        seen[rate] = seen.get(rate, 0) + 1
        return rate <= 6 or (rate <= 7.5 and seen[rate] == 1)  # luck at the first go only

    answer, trials = search(lucky, Bounds(1, 0.1, 100, 0.05))
    assert answer.outcome == FOUND and answer.confirmed and answer.met <= 6
    assert any(t.rate > 6 and t.met for t in trials)  # there was luck, and it is not the answer


@pytest.mark.parametrize("unlucky", range(8))
def test_one_unlucky_run_does_not_decide(unlucky):
    answer, _ = search(lambda rate, n: rate <= 40 and n != unlucky, Bounds(8, 0.1, 1000, 0.05))
    assert answer.outcome == FOUND and answer.confirmed
    assert answer.met <= 40 < answer.unmet <= answer.met * 1.05


def test_searches_of_runs_that_miss_by_chance_end_near_the_limit():
    low = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        answer, _ = search(lambda rate, _, rng=rng: rate <= 40 and rng.random() > 0.05, Bounds(8, 0.125, 8192, 0.05))
        low += answer.met is None or answer.met < 36
    assert low <= 6  # each needs two chances of 1 in 20 at one of some ten rates


def test_noise_leaves_the_answer_near_the_capacity_and_its_runs_agree():
    misses = []
    for seed in range(60):
        rng = np.random.default_rng(seed)

        def noisy(rate, _, rng=rng):
            return rate * rng.lognormal(0, 0.03) <= 10

        answer, trials = search(noisy, Bounds(1, 0.1, 1000, 0.05, max_runs=40))
        assert answer.outcome == FOUND and answer.confirmed
        for rate, met in ((answer.met, True), (answer.unmet, False)):
            told = [t.met for t in trials if t.rate == rate]
            assert told.count(met) == 2 and told.count(not met) <= 1
        misses.append(abs(math.log(answer.met / 10)))
    assert np.median(misses) < 0.06 and max(misses) < 0.2


def test_a_met_rate_above_one_that_was_not_is_luck():
    trials = [Trial(2, True), Trial(4, True), Trial(8, False), Trial(4, False), Trial(4, False), Trial(16, True)]
    assert bracket(trials) == (2, 4)
    assert bracket([]) == (None, None)
    assert advance(trials[:4], Bounds(1, 0.1, 100)) == Ask(4, confirms=True)  # its two runs disagree


def nothing(rate, cause, why="because"):
    return Trial(rate, None, (why,), cause)


def test_where_the_client_is_the_limit_lower_rates_are_tried():
    def busy(limit_of_the_server):
        def run(trials):
            rate = advance(trials, Bounds(4, 0.1, 1000, 0.05))
            if isinstance(rate, Ask):
                met = rate.rate <= limit_of_the_server
                one = nothing(rate.rate, CLIENT_LIMIT, "it lagged") if rate.rate > 20 else Trial(rate.rate, met)
                return run([*trials, one])
            return rate

        return run([])

    found = busy(13)  # twice at 32 the client lagged, and the server's own limit is below
    assert found.outcome == FOUND and found.confirmed and found.met <= 13 < found.unmet
    answer = busy(500)
    assert answer.outcome == CLIENT_LIMIT and answer.unmet is None and answer.confirmed
    assert 20 / 1.05 <= answer.met <= 20 and "the client, not the server, was the limit (it lagged)" in answer.reason
    bounds = Bounds(4, 2, 100)
    none = advance([nothing(rate, CLIENT_LIMIT) for rate in (4, 4, 2, 2)], bounds)
    assert none.outcome == CLIENT_LIMIT and none.met is None
    assert advance([nothing(4, CLIENT_LIMIT)] * 2, bounds) == Ask(2)
    mixed = advance([nothing(4, INVALID), nothing(4, CLIENT_LIMIT), nothing(4, INVALID)], bounds)
    assert mixed.outcome == INVALID


@pytest.mark.parametrize("rate", [4, 5])  # the end that is met, and the one that is not
def test_an_end_that_the_client_does_not_bear_again_ends_the_search(rate):
    trials = [Trial(4, True), Trial(5, False), *[nothing(rate, CLIENT_LIMIT)] * 2]
    for _ in range(20):
        step = advance(trials, Bounds(4, 1, 100, 0.5))
        if not isinstance(step, Ask):
            break
        trials.append(Trial(step.rate, True))
    assert (
        step.outcome == CLIENT_LIMIT and step.confirmed and step.met < rate and f"at {rate}/s the client" in step.reason
    )


def test_runs_that_are_too_short_have_an_outcome_of_their_own():
    bounds = Bounds(1, 0.1, 100)
    assert advance([Trial(1, True), nothing(2, TOO_SHORT)], bounds) == Ask(2)
    answer = advance([Trial(1, True), *[nothing(2, TOO_SHORT, "9 s are needed")] * 2], bounds)
    assert answer.outcome == TOO_SHORT and answer.met == 1 and "9 s are needed" in answer.reason


def test_an_invalid_run_is_repeated_twice_and_then_ends_the_search_with_its_reason():
    bounds = Bounds(1, 0.1, 100)
    once = [Trial(1, True), Trial(2, None, ("foreign work",), INVALID)]
    assert advance(once, bounds) == Ask(2)
    assert advance([*once, Trial(2, True)], bounds) == Ask(4)
    twice = [*once, Trial(2, None, ("y",), INVALID)]
    assert advance(twice, bounds) == Ask(2)
    assert advance(twice, Bounds(1, 0.1, 100, max_runs=3)).outcome == OUT_OF_RUNS
    answer = advance([*twice, Trial(2, None, ("the disk lagged",), INVALID)], bounds)
    assert answer.outcome == INVALID and answer.met == 1 and "the disk lagged" in answer.reason
    apart = [*once, Trial(2, True), Trial(4, None, ("x",), INVALID)]  # one invalid run at each of two rates is no end
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
    assert unmet(conditions, metrics(), None, 0.05) == []
    assert unmet(conditions, metrics(ttft_ms={"p95": 500.0}, goodput_share=0.95), None, 0.05) == []
    assert unmet(conditions, metrics(ttft_ms={"p95": 500.1}), None, 0.05) == ["p95_ttft<=500ms: 500.1 ms"]
    assert unmet(conditions, metrics(goodput_share=0.9), None, 0.05) == ["goodput>=95%: 90.0%"]
    assert unmet(conditions, metrics(ttft_ms={"p95": None}), None, 0.05) == ["p95_ttft<=500ms: not measured"]
    assert unmet(conditions, metrics(completed=198, failed=2), None, 0.05) == []  # 1 % is allowed
    assert unmet(conditions, metrics(completed=197, failed=3), None, 0.05) == ["3 of 200 requests failed"]
    assert "backlog" in unmet(conditions, metrics(), Backlog(2, 40, 100), 0.05)[0]
    behind = Backlog(2, 3, 100, came=500, ended=470)
    assert unmet(conditions, metrics(), behind, 0.05) == ["the server fell behind: 470 requests ended while 500 came"]
    assert unmet(conditions, metrics(), behind, 0.1) == []
