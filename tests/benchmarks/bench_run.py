"""``make bench``: run tests/benchmarks and keep what they measured in a folder of its own.

    python -m tests.benchmarks.bench_run [pytest's arguments]       KVBENCH_BENCH=quick: about 4 minutes instead of 10

    results/bench/<UTC time>-<git short sha>/
      manifest.json   versions, machine, git state, command, mode
      bench.json      pytest-benchmark's own format
      table.md  table.csv

Exit codes: 0 measured, 2 usage, 4 a benchmark failed, 5 nothing was selected, 130 interrupted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvbench.common.errors import UsageError
from kvbench.common.files import utc_now, write_json
from kvbench.common.foreign_cpu import MAX_FOREIGN_CORES, load_average
from kvbench.common.machine import environment, usable_cores
from kvbench.common.packages import REPOSITORY, check_packages
from kvbench.runs.folder import MANIFEST, create_run
from tests.benchmarks.bench_table import BENCH_JSON, TABLE_MD, bar_lines, write_tables

BENCHMARKS = REPOSITORY / "tests" / "benchmarks"
MODES = ("full", "quick", "smoke")  # of KVBENCH_BENCH
_EXIT_CODES = {0: 0, 1: 4, 2: 130, 3: 4, 4: 2, 5: 5}  # pytest's -> ours


def main(arguments: Sequence[str], output_dir: Path = Path("results")) -> int:
    """Run the benchmarks with these further arguments of pytest, write the tables, print the bars; the exit code.

    Raises:
        UsageError: there are no benchmarks here, or the results cannot be written.
    """
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    if not BENCHMARKS.is_dir():
        raise UsageError(
            f"there is no {BENCHMARKS}: the benchmarks are in kvbench's git repository, run them from there"
        )
    mode = os.environ.get("KVBENCH_BENCH", "full")
    if mode not in MODES:
        raise UsageError(f"KVBENCH_BENCH cannot be {mode!r}: it is one of {', '.join(MODES)}")
    average, cores = load_average(), usable_cores()
    if average is not None and average > cores / 2:
        print(
            f"the machine is busy: its load average over the last minute is {average:.1f} on {cores} cores. Benchmarks "
            f"during which other processes use more than {MAX_FOREIGN_CORES:.2f} of a core are marked disturbed",
            file=sys.stderr,
        )
    manifest: dict[str, Any] = {
        "format": 1, "kind": "bench", "status": "running", "mode": mode,
        "command": ["python", "-m", "tests.benchmarks.bench_run", *arguments], "started": utc_now(), "ended": None,
        **environment(),
    }  # fmt: skip
    folder = create_run(output_dir, "bench", manifest["git"]["short_sha"]).path
    write_json(folder / MANIFEST, manifest)
    started = time.monotonic()
    code = _run_pytest(arguments, folder / BENCH_JSON)
    manifest |= {"ended": utc_now(), "seconds": round(time.monotonic() - started, 1)}
    rows = []
    if (folder / BENCH_JSON).is_file() and (folder / BENCH_JSON).stat().st_size:
        rows = write_tables(folder, manifest)
    manifest |= {"status": "complete" if code == 0 else "incomplete", "benchmarks": len(rows),
                 "disturbed": sum(row.disturbed for row in rows)}  # fmt: skip
    write_json(folder / MANIFEST, manifest)
    if rows:
        _show(bar_lines(rows), manifest, folder)
    return code


def _run_pytest(arguments: Sequence[str], json_file: Path) -> int:
    command = [
        sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--benchmark-quiet",
        "--benchmark-disable-gc", f"--benchmark-json={json_file.absolute()}",
    ]  # fmt: skip
    if not names_benchmarks(arguments):
        command.append(str(BENCHMARKS))
    process = subprocess.Popen([*command, *arguments], cwd=REPOSITORY)
    while True:
        try:
            return _EXIT_CODES.get(process.wait(), 4)
        except KeyboardInterrupt:
            continue  # pytest was interrupted too, and ends by itself


def names_benchmarks(arguments: Sequence[str]) -> bool:
    """Whether pytest's arguments say themselves which of the benchmarks to run, by file or by node id."""
    paths = [REPOSITORY / each.partition("::")[0] for each in arguments if not each.startswith("-")]
    return any(path.exists() and path.resolve().is_relative_to(BENCHMARKS) for path in paths)


def _show(lines: Sequence[Sequence[str]], manifest: dict[str, Any], folder: Path) -> None:
    console = Console()
    if lines:
        table = Table(title="bars (the worst of all page sizes counts)")
        for name in ("bar", "wanted", "measured", ""):
            table.add_column(name)
        for line in lines:
            table.add_row(*line)
        console.print(table)
    if manifest["disturbed"]:
        console.print(
            f"{manifest['disturbed']} of {manifest['benchmarks']} benchmarks were disturbed by other processes: their "
            "figures are no measurement", highlight=False,
        )  # fmt: skip
    console.print(f"{manifest['benchmarks']} benchmarks in {manifest['seconds']:.0f} s: {folder / TABLE_MD}",
                  highlight=False, soft_wrap=True)  # fmt: skip


if __name__ == "__main__":
    check_packages()
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
