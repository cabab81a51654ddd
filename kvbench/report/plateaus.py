"""What each step of a changing rate came to: one row a plateau of a cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbench.common import text as words
from kvbench.runs.model import Cell, Run, number

LOAD_HEADS = (
    "asked for",
    "seconds",
    "requests",
    "requests/s",
    "output tok/s",
    "TTFT p95",
    "TPOT p50",
    "goodput",
)
PLATEAU_HEADS = ("configuration", *LOAD_HEADS)
PLATEAU_NOTE = (
    "The steady part of each step of the rate: median over the repeats. A step that answers far fewer requests/s than "
    "were asked for is beyond what the configuration can serve; random arrivals vary too, 100 of them by about 10 %."
)


@dataclass(frozen=True)
class PlateauRow:
    """The entries of PLATEAU_HEADS of one step of one cell."""

    cell: Cell
    values: tuple[str, ...]

    def __post_init__(self) -> None:
        assert len(self.values) == len(PLATEAU_HEADS)


def plateau_rows(run: Run) -> list[PlateauRow]:
    """Cell by cell, in the order of time; empty where no rate changes."""
    return [PlateauRow(cell, values) for cell in run.cells for values in _of(cell)]


def _of(cell: Cell) -> list[tuple[str, ...]]:
    told = [list(r.metrics.get("plateaus") or ()) for r in cell.repeats]
    if not told or len({len(plateaus) for plateaus in told}) != 1:
        return []
    return [(cell.name, *plateau_values(each)) for each in zip(*told, strict=True)]


def plateau_values(each: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The entries of LOAD_HEADS of one plateau. ``each``: it in the metrics of every repeat."""

    def median(*path: str) -> float | None:
        found = []
        for plateau in each:
            node: Any = plateau
            for part in path:
                node = node.get(part) if isinstance(node, Mapping) else None
            found.append(number(node))
        known = [value for value in found if value is not None]
        return float(np.median(known)) if len(known) == len(each) else None

    rate, start, end = median("request_rate"), median("start_s"), median("end_s")
    return (
        "–" if rate is None else f"{rate:g}/s",
        "–" if start is None or end is None else f"{start:.0f}–{end:.0f}",
        words.count(median("n")),
        words.significant(median("steady_request_throughput")),
        words.tokens_per_s(median("steady_output_throughput")),
        words.ms(median("ttft_ms", "p95")),
        words.ms(median("tpot_ms", "p50")),
        words.significant(median("steady_goodput")),
    )
