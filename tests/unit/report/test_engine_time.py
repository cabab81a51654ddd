"""Effects in engine time: read from a run's folder, shown beside what was served."""

from __future__ import annotations

import io
import shutil

import pytest
from rich.console import Console

from kvbench.common.console import print_table
from kvbench.common.files import write_json
from kvbench.report.decision import Decision
from kvbench.report.document import document
from kvbench.report.headline import headline
from kvbench.report.page import markdown, write_report
from kvbench.runs.engine_time import EFFECTS, FOLDER, EngineTime
from kvbench.runs.read import read_run
from tests.support.report_parts import engine_time_console, engine_time_note, engine_time_table


def effect(cell, metric="output_throughput", ratio=1.0, low=0.99, high=1.01, call="level", **more):
    known = {"cell": cell, "metric": metric, "ratio": ratio, "low": low, "high": high, "call": call}
    return known | {"smallest_seen": 0.012, "launches": 4, **more}


@pytest.fixture
def run_with(tmp_path, run_folder):
    """A synthetic run whose configurations but the baseline had these effects, made from a cell's id."""

    def make(*effects, variant="normal", **facts):
        folder = tmp_path / "run"
        shutil.copytree(run_folder(variant), folder, ignore=shutil.ignore_patterns("report.*", "summary.csv"))
        run = read_run(folder)
        cells = [cell for cell in run.at(run.loads[-1]) if not cell.is_baseline]
        rows = [each(cells[-1].cell_id) for each in effects]
        known = {
            "format": EngineTime.FORMAT,
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
    throughput, ttft = entries["output tok/s (whole run)"], entries["p95 TTFT"]
    assert row.cell.cell_id == cell.cell_id
    assert (throughput.text, throughput.mark) == ("+15.2 %", "better") and "+14.0 to +16.5" in throughput.note
    assert (ttft.text, ttft.mark) == ("+30.0 %", "worse")
    assert "p95 ITL" not in entries
    assert "but p95 TTFT +30 %" in headline(Decision.of(run)) and "in engine time" in headline(Decision.of(run))


def test_the_console_has_each_call_in_80_columns(run_with):
    wide = {"ratio": 4.606, "low": 4.058, "high": 5.228, "call": "behind"}
    run, _ = run_with(
        lambda c: effect(c, ratio=0.473, low=0.468, high=0.479, call="behind"),
        lambda c: effect(c, "p95_ttft_ms", **wide),
    )
    text = printed(run)
    assert "-52.7 (-53.2 to -52.1) worse" in text and "+361 (+306 to +423) worse" in text
    shutil.rmtree(run.folder)
    text = printed(run_with(lambda c: effect(c, low=0.97, high=1.04, call="open"))[0])
    assert "+0.0 (-3.0 to +4.0) undecided" in text


def printed(run):
    out = io.StringIO()
    print_table(Console(file=out, width=80, force_terminal=True, color_system=None), engine_time_console(run))
    assert "not shown" not in out.getvalue()
    return out.getvalue()


@pytest.mark.parametrize("served", [True, False])
def test_what_an_interrupted_run_knows_of_engine_time_is_shown_as_unfinished(run_with, served):
    run, cell = run_with(lambda c: effect(c, ratio=1.05, low=1.03, high=1.07, call="ahead"), finished=False)
    if not served:
        shutil.rmtree(run.folder / "cells")
        run = read_run(run.folder)
    report = document(run)
    text = markdown(report)
    table = text[text.index("# Engine time") :]
    row = next(line for line in table.splitlines() if line.startswith("|") and "+5.0 %" in line)
    assert (cell.name if served else cell.cell_id.replace("_", r"\_")) in row
    assert "Unfinished: it was interrupted after 4 launches." in text and "(unfinished)" in printed(run)
    assert ("Only engine time" in headline(Decision.of(run))) is not served
    write_report(report, run.folder)
    assert "+5.0 %" in (run.folder / "report.html").read_text()


def test_nothing_is_called_unfinished_that_is_not(run_with):
    run, _ = run_with(effect)
    assert "nfinished" not in markdown(document(run)).split("Manifest")[0] + printed(run)


def test_an_invalid_cell_has_no_served_ratio_beside_its_engine_time(run_with):
    run, _ = run_with(effect, variant="invalid")
    (row,) = engine_time_table(run).rows
    assert row.values[2].text == "+0.0 %" and len(row.values) == 3


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
