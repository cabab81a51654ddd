"""What each step of a changing rate came to: one row a plateau of a cell."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.runs.aggregate import PLATEAU_HEADS as LOAD_HEADS
from kvbench.runs.aggregate import plateau_row
from kvbench.runs.model import MeasuredCell, Run

PLATEAU_HEADS = ("configuration", *LOAD_HEADS)
PLATEAU_NOTE = (
    "The steady part of each step of the rate: median over the repeats. A step that answers far fewer requests/s than "
    "were asked for is beyond what the configuration can serve; random arrivals vary too, 100 of them by about 10 %."
)


@dataclass(frozen=True)
class PlateauRow:
    """The entries of PLATEAU_HEADS of one step of one cell."""

    cell: MeasuredCell
    values: tuple[str, ...]

    def __post_init__(self) -> None:
        assert len(self.values) == len(PLATEAU_HEADS)


def plateau_rows(run: Run) -> list[PlateauRow]:
    """Cell by cell, in the order of time; empty where no rate changes."""
    return [PlateauRow(cell, values) for cell in run.cells for values in _of(cell)]


def _of(cell: MeasuredCell) -> list[tuple[str, ...]]:
    told = [list(r.metrics.get("plateaus") or ()) for r in cell.repeats]
    if not told or len({len(plateaus) for plateaus in told}) != 1:
        return []
    return [(cell.name, *plateau_row(each)) for each in zip(*told, strict=True)]
