"""How TTFT grows with the load, and at which load each configuration breaks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.common import text as words
from kvbench.report.limits import NOTHING, UNKNOWN, limit_of
from kvbench.report.tables import UNCERTAIN, Column, Row, Table, Value
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Run, all_steady_latency

DOUBLES = 2.0
NOTE = (
    "p95 TTFT of the raw samples: of the steady window where all loads of a configuration have one, else of the whole "
    "run. It breaks at the lowest load with more than twice the p95 TTFT of the lightest load; "
    "beside it what limited the configuration there."
)


@dataclass(frozen=True)
class Break:
    """Where one configuration breaks.

    ``cells``: by load, ascending; ``at``: the first cell whose p95 TTFT is over twice the first one's, None: none is;
    ``steady``: whether all these are of the steady window.
    """

    name: str
    cells: tuple[MeasuredCell, ...]
    at: MeasuredCell | None
    steady: bool

    def words(self, run: Run) -> str:
        """at 3/s (KV memory); at 5/s where no limit was seen; not up to 5/s"""
        if self.at is None:
            return f"not up to {self.cells[-1].load.short}"
        limit = limit_of(run, self.at).limit
        return self.at.load.where + (f" ({limit})" if limit not in (NOTHING, UNKNOWN) else "")


def breaks(run: Run) -> list[Break]:
    """Of each configuration with valid cells at two loads or more of one kind, in display order."""
    found = []
    for name in run.configs:
        cells = [cell for load in loads(run) if (cell := run.cell(name, load)) and cell.valid]
        steady = all_steady_latency(cells)
        measured = [(cell, ttft) for cell in cells if (ttft := cell.percentile("ttft_ms", "p95", steady)[0])]
        if len(measured) > 1:
            at = next((cell for cell, ttft in measured if ttft > DOUBLES * measured[0][1]), None)
            found.append(Break(name, tuple(cell for cell, _ in measured), at, steady))
    return found


def loads(run: Run) -> list[MeasuredLoad]:
    """Those of the most frequent kind (closed, or open at a rate), ascending."""
    # In a closed loop more users always wait longer; measured, that says nothing of a break.
    sized = [load for load in run.loads if load.value and (run.simulated or load.mode == "open")]
    modes = [load.mode for load in sized]
    return [load for load in sized if load.mode == max(modes, key=modes.count, default="")]


def growth_table(run: Run) -> Table:
    """One row a configuration: p95 TTFT at each load, and where it breaks; no rows of a run with one load."""
    shown = loads(run)
    rows = []
    for each in breaks(run):
        at = {cell.load: cell for cell in each.cells}
        entries = [_p95(at[load], each.steady) if load in at else Value("–") for load in shown]
        entries.append(Value(each.words(run), each.at.load.value if each.at else None, "", "worse" * bool(each.at)))
        rows.append(Row(each.cells[-1], (Value(each.name, each.name), *entries)))
    heads = ("configuration", *(load.short for load in shown), "breaks")
    return Table(tuple(Column(head, head) for head in heads), tuple(rows), numbers_from=1)


def growth_brief(run: Run) -> str:
    """contiguous breaks at 3/s, paged (page 16) at 4/s: the first to break, and the baseline; empty where none does."""
    broken = [each for each in breaks(run) if each.at]
    if not broken:
        return ""
    first = min(broken, key=lambda each: each.at.load if each.at else run.loads[-1])
    base = [each for each in broken if each.cells[0].is_baseline and each is not first]
    return ", ".join([f"{first.name} breaks {first.at.load.where}", *(f"{b.name} {b.at.load.where}" for b in base)])


def growth_sentence(run: Run) -> str:
    """Which configurations break first; empty where none does."""
    found = breaks(run)
    if not any(each.at for each in found):
        return ""
    lightest = found[0].cells[0].load.where
    told = words.listing([f"{each.name} {each.words(run)}" for each in found])
    return f"p95 TTFT is over twice its own {lightest}: {told}."


def _p95(cell: MeasuredCell, steady: bool) -> Value:
    value, few = cell.percentile("ttft_ms", "p95", steady)
    return Value(words.ms(value) + UNCERTAIN * few, value)
