"""The frontier: intervals from the repeats, certainty only where no other point can be better, and every axis."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvbench.report.figures.frontier import certain, frontier_figure
from kvbench.report.style import looks
from tests.support.records import put
from tests.support.report_cells import cell, mark_few, run
from tests.support.report_parts import frontier_drawing as drawing
from tests.support.report_parts import frontier_frame, frontier_table

AXES = ("tokens_per_s", "goodput", "cost", "energy")


def test_intervals_are_students_of_the_logs_from_three_repeats_on() -> None:
    rates = (100.0, 110.0, 130.0)
    row = frontier_frame(run(cell(throughput=rates))).iloc[0]
    logs = np.log(rates)
    low, high = np.exp(stats.t.interval(0.95, 2, loc=logs.mean(), scale=stats.sem(logs)))
    assert (row["tokens_per_s"], row["tokens_per_s_low"], row["tokens_per_s_high"]) == pytest.approx((110, low, high))
    two, one = (frontier_frame(run(cell(throughput=rates[:n]))).iloc[0] for n in (2, 1))
    assert math.isnan(two["tokens_per_s_low"]) and two["tokens_per_s"] == 105.0
    assert math.isnan(one["tokens_per_s_low"]) and one["tokens_per_s"] == 100.0


def test_cost_energy_and_goodput_are_shown_where_they_are_known() -> None:
    measured = run(cell(throughput=(100.0, 100.0, 100.0), machine={"gpu_energy_j": 500.0}))
    for repeat in measured.cells[0].repeats:
        put(repeat.metrics, total_output_tokens=1000)
    row = frontier_frame(measured, price_per_hour=3.6).iloc[0]
    assert row["cost"] == pytest.approx(10.0)  # 3.6 an hour / 360,000 tokens an hour, times a million
    assert row["energy"] == pytest.approx(0.5)
    plain = run(cell(), cell(page_size=8))
    for one, rate in zip(plain.cells, (0.0, 2.0), strict=True):
        for repeat in one.repeats:
            put(repeat.metrics, steady_goodput=9.0, goodput=rate)
    frame = frontier_frame(plain)
    assert frame[["cost", "energy"]].isna().all(axis=None)
    assert list(frame["goodput"]) == [0.0, 2.0]  # nothing stays; of the whole run, as the latencies are


def test_the_table_has_every_point_and_marks_a_percentile_of_too_few_samples() -> None:
    few = cell(machine={"gpu_energy_j": 10.0})
    mark_few(few, "ttft_ms")
    for repeat in few.repeats:
        put(repeat.metrics, total_output_tokens=20)
    table = frontier_table(frontier_frame(run(few, cell(page_size=8, throughput=(100.0, 110.0, 130.0))), 3.6))
    heads = [column.title for column in table.columns]
    assert "cost per million output tokens" in heads and len(table.rows) == 2 and " to " in table.rows[1].values[2].note
    ttft = [row.values[heads.index("p95 TTFT, ms")].text for row in table.rows]
    assert ttft[0].endswith("*") and not ttft[1].endswith("*")
    assert "output tokens/s" in heads and any("energy" in head and "(whole run)" in head for head in heads)


def test_invalid_cells_are_not_on_the_frontier() -> None:
    frame = frontier_frame(run(cell(), cell(page_size=8, reasons=("lag",))))
    assert list(frame["configuration"]) == ["paged (page 16)"]
    invalid = run(cell(reasons=("lag",)))
    assert drawing(invalid, frontier_frame(invalid)) is None


def test_a_point_is_certain_where_every_other_is_surely_worse_in_one_of_both() -> None:
    fast = cell(throughput=(200.0, 201.0, 202.0), ttft=(900.0, 901.0, 902.0))
    soon = cell(page_size=8, throughput=(100.0, 101.0, 102.0), ttft=(100.0, 101.0, 102.0))
    beaten = cell(page_size=64, throughput=(90.0, 91.0, 92.0), ttft=(950.0, 951.0, 952.0))
    frame = frontier_frame(run(fast, soon, beaten))
    sure = dict(zip(frame["configuration"], certain(frame, "tokens_per_s", "ttft"), strict=True))
    assert sure == {"paged (page 16)": True, "paged (page 8)": True, "paged (page 64)": False}
    wide = frontier_frame(run(fast, cell(page_size=8, throughput=(150.0, 200.0, 260.0), ttft=(800.0, 900.0, 1000.0))))
    assert not certain(wide, "tokens_per_s", "ttft").any()
    one = frontier_frame(run(cell(throughput=(200.0,)), cell(page_size=8, throughput=(100.0,))))
    assert not certain(one, "tokens_per_s", "ttft").any()  # one repeat: no interval, no certainty


RATES = st.lists(st.floats(10, 1000), min_size=3, max_size=3).map(tuple)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(RATES, RATES), min_size=2, max_size=5))
def test_no_certain_point_is_beaten_in_both_medians(points) -> None:
    cells = [cell(page_size=2**i, throughput=rates, ttft=ttft) for i, (rates, ttft) in enumerate(points)]
    frame = frontier_frame(run(*cells))
    for row in frame[certain(frame, "tokens_per_s", "ttft")].itertuples():
        for other in frame.itertuples():
            assert not (other.tokens_per_s > row.tokens_per_s and other.ttft < row.ttft_low)


def test_buttons_choose_an_axis_and_show_its_traces_alone() -> None:
    shown = run(cell(), cell(page_size=8), cell(load=3), cell(page_size=8, load=3))
    for one in shown.cells:
        for repeat in one.repeats:
            put(repeat.metrics, goodput=2.0)
    figure = frontier_figure(frontier_frame(shown, 1.0), looks(shown.cells))
    (menu,) = figure.layout.updatemenus
    assert [button.label for button in menu.buttons] == [
        "output tokens/s", "requests/s within the SLO (whole run)", "cost per million output tokens",
    ]  # fmt: skip
    assert [trace.visible for trace in figure.data] == list(menu.buttons[0].args[0]["visible"])
    for button, axis in zip(menu.buttons, AXES, strict=False):
        visible = [t for t, on in zip(figure.data, button.args[0]["visible"], strict=True) if on]
        assert len(visible) == 4 and {trace.customdata[0] for trace in visible} == {axis}
    assert not frontier_figure(frontier_frame(run(cell())), looks(shown.cells)).layout.updatemenus
