"""Values for github-action-benchmark's charts, one file a direction, as its two custom tools read them.

``customBiggerIsBetter`` and ``customSmallerIsBetter`` take a list of ``{name, unit, value, range, extra}``; a
``range`` is drawn only as ``± number``, without a unit, and an empty list ends the action with an error: a direction
without values has no file.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.common.files import write_json
from kvbench.common.text import plural
from kvbench.gate.verdict import wording
from kvbench.gate.verdict.verdict import Finding, Verdict

BIGGER, SMALLER = "benchmark-bigger-is-better.json", "benchmark-smaller-is-better.json"
# columns of a sweep's summary.csv -> (unit, higher is better)
_SWEEP_COLUMNS = {
    "output_tokens_per_s": ("tokens/s", True),
    "ttft_ms_p95": ("ms", False),
    "itl_ms_p95": ("ms", False),
}


@dataclass(frozen=True)
class ChartValue:
    """One value of one chart. ``spread``: half of the width of its interval, in ``unit``."""

    name: str
    unit: str
    value: float
    higher_is_better: bool
    spread: float | None = None
    extra: str = ""


def verdict_points(verdict: Verdict) -> list[ChartValue]:
    """The candidate's values of a comparison, named by the findings' ids; the other gates have no timings to chart."""
    if verdict.kind != "compare":
        return []
    return [
        ChartValue(
            name=wording.line(finding.id),
            unit=wording.line(finding.unit or ""),
            value=finding.candidate,
            higher_is_better=finding.higher_is_better,
            spread=_half_width(finding),
            extra=f"{wording.LABELS[finding.outcome]}\n{wording.line(finding.sentence)}",
        )
        for finding in verdict.findings
        if wording.is_number(finding.candidate) and finding.higher_is_better is not None
    ]


def sweep_points(summary_csv: Path, workload: str) -> list[ChartValue]:
    """The valid cells of a sweep from its summary.csv, named ``<workload>/<cell>/<column>``; none without the file.

    Raises OSError.
    """
    found: list[ChartValue] = []
    if not summary_csv.is_file():
        return found
    with summary_csv.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row.get("valid") != "True":
                continue
            for column, (unit, higher) in _SWEEP_COLUMNS.items():
                value = _float(row.get(column))
                if value is None:
                    continue
                ends = [_float(row.get(f"{column}_{end}")) for end in ("min", "max")]
                spread = None if None in ends else (ends[1] - ends[0]) / 2
                extra = f"{row.get('configuration', '')}\n{plural(_float(row.get('repeats')) or 0, 'repeat')}"
                name = wording.line(f"{workload}/{row['cell_id']}/{column}")
                found.append(ChartValue(name, unit, value, higher, spread, wording.clean(extra)))
    return found


def benchmark_entries(points: Iterable[ChartValue], higher_is_better: bool) -> list[dict[str, str | float]]:
    """The entries of one of the two files."""
    return [
        {
            "name": point.name,
            "unit": point.unit,
            "value": point.value,
            **({"range": f"± {point.spread:.6g}"} if point.spread else {}),
            **({"extra": point.extra} if point.extra else {}),
        }
        for point in points
        if point.higher_is_better is higher_is_better
    ]


def write_benchmarks(points: Sequence[ChartValue], folder: Path) -> list[Path]:
    """The files that have entries; one of an earlier verdict that has none now is removed. Raises OSError."""
    written = []
    for name, higher in ((BIGGER, True), (SMALLER, False)):
        if entries := benchmark_entries(points, higher):
            write_json(folder / name, entries)
            written.append(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    return written


def _half_width(finding: Finding) -> float | None:
    """Half of the width of the candidate's interval, in its unit."""
    low, high = finding.interval or (None, None)
    if not all(map(wording.is_number, (finding.base, low, high))):
        return None
    return abs(finding.base) * (high - low) / 2


def _float(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if wording.is_number(value) else None
