"""The verdict on tables whose answer is known, its sentences, and what it says of the pairs it would need."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from kvbench.gate.timing.judge import findings_of, judge, sentence
from kvbench.gate.timing.pairs import PairTable
from kvbench.gate.timing.power import power, smallest_detectable, unbiased
from kvbench.gate.timing.rules import DEFAULT_RULES
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS

METRICS = DEFAULT_RULES.metrics
CELLS = ("chat/a", "chat/b", "code/a", "code/b")
WORSE = np.array([-1.0, 1.0, 1.0])  # a log ratio's sign where it is for the worse


def noise(pairs: int, sd: float = 0.002, seed: int = 1, cells: int = len(CELLS)) -> np.ndarray:
    """Log ratios [pairs, cells, metrics] of no change."""
    return np.random.default_rng(seed).normal(size=(pairs, cells, len(METRICS))) * sd


def table(y: np.ndarray) -> PairTable:
    cells = CELLS[: y.shape[1]]
    return PairTable(y, cells, tuple(cell.split("/")[0] for cell in cells), METRICS)


def outcomes(y: np.ndarray, look: int = 0) -> dict[str, str]:
    return {r.hypothesis.id: r.outcome for r in judge(table(y), DEFAULT_RULES, look).results}


def test_no_change_passes_everywhere():
    judgement = judge(table(noise(8)), DEFAULT_RULES, 0)
    assert judgement.outcome == PASS
    assert {r.outcome for r in judgement.results} == {PASS}
    assert len(judgement.results) == 3 * (1 + 2 + 4)
    assert sentence(judgement) == (
        "No regression: after 8 pairs, every comparison (21) is shown to be worse by less than its margin, if at all."
    )
    assert {r.pairs_needed for r in judgement.results} == {None}


@pytest.mark.parametrize("metric", range(3))
def test_a_change_for_the_worse_fails_and_one_for_the_better_does_not(metric):
    y = noise(12)
    y[:, 1, metric] += 0.12 * WORSE[metric]
    found = outcomes(y, 1)
    name = METRICS[metric].name
    assert {key for key, outcome in found.items() if outcome == FAIL} == {
        f"overall/{name}",
        f"class/chat/{name}",
        f"cell/chat/b/{name}",
    }
    y[:, 1, metric] -= 0.24 * WORSE[metric]
    assert set(outcomes(y, 1).values()) == {PASS}


def test_a_change_below_the_floor_does_not_fail_however_sure_it_is():
    for share, expected in ((0.014, PASS), (0.016, FAIL)):  # the floor of throughput is 1.5 %
        y = noise(16, sd=0.0001)
        y[:, :, 0] += np.log(1 - share)
        judgement = judge(table(y), DEFAULT_RULES, 2)
        overall = judgement.results[0]
        assert overall.p <= 0.003
        assert (overall.outcome, judgement.outcome) == (expected, expected)


def test_a_change_above_the_floor_does_not_fail_without_a_small_p():
    y = noise(8, sd=0.10)
    assert (y.mean(axis=0) * WORSE > 0.03).any()
    assert FAIL not in outcomes(y).values()


def test_a_failure_counts_though_it_is_within_the_margin():
    y = noise(12, sd=0.001)
    y[:, 0, 1] += np.log(1.06)  # above the floor of 3 %, below the margin of 10 % of a cell
    result = next(r for r in judge(table(y), DEFAULT_RULES, 1).results if r.hypothesis.id == "cell/chat/a/p95_ttft_ms")
    assert result.p_noninferior <= 0.015
    assert result.outcome == FAIL


def test_not_within_the_margin_and_not_shown_is_undecided():
    y = noise(8, sd=0.001)
    y[:4, 3, 1] += 0.30
    y[4:, 3, 1] -= 0.12
    judgement = judge(table(y), DEFAULT_RULES, 0)
    assert judgement.outcome == INCONCLUSIVE
    open_ = {r.hypothesis.id: r for r in judgement.of(INCONCLUSIVE)}
    assert "cell/code/b/p95_ttft_ms" in open_
    assert min(r.pairs_needed for r in open_.values()) > 8
    assert max(r.smallest_detectable for r in open_.values()) > 0.10
    assert "8 pairs; 10 % higher is not ruled out" in sentence(judgement)
    assert f"of 21 comparisons are undecided, least known: {METRICS[1].title} of code/b" in sentence(judgement)


def test_too_few_pairs_say_so():
    three = judge(table(noise(3)), DEFAULT_RULES, 0)
    assert three.outcome == INCONCLUSIVE
    assert {r.smallest_detectable for r in three.results} == {None}
    assert "so few pairs can show no regression, however large (p is 0.12 at least)" in sentence(three)
    assert {r.pairs_needed for r in three.results} == {6}  # 2^-6 is the first p of at most 0.02
    assert sentence(three).endswith("about 6 pairs would settle it.")
    one = judge(table(noise(1)), DEFAULT_RULES, 0)
    assert (one.outcome, one.results[0].interval, one.results[0].sd) == (INCONCLUSIVE, None, None)
    assert "one pair does not tell how much pairs scatter" in sentence(one)


def test_more_pairs_than_a_comparison_takes_are_no_advice():
    y = noise(16, sd=0.001, cells=1)
    y[:, 0, 1] = np.where(np.arange(16) % 2, 0.12, -0.09)
    judgement = judge(table(y), DEFAULT_RULES, 2)
    open_ = judgement.of(INCONCLUSIVE)
    assert [r.hypothesis.metric.name for r in open_] == ["p95_ttft_ms"]
    assert open_[0].pairs_needed > 16
    assert sentence(judgement).endswith(
        f"about {open_[0].pairs_needed} pairs would settle it, and a comparison takes 16 at most: longer loads or a "
        "quieter machine make pairs scatter less."
    )
    y[:, 0, 1] += METRICS[1].harm_of(0.04) - y[:, 0, 1].mean()  # at its margin no number of pairs is enough
    floor_at_margin = replace(METRICS[1], floor=0.04)
    rules = replace(DEFAULT_RULES, metrics=(METRICS[0], floor_at_margin, METRICS[2]))
    at_margin = judge(PairTable(y, CELLS[:1], ("chat",), rules.metrics), rules, 2)
    assert "; more than 200 pairs would settle it, and a comparison takes 16 at most" in sentence(at_margin)


def one_sided(pairs: int, lacking: str, sd: float = 0.002) -> tuple[PairTable, np.ndarray, np.ndarray]:
    """The table and the values of a comparison where one side has no p95 ITL of chat/b."""
    base = np.full((pairs, len(CELLS), len(METRICS)), 50.0)
    candidate = base * np.exp(noise(pairs, sd))
    (candidate if lacking == "candidate" else base)[:, 1, 2] = np.nan
    classes = tuple(cell.split("/")[0] for cell in CELLS)
    return PairTable.from_values(base, candidate, CELLS, classes, METRICS), base, candidate


@pytest.mark.parametrize(
    ("lacking", "pairs", "look", "outcome"),
    [
        ("candidate", 8, 0, FAIL),
        ("candidate", 9, 1, FAIL),  # 2^-9 is below 0.003
        ("candidate", 7, 0, INCONCLUSIVE),  # all other hypotheses pass
        ("base", 8, 0, INVALID),
        ("base", 3, 0, INVALID),
    ],
)
def test_a_metric_that_one_side_has_lost_is_never_a_pass(lacking, pairs, look, outcome):
    made, base, candidate = one_sided(pairs, lacking)
    judgement = judge(made, DEFAULT_RULES, look)
    assert judgement.outcome == outcome
    if pairs > 6:
        assert {r.outcome for r in judgement.results} == {PASS}
    findings = {f.id: f for f in findings_of(judgement, base, candidate)}
    assert len(findings) == 3 * (1 + 2 + 4) - 1  # the class chat has one cell with that metric
    found = findings["cell/chat/b/p95_itl_ms"]
    assert (found.suite, found.outcome, found.change, found.p) == ("cell", outcome, None, None)
    having = "base" if lacking == "candidate" else "candidate"
    assert found.sentence == f"{lacking} has no p95 ITL of chat/b, {having} has it in all {pairs} pairs."
    assert (found.base is None, found.candidate is None) == (lacking == "base", lacking == "candidate")
    assert (found.base or found.candidate) == pytest.approx(50, rel=0.01)
    assert sentence(judgement) == found.sentence
    assert judgement.notes == ()


def test_what_was_measured_goes_before_what_was_lost():
    made, base, candidate = one_sided(8, "base")
    y = made.log_ratio.copy()
    y[:, :, 0] -= 0.2
    judgement = judge(replace(made, log_ratio=y), DEFAULT_RULES, 0)
    assert judgement.outcome == FAIL
    assert sentence(judgement).startswith("output throughput")
    assert {f.outcome for f in findings_of(judgement, base, candidate)} == {FAIL, PASS, INVALID}


def test_nothing_but_what_one_side_has_is_not_empty():
    base = np.full((8, 1, 3), 50.0)
    made = PairTable.from_values(base, base * np.nan, CELLS[:1], ("chat",), METRICS)
    judgement = judge(made, DEFAULT_RULES, 0)
    assert (judgement.outcome, judgement.results) == (FAIL, ())
    assert sentence(judgement) == (
        "candidate has no output throughput of chat/a, base has it in all 8 pairs. So it is with 3 metrics of cells."
    )


def test_one_cell_is_held_to_the_margins_of_the_whole():
    y = noise(16, sd=0.001, cells=1)
    y[:, 0, 1] = np.log(1.08) + np.where(np.arange(16) % 2, 0.20, -0.20)  # +8 % TTFT: too noisy for a FAIL
    judgement = judge(table(y), DEFAULT_RULES, 2)
    finding = {f.id: f for f in findings_of(judgement, np.ones(y.shape), np.exp(y))}["cell/chat/a/p95_ttft_ms"]
    assert (finding.outcome, finding.figures["margin"]) == (INCONCLUSIVE, 0.04)
    assert "; 4 % higher is not ruled out" in finding.sentence
    y[:, 0, 1] = np.log(1.08) + np.where(np.arange(16) % 2, 0.01, -0.01)
    loose = replace(METRICS[1], floor=0.09, margins={**METRICS[1].margins, "overall": 0.09})  # nothing can fail
    rules = replace(DEFAULT_RULES, metrics=(METRICS[0], loose, METRICS[2]))
    assert judge(PairTable(y, CELLS[:1], ("chat",), rules.metrics), rules, 2).outcome == INCONCLUSIVE  # of a class: 5 %


def test_the_clock_may_take_a_look_early_but_not_late_or_twice():
    y = noise(16)
    y[:, 0, 1] += 0.2
    assert judge(table(y[:10]), DEFAULT_RULES, 1).outcome == FAIL  # 2^-10 is below 0.003
    assert judge(table(y[:7]), DEFAULT_RULES, 0).outcome == INCONCLUSIVE  # 2^-7 is above 0.004
    for pairs, look in ((8, 1), (9, 0), (12, 2)):
        with pytest.raises(ValueError, match=f"{pairs} pairs for the look at"):
            judge(table(y[:pairs]), DEFAULT_RULES, look)


def test_alpha_is_that_of_the_look():
    y = noise(8, sd=0.01)
    y[:, 0, 1] = 0.10 + 0.0001 * np.arange(8)
    y[0, 0, 1] = -0.01  # the pattern without this pair's sign is as bad: p is 2 / 256 or more
    result = next(r for r in judge(table(y), DEFAULT_RULES, 0).results if r.hypothesis.id == "cell/chat/a/p95_ttft_ms")
    assert 0.004 < result.p < 0.05
    assert result.harm > 0.03
    assert result.outcome != FAIL


def test_nothing_to_compare_is_no_pass():
    judgement = judge(table(np.full((8, 4, 3), np.nan)), DEFAULT_RULES, 0)
    assert judgement.outcome == EMPTY
    assert sentence(judgement).startswith("Nothing was compared")
    assert len(judgement.notes) == 12


def test_change_interval_and_sides_are_those_of_geometric_means():
    y = noise(8, sd=0.02, seed=5)
    base = np.exp(np.random.default_rng(2).normal(size=y.shape))
    judgement = judge(table(y), DEFAULT_RULES, 0)
    findings = {f.id: f for f in findings_of(judgement, base, base * np.exp(y))}
    assert len(findings) == 21
    found, result = findings["class/code/output_throughput"], y[:, 2:, 0].mean(axis=1)
    assert found.base == pytest.approx(stats.gmean(base[:, 2:, 0], axis=None))
    assert found.change == pytest.approx(found.candidate / found.base - 1)
    interval = stats.ttest_1samp(result, 0).confidence_interval(0.95)
    assert found.interval == pytest.approx((np.expm1(interval.low), np.expm1(interval.high)))
    assert found.series == pytest.approx(tuple(np.expm1(result)))
    assert (found.suite, found.metric, found.unit, found.higher_is_better) == (
        "class",
        "output_throughput",
        "tokens/s",
        True,
    )
    assert (found.figures["floor"], found.figures["margin"], found.figures["pairs"]) == (0.015, 0.03, 8)


def test_a_failure_says_what_where_how_much_and_how_sure():
    y = noise(8, sd=0.001)
    y[:, 2, 0] += np.log(1 - 0.2)
    judgement = judge(table(y), DEFAULT_RULES, 0)
    text = {f.id: f.sentence for f in findings_of(judgement, np.ones(y.shape), np.exp(y))}
    assert text["cell/code/a/output_throughput"].startswith(
        "output throughput of code/a is 20.0 % lower (95 % interval -2"
    )
    assert text["cell/code/a/output_throughput"].endswith(
        "after 8 pairs; p = 0.0039 for all 21 comparisons together, and it matters from 1.5 % on."
    )
    assert "of class code: " not in text["class/code/output_throughput"]
    assert "10 % higher or more is ruled out (p = 0.0039)." in text["cell/chat/a/p95_ttft_ms"]
    assert sentence(judgement).startswith("output throughput of code/a is 20.0 % lower")
    assert sentence(judgement).endswith(" 3 of 21 comparisons fail.")
    everywhere = noise(8, sd=0.001)
    everywhere[:, :, 0] += np.log(1 - 0.2)
    assert sentence(judge(table(everywhere), DEFAULT_RULES, 0)).startswith("output throughput over all cells is 20.0 %")


def test_rules_of_other_metrics_are_refused():
    y = noise(8)[:, :, :2]
    other = PairTable(y, CELLS, ("a",) * 4, METRICS[:2])
    with pytest.raises(ValueError, match="metrics are not those of the rules"):
        judge(other, DEFAULT_RULES, 0)


def test_power_without_a_floor_is_the_noncentral_ts_and_with_one_that_of_drawn_samples():
    harm, sd, pairs, critical = np.array([0.01, 0.04, 0.07]), np.array([0.03, 0.03, 0.05]), 10, 3.2
    expected = stats.nct.sf(critical, pairs - 1, harm / sd * np.sqrt(pairs))
    assert power(harm, sd, pairs, critical) == pytest.approx(expected, abs=2e-3)
    x = harm + sd * np.random.default_rng(1).normal(size=(200_000, pairs, 3))
    mean, t = x.mean(axis=1), x.mean(axis=1) / (x.std(axis=1, ddof=1) / np.sqrt(pairs))
    drawn = ((mean >= 0.05) & (t > critical)).mean(axis=0)
    assert power(harm, sd, pairs, critical, 0.05) == pytest.approx(drawn, abs=5e-3)


@pytest.mark.parametrize(("pairs", "floor"), itertools.product((2, 8, 16), (0.0, 0.03)))
def test_smallest_detectable_has_a_power_of_80_percent(pairs, floor):
    sd = np.array([0.001, 0.04, 0.3])
    seen = smallest_detectable(sd, pairs, 6.0, floor)
    assert power(seen, sd, pairs, 6.0, floor) == pytest.approx(0.8, abs=1e-3)
    assert (seen >= floor).all()
    assert smallest_detectable(np.array([0.0]), pairs, 6.0, floor) == [floor]


@pytest.mark.parametrize("up_to", [0.0, 0.28])  # a PASS is nearer, then a FAIL
def test_pairs_needed_settle_it_in_four_of_five_cases_and_one_fewer_does_not(up_to):
    y = noise(8, sd=0.0001, cells=1)
    y[:, 0, 1] = np.array([0.12 + up_to, -0.12 + up_to / 8] * 4)
    result = next(r for r in judge(table(y), DEFAULT_RULES, 0).results if "ttft" in r.hypothesis.id)
    assert result.outcome == INCONCLUSIVE

    def settled(pairs: int, tests: int) -> float:
        x = result.harm + result.sd * np.random.default_rng(4).normal(size=(50_000, pairs))
        x = x if up_to else METRICS[1].harm_of(0.04) - x  # the only cell is held to the margin of the whole
        t = x.mean(axis=1) / (x.std(axis=1, ddof=1) / np.sqrt(pairs))
        look = DEFAULT_RULES.look_for(pairs)
        return (t > stats.t.isf(look.alpha / tests if up_to else look.alpha_pass, pairs - 1)).mean()

    assert settled(result.pairs_needed, 3 if up_to else 1) >= (0.75 if up_to else 0.79)
    assert settled(result.pairs_needed - 1, 1) < (0.9 if up_to else 0.81)


@pytest.mark.parametrize("pairs", [2, 8, 16])
def test_the_mean_of_sds_falls_short_of_the_true_one_by_c4(pairs):
    drawn = np.random.default_rng(1).normal(size=(200_000, pairs)).std(axis=1, ddof=1).mean()
    assert unbiased(pairs) == pytest.approx(drawn, abs=4e-3)
    assert unbiased(8) == pytest.approx(0.9650, abs=5e-5)  # of published tables
