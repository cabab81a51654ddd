"""The search for the highest rate that meets an SLO: its steps, its conditions, and whether a server kept up."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from kvbench.metrics.model import LoadMetrics
from kvbench.sweep.rate_run import RunLength, patience_s
from kvbench.sweep.rate_search import (
    ALWAYS,
    CLIENT_LIMIT,
    FOUND,
    INVALID,
    NEVER,
    OUT_OF_RUNS,
    TOO_SHORT,
    Bounds,
    QueueGrowth,
    SearchAnswer,
    Trial,
    filling_s,
    interval_so_far,
    misses,
    next_step,
    parse_conditions,
    queue_growth,
)
from kvbench.workload.load_section import Slo


def search(verdict, bounds):
    """Runs to the answer; ``verdict(rate, n)``: of the n-th run, True, False or None."""
    trials: list[Trial] = []
    while not isinstance(step := next_step(trials, bounds), SearchAnswer):
        trials.append(Trial(step, verdict(step, len(trials)), ("because",)))
        assert len(trials) <= bounds.max_runs
    return step, trials


@pytest.mark.parametrize("start", [0.25, 7.3, 100.0])
@pytest.mark.parametrize("tolerance", [0.1, 0.02])
def test_a_capacity_is_found_within_the_tolerance_from_wherever_it_starts(start, tolerance):
    capacity, bounds = 7.31, Bounds(start, 0.01, 1000, tolerance, 60)
    answer, trials = search(lambda rate, _: rate <= capacity, bounds)
    assert answer.outcome == FOUND and answer.reason == ""
    assert answer.interval.low <= capacity <= answer.interval.high <= answer.interval.low * (1 + tolerance)
    assert answer.interval.low < answer.interval.rate < answer.interval.high
    rates = [t.rate for t in trials]
    assert all(b <= 2 * max(met) for n, b in enumerate(rates) if (met := [r for r in rates[:n] if r <= capacity]))


def test_bounds_that_are_met_or_missed_throughout_leave_an_end_open():
    answer, trials = search(lambda rate, _: True, Bounds(1, 0.5, 12))
    assert answer.outcome == ALWAYS and answer.interval.high is None and answer.interval.rate is None
    assert answer.interval.low >= 12 / 1.1
    assert [t.rate for t in trials][:5] == [1, 2, 4, 8, 12] and {t.rate for t in trials[5:]} <= {12}
    answer, trials = search(lambda rate, _: False, Bounds(1, 0.3, 12))
    assert answer.outcome == NEVER and answer.interval.low is None and answer.interval.high <= 0.3 * 1.1
    assert [t.rate for t in trials][:3] == [1, 0.5, 0.3] and {t.rate for t in trials[3:]} <= {0.3}


def test_where_only_one_rate_may_be_run_nothing_is_known_before_it_was():
    bounds = Bounds(20, 20, 20)
    assert next_step([], bounds) == 20
    answer, trials = search(lambda rate, _: True, bounds)
    assert answer.outcome == ALWAYS and answer.interval.low >= 20 and len(trials) <= 10


@pytest.mark.parametrize("unlucky", [0, 3, 7])
def test_one_unlucky_run_does_not_decide(unlucky):
    answer, _ = search(lambda rate, n: rate <= 40 and n != unlucky, Bounds(8, 0.1, 1000))
    assert answer.outcome == FOUND and answer.interval.low <= 40 <= answer.interval.high


def nothing(rate, cause, why="because"):
    return Trial(rate, None, (why,), cause)


def test_where_the_client_is_the_limit_lower_rates_are_tried():
    def busy(limit_of_the_server):
        trials = []
        while not isinstance(step := next_step(trials, Bounds(4, 0.1, 1000)), SearchAnswer):
            met = step <= limit_of_the_server
            trials.append(nothing(step, CLIENT_LIMIT, "it lagged") if step > 20 else Trial(step, met))
        return step

    found = busy(13)  # twice at 32 the client lagged, and the server's own limit is below
    assert found.outcome == FOUND and found.interval.low <= 13 <= found.interval.high
    answer = busy(500)
    assert answer.outcome == CLIENT_LIMIT and answer.interval.high is None
    assert 20 / 1.15 <= answer.interval.low <= 20
    assert "the client, not the server, was the limit (it lagged)" in answer.reason
    bounds = Bounds(4, 2, 100)
    none = next_step([nothing(rate, CLIENT_LIMIT) for rate in (4, 4, 2, 2)], bounds)
    assert none.outcome == CLIENT_LIMIT and none.interval is None
    assert next_step([nothing(4, CLIENT_LIMIT)] * 2, bounds) == 2


def test_invalid_runs_are_made_again_and_end_the_search_only_after_six_in_a_row():
    bounds, lost = Bounds(1, 0.1, 100), nothing(2, INVALID, "the disk lagged")
    for attempts in range(1, 6):
        assert next_step([Trial(1, True), *[lost] * attempts], bounds) == 2
    assert next_step([Trial(1, True), *[lost] * 5, Trial(2, True)], bounds) == 4
    assert next_step([Trial(1, True), lost, lost], Bounds(1, 0.1, 100, max_runs=3)).outcome == OUT_OF_RUNS
    answer = next_step([Trial(1, True), *[lost] * 6], bounds)
    assert answer.outcome == INVALID and answer.interval.high is None and "the disk lagged" in answer.reason
    mixed = [nothing(4, INVALID), *[nothing(4, CLIENT_LIMIT)] * 2, *[nothing(4, INVALID)] * 3]
    assert next_step(mixed, bounds).outcome == INVALID


def test_invalid_runs_change_nothing_of_the_interval():
    told, bounds = [Trial(8, True), Trial(10, False), Trial(9, True)], Bounds(8, 1, 100)
    assert interval_so_far([*told, nothing(9.5, INVALID)], bounds) == interval_so_far(told, bounds)
    assert interval_so_far([nothing(8, INVALID)], bounds) is None


def test_the_number_of_runs_is_bounded_and_the_interval_so_far_is_told():
    answer, trials = search(lambda rate, _: rate <= 7, Bounds(1, 0.1, 100, 0.02, max_runs=9))
    assert answer.outcome == OUT_OF_RUNS and len(trials) == 9 and "--max-runs" in answer.reason
    assert answer.interval.low <= 7 <= answer.interval.high and answer.interval.high > answer.interval.low * 1.02
    answer, _ = search(lambda rate, _: rate <= 7, Bounds(1, 0.1, 100, max_runs=3))
    assert answer.interval.high is None and 1 < answer.interval.low <= 4  # 1, 2 and 4 met it


def test_conditions_are_read_with_their_units():
    ttft, itl, e2el, share, part = parse_conditions(
        "p95_ttft<=500ms, P99_itl_ms <= 50,median_e2el<2s,goodput>=95%,goodput>=0.9"
    )
    assert (ttft.metric, ttft.stat, ttft.limit) == ("ttft_ms", "p95", 500)
    assert (itl.metric, itl.stat, itl.limit) == ("itl_ms", "p99", 50)
    assert (e2el.metric, e2el.stat, e2el.limit) == ("e2el_ms", "p50", 2000)
    assert (share.metric, share.limit, part.limit) == ("goodput", 0.95, 0.9)
    assert (ttft.samples_needed, itl.samples_needed, e2el.samples_needed) == (130, 1, 11)


@pytest.mark.parametrize("text", ["p95_ttft<400", "p95_ttft<=400", "goodput>97%", "goodput>=97%"])
def test_a_value_at_its_limit_keeps_it(text):
    (condition,) = parse_conditions(text)
    assert condition.met(metrics())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "''"),
        ("p95_ttft", "'p95_ttft'"),
        ("p95_ttft>=3", "'p95_ttft>=3'"),
        ("p97_ttft<=3", "'p97' .*p95"),
        ("p95_tttf<=3", "'tttf' .*ttft"),
        ("p95_ttft<=0ms", "0 is not a number above 0"),
        ("p95_ttft<=1.2.3ms", "1.2.3 is not a number above 0"),
        ("goodput>=120%", "'goodput>=120%'"),
    ],
)
def test_conditions_that_mean_nothing_are_refused_by_their_text(text, words):
    with pytest.raises(ValueError, match=words):
        parse_conditions(text)


def metrics(**values):
    values = {"ttft_ms": {"p95": 400.0}, "completed": 200, "failed": 0, "goodput_share": 0.97} | values
    share, sent = values.pop("goodput_share"), values["completed"] + values["failed"]
    return LoadMetrics.model_validate(values | {"duration_s": 10.0, "goodput": share * sent / 10.0})


@pytest.mark.parametrize(
    ("measured", "growth", "tolerance", "named"),
    [
        ({}, None, 0.05, []),
        ({"ttft_ms": {"p95": 500.0}, "goodput_share": 0.95}, None, 0.05, []),
        ({"ttft_ms": {"p95": 500.1}}, None, 0.05, ["500.1 ms"]),
        ({"goodput_share": 0.9}, None, 0.05, ["90.0%"]),
        ({"ttft_ms": {"p95": None}}, None, 0.05, ["p95_ttft"]),
        ({"completed": 198, "failed": 2}, None, 0.05, []),  # 1 % is allowed
        ({"completed": 197, "failed": 3}, None, 0.05, ["3 of 200"]),
        ({}, QueueGrowth(2, 40, 100), 0.05, ["40.0"]),
        ({}, QueueGrowth(2, 3, 100, came=500, ended=470), 0.05, ["470"]),
        ({}, QueueGrowth(2, 3, 100, came=500, ended=470), 0.1, []),
    ],
)
def test_a_run_meets_the_slo_only_with_every_condition_and_almost_no_failure(measured, growth, tolerance, named):
    conditions = parse_conditions("p95_ttft<=500ms,goodput>=95%")
    reasons = [miss.text for miss in misses(conditions, metrics(**measured), growth, tolerance)]
    assert len(reasons) == len(named) and all(value in reason for value, reason in zip(named, reasons, strict=True))


def test_a_miss_says_which_limit_it_was():
    conditions = parse_conditions("p95_ttft<=500ms,goodput>=95%")
    slow = metrics(ttft_ms={"p95": 600.0}, goodput_share=0.9, failed=12, slo_misses={"ttft_ms": 3, "tpot_ms": 9})
    found = misses(conditions, slow, QueueGrowth(2, 40, 100), 0.05)
    assert [miss.cause for miss in found] == [
        "p95 ttft", "goodput (failed 12, tpot 9, ttft 3)", "failures", "queue grew",
    ]  # fmt: skip
    (behind,) = misses(conditions, metrics(), QueueGrowth(2, 3, 100, came=500, ended=470), 0.05)
    assert behind.cause == "fell behind"


def test_the_server_falls_behind_by_numbers_that_can_tell():
    assert QueueGrowth(0, 0, 0, came=400, ended=379).falls_behind(0.05)
    assert not QueueGrowth(0, 0, 0, came=400, ended=380).falls_behind(0.05)
    assert not QueueGrowth(0, 0, 0, came=399, ended=300).falls_behind(0.05)  # too few: their number swings by more
    starts = np.arange(40.0)
    kept_up = queue_growth(starts, starts + 3)  # settled at 9.75 s
    assert (kept_up.came, kept_up.ended) == (30, 30)
    slow = queue_growth(starts, starts + np.where(starts % 5 == 0, 21, 3))
    assert (slow.came, slow.ended) == (0, 0)  # the number in flight climbs for over half of the run
    behind = queue_growth(starts, np.where(starts < 10, starts + 3, starts * 2))
    assert (behind.came, behind.ended) == (30, 13)  # 7, 8, 9 and those that came at 10 to 19


def test_growth_is_of_the_time_average_of_the_requests_in_flight():
    starts, ends = np.arange(17.0), np.arange(17.0) + 3.0  # 3 in flight at any time from t = 3 on
    growth = queue_growth(starts, ends)  # settled from t = 4 on, thirds of 4 s
    assert growth.early == pytest.approx(3) and growth.late == pytest.approx(3) and growth.arrivals == 8
    stuck = np.where(starts < 4, starts + 1, np.nan)  # from t = 4 on nothing ends: all that came are in flight
    grown = queue_growth(starts, stuck)
    assert grown.early == pytest.approx(2.5) and grown.late == pytest.approx(10.5) and grown.grows


def test_a_run_that_was_over_before_the_first_answers_tells_nothing_of_the_queue():
    starts = np.arange(40.0)
    assert filling_s(starts, starts + 7) == 7
    assert queue_growth(starts, starts + 19) is not None and not queue_growth(starts, starts + 19).grows
    assert queue_growth(starts, starts + 21) is None  # it fills up to 21 in flight, all through the run
    assert queue_growth([1.0] * 20, [2.0] * 20) is None and queue_growth([1, 2, 3], [2, 3, 4]) is None


def test_growth_must_be_beyond_chance_and_a_share_of_what_came():
    assert QueueGrowth(100, 140, 200).grows
    assert not QueueGrowth(5, 8, 20).grows  # 15 % of the arrivals, and well within what 5 in flight swing by
    assert not QueueGrowth(400, 470, 4000).grows  # beyond chance, and under 2 % of the arrivals: all but kept up


CAPACITY = 10.0  # requests/s of SERVERS that take SERVERS / CAPACITY seconds for one, in the mean
SERVERS = 10
TOLERANCE, OVERLOAD = 0.1, 0.05


def served(rate, count, rng, servers=SERVERS, sigma=0.5):
    """Starts, ends and waits [s] of a queue M/G/c, first come first served, with log-normal service times."""
    starts = np.cumsum(rng.exponential(1 / rate, count))
    service = servers / CAPACITY * rng.lognormal(-sigma * sigma / 2, sigma, count)
    free = [0.0] * servers
    ends = np.empty(count)
    for i, start in enumerate(starts):
        ends[i] = max(heapq.heappop(free), start) + service[i]
        heapq.heappush(free, ends[i])
    return starts, ends, ends - service - starts


def judged(rate, conditions, length, rng):
    count = length.requests(rate, conditions)
    starts, ends, waits = served(rate, count, rng)
    measured = metrics(
        ttft_ms={"p95": float(np.percentile(waits, 95)) * 1e3 + 50}, tpot_ms={"p95": 20.0}, completed=count,
        goodput_share=float(np.mean(waits + 0.05 <= 5.0)),
    )  # fmt: skip
    growth = queue_growth(starts, ends)
    missed = misses(conditions, measured, growth, OVERLOAD)
    if not missed and growth is None:
        return Trial(rate, None, ("short",), TOO_SHORT)
    return Trial(rate, not missed, tuple(miss.text for miss in missed))


@pytest.mark.parametrize(
    ("slo", "least"),
    [("p95_ttft<=500ms", 6.5), ("p95_ttft<=5s", 9.0), ("p95_ttft<=30s", 9.0), ("p95_tpot<=50ms", 9.0),
     ("goodput>=95%", 9.0)],
)  # fmt: skip
def test_no_search_answers_a_rate_beyond_the_capacity(slo, least):
    conditions = parse_conditions(slo)
    length = RunLength(1, 20.0, overload=OVERLOAD, patience_s=patience_s(conditions, Slo(ttft_ms=5000)))
    answers = []
    for seed in range(8):
        trials: list[Trial] = []
        while not isinstance(step := next_step(trials, Bounds(4.0, 4 / 64, 4 * 1024.0, TOLERANCE)), SearchAnswer):
            trials.append(judged(step, conditions, length, np.random.default_rng([seed, len(trials)])))
        assert isinstance(step, SearchAnswer) and step.outcome in (FOUND, OUT_OF_RUNS)
        answers.append(step.interval.rate)
    assert max(answers) <= CAPACITY * 1.11
    assert np.mean(np.array(answers) > CAPACITY * 1.06) <= 0.08
    assert np.median(answers) >= least


@pytest.mark.parametrize("slo", ["p95_ttft<=5s", "p95_tpot<=50ms"])
def test_a_run_long_enough_shows_an_overload(slo):
    conditions = parse_conditions(slo)
    length = RunLength(1, 20.0, overload=OVERLOAD, patience_s=patience_s(conditions, None))

    def met(load):
        rngs = (np.random.default_rng(seed) for seed in range(20))
        return np.mean([judged(CAPACITY * load, conditions, length, rng).met for rng in rngs])

    assert met(0.85) >= 0.95 and met(1.05) <= 0.7 and met(1.1) <= 0.1 and met(1.2) == 0.0  # 1.05: a toss-up
