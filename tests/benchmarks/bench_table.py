"""A table of benchmarks from pytest-benchmark's JSON: table.md to read, table.csv to compute with, and the bars.

python -m tests.benchmarks.bench_table results/bench/<run>      make both again from bench.json
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.files import read_json, write_text
from tests.benchmarks.bench_bars import BARS, Bar, Measured

BENCH_JSON, TABLE_MD, TABLE_CSV = "bench.json", "table.md", "table.csv"
_SITTING = ("device", "foreign_cpu_cores", "disturbed")  # of extra_info; the rest are figures


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
    told, stats = entry["extra_info"], entry["stats"]
    return Row(
        file=file.removeprefix("test_").removesuffix(".py"),
        test=name.partition("[")[0],
        group=entry["group"] or name.partition("[")[0],
        params={key: _plain(value) for key, value in (entry["params"] or {}).items()},
        figures={key: value for key, value in _flat(told) if key not in _SITTING},
        rounds=stats["rounds"],
        min_s=stats["min"],
        median_s=stats["median"],
        device=told.get("device", ""),
        foreign_cpu_cores=told.get("foreign_cpu_cores"),
        disturbed=bool(told.get("disturbed")),
    )


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)


def _flat(told: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in told.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", each) for inner, each in _flat(value))
        else:
            yield key, value


def to_csv(rows: Sequence[Row]) -> str:
    """One line a benchmark; the columns are all parameters and all figures that any of them has."""
    params, figures = _keys(row.params for row in rows), _keys(row.figures for row in rows)
    head = ["file", "test", "group", *params, "rounds", "min_s", "median_s", "device", "foreign_cpu_cores", "disturbed"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*head, *(key if key not in head else f"figure {key}" for key in figures)])
    for row in rows:
        given = [row.params.get(key, "") for key in params]
        sitting = [row.device, "" if row.foreign_cpu_cores is None else row.foreign_cpu_cores, row.disturbed]
        told = [row.figures.get(key, "") for key in figures]
        writer.writerow([row.file, row.test, row.group, *given, row.rounds, row.min_s, row.median_s, *sitting, *told])
    return text.getvalue()


def to_markdown(rows: Sequence[Row], manifest: Mapping[str, Any], bars: Sequence[Bar] = BARS) -> str:
    """A heading, the bars, and a table a group. What is the same for a whole group stands above its table."""
    parts = ["# Benchmarks", *_heading(rows, manifest)]
    if lines := bar_lines(rows, bars):
        parts += ["## Bars", _table(["bar", "wanted", "measured", ""], lines)]
    for (file, group), members in _grouped(rows).items():
        parts += [f"## {group}", *_group_table(file, members)]
    return "\n\n".join(parts) + "\n"


def bar_lines(rows: Sequence[Row], bars: Sequence[Bar] = BARS) -> list[list[str]]:
    """Title, what is wanted, what was measured (worst and best), and the verdict, of every bar of this device."""
    measured = [Measured(row.test, row.group, row.params, row.figures, row.device) for row in rows]
    lines = []
    for bar in bars:
        if not any(bar.fits_device(each.device) for each in measured):
            continue
        found = bar.values(measured)
        if not found:
            lines.append([bar.title, bar.wanted, "", "not measured"])
            continue
        worst, best = bar.worst(found), bar.best(found)
        told = f"{worst:.3g}" if worst == best else f"{worst:.3g} to {best:.3g}"
        lines.append([bar.title, bar.wanted, told, "reached" if bar.met(worst) else "MISSED"])
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


def _grouped(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.file, row.group), []).append(row)
    return groups


def _group_table(file: str, rows: Sequence[Row]) -> list[str]:
    keys = _keys({"test": row.test, **row.params} for row in rows)
    varying = [key for key in keys if len({_parameter(row, key) for row in rows}) > 1]
    same = [f"{key} {_parameter(rows[0], key)}" for key in keys if key not in varying and key != "test"]
    figures = _keys(row.figures for row in rows)
    body = []
    for row in rows:
        mark = "!" if row.disturbed else ""
        told = [_number(row.figures.get(key)) for key in figures]
        body.append([*(_parameter(row, key) for key in varying), _time(row.min_s) + mark, _time(row.median_s), *told])
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


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def write_tables(folder: Path, manifest: Mapping[str, Any]) -> list[Row]:
    """table.md and table.csv from bench.json. Raises UsageError as ``read_rows`` does."""
    rows = read_rows(folder / BENCH_JSON)
    write_text(folder / TABLE_CSV, to_csv(rows))
    write_text(folder / TABLE_MD, to_markdown(rows, manifest))
    return rows


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.benchmarks.bench_table results/bench/<run>")
    try:
        write_tables(Path(sys.argv[1]), read_json(Path(sys.argv[1]) / "manifest.json"))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
