"""Sentences that sweeps and reports share: repeats that do not count, and the plateaus of a changing rate."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvbench.common import text as words
from kvbench.common.text import and_more
from kvbench.metrics.model import Plateau
from kvbench.runs.model import MeasuredCell
from kvbench.runs.results import CellSummary, Manifest

_MOST_NAMED = 6  # repeats in a note
PLATEAU_HEADS = (
    "asked for", "seconds", "requests", "requests/s", "output tok/s", "TTFT p95", "TPOT p50", "goodput",
)  # fmt: skip


def repeat_notes(manifest: Manifest, cells: Iterable[MeasuredCell | CellSummary]) -> list[str]:
    """Writes sentences about repeats of ``cells`` that are missing from valid cells, or were measured again."""
    planned, notes = manifest.planned_repeats, []
    if again := Counter((load.cell_id, load.repeat) for load in manifest.set_aside):
        times = {1: "", 2: " (twice)"}
        loads = [f"{cell_id} repeat {repeat}{times.get(n, f' ({n} times)')}" for (cell_id, repeat), n in again.items()]
        notes.append(f"measured again: {and_more(loads, _MOST_NAMED)}; what was disturbed is kept in set-aside/")
    if invalid := [
        f"{cell.cell_id}: {len(cell.repeats)} of {len(cell.repeats) + len(cell.invalid_repeats)} repeats are valid "
        f"({_first_reasons(cell.invalid_repeats)})"
        for cell in cells
        if cell.invalid_repeats
    ]:
        notes.append(f"invalid repeats are left out: {and_more(invalid, _MOST_NAMED, between='; ')}")
    if left := manifest.left_out_repeats:
        counts = [f"{cell_id}: {planned[cell_id] - n} of {planned[cell_id]} repeats" for cell_id, n in left.items()]
        minutes = manifest.max_minutes
        limit = "" if minutes is None else f" {minutes:g}"
        notes.append(f"cut short by --max-minutes{limit}, measured: {and_more(counts, _MOST_NAMED, between='; ')}")
    return notes


def _first_reasons(reasons: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"repeat {repeat}: {why[0].split(';')[0].rstrip('.')}" for repeat, why in reasons.items())


def plateau_row(repeats: Sequence[Plateau]) -> tuple[str, ...]:
    """The entries of PLATEAU_HEADS for one plateau of the rate: medians over its ``repeats``."""

    def median(path: str) -> float | None:
        values = [value for plateau in repeats if (value := plateau.value(path)) is not None]
        return statistics.median(values) if len(values) == len(repeats) else None

    rate, start, end = median("request_rate"), median("start_s"), median("end_s")
    return (
        "–" if rate is None else f"{rate:g}/s",
        "–" if start is None or end is None else f"{start:.0f}–{end:.0f}",
        words.count(median("n")),
        words.significant(median("steady_request_throughput")),
        words.tokens_per_s(median("steady_output_throughput")),
        words.ms(median("ttft_ms.p95")),
        words.ms(median("tpot_ms.p50")),
        words.significant(median("steady_goodput")),
    )
