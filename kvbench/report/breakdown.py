"""The two finer tables: one setting changed alone, and latencies by class of request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvbench.common import text as words
from kvbench.report.comparisons import Effect, effects, paging
from kvbench.report.tables import UNCERTAIN, Value, ratio_value
from kvbench.runs.model import MeasuredCell, Run, number


@dataclass(frozen=True)
class EffectRow:
    """One setting changed alone from the baseline at one load: ratios of throughput, p95 TTFT, TPOT and ITL."""

    effect: Effect
    values: tuple[Value, ...]


EFFECT_HEADS = ("output tok/s", "p95 TTFT", "p50 TPOT", "p95 ITL")


def effect_rows(run: Run) -> list[EffectRow]:
    """Setting by setting, value by value, the highest load first."""
    listed = [one for one in effects(run) if one.setting != "layout" or not paging(run)]
    first = {key: i for i, key in reversed(list(enumerate((e.setting, str(e.value)) for e in listed)))}
    order = {setting: i for i, (setting, _) in reversed(list(enumerate(first)))}
    listed.sort(key=lambda e: (order[e.setting], first[e.setting, str(e.value)], -e.comparison.load.value))
    found = []
    for one in listed:
        c = one.comparison
        latencies = (ratio_value(r, higher_is_better=False) for r in (c.ttft, c.tpot, c.itl))
        found.append(EffectRow(one, (ratio_value(c.throughput), *latencies)))
    return found


CLASS_METRICS = (
    ("ttft_ms", "p50"),
    ("ttft_ms", "p95"),
    ("tpot_ms", "p50"),
    ("tpot_ms", "p95"),
    ("e2el_ms", "p95"),
)


def class_name(row: ClassRow) -> str:
    """The class, with its priority where classes differ in it."""
    return row.name if row.priority is None else f"{row.name} (priority {row.priority})"


@dataclass(frozen=True)
class ClassRow:
    """One workload class (or turn) in one cell: how many requests and the entries of CLASS_METRICS."""

    name: str
    cell: MeasuredCell
    n: int
    values: tuple[Value, ...]
    priority: int | None = None


def class_rows(run: Run) -> list[ClassRow]:
    """Per-class latencies, the highest load first; empty when the workload has fewer than two classes.

    Classes of different priorities: the most urgent first.
    """
    found = _group_rows(run, per_class)
    if len({row.name for row in found}) < 2:
        return []
    urgency = {row.name: row.priority or 0 for row in found}
    if len(set(urgency.values())) < 2:
        return [replace(row, priority=None) for row in found]
    loads = {load: i for i, load in enumerate(reversed(run.loads))}
    return sorted(found, key=lambda row: (loads[row.cell.load], urgency[row.name]))


def turn_rows(run: Run) -> list[ClassRow]:
    """Latencies of the first and of later turns of conversations; empty for a workload without."""
    titles = {"first": "first turn", "later": "later turns"}

    def per_turn(cell: MeasuredCell) -> Mapping[str, Any]:
        found = cell.pooled.get("per_turn") or {}
        return {title: found[key] for key, title in titles.items() if found.get(key)}

    return [replace(row, priority=None) for row in _group_rows(run, per_turn)]


def _group_rows(run: Run, groups: Callable[[MeasuredCell], Mapping[str, Any]]) -> list[ClassRow]:
    found = []
    for load in reversed(run.loads):
        names = dict.fromkeys(name for cell in run.at(load) for name in groups(cell))
        for name in names:
            for cell in run.at(load):
                summary = groups(cell).get(name)
                if summary:
                    values = tuple(_class_value(summary.get(metric) or {}, which) for metric, which in CLASS_METRICS)
                    n, priority = int(number(summary.get("n")) or 0), number(summary.get("priority"))
                    found.append(ClassRow(name, cell, n, values, None if priority is None else int(priority)))
    return found


def per_class(cell: MeasuredCell) -> Mapping[str, Any]:
    """Latency summaries by class: pooled where the sweep stored them, otherwise medians over the repeats."""
    pooled = cell.pooled.get("per_class")
    if pooled:
        return pooled
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(n for r in cell.repeats for n in (r.metrics.get("per_class") or {})):
        each = [(r.metrics.get("per_class") or {}).get(name) or {} for r in cell.repeats]
        found[name] = {"n": sum(number(e.get("n")) or 0 for e in each)}
        for metric in {metric for metric, _ in CLASS_METRICS}:
            values = {
                which: [v for e in each if (v := number((e.get(metric) or {}).get(which))) is not None]
                for which in ("p50", "p95")
            }
            found[name][metric] = {w: float(np.median(v)) for w, v in values.items() if v} | {
                "uncertain": ["p50", "p95"]
            }
    return found


def _class_value(summary: Mapping[str, Any], which: str) -> Value:
    value = number(summary.get(which))
    return Value(words.ms(value) + (UNCERTAIN if which in (summary.get("uncertain") or ()) else ""), value)
