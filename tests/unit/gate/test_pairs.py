"""What is tested of a table of pairs, and which tables are refused; the rules that say so."""

import math
from dataclasses import replace

import numpy as np
import pytest

from kvbench.gate.timing.pairs import PairTable, hypotheses
from kvbench.gate.timing.rules import CELL, CLASS, DEFAULT_RULES, OVERALL

METRICS = DEFAULT_RULES.metrics


def table(cells: tuple[str, ...], y: np.ndarray) -> PairTable:
    return PairTable(y, cells, tuple(DEFAULT_RULES.class_of(cell) for cell in cells), METRICS)


def drawn(cells: int, pairs: int = 4) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(pairs, cells, len(METRICS))) * 0.02


def test_every_metric_overall_by_class_and_by_cell_with_worse_positive():
    cells = ("a/1", "a/2", "b/1", "b/2", "b/3")
    y = drawn(5)
    tested = hypotheses(table(cells, y))
    by_id = {h.id: tested.harm[:, i] for i, h in enumerate(tested.each)}
    assert len(by_id) == 3 * (1 + 2 + 5)
    assert [h.level for h in tested.each] == [OVERALL] * 3 + [CLASS] * 6 + [CELL] * 15
    assert by_id["overall/p95_ttft_ms"] == pytest.approx(y[:, :, 1].mean(axis=1))
    assert by_id["class/b/p95_itl_ms"] == pytest.approx(y[:, 2:, 2].mean(axis=1))
    assert by_id["class/a/output_throughput"] == pytest.approx(-y[:, :2, 0].mean(axis=1))
    assert by_id["cell/b/2/output_throughput"] == pytest.approx(-y[:, 3, 0])
    assert tested.log_ratio()[:, 0] == pytest.approx(y[:, :, 0].mean(axis=1))
    assert tested.notes == ()


WHOLE, OF_CLASS, OF_CELL = (2, 4, 3), (3, 5, 3), (4, 10, 6)  # % of throughput, TTFT, ITL: the design's


@pytest.mark.parametrize(
    ("cells", "tested"),
    [
        (("a/1",), {"a/1": WHOLE}),  # the only cell is the whole
        (("a/1", "a/2"), {"": WHOLE, "a/1": OF_CELL, "a/2": OF_CELL}),  # one class is the whole
        (("a/1", "b/1"), {"": WHOLE, "a/1": OF_CLASS, "b/1": OF_CLASS}),  # a class of one cell is that cell
        (("a/1", "a/2", "b/1"), {"": WHOLE, "a": OF_CLASS, "a/1": OF_CELL, "a/2": OF_CELL, "b/1": OF_CLASS}),
    ],
)
def test_what_stands_for_several_levels_is_tested_once_and_held_to_the_tightest_margin(cells, tested):
    found: dict[str, list] = {}
    for hypothesis in hypotheses(table(cells, drawn(len(cells)))).each:
        found.setdefault(hypothesis.where, []).append(100 * hypothesis.margin_share)
        assert hypothesis.margin == pytest.approx(abs(hypothesis.metric.harm_of(hypothesis.margin_share)))
    assert {where: pytest.approx(margins) for where, margins in tested.items()} == found
    # the whole that is one class is held to the margin of a class where that is tighter
    tight = tuple(replace(metric, margins={OVERALL: 0.06, CLASS: 0.05, CELL: 0.10}) for metric in METRICS)
    of_classes = tuple(cell[0] for cell in cells)
    first = hypotheses(PairTable(drawn(len(cells)), cells, of_classes, tight)).each[0]
    assert first.margin_share == (0.05 if len(set(of_classes)) == 1 else 0.06)


def test_a_metric_that_a_cell_does_not_have_is_left_out_of_it_and_of_the_means():
    y = drawn(3)
    y[:, 1, 2] = np.nan
    tested = hypotheses(table(("a/1", "a/2", "b/1"), y))
    ids = [h.id for h in tested.each]
    assert "cell/a/2/p95_itl_ms" not in ids
    assert "class/a/p95_itl_ms" not in ids  # only one cell of it is left
    assert tested.harm[:, ids.index("overall/p95_itl_ms")] == pytest.approx(y[:, [0, 2], 2].mean(axis=1))
    assert tested.notes == ("a/2 has no p95 ITL",)


@pytest.mark.parametrize(("value", "says"), [(np.nan, "missing"), (np.inf, "infinite")])
def test_incomplete_pairs_are_refused(value, says):
    y = drawn(2)
    y[1, 0, 1] = value
    with pytest.raises(ValueError, match=f"p95_ttft_ms of a/1 in pair 2 is {says}"):
        table(("a/1", "a/2"), y)


def test_values_become_log_ratios_and_what_cannot_is_refused():
    base, candidate = np.full((2, 1, 3), 100.0), np.full((2, 1, 3), 110.0)
    made = PairTable.from_values(base, candidate, ["a/1"], ["a"], METRICS)
    assert made.log_ratio == pytest.approx(np.full((2, 1, 3), math.log(1.1)))
    assert made.first(1).pairs == 1
    candidate[1, 0, 0] = 0
    with pytest.raises(ValueError, match="output_throughput of a/1 in pair 2"):
        PairTable.from_values(base, candidate, ["a/1"], ["a"], METRICS)
    candidate[:, 0, 0], candidate[1, 0, 2] = 100.0, np.nan  # there now and then, whatever the other side has
    for pairs_of_base in (slice(0, 0), slice(0, 2), slice(0, 1)):
        base[pairs_of_base, 0, 2] = np.nan
        with pytest.raises(ValueError, match=r"p95_itl_ms of a/1 in pair \d is missing \((base|candidate)\)"):
            PairTable.from_values(base, candidate, ["a/1"], ["a"], METRICS)
        base[:, 0, 2] = 100.0


def test_a_metric_that_only_one_side_has_is_told_from_one_that_neither_has():
    base, candidate = np.full((4, 2, 3), 100.0), np.full((4, 2, 3), 110.0)
    candidate[:, 0, 2] = base[:, 1, 1] = np.nan
    base[:, 1, 2] = candidate[:, 1, 2] = np.nan
    made = PairTable.from_values(base, candidate, ["a/1", "a/2"], ["a", "a"], METRICS)
    assert [(each.lacking, each.cell, each.metric) for each in made.one_sided] == [("candidate", 0, 2), ("base", 1, 1)]
    assert made.first(2).one_sided == made.one_sided
    tested = hypotheses(made)
    assert tested.notes == ("a/2 has no p95 ITL",)
    assert {"cell/a/1/p95_itl_ms", "cell/a/2/p95_ttft_ms"}.isdisjoint(h.id for h in tested.each)


def test_floors_and_margins_are_relative_changes_for_the_worse():
    throughput, ttft, _ = METRICS
    assert math.exp(-throughput.harm_of(0.015)) == pytest.approx(1 - 0.015)
    assert math.exp(ttft.harm_of(0.03)) == pytest.approx(1 + 0.03)
    for metric in METRICS:
        assert metric.relative_of(metric.harm_of(0.2)) == pytest.approx(0.2)
    assert throughput.relative_of(-0.1) < 0 < throughput.relative_of(0.1)
    assert [DEFAULT_RULES.look_for(pairs).pairs for pairs in (1, 8, 9, 16, 40)] == [8, 8, 12, 16, 16]
