"""``kvbench calibrate-model`` of a sweep of the built-in engine: unit costs, and how well they predict other sweeps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kvbench.common.console import make_table, print_plain, print_table
from kvbench.common.errors import UsageError
from kvbench.runs.model import Run
from kvbench.runs.predictions import METRICS
from kvbench.runs.read import read_run
from kvbench.simulation.predict import predicted_cells, unit_costs_of
from kvbench.simulation.this_cpu import write_unit_costs


def is_sweep(folder: Path) -> bool:
    """Whether it is the folder of a sweep."""
    return (folder / "manifest.json").is_file() and (folder / "cells").is_dir()


def calibrate_sweep(folder: Path, check: Sequence[Path], output: Path | None, *, as_json: bool) -> int:
    """Raises UsageError for a folder that is no measured sweep of the built-in engine on a CPU."""
    run, console = _read(folder), Console()
    costs = unit_costs_of(run)
    if output is not None:
        write_unit_costs(output, costs, run)
    checked = {other.name: predicted_cells(_read(other), costs) for other in check}
    if as_json:
        cells = {
            name: {cell: {metric: dataclasses.asdict(each) for metric, each in found.items()}}
            for name, of in checked.items()
            for cell, found in of.items()
        }
        print(json.dumps({"unit_costs_s": dataclasses.asdict(costs), "checked": cells}, indent=2))
        return 0
    values = {**costs.units, **{f"context in {dtype}": seconds for dtype, seconds in costs.context.items()}}
    print_plain(console, f"unit costs of {run.folder.name} [us]" + (f" -> {output}" if output else ""))
    print_plain(console, ", ".join(f"{name} {1e6 * seconds:.4g}" for name, seconds in values.items() if seconds))
    for folder_name, of in checked.items():
        rows = [
            (cell, *(f"{found[m].error:+.1%}" if m in found else "-" for m in METRICS)) for cell, found in of.items()
        ]
        print_table(console, make_table(("cell", *METRICS), rows, title=f"predicted over measured: {folder_name}"))
    return 0


def _read(folder: Path) -> Run:
    try:
        run = read_run(folder)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if run.manifest.get("gpus"):
        raise UsageError(f"{folder} was measured on a GPU: unit costs are for CPUs, whose steps do not overlap")
    return run
