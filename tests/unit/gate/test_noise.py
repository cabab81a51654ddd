"""A runner's noise from pairs that were drawn with known noise, and what is said about the limits."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from kvbench.gate.timing.noise import Noise, RunnerNoise, noise_of, warnings_of
from kvbench.gate.timing.pairs import PairTable
from kvbench.gate.timing.rules import CELL, CLASS, DEFAULT_RULES, OVERALL, Look
from tests.support.gate_simulation import NAMES, OF_CLASS, PAIR_SD, log_ratios, table

LAST = 11  # pairs; all patterns of 16, at each look of the defaults, would take seconds
RULES = replace(DEFAULT_RULES, looks=(Look(8, 0.004, 0.02), Look(LAST, 0.003, 0.015)))


def drawn(pairs: int = 24, seed: int = 3, shared: float = 0.0, configurations: int = 12) -> np.ndarray:
    return log_ratios("normal", np.random.default_rng(seed), 1, pairs, shared, configurations)[0]


def measured(y: np.ndarray) -> RunnerNoise:
    return noise_of(table(y), RULES)


def said(y: np.ndarray) -> str:
    return "\n".join(warnings_of(measured(y), RULES))


@pytest.fixture(scope="module")
def noise() -> RunnerNoise:
    return measured(drawn())


def line_of(noise: RunnerNoise, metric: str, level: str) -> Noise:
    (line,) = noise.of(metric, level)
    return line


def test_the_scatter_of_each_metric_and_level_is_what_was_drawn(noise):
    assert len(noise.each) == 9
    for metric, sd in zip(RULES.metrics, PAIR_SD, strict=True):
        for level, cells, hypotheses in ((CELL, 1, 24), (CLASS, 6, 4), (OVERALL, 24, 1)):
            line = line_of(noise, metric.name, level)
            assert line.hypotheses == hypotheses
            low, high = np.sqrt(stats.chi2.ppf([0.001, 0.999], 23) / 23)  # of one sd; the median lies closer
            assert low < line.sd / (sd / np.sqrt(cells)) < high
            assert line.worst >= line.sd and abs(line.autocorrelation) < 0.7 and line.bias_p > 0.01


def test_the_worst_is_named_and_shared_noise_does_not_average_out():
    y = drawn()
    y[:, 7, 1] *= 5
    line = line_of(measured(y), "p95_ttft_ms", CELL)
    assert line.where == NAMES[7] and line.worst == pytest.approx(y[:, 7, 1].std(ddof=1))
    together = line_of(measured(drawn(shared=0.9, configurations=1)), "p95_ttft_ms", OVERALL)
    assert together.sd > 0.6 * PAIR_SD[1]


def test_more_pairs_show_less_and_wider_levels_too(noise):
    for metric in RULES.metrics:
        for level in (OVERALL, CLASS, CELL):
            line = line_of(noise, metric.name, level)
            for by_look in (line.detectable, line.worst_detectable, line.margin, line.worst_margin):
                assert by_look[8] > by_look[LAST] > 0
            assert line.margin[LAST] < line.detectable[LAST]  # one hypothesis at 0.015 against all at 0.0025
        wide, narrow = (line_of(noise, metric.name, level).detectable[LAST] for level in (OVERALL, CELL))
        assert wide < narrow
    part = line_of(measured(drawn()[:9]), "p95_itl_ms", CELL)  # a look beyond the pairs that are there is worked out
    whole = line_of(noise, "p95_itl_ms", CELL)
    assert part.detectable[LAST] / part.sd == pytest.approx(whole.detectable[LAST] / whole.sd, rel=0.2)
    y = drawn(shared=0.95, configurations=1)  # hypotheses that depend on each other count as few
    part, whole = (line_of(measured(each), "p95_itl_ms", CELL) for each in (y[:8], y))
    assert part.detectable[LAST] / part.sd == pytest.approx(whole.detectable[LAST] / whole.sd, rel=0.08)
    # 4 % of pair noise: an independent approximation by the t of 72 to 87 tests
    t = stats.t.isf(0.0025 / 80, LAST - 1) + stats.norm.ppf(0.8)
    line = line_of(noise, "p95_ttft_ms", CELL)
    assert line.detectable[LAST] == pytest.approx(np.expm1(t * line.sd / np.sqrt(LAST)), rel=0.2)


def test_limits_below_what_the_runner_shows_are_named(noise):
    floor = next(text for text in warnings_of(noise, RULES) if text.startswith("p95_ttft_ms: the floor of 2 % "))
    cell = line_of(noise, "p95_ttft_ms", CELL)
    assert f"{cell.worst_detectable[LAST] * 100:.3g} % of {cell.where}" in floor and "over all cells" not in floor
    assert said(drawn() * 0.1) == ""
    margin = next(text for text in said(drawn() * 4).splitlines() if text.startswith("p95_ttft_ms: an unchanged"))
    assert f"after {LAST} pairs" in margin and "10 % of w" in margin
    y = drawn() * 0.1
    y[:, 7, 1] *= 12  # 5 %: a slowdown of 3 % there is not seen, one of its margin of 10 % is
    assert "w1/c7" in said(y) and len(said(y).splitlines()) == 1


def test_a_cell_that_is_alone_in_its_class_is_held_to_the_margin_of_the_class():
    noise = noise_of(PairTable(drawn()[:, :7], NAMES[:7], OF_CLASS[:7], RULES.metrics), RULES)
    together, alone = noise.of("p95_ttft_ms", CELL)
    assert (together.hypotheses, together.stands_for, alone.hypotheses) == (6, (CELL,), 1)
    assert (alone.stands_for, alone.where) == ((CLASS, CELL), NAMES[6])
    least = alone.worst_margin[LAST]
    tight = replace(RULES.metrics[1], margins={OVERALL: 0.9, CLASS: least - 0.01, CELL: 0.9})
    (text,) = (each for each in warnings_of(noise, replace(RULES, metrics=(tight,))) if "inconclusive" in each)
    assert NAMES[6] in text and f"{least * 100:.3g} %" in text


def test_few_pairs_and_sides_that_differ_are_named():
    assert said(drawn(pairs=10) * 0.1).startswith("10 A/A pairs")
    y = drawn()
    y[:, :, 2] += 0.02
    assert "p95_itl_ms over all cells: one build differs from itself by +2" in said(y)
    y = drawn()
    y[:, :, 0] += np.linspace(-0.02, 0.02, 24)[:, None]
    assert "output_throughput over all cells: a pair depends on the one before" in said(y)
    y[:, :, 2] = np.nan  # a metric that no cell has
    assert [line.metric for line in measured(y).each] == ["output_throughput"] * 3 + ["p95_ttft_ms"] * 3
    with pytest.raises(ValueError, match="no cell has any of the metrics"):
        measured(y * np.nan)


def test_noise_survives_json_and_that_of_other_looks_says_nothing_of_these(noise):
    assert RunnerNoise.parse(json.loads(json.dumps(noise.to_json()))) == noise
    assert "floor" in warnings_of(noise, replace(RULES, looks=RULES.looks[:1]))[0]
    (text,) = warnings_of(noise, DEFAULT_RULES)
    assert f"[8, {LAST}]" in text and "16" in text
