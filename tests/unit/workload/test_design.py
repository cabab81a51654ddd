"""Which cells a sweep has, what they are called, and in which order they run."""

from __future__ import annotations

import re

import pytest

from kvbench.common.errors import UsageError
from kvbench.workload.design import load_point, make_design, normalise, plan_blocks, select

BASE = {"layout": "paged", "page_size": 16, "enable_prefix_caching": False, "max_num_seqs": 64}
SWEEP = {"layout": ["contiguous", "paged"], "page_size": [8, 16, 64], "enable_prefix_caching": [False, True]}
LOADS = [load_point("closed", concurrency=c, rate=None, num_requests=2 * c) for c in (3, 24)]


def ids(design):
    return [c.config_id for c in design.configurations]


def test_one_variable_at_a_time_whether_the_baselines_value_is_listed_or_not():
    assert ids(make_design(BASE, {"page_size": [8]}, LOADS, "one_at_a_time")) == ["paged-p16", "paged-p8"]
    design = make_design(BASE, SWEEP, LOADS, "one_at_a_time")
    assert ids(design) == ["paged-p16", "contiguous", "paged-p8", "paged-p64", "paged-p16-prefix"]
    assert [c.cell_id for c in design.cells][:4] == [
        "paged-p16-c3", "paged-p16-c24", "contiguous-c3", "contiguous-c24",
    ]  # fmt: skip
    assert len(design.cells) == 10
    for configuration in design.configurations:
        assert len(configuration.varied) == (0 if configuration.is_baseline else 1)


def test_contiguous_drops_page_size_and_prefix_caching_and_keeps_the_rest():
    settings = normalise({**BASE, "layout": "contiguous", "reservation": "max"})
    assert settings == {"layout": "contiguous", "max_num_seqs": 64, "reservation": "max"}
    assert "reservation" not in normalise({**BASE, "reservation": "max"})


@pytest.mark.parametrize(
    "values",
    [
        ["48MiB", "1 GiB", "48 MiB"],
        ["a/b", "a b", "../../etc", "", None, "x" * 300, "x" * 301],
        ["Auto", "auto", "AUTO"],
        [0.1, 0.10000001, 1e-9],
        ["ü", "ö", "日本"],
    ],
)
def test_ids_are_unique_and_safe_as_file_names_for_any_setting(values):
    design = make_design(BASE, {"some_setting": values}, LOADS, "one_at_a_time")
    found = [cell.cell_id for cell in design.cells]
    assert len(design.configurations) == len(values) + (None not in values)  # None is the default: the baseline
    assert len({name.lower() for name in found}) == len(found)
    for name in found:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}", name), name


def test_none_puts_a_setting_back_to_its_default():
    design = make_design({**BASE, "num_threads": 2}, {"num_threads": [None, 1]}, LOADS, "one_at_a_time")
    assert ids(design) == ["paged-p16", "paged-p16-numthreads_None", "paged-p16-numthreads_1"]
    assert "num_threads" not in design.configurations[1].settings
    assert design.configurations[1].varied == {"num_threads": None}


def test_changed_flags_are_named_in_both_directions():
    base = {**BASE, "enable_prefix_caching": True, "enable_chunked_prefill": True}
    sweep = {"enable_prefix_caching": [False], "enable_chunked_prefill": [False], "max_num_seqs": [8]}
    assert ids(make_design(base, sweep, LOADS, "one_at_a_time")) == [
        "paged-p16", "paged-p16-noprefix", "paged-p16-unchunked", "paged-p16-seqs8",
    ]  # fmt: skip


@pytest.mark.parametrize(("rate", "expected"), [(4.0, "r4"), (0.5, "r0.5"), (1e-7, "r1e_07"), (None, "trace")])
def test_open_loop_load_ids(rate, expected):
    assert load_point("open", concurrency=None, rate=rate, num_requests=None).load_id == expected


def test_only_filters_cells_and_refuses_a_glob_that_matches_nothing():
    design = make_design(BASE, SWEEP, LOADS, "one_at_a_time")
    chosen = select(design, ["paged-*-c24", "contiguous-c3"])
    assert [c.cell_id for c in chosen.cells] == [
        "paged-p16-c24", "contiguous-c3", "paged-p8-c24", "paged-p64-c24", "paged-p16-prefix-c24",
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"'pagd-\*' matches no cell: the cells are paged-p16-c3, "):
        select(design, ["paged-*", "pagd-*"])


def test_blocks_run_each_cell_and_repeat_once_on_a_fresh_server_per_configuration():
    design = make_design(BASE, SWEEP, LOADS, "one_at_a_time")
    blocks = plan_blocks(design, 3, seed=0)
    assert len(blocks) == 15
    runs = [(cell.cell_id, block.repeat) for block in blocks for cell in block.cells]
    assert len(runs) == len(set(runs)) == 30
    assert [b.repeat for b in blocks] == sorted(b.repeat for b in blocks)  # whole repeats first
    assert all(c.configuration == b.configuration for b in blocks for c in b.cells)
    assert len({b.block_id for b in blocks}) == 15


def test_the_order_is_random_between_repeats_and_fixed_by_the_seed():
    design = make_design(BASE, SWEEP, LOADS, "one_at_a_time")
    order = [b.configuration.config_id for b in plan_blocks(design, 20, seed=1)]
    assert order == [b.configuration.config_id for b in plan_blocks(design, 20, seed=1)]
    assert order != [b.configuration.config_id for b in plan_blocks(design, 20, seed=2)]
    assert len({tuple(order[i : i + 5]) for i in range(0, 100, 5)}) > 5
    loads = {tuple(c.load.load_id for c in b.cells) for b in plan_blocks(design, 20, seed=1)}
    assert loads == {("c3", "c24"), ("c24", "c3")}


def test_in_one_repeat_every_configuration_sees_its_loads_in_the_same_order():
    loads = [load_point("closed", concurrency=c, rate=None, num_requests=c) for c in (1, 2, 3, 4, 5)]
    design = make_design(BASE, SWEEP, loads, "one_at_a_time")
    blocks = plan_blocks(design, 10, seed=1)
    orders = [{tuple(c.load.load_id for c in b.cells) for b in blocks if b.repeat == r} for r in range(1, 11)]
    assert [len(order) for order in orders] == [1] * 10
    assert len(set.union(*orders)) > 5  # and another in another repeat
    fewer = plan_blocks(select(design, ["*-c1", "*-c4", "contiguous-c2"]), 10, seed=1)
    for few in fewer:  # leaving cells out does not change the order of the others
        whole = next(b for b in blocks if b.block_id == few.block_id)
        assert [c for c in whole.cells if c in few.cells] == list(few.cells)
