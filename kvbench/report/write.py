"""Writes the report of a run into its folder: report.html, report.md, summary.csv."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from kvbench.common.files import write_text
from kvbench.report.markdown import markdown
from kvbench.report.page import page
from kvbench.report.tables import flat_rows
from kvbench.runs.model import Run


def write_report(run: Run) -> list[Path]:
    """The files of a finished, incomplete or running run; none is written before all of them are made."""
    made = {
        run.folder / "report.html": page(run),
        run.folder / "report.md": markdown(run),
        run.folder / "summary.csv": pd.DataFrame(flat_rows(run)).to_csv(index=False),
    }
    for path, text in made.items():
        write_text(path, text)
    return list(made)
