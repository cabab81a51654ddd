"""What a sweep says once its loads are run: what failed, what is invalid, table and report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from kvbench.common.files import read_json
from kvbench.runs.folder import DONE, RunFolder
from kvbench.sweep.block import Failure
from kvbench.workload.design import Cell


def by_reason(failures: Sequence[Failure]) -> list[str]:
    """One line a reason; a server that does not start fails several loads at once."""
    grouped: dict[str, list[str]] = {}
    for failure in failures:
        grouped.setdefault(failure.reason, []).append(f"{failure.cell_id} repeat {failure.repeat}")
    return [f"{', '.join(loads)} failed: {reason}" for reason, loads in grouped.items()]


def invalid_reasons(run: RunFolder, cell: Cell) -> list[str]:
    found = []
    for repeat in run.done_repeats(cell.cell_id):
        done = read_json(run.load(cell.cell_id, repeat) / DONE)
        found += [f"repeat {repeat}: {reason}" for reason in done["invalid_reasons"]]
    return found


def write_report(show: Callable[[Path, Console], None], run: RunFolder, console: Console) -> str | None:
    """Table, headline and report. A failure here must not cost the results: it is told, and the run stays."""
    from kvbench.common.errors import log_traceback

    try:
        show(run.path, console)
    except Exception as error:
        return (
            f"the report could not be written ({error!r}, {log_traceback(error)}); the results are kept, try "
            f"`kvbench report {run.path}`"
        )
    return None
