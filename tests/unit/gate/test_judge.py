"""The verdict on tables whose answer is known, and what it says of the pairs it would need."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from kvbench.gate.timing.judge import judge, sentence
from kvbench.gate.timing.pairs import PairTable
from kvbench.gate.timing.power import power, smallest_detectable, unbiased
from kvbench.gate.timing.rules import DEFAULT_RULES
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS, Finding

METRICS = DEFAULT_RULES.metrics
CELLS = ("chat/a", "chat/b", "code/a", "code/b")
TTFT = "cell/chat/a/p95_ttft_ms"
WORSE = np.array([-1.0, 1.0, 1.0])  # a log ratio's sign where it is for the worse


def noise(pairs: int, sd: float = 0.002, seed: int = 1, cells: int = len(CELLS)) -> np.ndarray:
    """Log ratios [pairs, cells, metrics] of no change."""
    return np.random.default_rng(seed).normal(size=(pairs, cells, len(METRICS))) * sd


def table(y: np.ndarray, metrics=METRICS) -> PairTable:
    cells = CELLS[: y.shape[1]]
    return PairTable(y, cells, tuple(cell.split("/")[0] for cell in cells), metrics)


def judged(y: np.ndarray, look: int = 0) -> dict[str, Finding]:
    return {finding.id: finding for finding in judge(table(y), DEFAULT_RULES, look).findings}


def test_no_change_passes_everywhere_and_nothing_to_compare_is_no_pass():
    judgement = judge(table(noise(8)), DEFAULT_RULES, 0)
    assert judgement.outcome == PASS
    assert {f.outcome for f in judgement.findings} == {PASS} and len(judgement.findings) == 3 * (1 + 2 + 4)
    assert {f.figures["pairs_needed"] for f in judgement.findings} == {None}
    assert "8 pairs" in sentence(judgement) and "21" in sentence(judgement)
    judgement = judge(table(np.full((8, 4, 3), np.nan)), DEFAULT_RULES, 0)
    assert judgement.outcome == EMPTY and sentence(judgement) and len(judgement.notes) == 12


@pytest.mark.parametrize("metric", range(3))
def test_a_change_for_the_worse_fails_and_one_for_the_better_does_not(metric):
    y = noise(10)
    y[:, 1, metric] += 0.12 * WORSE[metric]
    name = METRICS[metric].name
    failed = {key for key, finding in judged(y, 1).items() if finding.outcome == FAIL}
    assert failed == {f"overall/{name}", f"class/chat/{name}", f"cell/chat/b/{name}"}
    said = sentence(judge(table(y), DEFAULT_RULES, 1))  # what, where, how sure, after how many pairs
    assert all(part in said for part in (METRICS[metric].title, "chat", "p = 0.00098", "10 pairs", "3 of 21"))
    y[:, 1, metric] -= 0.24 * WORSE[metric]
    assert {finding.outcome for finding in judged(y, 1).values()} == {PASS}


# By pair: 10 % slower but in one pair. The pattern without that pair's sign is as bad: p is 2 / 256 or more.
ONE_THE_OTHER_WAY = np.array([-0.01, *(0.10 + 0.0001 * np.arange(1, 8))])


@pytest.mark.parametrize(
    ("pairs", "look", "shift", "p", "outcome"),
    [
        (10, 1, np.log(1.019), (0, 0.0025), PASS),  # below the floor of 2 %, however sure it is
        (10, 1, np.log(1.021), (0, 0.0025), FAIL),
        (10, 1, np.log(1.06), (0, 0.0025), FAIL),  # above the floor, though below the margin of 10 % of a cell
        (8, 0, ONE_THE_OTHER_WAY, (0.004, 0.05), INCONCLUSIVE),  # alpha is that of the look
    ],
)
def test_a_slowdown_fails_with_a_small_p_and_an_effect_of_at_least_the_floor(pairs, look, shift, p, outcome):
    y = noise(pairs, sd=0.0001)
    y[:, 0, 1] += shift
    found = judged(y, look)[TTFT]
    assert p[0] < found.p <= p[1] and (found.outcome, found.figures["margin"]) == (outcome, 0.10)


def test_what_is_undecided_says_how_many_pairs_it_needs():
    y = noise(8, sd=0.001)
    y[:4, 3, 1] += 0.30
    y[4:, 3, 1] -= 0.12
    judgement = judge(table(y), DEFAULT_RULES, 0)
    assert judgement.outcome == INCONCLUSIVE
    undecided = {f.id: f.figures for f in judgement.findings if f.outcome == INCONCLUSIVE}
    assert min(figures["pairs_needed"] for figures in undecided.values()) > 8
    assert max(figures["smallest_detectable"] for figures in undecided.values()) > 0.10
    assert f"{len(undecided)} of 21 " in sentence(judgement) and f"{METRICS[1].title} of code/b" in sentence(judgement)
    three = judge(table(noise(3)), DEFAULT_RULES, 0)
    assert three.outcome == INCONCLUSIVE
    assert {f.figures["smallest_detectable"] for f in three.findings} == {None}
    assert {f.figures["pairs_needed"] for f in three.findings} == {6}  # 2^-6 is the first p of at most 0.02
    assert "about 6 pairs" in sentence(three)
    one = judge(table(noise(1)), DEFAULT_RULES, 0)
    assert (one.outcome, one.findings[0].interval) == (INCONCLUSIVE, None) and sentence(one)
    y = noise(16, sd=0.001, cells=1)
    y[:, 0, 1] = np.where(np.arange(16) % 2, 0.12, -0.09)
    assert "takes 16 at most" in sentence(judge(table(y), DEFAULT_RULES, 2))
    y[:, 0, 1] += METRICS[1].harm_of(0.04) - y[:, 0, 1].mean()  # at its margin no number of pairs is enough
    rules = replace(DEFAULT_RULES, metrics=(METRICS[0], replace(METRICS[1], floor=0.04), METRICS[2]))
    assert "more than 200 pairs" in sentence(judge(table(y, rules.metrics), rules, 2))


@pytest.mark.parametrize(
    ("pairs", "look", "outcome"),
    [
        (10, 1, FAIL),  # early: 2^-10 is below 0.0025
        (7, 0, INCONCLUSIVE),  # 2^-7 is above 0.004
        (8, 1, None),
        (9, 0, None),
        (12, 2, None),
    ],
)
def test_the_clock_may_take_a_look_early_but_not_late_or_twice(pairs, look, outcome):
    y = noise(pairs)
    y[:, 0, 1] += 0.2
    if outcome:
        assert judge(table(y), DEFAULT_RULES, look).outcome == outcome
    else:
        with pytest.raises(ValueError, match=f"{pairs} pairs"):
            judge(table(y), DEFAULT_RULES, look)


OF_CLASS = tuple(cell.split("/")[0] for cell in CELLS)


def one_sided(pairs: int, lacking: str) -> PairTable:
    """The table of a comparison where one side has no p95 ITL of chat/b."""
    base = np.full((pairs, len(CELLS), len(METRICS)), 50.0)
    candidate = base * np.exp(noise(pairs))
    (candidate if lacking == "candidate" else base)[:, 1, 2] = np.nan
    return PairTable.from_values(base, candidate, CELLS, OF_CLASS, METRICS)


@pytest.mark.parametrize(
    ("lacking", "pairs", "look", "outcome"),
    [
        ("candidate", 8, 0, FAIL),
        ("candidate", 9, 1, FAIL),  # 2^-9 is below 0.003
        ("candidate", 7, 0, INCONCLUSIVE),  # all other hypotheses pass
        ("base", 8, 0, INVALID),
    ],
)
def test_a_metric_that_one_side_has_lost_is_never_a_pass(lacking, pairs, look, outcome):
    judgement = judge(one_sided(pairs, lacking), DEFAULT_RULES, look)
    assert judgement.outcome == outcome and judgement.notes == ()
    findings = {f.id: f for f in judgement.findings}
    assert len(findings) == 3 * (1 + 2 + 4) - 1  # the class chat has one cell with that metric
    found = findings.pop("cell/chat/b/p95_itl_ms")
    assert (found.suite, found.outcome, found.change, found.p) == ("cell", outcome, None, None)
    assert found.sentence.startswith(f"{lacking} has no p95 ITL of chat/b") and sentence(judgement) == found.sentence
    assert (found.base is None, found.candidate is None) == (lacking == "base", lacking == "candidate")
    assert (found.base or found.candidate) == pytest.approx(50, rel=0.01)
    assert {f.outcome for f in findings.values()} == {PASS} or pairs < 7


def test_what_was_measured_goes_before_what_was_lost_and_what_one_side_has_is_not_empty():
    made = one_sided(8, "base")
    y = made.log_ratio.copy()
    y[:, :, 0] -= 0.2
    judgement = judge(replace(made, log_ratio=y), DEFAULT_RULES, 0)
    assert judgement.outcome == FAIL and sentence(judgement).startswith("output throughput over all cells")
    assert {f.outcome for f in judgement.findings} == {FAIL, PASS, INVALID}
    base = np.full((8, 1, 3), 50.0)
    nothing = judge(PairTable.from_values(base, base * np.nan, CELLS[:1], ("chat",), METRICS), DEFAULT_RULES, 0)
    assert (nothing.outcome, nothing.compared) == (FAIL, []) and "3 metrics" in sentence(nothing)


def test_change_interval_and_sides_are_those_of_geometric_means():
    y = noise(8, sd=0.02, seed=5)
    base = np.exp(np.random.default_rng(2).normal(size=y.shape))
    made = PairTable.from_values(base, base * np.exp(y), CELLS, OF_CLASS, METRICS)
    findings = {f.id: f for f in judge(made, DEFAULT_RULES, 0).findings}
    assert len(findings) == 21
    found, result = findings["class/code/output_throughput"], y[:, 2:, 0].mean(axis=1)
    assert found.base == pytest.approx(stats.gmean(base[:, 2:, 0], axis=None))
    assert found.change == pytest.approx(found.candidate / found.base - 1)
    interval = stats.ttest_1samp(result, 0).confidence_interval(0.95)
    assert found.interval == pytest.approx((np.expm1(interval.low), np.expm1(interval.high)))
    assert found.series == pytest.approx(tuple(np.expm1(result)))
    assert (found.suite, found.metric, found.unit) == ("class", "output_throughput", "tokens/s")
    assert found.higher_is_better is True
    assert (found.figures["floor"], found.figures["margin"], found.figures["pairs"]) == (0.01, 0.03, 8)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shift", [699.0, 720.0])
def test_a_change_that_no_float_holds_is_a_finite_one(shift):
    """e^709 is the largest power that a float holds; a verdict is stored as JSON, which has no infinity."""
    for finding in judged(noise(8, sd=50.0) + shift).values():
        assert np.isfinite([finding.change, *finding.interval, *finding.series]).all() and finding.change > 1e250
        assert finding.figures["smallest_detectable"] is None or np.isfinite(finding.figures["smallest_detectable"])


def test_power_without_a_floor_is_the_noncentral_ts_and_with_one_that_of_drawn_samples():
    harm, sd, pairs, critical = np.array([0.01, 0.04, 0.07]), np.array([0.03, 0.03, 0.05]), 10, 3.2
    expected = stats.nct.sf(critical, pairs - 1, harm / sd * np.sqrt(pairs))
    assert power(harm, sd, pairs, critical) == pytest.approx(expected, abs=2e-3)
    x = harm + sd * np.random.default_rng(1).normal(size=(50_000, pairs, 3))
    mean, t = x.mean(axis=1), x.mean(axis=1) / (x.std(axis=1, ddof=1) / np.sqrt(pairs))
    drawn = ((mean >= 0.05) & (t > critical)).mean(axis=0)
    assert power(harm, sd, pairs, critical, 0.05) == pytest.approx(drawn, abs=8e-3)


@pytest.mark.parametrize(("pairs", "floor"), [(2, 0.0), (16, 0.03)])
def test_smallest_detectable_has_a_power_of_80_percent(pairs, floor):
    sd = np.array([0.001, 0.04, 0.3])
    seen = smallest_detectable(sd, pairs, 6.0, floor)
    assert power(seen, sd, pairs, 6.0, floor) == pytest.approx(0.8, abs=1e-3)
    assert (seen >= floor).all()
    assert smallest_detectable(np.array([0.0]), pairs, 6.0, floor) == [floor]
    for many, published in ((2, 0.7979), (8, 0.9650), (16, 0.9835)):  # c4 of ISO 7870, Montgomery's appendix VI
        assert unbiased(many) == pytest.approx(published, abs=5e-5)


@pytest.mark.parametrize("up_to", [0.0, 0.28])  # a PASS is nearer, then a FAIL
def test_pairs_needed_settle_it_in_four_of_five_cases_and_one_fewer_does_not(up_to):
    y = noise(8, sd=0.0001, cells=1)
    y[:, 0, 1] = np.array([0.12 + up_to, -0.12 + up_to / 8] * 4)
    found = judged(y)[TTFT]
    assert found.outcome == INCONCLUSIVE
    needed, harm, sd = found.figures["pairs_needed"], y[:, 0, 1].mean(), y[:, 0, 1].std(ddof=1)

    def settled(pairs: int, tests: int) -> float:
        x = harm + sd * np.random.default_rng(4).normal(size=(50_000, pairs))
        x = x if up_to else METRICS[1].harm_of(0.04) - x  # the only cell is held to the margin of the whole
        t = x.mean(axis=1) / (x.std(axis=1, ddof=1) / np.sqrt(pairs))
        look = DEFAULT_RULES.look_for(pairs)
        return (t > stats.t.isf(look.alpha / tests if up_to else look.alpha_pass, pairs - 1)).mean()

    assert settled(needed, 3 if up_to else 1) >= (0.75 if up_to else 0.79)
    assert settled(needed - 1, 1) < (0.9 if up_to else 0.81)
