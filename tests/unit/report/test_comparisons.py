"""Which cells are compared, and which lead."""

from __future__ import annotations

import pytest

from kvbench.report.comparisons import THROUGHPUT, Comparisons, best, differing, leaders, scatters, served, spread
from kvbench.runs.model import MeasuredLoad
from tests.support.records import put, take
from tests.support.report_cells import cell, mark_few, run

AT_24 = MeasuredLoad("closed", 24)


def test_only_valid_cells_with_figures_are_compared() -> None:
    assert served(cell(), cell(throughput=()), THROUGHPUT) is None
    assert served(cell(), cell(page_size=8, reasons=("lag",)), THROUGHPUT) is None
    assert spread({}) is None


def test_best_is_the_highest_median_of_valid_cells() -> None:
    cells = [cell(throughput=(100.0, 101.0, 102.0)), cell(page_size=8), cell(page_size=4, throughput=(900.0,) * 3,
                                                                             reasons=("lag",))]  # fmt: skip
    assert best(cells) is cells[0]
    assert best([cells[2]]) is None


PAGE_16, PAGE_8 = "paged (page 16)", "paged (page 8)"


@pytest.mark.parametrize(
    ("page_8", "page_32", "marked"),
    [
        ((98.0, 100.0, 100.0), (50.0, 50.0, 50.0), {PAGE_16: "level", PAGE_8: "level"}),
        ((60.0, 99.0, 101.0), (50.0, 50.0, 50.0), {PAGE_16: "level", PAGE_8: "undecided"}),
        ((70.0, 70.0, 70.0), (50.0, 50.0, 50.0), {PAGE_16: "level"}),
        ((98.0, 100.0, 100.0), (60.0, 99.0, 101.0), {}),  # nobody is decided to be worse
    ],
)
def test_leaders_are_all_that_are_not_decided_to_be_worse(
    page_8: tuple[float, ...], page_32: tuple[float, ...], marked: dict[str, str]
) -> None:
    top = (100.0, 101.0, 102.0)
    cells = [cell(throughput=top), cell(page_size=8, throughput=page_8), cell(page_size=32, throughput=page_32)]
    assert leaders(run(*cells).at(AT_24))["output_tokens_per_s"] == marked
    faster = [tuple(10_000 / value for value in values) for values in (top, page_8, page_32)]  # of latencies
    for key, name in (("ttft_ms_p95", "ttft"), ("tpot_ms_p50", "tpot")):
        cells = [
            cell(**{name: values}, throughput=(1.0,) * len(values), **sizes)
            for values, sizes in zip(faster, ({}, {"page_size": 8}, {"page_size": 32}), strict=True)
        ]
        assert leaders(run(*cells).at(AT_24))[key] == marked


def test_leaders_are_valid_and_not_alone() -> None:
    slow, best_of_all = cell("contiguous", throughput=(50.0,) * 3), cell(throughput=(900.0,) * 3, reasons=("lag",))
    assert not any(leaders(run(cell()).at(AT_24)).values())  # of one configuration there is no best
    assert not any(leaders(run(best_of_all, slow).at(AT_24)).values())
    shown = leaders(run(best_of_all, slow, cell(page_size=8)).at(AT_24))
    assert shown["output_tokens_per_s"] == {PAGE_8: "level"}


@pytest.mark.parametrize(
    ("few", "marked"), [((), {PAGE_16: "level"}), ((0,), {}), ((1,), {PAGE_16: "level"}), ((1, 2), {})]
)
def test_a_percentile_of_too_few_samples_is_neither_the_best_nor_worse(few: tuple[int, ...], marked: dict) -> None:
    cells = [cell(ttft=(500.0,) * 3), cell(page_size=8, ttft=(700.0,) * 3), cell("contiguous", ttft=(900.0,) * 3)]
    for number in few:
        mark_few(cells[number], "ttft_ms")
    assert leaders(run(*cells).at(AT_24))["ttft_ms_p95"] == marked


def test_there_is_no_leader_where_medians_and_paired_ratios_contradict_each_other() -> None:
    more = dict.fromkeys(("tpot", "ttft"), (20.0,) * 7)
    ahead = cell(throughput=(100.0,) * 3 + (500.0,) * 4, **more)  # the machine was faster in the last four repeats
    behind, slow = cell(page_size=8, throughput=(130.0, 130.0, 131.0)), cell("contiguous", throughput=(50.0,) * 3)
    assert served(behind, ahead, THROUGHPUT).call == "better"  # type: ignore[union-attr]
    assert leaders(run(ahead, behind, slow).at(AT_24))["output_tokens_per_s"] == {}
    assert leaders(run(ahead, slow).at(AT_24))["output_tokens_per_s"] == {PAGE_16: "level"}


@pytest.mark.parametrize(
    ("throughput", "found"), [((100.0, 120.0, 151.0), True), ((100.0, 120.0, 150.0), False), ((), False)]
)
def test_repeats_scatter_from_half_as_much_again(throughput: tuple[float, ...], found: bool) -> None:
    assert (scatters(cell(throughput=throughput)) is not None) == found


def test_paging_picks_the_pair_that_differs_least() -> None:
    cells = [cell("contiguous"), cell(page_size=64), cell(), cell(enable_prefix_caching=True)]
    (pair,) = Comparisons.of(run(*cells)).pairs.values()
    assert (pair[0].name, pair[1].name) == ("paged (page 16)", "contiguous")
    (pair,) = Comparisons.of(run(cell("contiguous", max_num_seqs=8), cell(), cell(max_num_seqs=8))).pairs.values()
    assert pair[0].settings["max_num_seqs"] == 8  # the same settings before the baseline
    assert Comparisons.of(run(cell(load=3), cell("contiguous", load=24))).pairs == {}


SWAP = {"preemption_mode": "swap"}


@pytest.mark.parametrize(
    ("a", "b", "changed"),
    [
        (cell(), cell("contiguous"), {"layout"}),
        (cell(enable_prefix_caching=True), cell("contiguous"), {"layout", "enable_prefix_caching"}),
        (cell(), cell(page_size=8), {"page_size"}),
        (cell(preemption_mode="recompute"), cell(**SWAP, swap_space="64MiB"), {"preemption_mode"}),
        (cell("contiguous", reservation="oracle"), cell(), {"layout"}),
        (cell("contiguous", reservation="max"), cell("contiguous"), set()),
        (cell(enable_chunked_prefill=False), cell(max_num_partial_prefills=2), {"enable_chunked_prefill"}),
    ],
)
def test_settings_that_only_another_one_needs_are_part_of_it(a, b, changed: set[str]) -> None:
    assert differing(a, b) == changed


def test_effects_are_single_changes_from_the_baseline() -> None:
    base, eight = cell(), cell(page_size=8, throughput=(120.0,) * 3)
    both = cell(page_size=8, enable_prefix_caching=True)
    (effect,) = Comparisons.of(run(base, eight, both)).alone
    assert (effect.setting, effect.value, effect.baseline_value) == ("page_size", 8, 16)
    ratio = served(effect.cell, effect.base, THROUGHPUT)
    assert ratio is not None and ratio.ratio == pytest.approx(1.2)
    assert Comparisons.of(run(eight, cell(page_size=64))).alone == []  # without a baseline
    largest, oracle = (cell("contiguous", reservation=kind, baseline=kind == "max") for kind in ("max", "oracle"))
    (effect,) = Comparisons.of(run(largest, oracle, cell(baseline=False))).alone
    assert effect.setting == "reservation"  # layouts only where paging is not compared


def test_throughput_falls_back_to_the_whole_run_for_every_repeat_alike() -> None:
    # One repeat without a steady window: mixing the two definitions would compare unlike numbers.
    short, steady = cell(throughput=(100.0, 110.0)), cell("contiguous", throughput=(100.0, 100.0))
    take(short.repeats[1].metrics, "steady_output_throughput")
    for each, value in ((short, 80.0), (steady, 40.0)):
        for repeat in each.repeats:
            put(repeat.metrics, output_throughput=value)
    assert short.throughput() == {0: 80.0, 1: 80.0}
    r = served(short, steady, THROUGHPUT)
    assert r is not None and r.values == pytest.approx((2.0, 2.0))
