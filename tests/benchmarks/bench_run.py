"""``make bench``: run tests/benchmarks and keep what they measured in a folder of its own.

    python -m tests.benchmarks.bench_run [pytest's arguments]       KVBENCH_BENCH=quick: about 4 minutes instead of 10

    results/bench/<UTC time>-<git short sha>/
      manifest.json   versions, machine, git state, command, mode
      bench.json      pytest-benchmark's own format, to compute with
      table.md        a table a group, with the bars, to read

Exit codes: 0 measured, 2 usage, 4 a benchmark failed, 5 nothing was selected, 130 interrupted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvbench.common.console import print_plain
from kvbench.common.errors import UsageError
from kvbench.common.files import read_json, utc_now, write_json, write_text
from kvbench.common.foreign_cpu import foreign_limit
from kvbench.common.machine import environment, usable_cores
from kvbench.common.packages import REPOSITORY
from kvbench.common.text import markdown_table
from kvbench.runs.folder import MANIFEST, create_run
from tests.benchmarks.bench_bars import BARS, Bar

BENCHMARKS = REPOSITORY / "tests" / "benchmarks"
BENCH_JSON, TABLE_MD = "bench.json", "table.md"
MODES = ("full", "quick", "smoke")  # of KVBENCH_BENCH
_EXIT_CODES = {0: 0, 1: 4, 2: 130, 3: 4, 4: 2, 5: 5}  # pytest's -> ours
_BAR_HEADS = ("bar", "wanted", "measured", "")
_NO_FIGURES = ("device", "foreign_cpu_cores", "disturbed")  # of extra_info


def main(arguments: Sequence[str], output_dir: Path = Path("results")) -> int:
    """Run the benchmarks with these further arguments of pytest, write the table, print the bars; the exit code.

    Raises:
        UsageError: KVBENCH_BENCH is no mode, or the results cannot be written.
    """
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    mode = os.environ.get("KVBENCH_BENCH", "full")
    if mode not in MODES:
        raise UsageError(f"KVBENCH_BENCH cannot be {mode!r}: it is one of {', '.join(MODES)}")
    average, cores = os.getloadavg()[0], usable_cores()
    if average is not None and average > cores / 2:
        print(
            f"the machine is busy: its load average over the last minute is {average:.1f} on {cores} cores. Benchmarks "
            f"during which other processes use more than {foreign_limit(cores):.2f} of a core are marked disturbed",
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
        rows = write_table(folder, manifest)
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


def _show(lines: Sequence[Sequence[str]], manifest: Mapping[str, Any], folder: Path) -> None:
    console = Console()
    if lines:
        table = Table(*_BAR_HEADS, title="bars (the worst of all page sizes counts)")
        for line in lines:
            table.add_row(*line)
        console.print(table)
    if manifest["disturbed"]:
        print_plain(
            console,
            f"{manifest['disturbed']} of {manifest['benchmarks']} benchmarks were disturbed by other processes: their "
            "figures are no measurement",
        )
    print_plain(console, f"{manifest['benchmarks']} benchmarks in {manifest['seconds']:.0f} s: {folder / TABLE_MD}")


@dataclass(frozen=True)
class Row:
    """One benchmark. Times in seconds, of one round."""

    file: str  # without test_ and .py
    test: str  # the function
    group: str
    params: dict[str, Any]
    figures: dict[str, Any]
    rounds: int
    min_s: float
    median_s: float
    device: str
    foreign_cpu_cores: float | None
    disturbed: bool


def read_rows(path: Path) -> list[Row]:
    """The benchmarks of a JSON file of pytest-benchmark, in the order in which they ran.

    Raises:
        UsageError: there is no such file, or it is something else.
    """
    data = read_json(path)
    try:
        return [_row(entry) for entry in data["benchmarks"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is not a JSON file of pytest-benchmark ({error!r}): give one of --benchmark-json"
        ) from None


def _row(entry: Mapping[str, Any]) -> Row:
    file, _, name = entry["fullname"].rpartition("/")[2].partition("::")
    info, stats = entry["extra_info"], entry["stats"]
    return Row(
        file=file.removeprefix("test_").removesuffix(".py"),
        test=name.partition("[")[0],
        group=entry["group"] or name.partition("[")[0],
        params={key: _plain(value) for key, value in (entry["params"] or {}).items()},
        figures={key: value for key, value in _flat(info) if key not in _NO_FIGURES},
        rounds=stats["rounds"],
        min_s=stats["min"],
        median_s=stats["median"],
        device=info.get("device", ""),
        foreign_cpu_cores=info.get("foreign_cpu_cores"),
        disturbed=bool(info.get("disturbed")),
    )


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)


def _flat(info: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in info.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", each) for inner, each in _flat(value))
        else:
            yield key, value


def write_table(folder: Path, manifest: Mapping[str, Any]) -> list[Row]:
    """table.md from bench.json; its rows. Raises UsageError as ``read_rows`` does."""
    rows = read_rows(folder / BENCH_JSON)
    write_text(folder / TABLE_MD, to_markdown(rows, manifest))
    return rows


def to_markdown(rows: Sequence[Row], manifest: Mapping[str, Any], bars: Sequence[Bar] = BARS) -> str:
    """A heading, the bars, and a table a group. What is the same for a whole group stands above its table."""
    parts = ["# Benchmarks", *_heading(rows, manifest)]
    if lines := bar_lines(rows, bars):
        parts += ["## Bars", _table(_BAR_HEADS, lines)]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.file, row.group), []).append(row)
    for (file, group), members in groups.items():
        parts += [f"## {group}", *_group_table(file, members)]
    return "\n\n".join(parts) + "\n"


def bar_lines(rows: Sequence[Row], bars: Sequence[Bar] = BARS) -> list[list[str]]:
    """Title, what is wanted, what was measured (worst and best), and the verdict, of every bar of this device."""
    lines = []
    for bar in bars:
        if not any(bar.fits_device(row.device) for row in rows):
            continue
        mine = (row.figures.get(bar.figure) for row in rows if bar.is_about(row.test, row.params, row.device))
        found = sorted((float(value) for value in mine if value is not None), reverse=bar.at_most)  # the worst first
        if not found:
            lines.append([bar.title, bar.wanted, "", "not measured"])
            continue
        shown = " to ".join(f"{value:.3g}" for value in dict.fromkeys((found[0], found[-1])))
        lines.append([bar.title, bar.wanted, shown, "reached" if bar.met(found[0]) else "MISSED"])
    return lines


def _heading(rows: Sequence[Row], manifest: Mapping[str, Any]) -> list[str]:
    cpu, git = manifest.get("cpu") or {}, manifest.get("git") or {}
    devices = ", ".join(dict.fromkeys(row.device for row in rows if row.device))
    disturbed = sum(row.disturbed for row in rows)
    lines = [
        f"{manifest.get('started', 'unknown time')}, commit {git.get('short_sha', 'unknown')}"
        f"{' with local changes' if git.get('dirty') else ''}, mode {manifest.get('mode', 'unknown')}, "
        f"{len(rows)} benchmarks; device {devices or 'unknown'}, {cpu.get('model', 'unknown processor')}, "
        f"{cpu.get('cores', '?')} cores.",
        "Times are of one round, the fastest and the median. 1 GB = 1e9 bytes.",
    ]
    if disturbed:
        lines.append(
            f"**{disturbed} of {len(rows)} benchmarks were disturbed** (marked !): other processes used the cores "
            "meanwhile. Their figures are no measurement; stop what else runs and measure again."
        )
    return lines


def _group_table(file: str, rows: Sequence[Row]) -> list[str]:
    keys = _keys({"test": row.test, **row.params} for row in rows)
    varying = [key for key in keys if len({_parameter(row, key) for row in rows}) > 1]
    same = [f"{key} {_parameter(rows[0], key)}" for key in keys if key not in varying and key != "test"]
    figures = _keys(row.figures for row in rows)
    body = []
    for row in rows:
        mark = "!" if row.disturbed else ""
        body.append([
            *(_parameter(row, key) for key in varying), _time(row.min_s) + mark, _time(row.median_s),
            *(_number(row.figures.get(key)) for key in figures),
        ])  # fmt: skip
    caption = f"tests/benchmarks/test_{file}.py" + (f"; {', '.join(same)}" if same else "")
    return [caption, _table([*varying, "fastest", "median", *figures], body)]


def _parameter(row: Row, key: str) -> str:
    value = row.test if key == "test" else row.params.get(key, "")
    return "contiguous" if key == "page_size" and value == 0 else str(value)


def _keys(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """All keys, in the order of their first appearance."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(markdown_table(heads, escaped, numbers_from=len(heads)))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
