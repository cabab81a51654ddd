"""What each configuration changes against the baseline: one answer a cell and metric, in one clock. Pure.

Engine time answers where it decides, since small effects show there; else the ratios paired by repeat that were served
over HTTP. The two clocks are never mixed in one figure, and each change says of which clock it is. All of a simulated
run is of the clock ``SIMULATED``, which stands where ``SERVED`` stands elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from kvbench.common import text as words
from kvbench.report.comparisons import baseline, compare, differing
from kvbench.runs.engine_time import LEVEL_WITHIN
from kvbench.runs.model import SERVED, SIMULATED, MeasuredCell, MeasuredLoad, Run
from kvbench.runs.ratios import HIGHER, LEVEL, LOWER, SAME
from kvbench.workload.settings import effective, phrase

THROUGHPUT, TTFT, ITL = "output_throughput", "p95_ttft_ms", "p95_itl_ms"
METRICS = {THROUGHPUT: "output tokens/s", TTFT: "p95 TTFT", ITL: "p95 ITL"}
AHEAD, BEHIND, IS_LEVEL, OPEN = "ahead", "behind", "level", "open"
ENGINE_TIME = "engine time"
MARGINS = {ENGINE_TIME: LEVEL_WITHIN, SERVED: LEVEL, SIMULATED: LEVEL}  # within which a change is called level
_WIDEST = 9.0  # high / low of an interval that still tells something


@dataclass(frozen=True)
class Change:
    """One metric of ``cell`` as a ratio to the baseline's under the same load.

    ``low``, ``high``: its 95 % interval, None where the scatter is not known; ``call``: ahead, behind, level or open
    (not decided); ``clock``: engine time, served or simulated; ``would_show``: the smallest relative change that would
    have shown.
    """

    cell: MeasuredCell
    metric: str
    clock: str
    ratio: float
    low: float | None
    high: float | None
    call: str
    would_show: float | None

    @property
    def decided(self) -> bool:
        return self.call != OPEN

    def inverse(self) -> Change:
        """The baseline against this cell, for a sentence that begins with the baseline."""
        calls = {AHEAD: BEHIND, BEHIND: AHEAD}
        low, high = (None if end is None else 1 / end for end in (self.high, self.low))
        call = calls.get(self.call, self.call)
        return Change(self.cell, self.metric, self.clock, 1 / self.ratio, low, high, call, self.would_show)

    @property
    def interval(self) -> str:
        """(13 to 20), in the unit of ``amount``; empty where it tells nothing."""
        if self.low is None or self.high is None or self.high > _WIDEST * self.low:
            return ""
        return f"({' to '.join(_number(end, times=self.ratio >= 2) for end in (self.low, self.high))})"

    def __str__(self) -> str:
        """+16 % (13 to 20); 2.4x (1.9 to 3.1) from twice on."""
        return f"{amount(self.ratio)} {self.interval}".rstrip()


def amount(ratio: float) -> str:
    """+16 %, −4.2 %, 2.4x: a ratio as a change, from twice on as a multiple."""
    if ratio >= 2:
        return f"{_number(ratio, times=True)}x"
    number = _number(ratio, times=False)
    return f"{number if number == '0' or number[0] == '−' else f'+{number}'} %"


def _number(ratio: float, times: bool) -> str:
    value = ratio if times else 100 * (ratio - 1)
    text = f"{value:.0f}" if abs(value) >= 9.95 else f"{value:.1f}"
    return text.replace("-", "−") if float(text) else "0"


def short_name(cell: MeasuredCell, base: MeasuredCell | None) -> str:
    """What distinguishes a configuration from the baseline: "page 8", "page 32 with FP8 KV (e4m3)", "contiguous".

    The baseline keeps its full name, and so does a configuration whose difference is not known.
    """
    changed = differing(cell, base) if base is not None and base is not cell else set()
    if not changed:
        return cell.name
    if "layout" in changed:
        return cell.name
    page = [f"page {cell.settings['page_size']}"] if "page_size" in changed else []
    others = sorted(changed - {"page_size"})
    rest = words.listing([phrase(name, effective(cell.settings, name)) for name in others])
    return " with ".join(filter(None, [*page, rest]))


def change(run: Run, cell: MeasuredCell, metric: str) -> Change | None:
    """Against the baseline at the cell's load, from the clock that decides it: engine time before served.

    What was served decides nothing that engine time excludes, though open there. None for the baseline itself, and
    where neither clock has the pair.
    """
    known = [each for clock in (ENGINE_TIME, SERVED) if (each := change_in(run, cell, metric, clock))]
    if not known:
        return None
    low, high = known[0].low or 0.0, known[0].high or math.inf
    return next((each for each in known if each.decided and low <= each.ratio <= high), known[0])


def change_in(run: Run, cell: MeasuredCell, metric: str, clock: str) -> Change | None:
    """The same in one clock."""
    base = baseline(run, cell.load)
    if base is None or base is cell:
        return None
    if clock == ENGINE_TIME:
        e = run.engine_time.of(cell.cell_id, metric) if run.engine_time else None
        return e and Change(cell, metric, clock, e.ratio, e.low, e.high, e.call, e.smallest_seen)
    return served(cell, base, metric)


def change_between(
    run: Run, cell: MeasuredCell, other: MeasuredCell, metric: str, clock: str | None = None
) -> Change | None:
    """Of a configuration against any other at its load: in either clock where one of them is the baseline.

    ``clock``: in that one only. Engine time knows no pair without the baseline.
    """
    if not (cell.is_baseline or other.is_baseline):
        return served(cell, other, metric) if clock != ENGINE_TIME else None
    varied = cell if other.is_baseline else other
    known = change_in(run, varied, metric, clock) if clock else change(run, varied, metric)
    return known if known is None or varied is cell else known.inverse()


def served(cell: MeasuredCell, other: MeasuredCell, metric: str) -> Change | None:
    """Of a configuration against another, as served: what the ratio paired by repeat shows."""
    pair = compare(cell, other)
    ratio = {THROUGHPUT: pair.throughput, TTFT: pair.ttft, ITL: pair.itl}[metric]
    if ratio is None:
        return None
    low, high = ratio.ci or (None, None)
    good = HIGHER if metric == THROUGHPUT else LOWER
    calls = {SAME: IS_LEVEL, HIGHER: BEHIND, LOWER: BEHIND, good: AHEAD}
    call = calls.get(ratio.verdict, OPEN)
    return Change(cell, metric, cell.clock, ratio.median, low, high, call, ratio.detectable)


def changes(run: Run, load: MeasuredLoad) -> list[Change]:
    """Every change at a load, all in one clock: engine time where it has any, else served."""
    for clock in (ENGINE_TIME, SERVED):
        found = [change_in(run, cell, metric, clock) for cell in run.at(load) for metric in METRICS]
        if known := [each for each in found if each]:
            return known
    return []


def decided_load(run: Run) -> MeasuredLoad | None:
    """The load that the report speaks of: the highest that decides anything, else the highest; None of no cells.

    In closed loop that is a throughput; in open loop the arrivals set it, so a p95 decides as well.
    """
    loads = run.loads[::-1]
    known = {
        load: [
            change(run, cell, metric)
            for cell in run.at(load)
            for metric in (METRICS if load.mode == "open" else (THROUGHPUT,))
        ]
        for load in loads
    }
    decided = (load for load, found in known.items() if any(each and each.decided for each in found))
    return next(decided, loads[0] if loads else None)


def changes_frame(run: Run) -> pd.DataFrame:
    """One row a change of the reported load: configuration, load, metric, clock, change, low, high [%], call."""
    load = decided_load(run)
    base = baseline(run, load) if load else None
    rows = [
        {
            "configuration": short_name(each.cell, base),
            "load": each.cell.load.label,
            "metric": each.metric,
            "clock": each.clock,
            "change": 100 * (each.ratio - 1),
            "low": None if each.low is None else 100 * (each.low - 1),
            "high": None if each.high is None else 100 * (each.high - 1),
            "call": each.call,
        }
        for each in (changes(run, load) if load else ())
    ]
    columns = ["configuration", "load", "metric", "clock", "change", "low", "high", "call"]
    return pd.DataFrame(rows, columns=columns)
