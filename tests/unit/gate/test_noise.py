"""A runner's noise from pairs that were drawn with known noise, and what is said about the limits."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from kvbench.gate.timing.noise import Noise, RunnerNoise, noise_of, warnings_of
from kvbench.gate.timing.pairs import PairTable
from kvbench.gate.timing.rules import CELL, CLASS, DEFAULT_RULES, OVERALL
from tests.support.gate_simulation import NAMES, OF_CLASS, PAIR_SD, log_ratios, table


def drawn(pairs: int = 24, seed: int = 3, shared: float = 0.0, configurations: int = 12) -> PairTable:
    return table(log_ratios("normal", np.random.default_rng(seed), 1, pairs, shared, configurations)[0])


@pytest.fixture(scope="module")
def noise() -> RunnerNoise:
    return noise_of(drawn(), DEFAULT_RULES)


def line_of(noise: RunnerNoise, metric: str, level: str) -> Noise:
    (line,) = noise.of(metric, level)
    return line


def quiet(table: PairTable, factor: float) -> PairTable:
    return PairTable(table.log_ratio * factor, table.cells, table.classes, table.metrics)


def test_the_scatter_of_each_metric_and_level_is_what_was_drawn(noise):
    assert len(noise.each) == 9
    for metric, sd in zip(DEFAULT_RULES.metrics, PAIR_SD, strict=True):
        for level, cells in ((CELL, 1), (CLASS, 6), (OVERALL, 24)):
            line = line_of(noise, metric.name, level)
            assert line.hypotheses == 24 if level == CELL else 4 if level == CLASS else 1
            low, high = np.sqrt(stats.chi2.ppf([0.001, 0.999], 23) / 23)  # of one sd; the median lies closer
            assert low < line.sd / (sd / np.sqrt(cells)) < high
            assert line.worst >= line.sd
            assert abs(line.autocorrelation) < 0.7
            assert line.bias_p > 0.01


def test_the_worst_is_named_and_shared_noise_does_not_average_out():
    y = drawn().log_ratio.copy()
    y[:, 7, 1] *= 5
    line = line_of(noise_of(table(y), DEFAULT_RULES), "p95_ttft_ms", CELL)
    assert line.where == NAMES[7]
    assert line.worst == pytest.approx(y[:, 7, 1].std(ddof=1))
    together = line_of(noise_of(drawn(shared=0.9, configurations=1), DEFAULT_RULES), "p95_ttft_ms", OVERALL)
    assert together.sd > 0.6 * PAIR_SD[1]


def test_more_pairs_show_less_and_wider_levels_too(noise):
    for metric in DEFAULT_RULES.metrics:
        for level in (OVERALL, CLASS, CELL):
            line = line_of(noise, metric.name, level)
            for by_look in (line.detectable, line.worst_detectable, line.margin, line.worst_margin):
                assert by_look[8] > by_look[12] > by_look[16] > 0
            assert line.margin[16] < line.detectable[16]  # one hypothesis at 0.015 against all at 0.003
        assert line_of(noise, metric.name, OVERALL).detectable[16] < line_of(noise, metric.name, CELL).detectable[16]
    # 4 % of pair noise: an independent approximation by the t of 72 to 87 tests and 16 pairs
    t = stats.t.isf(0.003 / 80, 15) + stats.norm.ppf(0.8)
    expected = np.expm1(t * line_of(noise, "p95_ttft_ms", CELL).sd / 4)
    assert line_of(noise, "p95_ttft_ms", CELL).detectable[16] == pytest.approx(expected, rel=0.12)


def test_limits_below_what_the_runner_shows_are_named(noise):
    said = warnings_of(noise, DEFAULT_RULES)
    floor = next(text for text in said if text.startswith("p95_ttft_ms: the floor of 3 % is below"))
    cell = line_of(noise, "p95_ttft_ms", CELL)
    assert f"{cell.worst_detectable[16] * 100:.3g} % of {cell.where}" in floor
    assert "over all cells" not in floor
    assert floor.endswith("raise the floor, lengthen the loads, or quieten the machine")
    assert warnings_of(noise_of(quiet(drawn(), 0.2), DEFAULT_RULES), DEFAULT_RULES) == ()
    loud = warnings_of(noise_of(quiet(drawn(), 4), DEFAULT_RULES), DEFAULT_RULES)
    assert any("would often stay inconclusive after 16 pairs" in text and "10 % of w" in text for text in loud)


def test_one_loud_cell_is_named_among_quiet_ones():
    y = quiet(drawn(), 0.2).log_ratio.copy()
    y[:, 7, 1] *= 10  # 8 %: a slowdown of 3 % there is not seen, one of its margin of 10 % is
    noise = noise_of(table(y), DEFAULT_RULES)
    shown = line_of(noise, "p95_ttft_ms", CELL).worst_detectable[16]
    assert warnings_of(noise, DEFAULT_RULES) == (
        "p95_ttft_ms: the floor of 3 % is below the smallest regression that this runner shows, at 16 pairs "
        f"{shown * 100:.3g} % of w1/c7: raise the floor, lengthen the loads, or quieten the machine",
    )


def test_a_cell_that_is_alone_in_its_class_is_held_to_the_margin_of_the_class():
    y = drawn().log_ratio[:, :7]
    noise = noise_of(PairTable(y, NAMES[:7], OF_CLASS[:7], DEFAULT_RULES.metrics), DEFAULT_RULES)
    together, alone = noise.of("p95_ttft_ms", CELL)
    assert (together.hypotheses, together.stands_for, alone.hypotheses) == (6, (CELL,), 1)
    assert (alone.stands_for, alone.where) == ((CLASS, CELL), NAMES[6])
    assert 0.03 < alone.worst_margin[16] < 0.05
    tight = replace(
        DEFAULT_RULES,
        metrics=(replace(DEFAULT_RULES.metrics[1], margins={OVERALL: 0.9, CLASS: 0.03, CELL: 0.9}),),
    )
    said = [text for text in warnings_of(noise, tight) if "inconclusive" in text]
    assert len(said) == 1
    assert f"too narrow are the margins 3 % of {NAMES[6]}, where {alone.worst_margin[16] * 100:.3g} %" in said[0]


def test_few_pairs_and_sides_that_differ_are_named():
    few = warnings_of(noise_of(drawn(pairs=10), DEFAULT_RULES), DEFAULT_RULES)
    assert few[0] == "10 A/A pairs: a runner's noise is known from 20 or more"
    y = drawn().log_ratio.copy()
    y[:, :, 2] += 0.02
    leaning = warnings_of(noise_of(table(y), DEFAULT_RULES), DEFAULT_RULES)
    assert any(text.startswith("p95_itl_ms over all cells: one build differs from itself by +2") for text in leaning)
    y = drawn().log_ratio.copy()
    y[:, :, 0] += np.linspace(-0.02, 0.02, 24)[:, None]
    hanging = warnings_of(noise_of(table(y), DEFAULT_RULES), DEFAULT_RULES)
    assert any("output_throughput over all cells: a pair depends on the one before" in text for text in hanging)


def test_looks_beyond_the_pairs_that_are_there_are_worked_out():
    full, part = noise_of(drawn(pairs=20), DEFAULT_RULES), noise_of(drawn(pairs=20).first(10), DEFAULT_RULES)
    for level in (OVERALL, CELL):
        a, b = (line_of(noise, "p95_itl_ms", level) for noise in (full, part))
        assert b.detectable[16] / b.sd == pytest.approx(a.detectable[16] / a.sd, rel=0.15)


def test_noise_of_other_looks_says_nothing_of_these(noise):
    fewer = replace(DEFAULT_RULES, looks=DEFAULT_RULES.looks[:2])
    assert "floor" in warnings_of(noise, fewer)[0]
    stored = noise_of(drawn(pairs=20).first(8), fewer)
    assert warnings_of(stored, DEFAULT_RULES)[1:] == (
        "the runner's noise was worked out for looks at [8, 12] pairs and the last look is now at 16: calibrate again",
    )


def test_noise_survives_json(noise):
    assert RunnerNoise.from_json(json.loads(json.dumps(noise.to_json()))) == noise
    with pytest.raises(ValueError, match="format 'x'"):
        RunnerNoise.from_json({**noise.to_json(), "format": "x"})


def test_tables_that_show_no_noise_are_refused():
    with pytest.raises(ValueError, match="3 pairs do not show"):
        noise_of(drawn().first(3), DEFAULT_RULES)
    with pytest.raises(ValueError, match="no cell has any of the metrics"):
        noise_of(PairTable(np.full((8, 24, 3), np.nan), NAMES, OF_CLASS, DEFAULT_RULES.metrics), DEFAULT_RULES)


def test_a_metric_that_no_cell_has_has_no_line():
    y = drawn().log_ratio.copy()
    y[:, :, 2] = np.nan
    noise = noise_of(table(y), DEFAULT_RULES)
    assert noise.of("p95_itl_ms") == ()
    assert len(noise.each) == 6
