"""No cell of a CSV file is a formula, and numbers stay as they are."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.common.text import csv_cell
from kvbench.report.document import document
from kvbench.report.page import write_report
from kvbench.runs.read import read_run
from tests.support.synthetic_run import PAIR, make_run
from tests.support.toy_engine import Scenario


@pytest.mark.parametrize("text", ["=1+1", "+x", "-cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "-", "--5"])
def test_a_formula_becomes_a_text(text):
    assert csv_cell(text) == f"'{text}"


@pytest.mark.parametrize("value", ["-1.5", "+2e3", "-inf", "a=b", "", "x-1", " =1", -1.5, None, True])
def test_numbers_and_other_texts_stay(value):
    assert csv_cell(value) is value


def test_the_summary_of_a_run_has_no_formula(tmp_path: Path) -> None:
    formula = '=HYPERLINK("http://127.0.0.1","x")'
    run = read_run(make_run(tmp_path / "run", Scenario(configs=PAIR)))
    cells = (replace(cell, settings={**cell.settings, "model": formula}) for cell in run.cells)
    run = replace(run, cells=tuple(cells))
    path = write_report(document(run), tmp_path / "out")[-1]
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows and all(row["setting_model"] == f"'{formula}" for row in rows)
    assert all(float(row["ttft_ms_p50"]) > 0 and row["valid"] == "True" for row in rows)
