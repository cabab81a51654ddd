"""Effects in engine time, shown beside what was served."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvbench.common.console import print_table
from kvbench.report.decision import Decision
from kvbench.report.headline import headline
from kvbench.report.page import markdown
from kvbench.runs.model import MeasuredCell, Run
from tests.support.report_cells import cell, in_engine_time, run
from tests.support.report_parts import engine_time_console, engine_time_note, engine_time_table, plain_document

OTHER = cell("contiguous")
TURNS = {"c4": {"turn_steps": 4, "cold_cost": 0.012, "first_turn_steps": 8}}


def run_with(*effects: tuple, other: MeasuredCell = OTHER, served: bool = True, **facts) -> Run:
    """A run whose other configuration had these effects; ``served``: over HTTP, too."""
    known = in_engine_time(*((other, *effect) for effect in effects), turns=TURNS, **facts)
    return run(*((cell(), other) if served else ()), engine_time=known)


LEVEL = ("output_throughput", 1.0, 0.99, 1.01, "level")


def printed(run: Run) -> str:
    out = io.StringIO()
    print_table(Console(file=out, width=80, force_terminal=True, color_system=None), engine_time_console(run))
    assert "not shown" not in out.getvalue()
    return out.getvalue()


def test_an_effect_stands_with_interval_and_call_beside_the_served_ratio() -> None:
    ttft = ("p95_ttft_ms", 1.30, 1.2, 1.4, "behind")
    shown = run_with(("output_throughput", 1.152, 1.140, 1.165, "ahead"), ttft)
    (row,) = engine_time_table(shown).rows
    entries = dict(zip((column.key for column in engine_time_table(shown).columns), row.values, strict=True))
    throughput, ttft = entries["output tok/s (whole run)"], entries["p95 TTFT"]
    assert row.cell.cell_id == OTHER.cell_id and entries["served output tok/s"].text and "p95 ITL" not in entries
    assert (throughput.text, throughput.mark) == ("+15.2 %", "better") and "+14.0 to +16.5" in throughput.note
    assert (ttft.text, ttft.mark) == ("+30.0 %", "worse")


def test_the_console_has_each_call_in_80_columns() -> None:
    wide = ("p95_ttft_ms", 4.606, 4.058, 5.228, "behind")
    text = printed(run_with(("output_throughput", 0.473, 0.468, 0.479, "behind"), wide))
    assert "-52.7 (-53.2 to -52.1) worse" in text and "+361 (+306 to +423) worse" in text
    assert "+0.0 (-3.0 to +4.0) undecided" in printed(run_with(("output_throughput", 1.0, 0.97, 1.04, "open")))


@pytest.mark.parametrize("served", [True, False])
def test_what_an_interrupted_run_knows_of_engine_time_is_shown_as_unfinished(served: bool) -> None:
    shown = run_with(("output_throughput", 1.05, 1.03, 1.07, "ahead"), served=served, finished=False)
    text = markdown(plain_document(shown))
    table = text[text.index("# Engine time") :]
    row = next(line for line in table.splitlines() if line.startswith("|") and "+5.0 %" in line)
    assert (OTHER.name if served else OTHER.cell_id) in row
    assert "Unfinished: it was interrupted after 3 launches." in text and "(unfinished)" in printed(shown)
    assert ("Only engine time" in headline(Decision.of(shown))) is not served
    whole = run_with(LEVEL, served=served)
    assert "nfinished" not in markdown(plain_document(whole)).split("Manifest")[0] + printed(whole)


def test_an_invalid_cell_has_no_served_ratio_beside_its_engine_time() -> None:
    (row,) = engine_time_table(run_with(LEVEL, other=cell("contiguous", reasons=("lag",)))).rows
    assert row.values[2].text == "+0.0 %" and len(row.values) == 3


def test_an_open_effect_says_what_would_have_been_seen_and_a_wide_one_has_no_interval() -> None:
    effects = (("output_throughput", 1.0, 0.97, 1.04, "open"), ("p95_itl_ms", 1.0, 0.05, 18.0, "open"))
    (row,) = engine_time_table(run_with(*effects, smallest_seen=0.048)).rows
    assert "4.8 %" in row.values[2].note
    assert "0.05" not in row.values[3].note and "–" not in row.values[3].note


def test_the_note_says_turns_their_cost_and_what_was_left_out() -> None:
    note = engine_time_note(run_with(LEVEL, notes=["c3 was not measured in engine time"]))
    for part in ("steps in a turn: 4, in the first launch 8", "1.2 %", "3 launches", "c3 was not measured"):
        assert part in note
    plain = run(cell(), OTHER)
    assert not engine_time_table(plain).rows and engine_time_console(plain) is None and engine_time_note(plain) == ""
