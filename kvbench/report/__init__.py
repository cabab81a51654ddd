"""Reports from a run folder: the sentence, the console table, HTML, Markdown and CSV.

paths = build_report(run_dir)       # writes report.html, report.md, summary.csv into the folder
print(headline(run_dir))
rich.print(console_table(run_dir))
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["ReportPaths", "build_report", "console_table", "headline"]


@dataclass(frozen=True)
class ReportPaths:
    """The files that `build_report` wrote."""

    html: Path
    markdown: Path
    csv: Path  # the table of all cells as numbers, with ratios and their intervals


def build_report(run_dir: Path | str) -> ReportPaths:
    """Write the report of a finished, incomplete or running run into its folder; replaces earlier reports whole.

    Raises:
        ValueError: `run_dir` is no results folder.
    """
    import pandas as pd

    from kvbench.report.markdown import markdown
    from kvbench.report.page import page
    from kvbench.report.tables import flat_rows
    from kvbench.runs.read import read_run

    run = read_run(run_dir)
    paths = ReportPaths(run.folder / "report.html", run.folder / "report.md", run.folder / "summary.csv")
    _replace_all(
        {
            paths.html: page(run),
            paths.markdown: markdown(run),
            paths.csv: pd.DataFrame(flat_rows(run)).to_csv(index=False),
        }
    )
    return paths


def headline(run_dir: Path | str) -> str:
    """The sentence that says what was found."""
    from kvbench.report.sentence import headline as sentence
    from kvbench.runs.read import read_run

    return sentence(read_run(run_dir))


def console_table(run_dir: Path | str) -> Table:
    """The table of all measured cells, for a terminal."""
    from kvbench.report.console import table
    from kvbench.runs.read import read_run

    return table(read_run(run_dir))


def _replace_all(texts: Mapping[Path, str]) -> None:
    """Write all beside and rename, so that a reader never sees half a report and an interruption leaves none."""
    parts = {path: path.with_name(f"{path.name}.{os.getpid()}.part") for path in texts}
    try:
        for path, text in texts.items():
            parts[path].write_text(text, encoding="utf-8")
        for path, part in parts.items():
            os.replace(part, path)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
