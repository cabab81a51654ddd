"""Part ``tune``: `kvbench dev tune` for as long as there is time; its table becomes tuned.json of the results.

The table is not put to use here: copy it to kernels/tuned/sm_XX.json (of the architecture that it names) and commit it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ci.gpu.part import PartReport, part_parser
from kvbench.common.packages import REPOSITORY

START_S = 20.0  # imports, and the compilation that is under way when the time is over
QUICK = ("--head-dim", "128", "--page-size", "16")


def tune_command(folder: Path, quick: bool, seconds: float) -> list[str]:
    """Builds the command ``kvbench dev tune`` for as long as ``seconds`` allow."""
    command = [sys.executable, "-m", "kvbench", "dev", "tune", "--output-dir", str(folder)]
    return [*command, "--max-minutes", f"{max(1.0, seconds - START_S) / 60:.3f}", *(QUICK if quick else ())]


def summarise(report: PartReport, table: dict[str, Any]) -> None:
    """Adds the table's entries as rows."""
    rows = []
    for entry in table["entries"]:
        report.row(**entry)
        shape = f"{entry['kernel']}, KV {entry['kind']}, D {entry['d_pad']}, page {entry['page_size']}"
        tiles = f"{entry['block_m']} x {entry['block_n']}, {entry['num_stages']} stages, {entry['num_warps']} warps"
        gain = 1 - entry["microseconds"] / entry["default_microseconds"]
        rows.append(
            [shape, tiles, f"{entry['default_microseconds']:.1f}", f"{entry['microseconds']:.1f}", f"{gain:.1%}"]
        )
    report.table("Tuned kernels", ["shape", "tiles", "computed us", "tuned us", "gain"], rows)
    better = sum(entry["microseconds"] < entry["default_microseconds"] for entry in table["entries"])
    report.data["headline"] = f"{better} of {len(rows)} faster; to use it: kernels/tuned/sm_{table['arch']}.json"
    report.save()


def main() -> int:
    """Runs the part; 1 if tuning failed."""
    args = part_parser(__doc__).parse_args()
    report = PartReport(args.out, args.seconds)
    if args.device == "cpu":
        report.data["not_run"] = "tunes kernels of GPUs only"
        report.save()
        return 0
    folder = args.scratch / "tuned"
    done = subprocess.run(tune_command(folder, args.quick, args.seconds), cwd=REPOSITORY, check=False)
    tables = sorted(folder.glob("sm_*.json"))
    if done.returncode != 0:
        report.fail("kvbench dev tune", f"ended with code {done.returncode}: see the log")
    if tables:
        shutil.copy(tables[0], args.scratch / "tuned.json")
        summarise(report, json.loads(tables[0].read_text(encoding="utf-8")))
    elif done.returncode == 0:
        report.data["not_run"] = f"no kernel was tuned in {args.seconds:.0f} s"
        report.save()
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
