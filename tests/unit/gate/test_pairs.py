"""What is tested of a table of pairs, and which tables are refused; the rules that say so."""

import math
from dataclasses import replace

import numpy as np
import pytest

from kvbench.common.errors import UsageError
from kvbench.gate.timing.pairs import PairTable, hypotheses
from kvbench.gate.timing.rules import CELL, CLASS, DEFAULT_RULES, OVERALL, Look, TimingRules

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


@pytest.mark.parametrize(
    ("cells", "overall", "classes"),
    [
        (("a/1",), 0, 0),
        (("a/1", "a/2"), 1, 0),  # one class is the whole
        (("a/1", "b/1"), 1, 0),  # a class of one cell is that cell
        (("a/1", "a/2", "b/1"), 1, 1),
    ],
)
def test_what_would_be_tested_twice_is_tested_once(cells, overall, classes):
    levels = [h.level for h in hypotheses(table(cells, drawn(len(cells)))).each]
    assert levels == [OVERALL] * 3 * overall + [CLASS] * 3 * classes + [CELL] * 3 * len(cells)


@pytest.mark.parametrize(
    (
        "cells",
        "level",
        "where",
        "margins",
    ),  # throughput, TTFT, ITL in percent: the design's, by level 2/4/3 3/5/3 4/10/6
    [
        (("a/1",), CELL, "a/1", (2, 4, 3)),  # the only cell is the whole
        (("a/1", "a/2"), CELL, "a/2", (4, 10, 6)),
        (("a/1", "b/1"), CELL, "b/1", (3, 5, 3)),  # and here its class
        (("a/1", "a/2", "b/1"), CELL, "b/1", (3, 5, 3)),
        (("a/1", "a/2", "b/1"), CELL, "a/1", (4, 10, 6)),
        (("a/1", "a/2", "b/1"), CLASS, "a", (3, 5, 3)),
        (("a/1", "a/2", "b/1"), OVERALL, "", (2, 4, 3)),
    ],
)
def test_what_stands_for_several_levels_is_held_to_the_tightest_margin_of_them(cells, level, where, margins):
    found = [h for h in hypotheses(table(cells, drawn(len(cells)))).each if (h.level, h.where) == (level, where)]
    assert tuple(100 * h.margin_share for h in found) == pytest.approx(margins)
    assert found[1].margin == pytest.approx(math.log(1 + margins[1] / 100))


def test_the_whole_that_is_one_class_is_held_to_the_margin_of_a_class_where_that_is_tighter():
    tight = replace(METRICS[1], margins={OVERALL: 0.06, CLASS: 0.05, CELL: 0.10})
    y = drawn(2)[:, :, 1:2]
    one = hypotheses(PairTable(y, ("a/1", "a/2"), ("a", "a"), (tight,))).each[0]
    two = hypotheses(PairTable(y, ("a/1", "b/1"), ("a", "b"), (tight,))).each[0]
    assert (one.level, one.margin_share, two.level, two.margin_share) == (OVERALL, 0.05, OVERALL, 0.06)


def test_a_metric_that_a_cell_does_not_have_is_left_out_of_it_and_of_the_means():
    y = drawn(3)
    y[:, 1, 2] = np.nan
    tested = hypotheses(table(("a/1", "a/2", "b/1"), y))
    ids = [h.id for h in tested.each]
    assert "cell/a/2/p95_itl_ms" not in ids
    assert "class/a/p95_itl_ms" not in ids  # only one cell of it is left
    assert tested.harm[:, ids.index("overall/p95_itl_ms")] == pytest.approx(y[:, [0, 2], 2].mean(axis=1))
    assert tested.notes == ("a/2 has no p95 ITL",)


def test_incomplete_pairs_are_refused():
    y = drawn(2)
    y[1, 0, 1] = np.nan
    with pytest.raises(ValueError, match="p95_ttft_ms of a/1 in pair 2 is missing"):
        table(("a/1", "a/2"), y)
    y[1, 0, 1] = np.inf
    with pytest.raises(ValueError, match="p95_ttft_ms of a/1 in pair 2 is infinite"):
        table(("a/1", "a/2"), y)
    with pytest.raises(ValueError, match="shape"):
        table(("a/1",), drawn(2))
    with pytest.raises(ValueError, match="same name"):
        table(("a/1", "a/1"), drawn(2))


def test_values_become_log_ratios_and_what_cannot_is_refused():
    base, candidate = np.full((2, 1, 3), 100.0), np.full((2, 1, 3), 110.0)
    made = PairTable.from_values(base, candidate, ["a/1"], ["a"], METRICS)
    assert made.log_ratio == pytest.approx(np.full((2, 1, 3), math.log(1.1)))
    assert made.first(1).pairs == 1
    candidate[1, 0, 0] = 0
    with pytest.raises(ValueError, match="output_throughput of a/1 in pair 2"):
        PairTable.from_values(base, candidate, ["a/1"], ["a"], METRICS)


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


@pytest.mark.parametrize("base_missing", [slice(0, 0), slice(0, 4), slice(0, 2)])
def test_a_metric_that_is_there_now_and_then_is_refused_whatever_the_other_side_has(base_missing):
    base, candidate = np.full((4, 1, 3), 100.0), np.full((4, 1, 3), 100.0)
    candidate[2:, 0, 2] = base[base_missing, 0, 2] = np.nan
    with pytest.raises(ValueError, match=r"p95_itl_ms of a/1 in pair \d is missing \((base|candidate)\)"):
        PairTable.from_values(base, candidate, ["a/1"], ["a"], METRICS)


def test_floors_and_margins_are_relative_changes_for_the_worse():
    throughput, ttft, _ = METRICS
    assert math.exp(-throughput.harm_of(0.015)) == pytest.approx(1 - 0.015)
    assert math.exp(ttft.harm_of(0.03)) == pytest.approx(1 + 0.03)
    for metric in METRICS:
        assert metric.relative_of(metric.harm_of(0.2)) == pytest.approx(0.2)
    assert throughput.relative_of(-0.1) < 0 < throughput.relative_of(0.1)


def test_default_rules_are_the_design():
    assert [(look.pairs, look.alpha) for look in DEFAULT_RULES.looks] == [(8, 0.004), (12, 0.003), (16, 0.003)]
    assert DEFAULT_RULES.alpha == pytest.approx(0.01)
    assert sum(look.alpha_pass for look in DEFAULT_RULES.looks) == pytest.approx(0.05)
    found = {
        m.name: (m.higher_is_better, m.floor, m.margins[OVERALL], m.margins[CLASS], m.margins[CELL]) for m in METRICS
    }
    assert found == {
        "output_throughput": (True, 0.015, 0.02, 0.03, 0.04),
        "p95_ttft_ms": (False, 0.03, 0.04, 0.05, 0.10),
        "p95_itl_ms": (False, 0.02, 0.03, 0.03, 0.06),
    }


def test_classes_are_workloads_or_what_globs_say():
    rules = replace(DEFAULT_RULES, classes={"long": ("*/long-*", "book/*"), "chat": ("chat/*",)})
    cells = ("chat/a-c8", "chat/long-c8", "book/a", "code/a")
    assert [rules.class_of(cell) for cell in cells] == ["chat", "long", "long", "code"]
    assert DEFAULT_RULES.class_of("chat/long-c8") == "chat"


@pytest.mark.parametrize(
    "looks",
    [
        (Look(7, 0.004, 0.02),),  # no p of 7 pairs is as small
        (Look(8, 0.004, 0.003),),
        (Look(8, 0.6, 0.02),),
        (Look(12, 0.003, 0.02), Look(8, 0.004, 0.02)),
        (Look(21, 0.003, 0.02),),
        (),
    ],
)
def test_looks_that_could_show_nothing_are_refused(looks):
    with pytest.raises(UsageError, match=str(looks[0].pairs) if looks else "at least one"):
        TimingRules(METRICS, looks)


@pytest.mark.parametrize(
    "change", [{"floor": 3}, {"margins": {OVERALL: 0.1, CLASS: 0.1, CELL: 0}}, {"margins": {OVERALL: 0.1, CELL: 0.1}}]
)
def test_floors_and_margins_that_are_none_are_refused(change):
    with pytest.raises(UsageError, match="output_throughput"):
        replace(METRICS[0], **change)


def test_the_look_of_so_many_pairs():
    assert [DEFAULT_RULES.look_for(pairs).pairs for pairs in (1, 8, 9, 16, 40)] == [8, 8, 12, 16, 16]
