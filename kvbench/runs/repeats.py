"""Which repeats of a sweep count: what was planned, left out, disturbed and measured again, as data and as notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from kvbench.common.text import and_more
from kvbench.runs.results import Manifest

_MOST_NAMED = 6


def planned_repeats(manifest: Manifest) -> Counter[str]:
    """How many repeats of each cell were planned."""
    return Counter(cell_id for block in manifest.plan for cell_id in block.cells)


def left_out_repeats(manifest: Manifest) -> Counter[str]:
    """How many repeats of each cell --max-minutes left no time for."""
    return Counter(cell_id for cell_id, _ in manifest.left_out)


def repeat_notes(manifest: Manifest, cells: Iterable[tuple[str, int, Mapping[Any, Any]]]) -> list[str]:
    """Sentences about repeats that are missing from valid cells, or were measured again.

    ``cells``: id, number of valid repeats, and the reasons of those that are left out as invalid, by repeat.
    """
    planned, notes = planned_repeats(manifest), []
    if again := Counter((load.cell_id, load.repeat) for load in manifest.set_aside):
        times = {1: "", 2: " (twice)"}
        loads = [f"{cell_id} repeat {repeat}{times.get(n, f' ({n} times)')}" for (cell_id, repeat), n in again.items()]
        notes.append(f"measured again: {and_more(loads, _MOST_NAMED)}; what was disturbed is kept in set-aside/")
    if invalid := [
        f"{cell_id}: {valid} of {valid + len(reasons)} repeats are valid ({_why(reasons)})"
        for cell_id, valid, reasons in cells
        if reasons
    ]:
        notes.append(f"invalid repeats are left out: {and_more(invalid, _MOST_NAMED, between='; ')}")
    if left := left_out_repeats(manifest):
        counts = [f"{cell_id}: {planned[cell_id] - n} of {planned[cell_id]} repeats" for cell_id, n in left.items()]
        minutes = manifest.max_minutes
        limit = "" if minutes is None else f" {minutes:g}"
        notes.append(f"cut short by --max-minutes{limit}, measured: {and_more(counts, _MOST_NAMED, between='; ')}")
    return notes


def _why(reasons: Mapping[Any, Any]) -> str:
    return "; ".join(f"repeat {repeat}: {why[0].split(';')[0].rstrip('.')}" for repeat, why in reasons.items())
