"""Changes against the baseline: one clock a load, calls in the reader's direction, numbers as people write them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.effects.comparison import Call, Comparison
from kvbench.metrics.definitions import ENGINE, SERVED
from kvbench.report.comparisons import ITL, THROUGHPUT, TTFT, Comparisons, short_name, sized
from kvbench.runs.model import Run
from tests.support.report_cells import FAST, LATE, SLOW, WIDE, cell, in_engine_time, run
from tests.support.report_parts import change


@pytest.mark.parametrize(
    ("figures", "metric", "call"),
    [
        ({"throughput": FAST}, THROUGHPUT, Call.BETTER),
        ({"throughput": SLOW}, THROUGHPUT, Call.WORSE),
        ({"throughput": (101.0, 99.0, 100.0)}, THROUGHPUT, Call.LEVEL),
        ({"throughput": WIDE}, THROUGHPUT, Call.UNDECIDED),
        ({"throughput": (150.0,)}, THROUGHPUT, Call.UNDECIDED),  # one repeat decides nothing
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
