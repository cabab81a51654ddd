"""How often the gate errs, by simulation with fixed seeds; the whole tables: tests/benchmarks/gate_power.md.

24 cells in 4 classes, 12 configurations or one, 3 metrics, launches in time order, three looks.
"""

import functools
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from kvbench.gate.compare.conclude import look_at
from kvbench.gate.timing.power import seen_by
from kvbench.gate.timing.rules import DEFAULT_RULES
from kvbench.gate.timing.signflip import adjusted_p
from kvbench.gate.verdict.verdict import FAIL, PASS
from tests.benchmarks import gate_power
from tests.benchmarks.gate_power import INDEPENDENT, ONE_LAUNCH, SHARES, WHERE, bounds, caught
from tests.support.gate_simulation import (
    CONFIGURATIONS,
    NOISES,
    Decisions,
    decide,
    harms,
    interrupted,
    log_ratios,
    passes_at_margin,
    table,
    worsened,
)

RUNS = 2000
LAST = DEFAULT_RULES.looks[-1].pairs
EVERYWHERE, ONE_CLASS, ONE_CELL = WHERE.values()
CASES = [("t4", INDEPENDENT), ("ar1", INDEPENDENT), ("drifting", (0.5, CONFIGURATIONS)), ("bimodal", ONE_LAUNCH)]


def in_full(cases: list) -> list:
    """Cases of the full ring: they say no more than those of the main one, of other noise or slowdowns."""
    return [pytest.param(*case, marks=pytest.mark.full) for case in cases]


@functools.cache
def unchanged(noise: str, launch: tuple[float, int]) -> Decisions:
    """2,000 comparisons of a build with itself; none of them ends by a PASS, which would only make alarms rarer."""
    rng = np.random.default_rng([5, CASES.index((noise, launch))])
    return decide(log_ratios(noise, rng, RUNS, LAST, *launch), passes=False)


def check_alpha(found: Decisions) -> None:
    runs = len(found.failed)
    assert bounds((found.failed > 0).sum(), runs)[1] <= 0.015
    # without the floors: the p-values themselves keep to the looks' alphas
    count = int((found.rejected > 0).sum())
    assert stats.binomtest(count, runs, DEFAULT_RULES.alpha, alternative="greater").pvalue > 0.01


@pytest.mark.parametrize(("noise", "launch"), [CASES[0], *in_full(CASES[1:])])
def test_a_build_against_itself_fails_in_at_most_one_and_a_half_percent(noise, launch):
    check_alpha(unchanged(noise, launch))


@pytest.mark.parametrize("noise", ["t4", *in_full([("ar1",)])])
def test_stopping_resuming_and_repeating_slow_launches_keeps_the_false_alarm_rate(noise):
    y, points = interrupted(noise, np.random.default_rng([13, NOISES.index(noise)]), 1000, 0.5)
    early = (points != [look.pairs for look in DEFAULT_RULES.looks]).any(axis=1)
    assert 0.4 < early.mean() < 0.9  # it is not the plain simulation once more
    check_alpha(decide(y, passes=False, points=points))
    means = y.mean(axis=(1, 2))  # neither side is favoured: each metric's mean is 0 within 3.5 standard errors
    assert (np.abs(means.mean(axis=0)) < 3.5 * means.std(axis=0) / np.sqrt(len(y))).all()


@pytest.mark.full
def test_p_values_alone_spend_their_alpha_and_no_more():
    """An exact test is not too careful either: 8 pairs reject in 1 of 256, all looks in a little under 1 %."""
    rejected = np.concatenate([unchanged(*case).rejected for case in CASES])
    low, high = bounds((rejected == 1).sum(), len(rejected))
    assert low <= 2.0**-8 <= high
    low, _ = bounds((rejected > 0).sum(), len(rejected))
    assert 0.005 <= low <= DEFAULT_RULES.alpha


TABLES = Path(gate_power.__file__).with_suffix(".md").read_text(encoding="utf-8")
ROWS = [(m, share, place) for m in range(3) for share in SHARES for place in WHERE]


def committed() -> dict[tuple[str, str, str], tuple[float, float]]:
    """Of gate_power.md: by metric, share and place, the parts that FAIL, of independent noise and of shared noise."""
    rows = {}
    for line in TABLES.split("## Power")[1].split("## What passes:")[0].splitlines():
        if len(columns := [column.strip() for column in line.strip("|").split("|")]) == 7 and "%" in columns[1]:
            independent, together = (float(columns[i].removesuffix(" %")) / 100 for i in (3, 5))
            rows[tuple(columns[:3])] = independent, together
    return rows


@pytest.mark.parametrize(("metric", "share", "place"), [*ROWS[3::9], *in_full([*ROWS[::9], *ROWS[6::9], *ROWS[1:9:4]])])
def test_a_slowdown_is_caught_as_often_as_the_committed_table_says(metric, share, place):
    assert len(committed()) == len(ROWS) == 27
    runs, of_table = 60, int(re.search(r"--runs (\d+)", TABLES)[1])
    known_shares = committed()[DEFAULT_RULES.metrics[metric].title, f"{share * 100:.0f} %", place]
    for j, (launch, expected) in enumerate(zip((INDEPENDENT, ONE_LAUNCH), known_shares, strict=True)):
        rng = np.random.default_rng([15, j, ROWS.index((metric, share, place))])
        count = int((caught(rng, runs, metric, share, place, launch) > 0).sum())
        known = round(expected * of_table)
        same = stats.fisher_exact([[count, runs - count], [known, of_table - known]]).pvalue
        assert same > 1e-3, f"{count} of {runs} are caught, the table says {expected:.1%}"


def test_a_build_against_itself_passes_and_a_slower_one_does_not():
    y = log_ratios("normal", np.random.default_rng(8), 100, LAST, *ONE_LAUNCH)
    assert (decide(y).passed > 0).mean() >= 0.95
    assert (decide(worsened(y[:60], 0, 0.03, EVERYWHERE)).passed > 0).mean() <= 0.05


@pytest.mark.parametrize("noise", ["bimodal", *in_full([("normal",), ("ar1",)])])
def test_a_harm_of_its_margin_passes_in_at_most_five_percent(noise):
    count = passes_at_margin(noise, np.random.default_rng([9, NOISES.index(noise)]), RUNS)
    low, _ = bounds(count, RUNS)
    assert low <= sum(look.alpha_pass for look in DEFAULT_RULES.looks)
    assert count / RUNS >= 0.02  # 5 of 256 patterns at the first look: a PASS is not out of reach


def test_what_is_called_detectable_is_caught_in_about_four_of_five_cases():
    """The mean of what 50 comparisons say of one cell's TTFT, put into that cell in 250 others, at the first look."""
    pairs, alpha = DEFAULT_RULES.looks[0].pairs, DEFAULT_RULES.looks[0].alpha
    each, harm = harms(log_ratios("normal", np.random.default_rng([10, 0]), 50, pairs))
    floors = np.array([h.floor for h in each])
    place = [h.id for h in each].index("cell/w0/c0/p95_ttft_ms")
    said = np.mean([seen_by(x, floors, alpha)[0][place] for x in harm])
    others = worsened(log_ratios("normal", np.random.default_rng([11, 0]), 250, pairs), 1, np.expm1(said), ONE_CELL)
    _, harm = harms(others)
    power = np.mean([adjusted_p(x)[place] <= alpha and x[:, place].mean() >= floors[place] for x in harm])
    assert 0.7 <= power <= 0.9


def test_the_simulated_decisions_are_those_of_a_folder_whether_it_was_interrupted_or_not():
    y, points = interrupted("normal", np.random.default_rng(16), 40, 0.5)
    y = worsened(y, 1, 0.06, ONE_CLASS)
    found = decide(y, points=points)
    usual = [look.pairs for look in DEFAULT_RULES.looks]
    as_planned = (points == usual).all(axis=1)
    chosen = [*np.flatnonzero(~as_planned)[:8], *np.flatnonzero(as_planned)[:3]]
    for run in chosen:
        stops = [n for n in points[run].tolist() if n not in usual]
        judgement = look_at(table(y[run]), DEFAULT_RULES, stops)
        assert (judgement.outcome == FAIL) == (found.failed[run] > 0)
        assert (judgement.outcome == PASS) == (found.passed[run] > 0)
        if number := max(found.failed[run], found.passed[run]):
            assert judgement.pairs == points[run][number - 1]
    assert len(chosen) == 11 and len(set(found.failed[chosen])) > 2  # at looks of all kinds
