"""Values for github-action-benchmark's charts, one file a direction, as its two custom tools read them.

``customBiggerIsBetter`` and ``customSmallerIsBetter`` take a list of ``{name, unit, value, range, extra}``; a
``range`` is drawn only as ``± number``, without a unit, and an empty list ends the action with an error: a direction
without values has no file.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.files import write_json
from kvbench.common.text import plural
from kvbench.gate.verdict import wording
from kvbench.gate.verdict.verdict import Verdict

BIGGER, SMALLER = "benchmark-bigger-is-better.json", "benchmark-smaller-is-better.json"
# columns of a sweep's summary.csv -> (unit, file)
_SWEEP_COLUMNS = {
    "output_tokens_per_s": ("tokens/s", BIGGER),
    "ttft_ms_p95": ("ms", SMALLER),
    "itl_ms_p95": ("ms", SMALLER),
}

Entries = list[tuple[str, dict[str, Any]]]
"""File and entry of each value."""


def verdict_entries(verdict: Verdict) -> Entries:
    """The candidate's values of a comparison, named by the findings' ids; the other gates have no timings to chart."""
    found: Entries = []
    for finding in verdict.findings if verdict.kind == "compare" else ():
        if not wording.is_number(finding.candidate) or finding.higher_is_better is None:
            continue
        low, high = finding.interval or (None, None)
        known = all(map(wording.is_number, (finding.base, low, high)))
        half = abs(finding.base) * (high - low) / 2 if known else None
        extra = f"{wording.LABELS[finding.outcome]}\n{wording.line(finding.sentence)}"
        entry = _entry(finding.id, finding.unit or "", finding.candidate, half, extra)
        found.append((BIGGER if finding.higher_is_better else SMALLER, entry))
    return found


def sweep_entries(summary_csv: Path, workload: str) -> Entries:
    """The valid cells of a sweep from its summary.csv, named ``<workload>/<cell>/<column>``; none without the file.

    Raises UsageError for a file that cannot be read.
    """
    if not summary_csv.is_file():
        return []
    try:
        with summary_csv.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row.get("valid") == "True"]
        return [entry for row in rows for entry in _cell_entries(row, workload)]
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise UsageError(
            f"{summary_csv} cannot be read ({error}): `kvbench report {summary_csv.parent}` writes it again"
        ) from None


def _cell_entries(row: Mapping[str, str], workload: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """File and entry of each value of a row of summary.csv. Raises ValueError and KeyError."""
    extra = f"{row.get('configuration', '')}\n{plural(_float(row.get('repeats')), 'repeat')}"
    for column, (unit, name) in _SWEEP_COLUMNS.items():
        value, low, high = (_float(row.get(column + end)) for end in ("", "_min", "_max"))
        if wording.is_number(value):
            window = row.get(f"{column}_window")
            about = f"{extra}; {window}" if window else extra
            yield name, _entry(f"{workload}/{row['cell_id']}/{column}", unit, value, (high - low) / 2, about)


def write_benchmarks(entries: Entries, folder: Path) -> list[Path]:
    """The files that have entries; one of an earlier verdict that has none now is removed. Raises OSError."""
    written = []
    for path in (folder / BIGGER, folder / SMALLER):
        if of_file := [entry for name, entry in entries if name == path.name]:
            write_json(path, of_file)
            written.append(path)
        else:
            path.unlink(missing_ok=True)
    return written


def _entry(name: str, unit: str, value: float, spread: float | None, extra: str) -> dict[str, Any]:
    """``spread``: half of the width of the value's interval."""
    entry = {"name": wording.line(name), "unit": wording.line(unit), "value": value}
    drawn = {"range": f"± {spread:.6g}"} if spread and wording.is_number(spread) else {}
    return {**entry, **drawn, "extra": wording.clean(extra)}


def _float(text: str | None) -> float:
    """NaN for an empty entry."""
    return float(text or "nan")
