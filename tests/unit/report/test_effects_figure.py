"""The effects figure: a panel a metric, decided changes apart from open ones, nothing drawn outside its axis."""

from __future__ import annotations

import pytest

from kvbench.effects.comparison import Call
from kvbench.report.comparisons import ITL, THROUGHPUT, TTFT
from tests.support.report_cells import cell, in_engine_time, run
from tests.support.report_parts import effects_drawing as drawing

BETTER, WORSE, OPEN = Call.BETTER, Call.WORSE, Call.UNDECIDED
A, B, C = cell(page_size=8), cell(page_size=64), cell("contiguous")
EFFECTS = (
    (A, THROUGHPUT, 1.10, 1.08, 1.12, BETTER), (A, TTFT, 1.02, 0.8, 1.3, OPEN), (A, ITL, 1.0, 0.9, 1.1, OPEN),
    (B, THROUGHPUT, 0.99, 0.97, 1.01, OPEN), (B, TTFT, 1.6, 1.3, 1.9, WORSE), (B, ITL, 1.0, 0.95, 1.05, OPEN),
    (C, THROUGHPUT, 0.5, 0.4, 0.6, WORSE), (C, TTFT, 9.0, 4.0, 20.0, WORSE), (C, ITL, 0.1, 0.08, 0.12, BETTER),
)  # fmt: skip


def shown():
    return run(cell(), A, B, C, engine_time=in_engine_time(*EFFECTS))


def marks(figure) -> dict[tuple[str, str], tuple[float, str]]:
    """(panel, call) -> x and text of each point."""
    return {
        (trace.xaxis or "x", trace.name): list(zip(trace.x, trace.text, strict=True))
        for trace in figure.data
        if trace.mode == "markers+text"
    }


def test_every_change_is_one_mark_in_its_panel_with_its_size() -> None:
    figure = drawing(shown()).figure
    found = marks(figure)
    assert sum(map(len, found.values())) == len(EFFECTS)
    assert ("x", "better") in found and ("x2", "worse") in found and ("x3", "not decided") in found
    assert found["x", "better"] == [(pytest.approx(10.0), "+10 %")]
    assert {text for _, text in found["x2", "worse"]} == {"+60 %", "9.0x"}
    looks = {trace.name: (trace.marker.color, trace.marker.symbol) for trace in figure.data if trace.name}
    assert len({colour for colour, _ in looks.values()}) == len(looks) == len({symbol for _, symbol in looks.values()})


def test_nothing_lies_outside_its_axis_and_the_margin_is_drawn_in_every_panel() -> None:
    figure = drawing(shown()).figure
    for panel in ("", "2", "3"):
        low, high = figure.layout[f"xaxis{panel}"].range
        inside = [x for t in figure.data if (t.xaxis or "x") == f"x{panel}" for x in t.x if x is not None]
        assert low < 0 < high and all(low <= x <= high for x in inside)
    bands = [shape for shape in figure.layout.shapes if shape.type == "rect"]
    assert [(band.x0, band.x1) for band in bands] == [(pytest.approx(-2.0), pytest.approx(2.0))] * 3


def test_the_caption_names_clock_load_and_margin_and_a_run_without_changes_has_no_figure() -> None:
    found = drawing(shown())
    assert found is not None and all(part in found.caption for part in ("engine time", "24 concurrent", "±2 %"))
    served = drawing(run(cell(), cell(page_size=8)))
    assert served is not None and "served" in served.caption and "±5 %" in served.caption
    assert drawing(run(cell())) is None and drawing(run()) is None
