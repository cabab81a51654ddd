"""What every part shares: its arguments, its clock, and the JSON file it keeps up to date while it runs.

A part that is stopped in the middle leaves everything it had measured until then.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class PartReport:
    """Rows, and what was skipped or failed and why. Every change is on disk at once.

    ``headline``: a few words for the table of parts. ``table``: columns and rows of text for the summary.
    """

    def __init__(self, path: Path, seconds: float):
        self._path = path
        self._ends = time.monotonic() + seconds
        self.data: dict[str, Any] = {"headline": "", "rows": [], "skipped": [], "failures": [], "tables": []}

    @property
    def time_left(self) -> float:
        """Seconds until no new measurement should begin."""
        return self._ends - time.monotonic()

    @property
    def exit_code(self) -> int:
        """Of the part's process: 1 if anything failed."""
        return 1 if self.data["failures"] else 0

    def row(self, **values: Any) -> None:
        """One measurement."""
        self.data["rows"].append(values)
        self.save()

    def skip(self, what: str, reason: str) -> None:
        """``what`` was not measured, and why."""
        self.data["skipped"].append({"what": what, "reason": reason})
        print(f"SKIPPED {what}: {reason}", flush=True)
        self.save()

    def fail(self, what: str, reason: str) -> None:
        """``what`` is wrong, and how."""
        self.data["failures"].append({"what": what, "reason": reason})
        print(f"FAILED {what}: {reason}", flush=True)
        self.save()

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Replaces the table of that title."""
        others = [table for table in self.data["tables"] if table["title"] != title]
        self.data["tables"] = [*others, {"title": title, "columns": columns, "rows": rows}]
        self.save()

    def conclude_checks(self, total: int, what: str) -> int:
        """The headline of a part whose rows are checks, ``total`` of them; the exit code."""
        passed = sum(row["status"] == "passed" for row in self.data["rows"])
        self.data["headline"] = f"{passed} of {total} {what}"
        self.save()
        return self.exit_code

    def save(self) -> None:
        """All of it, to the file, in one go."""
        scratch = self._path.with_suffix(".tmp")
        scratch.write_text(json.dumps(plain(self.data), indent=1) + "\n", encoding="utf-8")
        scratch.replace(self._path)


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it: NaN and infinities become null."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
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
    """The first line of an error, with its type; of a long text the beginning."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


def ratio_text(value: float | None) -> str:
    """For a table; a dash where there is none."""
    return "–" if value is None else f"{value:.2f}"


def attempt(report: PartReport, what: str, run: Callable[[], None]) -> None:
    """``run()``; an error is put down as a failure of ``what``, and a lack of time as skipped."""
    if report.time_left <= 0:
        report.skip(what, "no time left")
        return
    try:
        run()
    except Exception as error:  # whatever one case raises, the next ones are still worth measuring
        report.fail(what, sentence(error))
