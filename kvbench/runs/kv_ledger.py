"""The ledger of the KV budget: every byte has exactly one use; means over the steady window.

The server adds up, step by step, how many slots had each use (kv_slot_steps). The difference of two polls is the exact
mean over the steps between them; these means are averaged over time, each weighted with its interval's share of the
window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvbench.runs.model import MeasuredCell

SLOT_USES = ("tokens", "waste", "cached", "pinned", "free", "fragmented")
"""The uses that the server tells: each slot has one of them. ``waste``: reserved by a sequence, and empty."""
_STEPS = "kv_slot_steps_total_"
_MEANS = ("kv_budget_bytes", "kv_bytes_per_slot", "kv_scale_bytes_per_slot", "kv_slots_shared", "kv_slots_total")


@dataclass(frozen=True)
class Ledger:
    """One cell's budget in bytes, mean over time and repeats.

    ``parts``: bytes by use, SLOT_USES, the page ``table`` and the ``rest``; they add up to ``budget``.
    ``scales``: of the tokens' bytes, scales of a quantised KV.
    ``saved``: bytes that sequences would have needed on top if nothing were shared; None if unknown.
    """

    budget: float
    parts: Mapping[str, float]
    scales: float
    saved: float | None

    def share(self, use: str) -> float:
        """The share of the budget that a use has, 0..1."""
        return self.parts[use] / self.budget


def interval_slots(gauges: pd.DataFrame) -> pd.DataFrame:
    """Counts slots by use (SLOT_USES) between each poll and the one before it: exact means over the steps.

    Rows by ``t``, with the index of ``gauges``. What the gauges said stands in the first row, and where no step ended
    between two polls. Empty where the server does not count its slots.
    """
    polls = gauges[gauges["kv_slots_total"] > 0].sort_values("t")
    names = [_STEPS + use for use in SLOT_USES]
    if polls.empty or any(name not in polls for name in names) or polls[names].isna().to_numpy().any():
        return pd.DataFrame(columns=list(SLOT_USES), dtype=float)
    counted = polls[names].to_numpy()
    moved = np.diff(counted, axis=0, prepend=counted[:1])  # [polls, uses] slots summed over the interval's steps
    steps = moved.sum(axis=1, keepdims=True)
    total = polls["kv_slots_total"].to_numpy()[:, None]
    mean = np.where(steps > 0, moved / np.where(steps > 0, steps, 1) * total, _gauge_slots(polls).to_numpy())
    return pd.DataFrame(mean, index=polls.index, columns=list(SLOT_USES))


def mean_slots(gauges: pd.DataFrame, start: float, end: float) -> dict[str, float]:
    """Averages slots by use (SLOT_USES) over ``start`` .. ``end`` [s of the frame's ``t``]; one repeat's polls.

    Empty where the server does not count them. If no two polls enclose a part of the window, the gauges of all polls.
    """
    slots = interval_slots(gauges)
    if slots.empty:
        return {}
    polls = gauges.loc[slots.index]
    t = polls["t"].to_numpy()
    weight = np.clip(np.minimum(t[1:], end) - np.maximum(t[:-1], start), 0, None)
    if weight.sum() > 0:
        averaged = np.average(slots.to_numpy()[1:], axis=0, weights=weight)
    else:
        averaged = _gauge_slots(polls).to_numpy().mean(axis=0)
    return dict(zip(SLOT_USES, map(float, averaged), strict=True))


def _gauge_slots(polls: pd.DataFrame) -> pd.DataFrame:
    """The slots of each use at each poll, from the gauges alone. [polls, SLOT_USES]"""
    names = ("reserved", "used", "cached", "pinned", "fragmented")
    gauges = polls.reindex(columns=[f"kv_slots_{name}" for name in names]).fillna(0.0)
    reserved, used, cached, pinned, fragmented = (gauges[name] for name in gauges)
    free = polls["kv_slots_total"] - reserved - cached - pinned - fragmented
    columns = (used, reserved - used, cached, pinned, free, fragmented)
    return pd.DataFrame(dict(zip(SLOT_USES, columns, strict=True))).clip(lower=0.0)


def observe(gauges: pd.DataFrame, means: Mapping[str, float], start: float, end: float) -> dict[str, float]:
    """Collects what ``ledger`` needs of one repeat's polls: slots by use, and ``means`` of gauges."""
    slots = {f"use_{use}": mean for use, mean in mean_slots(gauges, start, end).items()}
    return slots | {name: means[name] for name in _MEANS if slots and name in means}


def bytes_per_slot(cell: MeasuredCell) -> float | None:
    """The bytes of a slot with its scales, as the server says, else as computed before its launch.

    A slot holds the KV of one token in one group of layers.
    """
    sizes = (cell.observed_mean("kv_bytes_per_slot"), cell.capacity.bytes_per_slot, cell.capacity.bytes_per_token)
    return next((size for size in sizes if size is not None and size > 0), None)


def scale_bytes_per_slot(cell: MeasuredCell) -> float | None:
    """The part of ``bytes_per_slot`` that scales take; None where neither the server nor the arithmetic tells."""
    computed = (cell.capacity.scale_bytes_per_slot, cell.capacity.scale_bytes_per_token)
    sizes = (cell.observed_mean("kv_scale_bytes_per_slot"), *computed)
    return next((size for size in sizes if size is not None), None)


def ledger(cell: MeasuredCell) -> Ledger | None:
    """Adds up the uses of the budget; None where the server does not tell slots, their size or its budget."""
    slots = {use: cell.observed_mean(f"use_{use}") for use in SLOT_USES}
    size = bytes_per_slot(cell)
    budget = cell.observed_mean("kv_budget_bytes") or cell.capacity.kv_budget_bytes
    if None in slots.values() or size is None or not budget:
        return None
    parts = {use: float(value or 0.0) * size for use, value in slots.items()}
    parts["table"] = cell.observed_mean("page_table_bytes") or 0.0
    parts["rest"] = max(0.0, budget - math.fsum(parts.values()))
    scales = float(slots["tokens"] or 0.0) * (scale_bytes_per_slot(cell) or 0.0)
    shared = cell.observed_mean("kv_slots_shared")
    return Ledger(math.fsum(parts.values()), parts, scales, None if shared is None else shared * size)


def swapped_bytes(cell: MeasuredCell, way: str = "out") -> float | None:
    """The bytes of KV moved to the host (``way`` "out") or back ("in") in all repeats; None where not known."""
    slots, size = cell.counter(f"swapped_{way}_slots_total"), bytes_per_slot(cell)
    return None if slots is None or size is None else slots * size


def step_seconds(cell: MeasuredCell) -> float | None:
    """The seconds of all steps of all repeats; None where the server does not count them."""
    phases = {name for repeat in cell.repeats for name in repeat.server if name.startswith("step_time_seconds_total_")}
    return math.fsum(cell.counter(name) or 0.0 for name in phases) if phases else None


def share_of_steps(cell: MeasuredCell, seconds: str) -> float | None:
    """The share of all step time that a counter (hash_seconds, swap_seconds) has, 0..1; None where not known."""
    spent, steps = cell.counter(f"{seconds}_total"), step_seconds(cell)
    return spent / steps if spent is not None and steps else None


_COUNTERS = (
    "num_preemptions", "recomputed_tokens", "swap_lost_slots", "swap_seconds", "forks", "copied_pages", "copied_slots",
    "prefix_cache_hits", "prefix_cache_queries", "prefix_cache_evictions", "hash_seconds", "allocated_pages",
    "freed_pages", "refused_fragmented",
)  # fmt: skip


def accounting(cell: MeasuredCell) -> dict[str, float]:
    """The ledger (means) and the server's counters (sums over repeats) for summary.csv; what is unknown is left out."""
    flat: dict[str, float | None] = {}
    if (used := ledger(cell)) is not None:
        flat = {f"kv_{use}_bytes": size for use, size in used.parts.items()}
        flat |= {"kv_scale_bytes": used.scales, "kv_budget_bytes": used.budget, "kv_saved_bytes": used.saved}
    flat |= {f"swapped_{way}_bytes": swapped_bytes(cell, way) for way in ("out", "in")}
    flat |= {name: cell.counter(f"{name}_total") for name in _COUNTERS}
    return {name: value for name, value in flat.items() if value is not None}
