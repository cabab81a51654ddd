"""No cell of a CSV file is a formula, and numbers stay as they are."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from kvbench.common.text import csv_cell
from kvbench.report.page import write_report
from tests.support.report_cells import cell, run
from tests.support.report_parts import plain_document


@pytest.mark.parametrize("text", ["=1+1", "+x", "-cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "-", "--5"])
def test_a_formula_becomes_a_text(text):
    assert csv_cell(text) == f"'{text}"


@pytest.mark.parametrize("value", ["-1.5", "+2e3", "-inf", "a=b", "", "x-1", " =1", -1.5, None, True])
def test_numbers_and_other_texts_stay(value):
    assert csv_cell(value) is value


def test_the_summary_of_a_run_has_no_formula(tmp_path: Path) -> None:
    formula = '=HYPERLINK("http://127.0.0.1","x")'
    path = write_report(plain_document(run(cell(model=formula), cell(page_size=8, model=formula))), tmp_path)[-1]
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows and all(row["setting_model"] == f"'{formula}" for row in rows)
    assert all(float(row["ttft_ms_p95"]) > 0 and row["valid"] == "True" for row in rows)
