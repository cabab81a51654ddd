"""Which cells are compared, which lead, and changes against the baseline, in the direction of each metric."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.effects.comparison import Call, Comparison
from kvbench.metrics.definitions import ENGINE, SERVED
from kvbench.report.comparisons import (
    ITL,
    THROUGHPUT,
    TTFT,
    Comparisons,
    best,
    differing,
    leaders,
    scatters,
    served,
    short_name,
    sized,
    spread,
)
from kvbench.runs.model import MeasuredLoad, Run
from tests.support.records import put, take
from tests.support.report_cells import FAST, LATE, SLOW, WIDE, cell, in_engine_time, mark_few, run
from tests.support.report_parts import change

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


@pytest.mark.parametrize(
    ("figures", "metric", "call"),
    [
        ({"throughput": FAST}, THROUGHPUT, Call.BETTER),
        ({"throughput": SLOW}, THROUGHPUT, Call.WORSE),
        ({"throughput": (101.0, 99.0, 100.0)}, THROUGHPUT, Call.LEVEL),
        ({"throughput": WIDE}, THROUGHPUT, Call.UNDECIDED),
        ({"ttft": LATE}, TTFT, Call.WORSE),  # more of a latency is worse
        ({"tpot": (10.0, 10.1, 10.2)}, ITL, Call.BETTER),
    ],
)
def test_a_served_change_is_called_in_the_direction_of_its_metric(figures: dict, metric: str, call: str) -> None:
    other = cell(page_size=8, **figures)
    found = change(run(cell(), other), other, metric)
    assert found is not None and (found.call, found.clock) == (call, SERVED)


def test_engine_time_outranks_what_was_served_and_the_clocks_never_mix() -> None:
    a, b = cell(page_size=8, throughput=SLOW), cell(page_size=64, throughput=FAST)
    known = run(cell(), a, b, engine_time=in_engine_time((a, THROUGHPUT, 1.1, 1.08, 1.12, Call.BETTER)))
    found = Comparisons.of(known).changes
    assert [(one.name, each.clock, each.call) for one, each in found] == [(a.name, ENGINE, Call.BETTER)]


def test_what_was_served_decides_only_what_engine_time_does_not_exclude() -> None:
    other = cell(page_size=8, throughput=FAST)
    excluded = run(cell(), other, engine_time=in_engine_time((other, THROUGHPUT, 1.01, 0.99, 1.03, Call.UNDECIDED)))
    found = change(excluded, other, THROUGHPUT)
    assert found is not None and (found.clock, found.call) == (ENGINE, Call.UNDECIDED)
    wide = run(cell(), other, engine_time=in_engine_time((other, THROUGHPUT, 1.3, 0.9, 1.8, Call.UNDECIDED)))
    found = change(wide, other, THROUGHPUT)
    assert found is not None and (found.clock, found.call) == (SERVED, Call.BETTER)


def test_nothing_is_compared_with_an_invalid_baseline_but_engine_time_needs_none() -> None:
    base, other = cell(reasons=("lag",)), cell(page_size=8, throughput=FAST)
    assert change(run(base, other), other, THROUGHPUT) is None
    known = run(base, other, engine_time=in_engine_time((other, THROUGHPUT, 1.1, 1.08, 1.12, Call.BETTER)))
    assert change(known, other, THROUGHPUT).ratio == 1.1
    assert change(known, base, THROUGHPUT) is None


def test_the_reported_load_is_the_highest_that_decides_anything() -> None:
    low, high = cell(page_size=8, load=3, throughput=FAST), cell(page_size=8, throughput=WIDE)
    everything: Run = run(cell(load=3), cell(), low, high)
    assert Comparisons.of(everything).load == low.load
    assert Comparisons.of(run(cell(load=3), cell())).load.value == 24
    assert Comparisons.of(run()).load is None


@pytest.mark.parametrize(
    ("ratio", "low", "high", "text"),
    [
        (1.163, 1.126, 1.202, "+16 % (13 to 20)"),
        (0.957, 0.93, 0.985, "−4.3 % (−7.0 to −1.5)"),
        (2.4, 1.9, 3.1, "2.4x (1.9 to 3.1)"),
        (12.2, 11.0, 13.4, "12x (11 to 13)"),
        (1.0, 0.98, 1.02, "0 % (−2.0 to 2.0)"),
        (1.5, None, None, "+50 %"),
        (1.5, 0.1, 20.0, "+50 %"),  # such an interval tells nothing
    ],
)
def test_a_change_is_written_as_people_say_it(ratio, low, high, text: str) -> None:
    assert sized(Comparison(THROUGHPUT, SERVED, ratio, low, high, 3, Call.UNDECIDED)) == text


def test_a_configuration_is_named_by_what_it_changes() -> None:
    base = cell()
    assert short_name(base, base) == base.name
    assert short_name(cell(page_size=8), base) == "page 8"
    assert short_name(cell("contiguous"), base) == "contiguous"
    both = cell(page_size=32, kv_cache_dtype="fp8_e4m3", enable_prefix_caching=True)
    assert short_name(both, base) == "page 32 with prefix caching and FP8 KV (e4m3)"
    assert short_name(replace(base, settings={}), None) == base.name
