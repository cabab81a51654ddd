"""The split of step time, from counters set by hand."""

from __future__ import annotations

import pytest

from kvbench.report.figures.step_time import drawing, step_time, step_time_table
from tests.support.report_cells import cell, run

SECONDS = {"schedule": 1.0, "prepare": 3.0, "execute": 15.0, "sample": 0.5, "output": 0.5}


def counted(**more: float) -> dict[str, float]:
    """Of one of three repeats: 20 s in 1,000 steps."""
    return {f"step_time_seconds_total_{name}": s for name, s in SECONDS.items()} | {"steps_total": 1000.0} | more


def test_moving_kv_is_taken_out_of_prepare_and_hashing_is_beside() -> None:
    shown = run(cell(server=counted(swap_seconds_total=2.0, hash_seconds_total=0.2)))
    found = step_time(shown.by_load).set_index("phase")
    assert found["share"].loc[["prepare", "move", "execute"]].tolist() == pytest.approx([5, 10, 75])
    assert found["ms"].loc["execute"] == pytest.approx(15)
    assert found["share"].sum() == pytest.approx(100)
    table = step_time_table(shown.by_load)
    row = dict(zip((column.key for column in table.columns), table.rows[0].values, strict=True))
    assert [row[key].text for key in ("steps", "step_ms", "move", "hash_share")] == ["3,000", "20.0", "10 %", "1.0 %"]
    assert row["move"].note == "2.00 ms"
    assert {"move KV", "execute"} <= {trace.name for trace in drawing(shown.by_load).figure.data}


def test_what_never_happened_has_no_bar_and_no_column() -> None:
    shown = run(cell(server=counted(swap_seconds_total=0.0, hash_seconds_total=0.0)), cell("contiguous"))
    assert not {"move", "hash_share"} & {column.key for column in step_time_table(shown.by_load).columns}
    assert "move KV" not in {trace.name for trace in drawing(shown.by_load).figure.data}
    assert len(step_time_table(shown.by_load).rows) == 1, "of the other configuration nothing is known"


def test_the_title_names_the_largest_part() -> None:
    slow = cell("contiguous", server=counted(step_time_seconds_total_execute=35.0))
    assert drawing(run(cell(server=counted()), slow).by_load).title == (
        "Execute takes 75–88 % of step time; scheduling at most 5.0 %"
    )


def test_an_invalid_cell_is_marked_and_not_in_the_title() -> None:
    bad = cell("contiguous", reasons=("lag",), server=counted(step_time_seconds_total_execute=35.0))
    shown = drawing(run(cell(server=counted()), bad).by_load)
    assert "75 %" in shown.title and "88" not in shown.title
    assert any("contiguous (invalid)" in note.text for note in shown.figure.layout.annotations)


def test_a_server_that_does_not_split_its_steps_has_neither_figure_nor_table() -> None:
    silent = run(cell())
    assert drawing(silent.by_load) is None and not step_time_table(silent.by_load).rows
