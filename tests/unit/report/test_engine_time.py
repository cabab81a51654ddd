"""Effects in engine time: read from a run's folder, shown beside what was served."""

from __future__ import annotations

import shutil

import pytest

from kvbench.common.files import write_json
from kvbench.report.engine_time import engine_time_console, engine_time_note, engine_time_table
from kvbench.report.markdown import markdown
from kvbench.report.wording import headline
from kvbench.runs.engine_time import EFFECTS, FOLDER, FORMAT
from kvbench.runs.read import read_run


def effect(cell, metric="output_throughput", ratio=1.0, low=0.99, high=1.01, call="level", **more):
    known = {"cell": cell, "metric": metric, "ratio": ratio, "low": low, "high": high, "call": call}
    return known | {"smallest_seen": 0.012, "launches": 4, **more}


@pytest.fixture
def run_with(tmp_path, run_folder):
    """A synthetic run whose configurations but the baseline had these effects, made from a cell's id."""

    def make(*effects, variant="normal", **facts):
        folder = tmp_path / "run"
        shutil.copytree(run_folder(variant), folder)
        run = read_run(folder)
        cells = [cell for cell in run.at(run.loads[-1]) if not cell.is_baseline]
        rows = [each(cells[-1].cell_id) for each in effects]
        known = {
            "format": FORMAT,
            "finished": True,
            "turns": {"c4": {"turn_steps": 4, "cold_cost": 0.012, "first_turn_steps": 8}},
            "notes": [],
            **facts,
        }
        write_json(folder / FOLDER / EFFECTS, known | {"effects": rows})
        return read_run(folder), cells[-1]

    return make


def test_an_effect_stands_with_interval_and_call_beside_the_served_ratio(run_with):
    run, cell = run_with(
        lambda c: effect(c, ratio=1.152, low=1.140, high=1.165, call="ahead"),
        lambda c: effect(c, "p95_ttft_ms", ratio=1.30, low=1.2, high=1.4, call="behind"),
    )
    (row,) = engine_time_table(run).rows
    entries = dict(zip((column.key for column in engine_time_table(run).columns), row.values, strict=True))
    throughput, ttft = entries["output tok/s"], entries["p95 TTFT"]
    assert row.cell.cell_id == cell.cell_id
    assert (throughput.text, throughput.mark) == ("+15.2 %", "better") and "+14.0 to +16.5" in throughput.note
    assert (ttft.text, ttft.mark) == ("+30.0 %", "worse")
    assert entries["p95 ITL"].text == "–"
    assert "in engine time +15.2 % (+14.0 to +16.5) at" in markdown(run)
    assert engine_time_console(run).row_count == 1


def test_an_open_effect_says_what_would_have_been_seen_and_one_of_few_launches_has_no_interval(run_with):
    run, _ = run_with(
        lambda c: effect(c, low=0.97, high=1.04, call="open", smallest_seen=0.048),
        lambda c: effect(c, "p95_itl_ms", low=0.05, high=18.0, call="open", smallest_seen=None),
    )
    (row,) = engine_time_table(run).rows
    assert "4.8 %" in row.values[2].note
    assert "to" not in row.values[4].note.split()


def test_the_note_says_turns_their_cost_and_what_was_left_out(run_with):
    run, _ = run_with(effect, notes=["c3 was not measured in engine time"])
    note = engine_time_note(run)
    for part in ("steps in a turn: 4, in the first launch 8", "1.2 %", "4 launches", "c3 was not measured"):
        assert part in note


def test_a_run_without_engine_time_has_no_table(run_folder):
    run = read_run(run_folder("normal"))
    assert not engine_time_table(run).rows and engine_time_console(run) is None and engine_time_note(run) == ""


def test_where_served_loads_are_invalid_the_first_sentence_is_what_engine_time_decides(run_with):
    run, cell = run_with(lambda c: effect(c, ratio=2.05, low=2.0, high=2.1, call="ahead"), variant="invalid")
    base = next(each for each in run.at(cell.load) if each.is_baseline)
    first, served = headline(run).split(" Over HTTP: ")
    assert cell.name in first and base.name in first and "+105.0 % (+100.0 to +110.0)" in first
    assert served.startswith("no verdict")


@pytest.mark.parametrize(("variant", "call"), [("invalid", "open"), ("normal", "ahead")])
def test_the_first_sentence_is_of_the_served_loads_where_engine_time_is_open_or_they_decide(run_with, variant, call):
    run, _ = run_with(lambda c: effect(c, ratio=1.05, low=0.98, high=1.12, call=call), variant=variant)
    assert "ngine time" not in headline(run)
