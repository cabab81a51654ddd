"""Findings against numbers worked out by hand, and scipy's own t interval."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from kvbench.report.comparisons import (
    best,
    compare,
    differing,
    effects,
    log_t_interval,
    paging,
    paired_ratio,
    scatters,
    spread,
)
from kvbench.report.validity import validity
from kvbench.runs.model import MeasuredLoad
from tests.support.report_cells import cell, run


def test_ratios_are_paired_by_repeat_and_not_pooled() -> None:
    # The machine halves in speed in repeat 2; paired ratios do not see it, ratios of means would.
    r = paired_ratio({1: 200.0, 2: 110.0, 3: 190.0}, {1: 100.0, 2: 50.0, 3: 100.0})
    assert r is not None
    assert r.values == pytest.approx((2.0, 2.2, 1.9))
    assert (r.median, r.low, r.high, r.n) == pytest.approx((2.0, 1.9, 2.2, 3))


def test_only_repeats_that_both_have_are_compared() -> None:
    r = paired_ratio({1: 10.0, 2: 30.0, 4: 50.0}, {2: 10.0, 3: 10.0, 4: 10.0})
    assert r is not None
    assert r.values == pytest.approx((3.0, 5.0))
    assert paired_ratio({1: 10.0}, {2: 10.0}) is None
    assert paired_ratio({1: 10.0}, {1: 0.0}) is None


def test_t_interval_matches_scipy_on_logs() -> None:
    values = (1.85, 1.9, 1.96, 1.7)
    logs = np.log(values)
    low, high = stats.t.interval(0.95, len(logs) - 1, loc=logs.mean(), scale=stats.sem(logs))
    assert log_t_interval(values) == pytest.approx((np.exp(low), np.exp(high)))
    assert log_t_interval((1.2, 1.3)) is None


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((1.9, 1.85, 1.96), "higher"),
        ((0.6, 0.61, 0.62), "lower"),
        ((0.66, 0.73, 4.09), "unclear"),  # includes 1 because nothing is known, not because it is level
        ((0.97, 1.10, 1.20), "unclear"),
        ((1.02, 1.021, 1.022), "level"),  # within 5 %, however sure
        ((0.96, 1.0, 1.04), "level"),
        ((0.94, 1.0, 1.04), "unclear"),
        ((0.99, 1.0, 1.06), "unclear"),
        ((1.05, 1.06, 1.07), "higher"),  # small, but not all within 5 %, and the interval excludes 1
        ((1.04, 1.30, 1.35), "unclear"),  # all above 1, but the interval of three repeats includes it
        ((2.16, 8.97, 11.0), "unclear"),
        ((1.5,), "unclear"),
        ((1.01,), "unclear"),
        ((1.5, 1.6), "unclear"),
        ((1.0, 1.0), "unclear"),
    ],
)
def test_verdicts(values: tuple[float, ...], verdict: str) -> None:
    r = paired_ratio(dict(enumerate(values)), dict.fromkeys(range(len(values)), 1.0))
    assert r is not None
    assert r.verdict == verdict


def test_best_tells_level_from_not_told_apart() -> None:
    top = best(
        run(
            cell(throughput=(100.0, 101.0, 102.0)),
            cell(page_size=8, throughput=(98.0, 100.0, 100.0), baseline=False),
            cell(page_size=32, throughput=(60.0, 99.0, 101.0), baseline=False),
            cell(page_size=64, throughput=(50.0, 50.0, 50.0), baseline=False),
        ),
        MeasuredLoad("closed", 24),
    )
    assert top is not None
    assert top.level_with == ("paged (page 8)",)
    assert top.unclear_with == ("paged (page 32)",)


def test_repeats_scatter_from_half_as_much_again() -> None:
    assert scatters(cell(throughput=(100.0, 120.0, 151.0))) is not None
    assert scatters(cell(throughput=(100.0, 120.0, 150.0))) is None
    assert scatters(cell(throughput=())) is None


def test_spread_of_nothing_is_none() -> None:
    assert spread({}) is None


def test_paging_picks_the_pair_that_differs_in_layout_only() -> None:
    contiguous = cell("contiguous")
    cells = [contiguous, cell(page_size=64, baseline=False), cell(), cell(enable_prefix_caching=True)]
    (pair,) = paging(run(*cells))
    assert (pair.a.name, pair.b.name) == ("paged (page 16)", "contiguous")


def test_paging_prefers_the_same_settings_over_the_baseline() -> None:
    contiguous = cell("contiguous", max_num_seqs=8)
    (pair,) = paging(run(contiguous, cell(), cell(max_num_seqs=8)))
    assert pair.a.settings["max_num_seqs"] == 8


def test_loads_of_only_one_layout_are_not_paired() -> None:
    assert paging(run(cell(load=3), cell("contiguous", load=24))) == []


def test_page_size_is_no_difference_between_layouts_but_prefix_caching_is() -> None:
    assert differing(cell(), cell("contiguous")) == {"layout"}
    assert differing(cell(enable_prefix_caching=True), cell("contiguous")) == {"layout", "enable_prefix_caching"}
    assert differing(cell(), cell(page_size=8)) == {"page_size"}


def test_best_leaves_invalid_cells_out_and_names_those_level() -> None:
    fast_but_invalid = cell(throughput=(900.0,) * 3, page_size=8, reasons=("lag",))
    top = best(
        run(
            fast_but_invalid,
            cell(throughput=(200.0, 201.0, 202.0)),
            cell(page_size=64, throughput=(199.0, 203.0, 200.0)),
            cell("contiguous"),
        ),
        MeasuredLoad("closed", 24),
    )
    assert top is not None
    assert top.cell.name == "paged (page 16)"
    assert len(top.level_with) == 1
    assert "page_size" in top.level_with[0] or "64" in top.level_with[0]


def test_effects_are_single_changes_from_the_baseline() -> None:
    base, eight = cell(), cell(page_size=8, throughput=(120.0,) * 3, baseline=False)
    both = cell(page_size=8, enable_prefix_caching=True, baseline=False)
    found = effects(run(base, eight, both))
    assert [(e.setting, e.value, e.baseline_value) for e in found] == [("page_size", 8, 16)]
    assert found[0].comparison.throughput is not None
    assert found[0].comparison.throughput.median == pytest.approx(1.2)


def test_no_baseline_means_no_effects() -> None:
    assert effects(run(cell(page_size=8, baseline=False), cell(page_size=64, baseline=False))) == []


def test_throughput_falls_back_to_the_whole_run_for_every_repeat_alike() -> None:
    # One repeat without a steady window: mixing the two definitions would compare unlike numbers.
    short = cell(throughput=(100.0, 110.0))
    del short.repeats[1].metrics["steady_output_throughput"]  # type: ignore[attr-defined]
    for repeat in short.repeats:
        repeat.metrics["output_throughput"] = 80.0  # type: ignore[index]
    assert short.throughput() == {0: 80.0, 1: 80.0}
    steady = cell("contiguous", throughput=(100.0, 100.0))
    for repeat in steady.repeats:
        repeat.metrics["output_throughput"] = 40.0  # type: ignore[index]
    r = compare(short, steady).throughput
    assert r is not None
    assert r.values == pytest.approx((2.0, 2.0))


def test_comparison_with_no_common_repeat_has_no_ratio() -> None:
    empty = cell(throughput=())
    assert compare(cell(), empty).throughput is None


def test_validity() -> None:
    assert validity(run()).status == "empty"
    assert validity(run(cell())).status == "valid"
    assert validity(run(cell(), status="incomplete")).status == "incomplete"
    assert validity(run(cell(), missing=("x",))).status == "incomplete"
    broken = validity(run(cell(reasons=("lag p99 3 ms",)), missing=("x",)))
    assert broken.status == "invalid"
    assert any("lag p99 3 ms" in reason for reason in broken.reasons)
    failed = validity(run(cell(failed=2)))
    assert failed.status == "valid"
    assert "6 of 144 requests failed" in failed.reasons[0]


def test_reasons_of_one_kind_are_one_line() -> None:
    lag = tuple(f"repeat {i}: the client lagged: p99 {i}.5 ms, the limit is 1 ms." for i in (1, 2, 3))
    lines = validity(run(cell(reasons=lag), cell("contiguous", reasons=(*lag, "2 pages were still owned")))).reasons
    assert lines == (
        "paged (page 16) at 24 at once: the client lagged: p99 1.5 ms, the limit is 1 ms (and 5 more like it: "
        "paged (page 16) at 24 at once, contiguous at 24 at once)",
        "contiguous at 24 at once: 2 pages were still owned",
    )
