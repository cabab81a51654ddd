"""No search answers a rate that the server cannot serve, however long the SLO lets a request wait."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest

from kvbench.loadtest.max_rate.plan import Sizes, patience_s
from kvbench.loadtest.max_rate.queue_growth import arrivals_to_tell, backlog_of, share_told
from kvbench.loadtest.max_rate.search import TOO_SHORT, Answer, Ask, Bounds, Trial, advance, parse_conditions, unmet
from kvbench.workload.load_section import Slo

CAPACITY = 10.0  # requests/s of SERVERS that take SERVERS / CAPACITY seconds for one, in the mean
SERVERS = 10
TOLERANCE = 0.05


def served(rate, count, rng):
    """Starts, ends and waits [s] of a queue M/G/10, first come first served, with log-normal service times."""
    starts = np.cumsum(rng.exponential(1 / rate, count))
    service = SERVERS / CAPACITY * rng.lognormal(-0.125, 0.5, count)
    free = [0.0] * SERVERS
    ends = np.empty(count)
    for i, start in enumerate(starts):
        ends[i] = max(heapq.heappop(free), start) + service[i]
        heapq.heappush(free, ends[i])
    return starts, ends, ends - service - starts


def judged(rate, conditions, sizes, rng):
    count = sizes.requests(rate, conditions)
    starts, ends, waits = served(rate, count, rng)
    metrics = {
        "ttft_ms": {"p95": np.percentile(waits, 95) * 1e3 + 50}, "tpot_ms": {"p95": 20.0}, "completed": count,
        "failed": 0, "goodput_share": np.mean(waits + 0.05 <= 5.0),
    }  # fmt: skip
    backlog = backlog_of(starts, ends)
    reasons = unmet(conditions, metrics, backlog, TOLERANCE)
    if not reasons and backlog is None:
        return Trial(rate, None, ("short",), TOO_SHORT)
    return Trial(rate, not reasons, tuple(reasons))


@pytest.mark.parametrize(
    ("slo", "least"),
    [("p95_ttft<=500ms", 6.5), ("p95_ttft<=5s", 9.0), ("p95_ttft<=30s", 9.0), ("p95_tpot<=50ms", 9.0),
     ("goodput>=95%", 9.0)],
)  # fmt: skip
def test_no_search_answers_a_rate_beyond_the_capacity(slo, least):
    conditions = parse_conditions(slo)
    sizes = Sizes(1, 20.0, tolerance=TOLERANCE, patience_s=patience_s(conditions, Slo(ttft_ms=5000)))
    answers = []
    for seed in range(60):
        trials: list[Trial] = []
        while isinstance(step := advance(trials, Bounds(4.0, 4 / 64, 4 * 1024.0, TOLERANCE)), Ask):
            trials.append(judged(step.rate, conditions, sizes, np.random.default_rng([seed, len(trials)])))
        assert isinstance(step, Answer) and step.confirmed
        answers.append(step.met)
    assert max(answers) <= CAPACITY * 1.11
    assert np.mean(np.array(answers) > CAPACITY * 1.06) <= 0.08
    assert np.median(answers) >= least


@pytest.mark.parametrize("overload", [1.05, 1.1, 1.2])
@pytest.mark.parametrize("slo", ["p95_ttft<=5s", "p95_tpot<=50ms"])
def test_a_run_long_enough_shows_an_overload(overload, slo):
    conditions = parse_conditions(slo)
    sizes = Sizes(1, 20.0, tolerance=TOLERANCE, patience_s=patience_s(conditions, None))
    missed = [
        judged(CAPACITY * overload, conditions, sizes, np.random.default_rng(seed)).met is False for seed in range(30)
    ]
    assert np.mean(missed) >= {1.05: 0.3, 1.1: 0.9, 1.2: 1.0}[overload]  # at the tolerance itself it is a toss-up
    kept_up = [judged(CAPACITY * 0.85, conditions, sizes, np.random.default_rng(seed)).met for seed in range(30)]
    assert np.mean(kept_up) >= 0.95


def test_how_long_a_queue_takes_to_break_the_slo():
    """At an overload x the last of T seconds waits x T, and a percentile q of all waits is q x T."""
    assert patience_s(parse_conditions("p50_ttft<=2s"), None) == pytest.approx(4)
    assert patience_s(parse_conditions("p95_ttft<=2s,p99_e2el<=99s,p99_tpot<=9ms"), None) == pytest.approx(2 / 0.95)
    assert patience_s(parse_conditions("max_e2el<=2s"), None) == 2 and patience_s((), None) == math.inf
    assert math.isinf(patience_s(parse_conditions("p95_tpot<=50ms,p95_ttft_send<=1s"), None))
    goodput = parse_conditions("goodput>=80%")
    assert patience_s(goodput, Slo(ttft_ms=4000, tpot_ms=9)) == pytest.approx(5)
    assert math.isinf(patience_s(goodput, Slo(tpot_ms=9)))


def test_runs_are_as_long_as_the_tolerance_asks():
    p95 = parse_conditions("p95_ttft<=5s")
    waiting = Sizes(1, 20.0, tolerance=0.05, patience_s=5.0)
    assert waiting.requests(4.0, p95) == 400 and waiting.seconds_of(4.0, p95) == 100  # 5 s of wait at 5 % more
    assert waiting.requests(40.0, p95) == 1200  # beyond chance by their number: 3 / 0.05^2
    assert Sizes(1, 20.0, tolerance=0.1).requests(1.0, p95) == 300
    assert Sizes(50, 0.0, enough=False, tolerance=0.05, patience_s=5.0).requests(4.0, p95) == 50
    assert Sizes(77, 20.0, tolerance=0.05, fixed=True).requests(40.0, p95) == 77
    assert waiting.overload_told(4.0, 400) == pytest.approx(0.05)
    assert waiting.overload_told(4.0, 100) == pytest.approx(math.sqrt(3 / 100))  # by number, sooner than by 20 %
    assert share_told(round(arrivals_to_tell(0.03))) == pytest.approx(0.03, rel=1e-3)
