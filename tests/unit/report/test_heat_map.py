"""Two settings at once: ratios by combination, from cells set by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvbench.runs.engine_time import EngineTime
from kvbench.runs.model import MeasuredCell, Run
from tests.support.report_cells import cell, engine_effect, run
from tests.support.report_parts import heat_map_drawing as drawing
from tests.support.report_parts import heat_map_frame as heat_map

FP8 = {"kv_cache_dtype": "fp8_e4m3"}


def grid(**over: dict[str, Any]) -> list[MeasuredCell]:
    """Page sizes 16 and 64, with and without FP8 KV; ``over``: how one is made, by name."""
    made = {
        "base": {"throughput": (100.0, 100.0, 100.0)},
        "fp8": {"throughput": (120.0, 121.0, 122.0), **FP8},
        "p64": {"throughput": (80.0, 125.0, 110.0), "page_size": 64},
        "both": {"throughput": (130.0, 131.0, 132.0), "page_size": 64, **FP8},
    }
    return [cell(**(made[name] | over.get(name, {}))) for name in made if over.get(name) != {"left": "out"}]


def tiles(shown: Run) -> dict[tuple[str, str], dict[str, Any]]:
    found = heat_map(shown, shown.loads[-1])
    return {(row["page_size"], row["kv_cache_dtype"]): row for row in found.to_dict("records")}


AUTO, E4M3 = "KV in the model's dtype", "FP8 KV (e4m3)"


def test_every_combination_has_its_ratio_to_the_baseline_and_its_verdict() -> None:
    found = tiles(run(*grid()))
    assert len(found) == 4 and {row["time"] for row in found.values()} == {"served"}
    assert (found["16", AUTO]["text"], found["16", AUTO]["ratio"]) == ("baseline", 1.0)
    assert found["16", E4M3]["ratio"] == pytest.approx(1.21) and found["16", E4M3]["decided"]
    assert (found["64", AUTO]["text"], found["64", AUTO]["decided"]) == ("1.10x?", False)
    assert (found["64", E4M3]["text"], found["64", E4M3]["interval"]) == ("1.31x", "1.30–1.32")
    title = drawing(run(*grid())).title
    assert title == "The best of 4: paged (page 64) + kv_cache_dtype fp8_e4m3, 1.31x the baseline"


def test_what_is_invalid_or_missing_is_blank_and_said() -> None:
    shown = run(*grid(both={"reasons": ("lag",)}, p64={"left": "out"}))
    found = tiles(shown)
    assert [found["64", kind]["text"] for kind in (AUTO, E4M3)] == ["missing", "invalid"]
    made = drawing(shown)
    drawn = made.figure.data[0]
    assert sum(value is None or value != value for line in drawn.z for value in line) == 2
    assert "Without a colour" in made.caption and "Without" not in drawing(run(*grid())).caption


def test_where_nothing_is_decided_no_combination_is_called_behind_or_level() -> None:
    once = {name: {"throughput": (80.0,)} for name in ("base", "fp8", "p64", "both")}
    assert "is told apart from" in drawing(run(*grid(**once))).title
    slower = {name: {"throughput": (50.0, 51.0, 52.0)} for name in ("fp8", "p64", "both")}
    assert "is better than" in drawing(run(*grid(**slower))).title


def test_grey_means_not_told_apart() -> None:
    figure = drawing(run(*grid())).figure
    columns, rows = (
        [text.replace("<br>", " ") for text in axis.ticktext] for axis in (figure.layout.xaxis, figure.layout.yaxis)
    )
    lines = zip(rows, figure.data[0].z, strict=True)
    known = {(row, column): z for row, line in lines for column, z in zip(columns, line, strict=True)}
    assert known["64", AUTO] == 0 and known["16", AUTO] == 0
    assert known["64", E4M3] == pytest.approx(1) and 0 < known["16", E4M3] < 1, "the largest effect ends the scale"
    slower = heat_map(run(*grid(fp8={"throughput": (60.0, 61.0, 62.0)})), run(*grid()).loads[0])
    assert slower.loc[slower["ratio"] < 1, "decided"].tolist() == [True]


def test_a_run_of_one_setting_at_a_time_has_none() -> None:
    shown = run(*grid(both={"left": "out"}))
    assert drawing(shown) is None and heat_map(shown, shown.loads[0]).empty
    assert drawing(run(cell(), cell(page_size=8), cell(page_size=32))) is None
    named = run(*grid(), workload={"design": "one_at_a_time"})  # a combination that --only named
    assert drawing(named) is None


def test_engine_time_is_taken_where_it_knows_every_cell_and_never_mixed() -> None:
    cells = grid(both={"reasons": ("lag",)})
    known = ((1.08, 1.05, 1.11, "ahead"), (1.0, 0.99, 1.01, "level"), (1.1, 0.9, 1.3, "open"))
    effects = tuple(
        engine_effect(one, "output_throughput", *effect, 0.01) for one, effect in zip(cells[1:], known, strict=True)
    )
    whole = dataclasses.replace(run(*cells), engine_time=EngineTime(effects=effects))
    found = tiles(whole)
    assert {key: row["text"] for key, row in found.items()} == {
        ("16", AUTO): "baseline", ("16", E4M3): "1.08x", ("64", AUTO): "≈1.00x", ("64", E4M3): "1.10x?",
    }  # fmt: skip
    assert [key for key, row in found.items() if row["decided"]] == [("16", E4M3)]
    assert found["16", E4M3]["interval"] == "1.05–1.11" and "engine time" in drawing(whole).caption
    part = dataclasses.replace(whole, engine_time=EngineTime(effects=effects[:2]))
    assert tiles(part)["16", E4M3]["ratio"] == pytest.approx(1.21) and "served" in drawing(part).caption


def test_a_third_setting_makes_panels_and_what_cannot_be_is_left_empty() -> None:
    third = [
        cell(page_size=size, enable_prefix_caching=on or None, baseline=size == 16 and not on, **dtype)
        for size in (8, 16, 32) for on in (False, True) for dtype in ({}, FP8)
    ]  # fmt: skip
    shown = run(*third[:2], *third[4:], *third[2:4])
    figure = drawing(shown).figure
    assert len(figure.data) == 2 and list(figure.layout.yaxis.ticktext) == ["8", "16", "32"]
    assert {"prefix caching: off", "prefix caching: on"} <= {each.text for each in figure.layout.annotations}
    layouts = run(*grid(), cell("contiguous", baseline=False), cell("contiguous", baseline=False, **FP8))
    layouts = dataclasses.replace(layouts, cells=tuple(
        dataclasses.replace(one, varied={**one.varied, "layout": "contiguous"}) if one.is_contiguous else one
        for one in layouts.cells
    ))  # fmt: skip
    found = heat_map(layouts, layouts.loads[0])
    empty = found[found["configuration"] == ""]
    assert set(empty["text"]) == {""} and len(found) - len(empty) == len(layouts.cells)
