"""Reports from a run folder: the sentence, the console table, HTML, Markdown and CSV.

paths = build_report(run_dir)       # writes report.html, report.md, summary.csv into the folder
print(headline(run_dir))
rich.print(console_table(run_dir))
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["ReportPaths", "build_report", "console_table", "headline"]


@dataclass(frozen=True)
class ReportPaths:
    """The files that ``build_report`` wrote."""

    html: Path
    markdown: Path
    csv: Path  # the table of all cells as numbers, with ratios and their intervals


def build_report(run_dir: Path | str) -> ReportPaths:
    """Write the report of a finished, incomplete or running run into its folder, once all of it is made.

    Raises:
        ValueError: ``run_dir`` is no results folder.
    """
    import pandas as pd

    from kvbench.common.files import write_text
    from kvbench.report.markdown import markdown
    from kvbench.report.page import page
    from kvbench.report.tables import flat_rows
    from kvbench.runs.read import read_run

    run = read_run(run_dir)
    paths = ReportPaths(run.folder / "report.html", run.folder / "report.md", run.folder / "summary.csv")
    made = {
        paths.html: page(run),
        paths.markdown: markdown(run),
        paths.csv: pd.DataFrame(flat_rows(run)).to_csv(index=False),
    }
    for path, text in made.items():
        write_text(path, text)
    return paths


def headline(run_dir: Path | str) -> str:
    """The sentence that says what was found."""
    from kvbench.report import wording
    from kvbench.runs.read import read_run

    return wording.headline(read_run(run_dir))


def console_table(run_dir: Path | str) -> Table:
    """The table of all measured cells, for a terminal."""
    from kvbench.report import console
    from kvbench.runs.read import read_run

    return console.console_table(read_run(run_dir))
