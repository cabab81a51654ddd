"""The base of every part: its arguments, its clock, and the JSON file that it keeps up to date.

A part that is stopped in the middle leaves everything it had measured until then. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

LINE_CHARACTERS = 300  # most characters of a reason's line
TRACEBACK_CHARACTERS = 6000  # the end of it


class Report:
    """The rows of a part or of one case, and what was skipped or failed and why.

    ``headline``: a few words for the table of parts. ``table``: columns and rows of text for the summary.
    """

    def __init__(self, seconds: float):
        self._ends = time.monotonic() + seconds
        self.data: dict[str, Any] = {"headline": "", "rows": [], "skipped": [], "failures": [], "tables": []}

    @property
    def time_left(self) -> float:
        """Seconds until no new measurement should begin."""
        return self._ends - time.monotonic()

    @property
    def exit_code(self) -> int:
        """The exit code of the part's process: 1 if anything failed."""
        return 1 if self.data["failures"] else 0

    def add(self, kind: str, value: dict[str, Any]) -> None:
        """Adds ``value`` to ``kind``: appends to rows, skipped or failures, or updates data."""
        if kind == "data":
            self.data |= value
        else:
            self.data[kind].append(value)

    def row(self, **values: Any) -> None:
        """Adds one measurement."""
        self.add("rows", values)

    def put(self, **values: Any) -> None:
        """Stores further values of the part; a value replaces an earlier one of its key."""
        self.add("data", values)

    def skip(self, what: str, reason: str) -> None:
        """Notes that ``what`` was not measured, and why."""
        self.add("skipped", {"what": what, "reason": reason})

    def fail(self, what: str, reason: str, **more: Any) -> None:
        """Notes that ``what`` is wrong, and how."""
        self.add("failures", {"what": what, "reason": reason, **more})

    def error(self, what: str, error: BaseException) -> None:
        """Notes that ``what`` failed with ``error``, whose traceback is kept."""
        text = "".join(traceback.format_exception(error))
        self.fail(what, sentence(error), traceback=text[-TRACEBACK_CHARACTERS:])


class PartReport(Report):
    """A report that writes every change to disk at once, and failures to the log."""

    def __init__(self, path: Path, seconds: float):
        super().__init__(seconds)
        self._path = path

    def add(self, kind: str, value: dict[str, Any]) -> None:
        super().add(kind, value)
        if kind in ("skipped", "failures"):
            word = "FAILED" if kind == "failures" else "SKIPPED"
            print(f"{word} {value['what']}: {value['reason']}\n{value.get('traceback', '')}", flush=True)
        self.save()

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Replaces the table of that title."""
        others = [table for table in self.data["tables"] if table["title"] != title]
        self.data["tables"] = [*others, {"title": title, "columns": columns, "rows": rows}]
        self.save()

    def save(self) -> None:
        """Writes the whole report to the file."""
        scratch = self._path.with_suffix(".tmp")
        scratch.write_text(json.dumps(plain(self.data), indent=1) + "\n", encoding="utf-8")
        scratch.replace(self._path)


@dataclass(frozen=True)
class Planned:
    """A case by its ``name``. ``group``: cases of one group may share a process; None: this one has its own.

    ``seconds``: after which it counts as hung, and its process is stopped.
    """

    name: str
    group: str | None = "main"
    seconds: float = 120.0


class PartCases(Protocol):
    """The cases that ``ci.gpu.isolated`` runs, made from the part's arguments in each child process."""

    workers: int  # processes at once

    def plan(self) -> list[Planned]:
        """All cases, the most important and least risky first. Called in the first process only."""

    def run(self, name: str, report: Report) -> None:
        """Runs one case; what it raises is recorded as its failure."""


def plain(value: Any) -> Any:
    """Converts ``value`` for JSON: NaN and infinities become null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def part_parser(description: str) -> argparse.ArgumentParser:
    """The arguments that ``python -m ci.gpu`` gives every part."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="the part's JSON file")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--seconds", type=float, required=True, help="begin no measurement after so many seconds")
    parser.add_argument("--facts", type=Path, help="the JSON file of the part `facts`")
    parser.add_argument("--scratch", type=Path, required=True, help="a folder for intermediate files")
    parser.add_argument("--quick", action="store_true", help="fewer cases, requests and repeats")
    parser.add_argument("--tiny", action="store_true", help="shapes that a CPU does in seconds: for tests")
    return parser


def read_ceilings(path: Path | None) -> dict[str, float]:
    """The measured ceilings of the facts file; empty when there is none."""
    if path is None or not path.is_file():
        return {}
    return json.loads(path.read_text(encoding="utf-8")).get("ceilings", {})


def sentence(error: BaseException) -> str:
    """The type of an error with its first and last lines.

    The first line alone may say nothing: that of Triton's CompilationError is a place, such as ``at 57:12:``.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    kept = lines if len(lines) <= 3 else [lines[0], "...", *lines[-2:]]
    shown = [line if len(line) <= LINE_CHARACTERS else f"{line[:LINE_CHARACTERS]}..." for line in kept]
    return f"{type(error).__name__}: {' / '.join(shown)}"


def number_text(value: float | None, form: str = ".2f") -> str:
    """Shows a number in a table; a dash where there is none."""
    return "–" if value is None else format(value, form)
