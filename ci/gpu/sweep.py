"""Part ``sweep``: the gpu profile of workloads/mixed.yaml through `kvbench sweep`, servers and load client and all.

When its time is over the sweep is interrupted as by Ctrl-C, and the report is made of the loads that were finished.
"""

from __future__ import annotations

import csv
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from ci.gpu.commands import END_GRACE_S, PROFILES, WORKLOAD, run_kvbench
from ci.gpu.part import PartReport, part_parser

QUICK = (
    "--repeats", "1", "--only", "paged-p16-c*", "--only", "contiguous-c*",
    "-o", "load.concurrency=[64]", "-o", "load.num_requests=[128]", "--lockstep-minutes", "0", "--no-quality",
)  # fmt: skip
TINY = (
    "--repeats", "1", "--only", "paged-p16-c*",
    "-o", "load.concurrency=[2]", "-o", "load.num_requests=[4]", "-o", "engine.kv_budget=40MiB",
    "--no-quality",
)  # fmt: skip
REPORT_SECONDS = 15.0
KEPT = ("report.html", "summary.csv")
EXIT_INVALID = 4


def sweep_command(device: str, quick: bool, tiny: bool, folder: Path) -> list[str]:
    """Builds the command line of the sweep, with results into ``folder``."""
    words = ["sweep", WORKLOAD, "--profile", PROFILES[device], "--output-dir", str(folder)]
    return [*words, *(TINY if tiny else QUICK if quick else ())]


def newest_run(folder: Path) -> Path | None:
    """Finds the latest run's folder, if there is one."""
    runs = sorted(folder.glob("*/*/manifest.json"), key=os.path.getmtime)
    return runs[-1].parent if runs else None


def read_cells(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of summary.csv, numbers as numbers."""
    with path.open(encoding="utf-8", newline="") as file:
        return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _number(text: str | None) -> Any:
    try:
        return float(text) if text else None
    except ValueError:
        return text


def summarise(report: PartReport, cells: list[dict[str, Any]], label: str) -> None:
    """Makes one table row a cell, and the headline."""
    columns = [
        "cell",
        "valid",
        "output tok/s",
        "of the first",
        "TTFT p50 / p95 ms",
        "ITL p50 ms",
        "running",
        "preempted",
    ]
    rows = []
    for cell in cells:
        report.row(**{key: value for key, value in cell.items() if not key.startswith("setting_")})
        if not cell.get("completed"):
            continue  # not reached
        rows.append(
            [
                str(cell["cell_id"]),
                str(cell["valid"]),
                _shown(cell, "output_tokens_per_s")
                + " (whole run)" * (cell.get("output_tokens_per_s_window") == "whole run"),
                _shown(cell, "ratio", "{:.2f}"),
                f"{_shown(cell, 'ttft_ms_p50')} / {_shown(cell, 'ttft_ms_p95')}",
                _shown(cell, "itl_ms_p50", "{:.1f}"),
                _shown(cell, "running_mean", "{:.1f}"),
                _shown(cell, "num_preemptions"),
            ]
        )
    report.table(f"mixed.yaml through the server{label}", columns, rows)
    report.data["headline"] = f"{len(rows)} of {len(cells)} cells measured{label}, see report.html"
    report.save()


def _shown(cell: dict[str, Any], key: str, form: str = "{:,.0f}") -> str:
    value = cell.get(key)
    return form.format(value) if isinstance(value, float) else "–"


def main() -> int:
    """Runs the part; 1 if the sweep failed."""
    args = part_parser(__doc__).parse_args()
    report = PartReport(args.out, args.seconds)
    folder = args.scratch / "sweep"
    command = sweep_command(args.device, args.quick, args.tiny, folder)
    report.data["command"] = ["kvbench", *command]
    code, interrupted = run_kvbench(command, max(1.0, report.time_left - END_GRACE_S - REPORT_SECONDS))
    run = newest_run(folder)
    if run is None:
        report.fail("kvbench sweep", f"ended with code {code} before anything was measured: see the log")
        return 1
    if interrupted:
        report.skip("cells of the sweep that were not finished", "no time left")
        run_kvbench(["report", str(run)], REPORT_SECONDS)
    elif code not in (0, EXIT_INVALID):
        report.fail("kvbench sweep", f"ended with code {code}: see the log")
    cells = read_cells(run / "summary.csv") if (run / "summary.csv").is_file() else []
    for cell in cells:
        if cell.get("invalid_reasons"):
            report.fail(f"cell {cell['cell_id']}", f"no valid measurement: {cell['invalid_reasons']}")
    if code == EXIT_INVALID and not report.data["failures"]:
        report.fail("kvbench sweep", "not every load was measured (exit code 4): see the log")
    if any(cell.get("completed") for cell in cells):
        summarise(report, cells, " (quick)" if args.quick else "")
        for name in KEPT:
            if (run / name).is_file():
                shutil.copy(run / name, args.scratch / name)
    elif interrupted:
        report.data["not_run"] = f"no load was finished in {args.seconds:.0f} s"
        report.save()
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
