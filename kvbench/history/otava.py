"""Change points of stored series, found by Apache Otava as a program of its own.

Otava pins versions of numpy and scipy that kvbench cannot live with, so it has its own environment: it is given CSV
files and a configuration in a scratch folder, and answers with one JSON object a file on its output. Whatever goes
wrong there is a note and no error: change points are advisory.
"""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.history.model import Point, Series

ADVISORY = "advisory: in histories whose runs resemble their neighbours, 55 % of such points are false"
GET = (
    "Change points: not looked for, there is no program `otava`; get it into an environment of its own (python -m venv "
    "otava-venv && otava-venv/bin/pip install apache-otava) and name it: --otava otava-venv/bin/otava."
)
LEAST = 8  # counted runs; of fewer, no permutation reaches Otava's p of 0.001
LIMIT_S = 120.0
_GROUP = "all"
_SPAN = (
    "1970-01-01T00:00:00+00:00",
    "2200-01-01T00:00:00+00:00",
)  # Otava's own default forgets what is over a year old


class OtavaError(Exception):
    """Otava failed or said something else than it does: one clause that says what."""


@dataclass(frozen=True)
class ChangePoint:
    """From ``point`` on, the mean is another one: ``change`` is mean after / mean before - 1, ``p`` Otava's."""

    point: Point
    change: float
    p: float


def find_change_points(
    series: Sequence[Series], program: str | None, limit_s: float = LIMIT_S
) -> tuple[dict[Series, tuple[ChangePoint, ...]], str]:
    """Change points by series, of those that have any, and one line on how they were looked for."""
    long = [each for each in series if len(each.counted) >= LEAST]
    if not long:
        return {}, f"Change points: not looked for, no series has the {LEAST} counted runs that they take."
    if (path := shutil.which(program or "otava")) is None:
        return {}, GET if program is None else f"Change points: not looked for, --otava {program!r} is no program."
    try:
        found = _asked(path, long, limit_s)
    except OtavaError as error:
        return {}, f"Change points: not found out, {path} {error}."
    count = sum(map(len, found.values()))
    return found, f"Change points by Apache Otava: {count} in {len(long)} series of {LEAST} or more runs; {ADVISORY}."


def _asked(path: str, series: Sequence[Series], limit_s: float) -> dict[Series, tuple[ChangePoint, ...]]:
    tests = _tests(series)
    with tempfile.TemporaryDirectory(prefix="kvbench-otava-") as name:
        folder = Path(name)
        _write_inputs(folder, tests)
        command = [os.path.abspath(path), "analyze", _GROUP, "--config-file", "otava.yaml", "--output", "json"]
        command += ["--since", _SPAN[0], "--until", _SPAN[1]]
        output = _run(command, folder, limit_s)
    answers = _parsed(output)
    if set(answers) != set(tests):
        raise OtavaError(f"answered for {len(answers)} tests where it was asked for {len(tests)}")
    found: dict[Series, tuple[ChangePoint, ...]] = {}
    for test, columns in tests.items():
        for column, change in _change_points(answers[test], columns):
            found[columns[column]] = (*found.get(columns[column], ()), change)
    return found


def _tests(series: Sequence[Series]) -> dict[str, dict[str, Series]]:
    """Test -> column -> series. Those of the same runs share a file: to read times is what Otava spends its time on."""
    by_runs: dict[tuple[int, ...], list[Series]] = {}
    for each in series:
        by_runs.setdefault(tuple(id(point.run) for point in each.counted), []).append(each)
    return {
        f"t{index}": {f"c{column}": each for column, each in enumerate(some)}
        for index, some in enumerate(by_runs.values())
    }


def _write_inputs(folder: Path, tests: Mapping[str, Mapping[str, Series]]) -> None:
    """A CSV file a test, counted runs only, and the configuration (JSON is YAML)."""
    config: dict[str, Any] = {}
    for name, columns in tests.items():
        counted = [series.counted for series in columns.values()]
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["time", *columns])
            for points in zip(*counted, strict=True):
                rows.writerow([points[0].run.started.isoformat(), *(repr(point.value) for point in points)])
        config[name] = {
            "type": "csv",
            "file": f"{name}.csv",
            "time_column": "time",
            "attributes": [],
            "metrics": {
                column: {"column": column, "direction": series.metric.better or 1, "scale": 1}
                for column, series in columns.items()
            },
        }
    text = json.dumps({"tests": config, "test_groups": {_GROUP: list(config)}})
    (folder / "otava.yaml").write_text(text, encoding="utf-8")


def _run(command: Sequence[str], folder: Path, limit_s: float) -> str:
    """What it printed. Of this environment it gets the path only: Otava reads BRANCH and tokens of services from it."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder), "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        raise OtavaError(f"took more than {limit_s:g} s: ask about fewer runs with --last") from None
    except OSError as error:
        raise OtavaError(f"cannot be run ({error.strerror})") from None
    said = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode:
        raise OtavaError(f"ended with {done.returncode}" + (f" ({said[-1][:200]})" if said else ""))
    try:
        return done.stdout.decode()
    except UnicodeDecodeError:
        raise OtavaError("printed what is no UTF-8") from None


def _parsed(output: str) -> dict[str, Any]:
    """Test name -> its groups of changes: an object a line."""
    answers: dict[str, Any] = {}
    for line in output.splitlines():
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            raise OtavaError(f"printed a line that is not JSON: {line[:80]!r}") from None
        if not isinstance(answer, dict) or len(answer) != 1 or set(answer) & set(answers):
            raise OtavaError("printed something else than one object for each test")
        answers |= answer
    return answers


def _change_points(groups: Any, columns: Mapping[str, Series]) -> Iterator[tuple[str, ChangePoint]]:
    """(column, change point), oldest first. Raises OtavaError for what Otava would not print."""
    for change in _changes(groups):
        try:
            before, after, p = (float(change[name]) for name in ("mean_before", "mean_after", "pvalue"))
            column, index = change["metric"], change["index"]
        except (KeyError, TypeError, ValueError):
            raise OtavaError(f"printed a change that lacks its numbers: {str(change)[:80]}") from None
        if not isinstance(column, str) or column not in columns:
            raise OtavaError(f"found a change of {column!r}, which it was not asked for")
        counted = columns[column].counted
        if type(index) is not int or not 0 < index < len(counted):
            raise OtavaError(f"found a change at {index!r} of {len(counted)} runs")
        if not 0 <= p <= 1 or not before or not math.isfinite(before + after):
            raise OtavaError(f"printed a change with p {p:g} from a mean of {before:g} to {after:g}")
        yield column, ChangePoint(counted[index], after / before - 1, p)


def _changes(groups: Any) -> Iterable[Mapping[str, Any]]:
    try:
        changes = [change for group in groups for change in group["changes"]]
    except (KeyError, TypeError):
        raise OtavaError("printed changes in another form than Otava 0.8's") from None
    if not all(isinstance(change, dict) for change in changes):
        raise OtavaError("printed changes in another form than Otava 0.8's")
    return changes
