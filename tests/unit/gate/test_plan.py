"""Which cells of two sides belong together, and the order within a pair."""

from __future__ import annotations

from collections import Counter

import pytest
from scipy.stats import binomtest

from kvbench.common.errors import UsageError
from kvbench.gate.timing.plan import PairedCell, match_designs, turns
from kvbench.workload.design import make_design
from kvbench.workload.load_section import load_point

LOADS = (
    load_point("closed", concurrency=4, rate=None, num_requests=8),
    load_point("open", concurrency=None, rate=2.0, num_requests=8),
)


def design(loads=LOADS, sweep=None, **engine):
    return make_design({"layout": "paged", "page_size": 16, **engine}, sweep or {}, loads, "one_at_a_time")


def test_equal_sides_have_the_names_of_their_cells():
    both = design(sweep={"layout": ["contiguous"]})
    matches = match_designs("mixed", both, both)
    assert [m.names for m in matches] == [
        ("mixed/paged-p16-c4", "mixed/paged-p16-r2"),
        ("mixed/contiguous-c4", "mixed/contiguous-r2"),
    ]
    (cell, _) = matches[0].paired_cells
    assert cell == PairedCell("mixed/paged-p16-c4", "mixed", "mixed/paged-p16", "paged-p16-c4", "paged-p16-c4")


def test_sides_of_different_settings_are_named_by_both_and_what_cannot_be_paired_is_refused():
    (match,) = match_designs("mixed", design(), design(page_size=32))
    assert match.names[0] == "mixed/paged-p16~paged-p32-c4"
    assert (match.base_cells[0].cell_id, match.candidate_cells[0].cell_id) == ("paged-p16-c4", "paged-p32-c4")
    with pytest.raises(UsageError, match=r"base has 1 configurations .* candidate 2"):
        match_designs("mixed", design(), design(sweep={"layout": ["contiguous"]}))
    with pytest.raises(UsageError, match="different loads"):
        match_designs("mixed", design(), design(LOADS[:1]))


def test_the_coin_is_fair_of_each_configuration_by_itself_and_of_the_seed_alone():
    both = design(sweep={"layout": ["contiguous"]})
    matches = match_designs("mixed", both, both)
    drawn = [{t.match.key: t.first for t in turns(matches, pair, 7)} for pair in range(1, 801)]
    for key in drawn[0]:
        heads = sum(each[key] == "base" for each in drawn)
        assert binomtest(heads, len(drawn)).pvalue > 1e-4
    together = Counter(tuple(sorted(each.items())) for each in drawn)
    assert len(together) == 4 and min(together.values()) > 140  # of 200 expected: the coins are independent
    assert turns(matches, 3, 7) == turns(matches, 3, 7)
    assert len({tuple(t.first for t in turns(matches, p, s)) for p in range(4) for s in range(4)}) > 1
    orders = set()
    for turn in (turn for pair in range(1, 20) for turn in turns(matches[:1], pair, 1)):
        base, candidate = (
            tuple(cell.load.load_id for cell in turn.match.block(side, 1, turn.order).cells) for side in turn.sides
        )
        assert base == candidate  # both sides of a pair get their loads in the same order
        orders.add(base)
    assert orders == {("c4", "r2"), ("r2", "c4")}
