"""How the configurations of a run compare: which cells, in which metric and clock, and the words for it. Pure.

Engine time answers where it decides, since small effects show there; else the ratios paired by repeat that were served
over HTTP. The two clocks are never mixed in one figure, and each comparison says of which clock it is. All of a
simulated run is of the clock ``SIMULATED``, which stands where ``SERVED`` stands elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvbench.common import text as words
from kvbench.effects.comparison import Call, Comparison, contradicts, paired
from kvbench.metrics.definitions import ENGINE, SERVED, figure
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Run, all_steady, all_steady_latency
from kvbench.workload.settings import applies, effective, phrase, setting_title

THROUGHPUT, TTFT, TPOT, ITL = "output_throughput", "p95_ttft_ms", "p50_tpot_ms", "p95_itl_ms"
JUDGED = (THROUGHPUT, TTFT, ITL)  # by which a configuration is ahead or behind
COMPARED = (THROUGHPUT, TTFT, TPOT, ITL)
HEADS = ("output tok/s", *(figure(metric).title for metric in COMPARED[1:]))  # of COMPARED, in tables
SCATTER = 1.5  # largest over smallest throughput of one cell's repeats from which on they are said to scatter
NOT_TOLD = "not told apart"
RATIO_MARKS = f"≈ means level, ? {NOT_TOLD} from 1"
CALLS = {Call.BETTER: "ahead", Call.WORSE: "behind", Call.LEVEL: "level", Call.UNDECIDED: "open"}
"""The words for people where a table of engine time has a column of calls."""
_ASKED = ("layout", "page_size", "kv_cache_dtype")
_WIDEST = 9.0  # high / low of an interval that still tells something


# --- Values over repeats ---


@dataclass(frozen=True)
class RepeatSpread:
    """Median, minimum and maximum over repeats."""

    median: float
    low: float
    high: float
    n: int


def spread(values: Mapping[int, float]) -> RepeatSpread | None:
    """Median, min and max of per-repeat values; None when there are none."""
    known = list(values.values())
    return RepeatSpread(float(np.median(known)), min(known), max(known), len(known)) if known else None


def median(values: Mapping[int, float]) -> float | None:
    """The median of per-repeat values; None when there are none."""
    return float(np.median(list(values.values()))) if values else None


def scatters(cell: MeasuredCell) -> RepeatSpread | None:
    """The spread of a cell's throughput where its repeats scatter by more than SCATTER; None where they do not."""
    s = spread(cell.throughput())
    return s if s is not None and s.low > 0 and s.high / s.low > SCATTER else None


# --- Configurations ---


def differing(a: MeasuredCell, b: MeasuredCell) -> set[str]:
    """Engine settings in which two configurations differ; one that is left out is at its default.

    A setting that applies to one of the two only (page size between layouts, swap space beside recompute) is part of
    the setting that it depends on. Prefix caching is not: a contiguous configuration is one that has it off.
    """
    x, y = a.settings, b.settings
    return {
        key
        for key in x.keys() | y.keys()
        if (key == "enable_prefix_caching" or (applies(key, x) and applies(key, y)))
        and effective(x, key) != effective(y, key)
    }


def short_name(cell: MeasuredCell, base: MeasuredCell | None) -> str:
    """What distinguishes a configuration from the baseline: "page 8", "page 32 with FP8 KV (e4m3)", "contiguous".

    The baseline keeps its full name, and so does a configuration whose difference is not known.
    """
    changed = differing(cell, base) if base is not None and base is not cell else set()
    if not changed or "layout" in changed:
        return cell.name
    page = [f"page {cell.settings['page_size']}"] if "page_size" in changed else []
    others = [phrase(name, effective(cell.settings, name)) for name in sorted(changed - {"page_size"})]
    return " with ".join(filter(None, [*page, words.listing(others)]))


def not_varied(run: Run, base: MeasuredCell) -> list[str]:
    """Titles of the settings that every reader asks about and that no configuration at the baseline's load varies."""
    known = {*base.settings, *(_ASKED if run.is_built_in else ())}
    varied = {name for cell in run.at(base.load) for name in differing(cell, base)}
    return [setting_title(name) for name in _ASKED if name in known - varied]


def tokens_held(cell: MeasuredCell, base: MeasuredCell) -> float | None:
    """How many times as many tokens as ``base`` a configuration holds in the same memory; None where not known."""
    held, before = cell.capacity.capacity_tokens, base.capacity.capacity_tokens
    return held / before if held and before else None


def baseline(run: Run, load: MeasuredLoad) -> MeasuredCell | None:
    """The baseline configuration at a load."""
    return next((cell for cell in run.at(load) if cell.is_baseline), None)


def paging_pair(run: Run) -> tuple[str, str] | None:
    """Names of the paged and the contiguous configuration that differ least, the baseline first; None without."""
    pairs = {
        (p.name, c.name): (
            len(differing(p, c)),
            not (p.is_baseline or c.is_baseline),
            abs((p.settings.get("page_size") or 0) - 16),
        )
        for p in run.cells
        for c in run.cells
        if p.is_paged and c.is_contiguous
    }
    return min(pairs, key=lambda names: pairs[names]) if pairs else None


def paging(run: Run) -> list[tuple[MeasuredCell, MeasuredCell]]:
    """The paged and the contiguous cell of ``paging_pair`` at each load that has both, loads ascending."""
    names = paging_pair(run)
    pairs = [(run.cell(names[0], load), run.cell(names[1], load)) for load in run.loads] if names else []
    return [(paged, contiguous) for paged, contiguous in pairs if paged is not None and contiguous is not None]


def reference(run: Run, load: MeasuredLoad) -> MeasuredCell | None:
    """What ratios in tables and figures are relative to: contiguous where measured, else the baseline."""
    pair = paging_pair(run)
    return (run.cell(pair[1], load) if pair else None) or baseline(run, load)


def best(run: Run, load: MeasuredLoad) -> MeasuredCell | None:
    """The valid cell with the highest median of output tokens/s, all of one window; None when there is none."""
    valid = [cell for cell in run.at(load) if cell.valid]
    steady = all_steady(valid)
    known = [(value, cell) for cell in valid if (value := median(cell.throughput(steady))) is not None]
    return max(known, key=lambda pair: pair[0])[1] if known else None


@dataclass(frozen=True)
class Effect:
    """One setting changed alone from the baseline ``base``, at one load."""

    setting: str
    value: object
    baseline_value: object
    cell: MeasuredCell
    base: MeasuredCell


def effects(run: Run) -> list[Effect]:
    """Every configuration that differs from the baseline in one setting; in the layout only without ``paging``."""
    alone, layouts = [], bool(paging(run))
    for cell in run.cells:
        base = baseline(run, cell.load)
        changed = differing(cell, base) if base is not None and cell is not base else set()
        if base is None or len(changed) != 1 or (layouts and changed == {"layout"}):
            continue
        (setting,) = changed
        values = (effective(settings, setting) for settings in (cell.settings, base.settings))
        alone.append(Effect(setting, *values, cell, base))
    return alone


# --- Comparisons ---


def is_steady(metric: str, *cells: MeasuredCell) -> bool:
    """Tests whether a metric of ``cells`` is compared in the steady window; else over the whole run, of all of them."""
    return all_steady_latency(cells) if figure(metric).statistic else all_steady(cells)


def values(metric: str, cell: MeasuredCell, steady: bool) -> dict[int, float]:
    """A metric by repeat: of the steady window, or of the whole run."""
    return cell.per_repeat(figure(metric).of_steady(steady).path)


def served(cell: MeasuredCell, other: MeasuredCell, metric: str) -> Comparison | None:
    """A configuration against another as served, paired by repeat; None where a cell is in doubt or has no figure."""
    if not (cell.valid and other.valid):
        return None
    steady = is_steady(metric, cell, other)
    return paired(metric, cell.clock, values(metric, cell, steady), values(metric, other, steady))


def in_engine_time(run: Run, cell_id: str, metric: str) -> Comparison | None:
    """A configuration against the baseline in engine time; None where that was not measured."""
    return run.engine_time.of(cell_id, metric) if run.engine_time else None


def change_in(run: Run, cell: MeasuredCell, metric: str, clock: str) -> Comparison | None:
    """A configuration against the baseline at its load in one clock; None for the baseline itself."""
    base = baseline(run, cell.load)
    if base is None or base is cell:
        return None
    return in_engine_time(run, cell.cell_id, metric) if clock == ENGINE else served(cell, base, metric)


def change(run: Run, cell: MeasuredCell, metric: str) -> Comparison | None:
    """The same from the clock that decides it: engine time before served.

    What was served decides nothing that engine time excludes, though undecided there.
    """
    known = [one for clock in (ENGINE, SERVED) if (one := change_in(run, cell, metric, clock))]
    if not known:
        return None
    low, high = known[0].low or 0.0, known[0].high or math.inf
    return next((one for one in known if one.decided and low <= one.ratio <= high), known[0])


def change_between(
    run: Run, cell: MeasuredCell, other: MeasuredCell, metric: str, clock: str | None = None
) -> Comparison | None:
    """A configuration against any other at its load: in either clock where one of them is the baseline.

    ``clock``: in that one only. Engine time knows no pair without the baseline.
    """
    if not (cell.is_baseline or other.is_baseline):
        return served(cell, other, metric) if clock != ENGINE else None
    varied = cell if other.is_baseline else other
    known = change_in(run, varied, metric, clock) if clock else change(run, varied, metric)
    return known if known is None or varied is cell else known.inverse()


def changes(run: Run, load: MeasuredLoad) -> list[tuple[MeasuredCell, Comparison]]:
    """Every cell at a load against the baseline, all in one clock: engine time where it has any, else served."""
    for clock in (ENGINE, SERVED):
        every = [(cell, change_in(run, cell, metric, clock)) for cell in run.at(load) for metric in JUDGED]
        if known := [(cell, one) for cell, one in every if one]:
            return known
    return []


def decided_load(run: Run) -> MeasuredLoad | None:
    """The load that the report speaks of: the highest that decides anything, else the highest; None of no cells.

    In closed loop that is a throughput; in open loop the arrivals set it, so a p95 decides as well.
    """
    for load in reversed(run.loads):
        metrics = JUDGED if load.mode == "open" else (THROUGHPUT,)
        known = (change(run, cell, metric) for cell in run.at(load) for metric in metrics)
        if any(one and one.decided for one in known):
            return load
    return run.loads[-1] if run.loads else None


def reported_cells(run: Run) -> tuple[list[MeasuredCell], MeasuredCell | None]:
    """The cells at that load, and the baseline among them."""
    load = decided_load(run)
    return (run.at(load), baseline(run, load)) if load else ([], None)


def leaders(run: Run, load: MeasuredLoad) -> dict[str, dict[str, Call]]:
    """By column of the table of all cells: the configurations that are not decided to be worse than the best value.

    LEVEL is the best one and what is level with it, UNDECIDED what is not told apart from it. Among valid cells,
    without percentiles of too few samples; empty where no cell is decided to be worse.
    """
    valid = [cell for cell in run.at(load) if cell.valid]
    steady, settled = all_steady(valid), all_steady_latency(valid)
    ttft, tpot = (
        [(cell, *cell.percentile(*which, settled)) for cell in valid]
        for which in (("ttft_ms", "p95"), ("tpot_ms", "p50"))
    )
    return {
        "output_tokens_per_s": _leaders(THROUGHPUT, [(c, median(c.throughput(steady)), False) for c in valid]),
        "ttft_ms_p95": _leaders(TTFT, ttft),
        "tpot_ms_p50": _leaders(TPOT, tpot),
    }


def _leaders(metric: str, shown: Sequence[tuple[MeasuredCell, float | None, bool]]) -> dict[str, Call]:
    """``shown``: what tables have of each cell, and whether it is of too few samples."""
    known = [one for one in shown if one[1] is not None]
    pick = max if figure(metric).higher_is_better else min
    top, _, few = pick(known, key=lambda one: one[1], default=(None, None, True))
    if top is None or few:
        return {}
    others = {cell.name: served(cell, top, metric) for cell, _, few in known if cell is not top and not few}
    calls = {name: one.call if one else Call.UNDECIDED for name, one in others.items()}
    if Call.WORSE not in calls.values() or Call.BETTER in calls.values():  # better: the ratios contradict the medians
        return {}
    return {top.name: Call.LEVEL} | {name: call for name, call in calls.items() if call != Call.WORSE}


def median_ratio(cell: MeasuredCell, other: MeasuredCell) -> float | None:
    """The ratio of the throughputs that tables show, where it visibly contradicts the paired one."""
    shown, against = median(cell.throughput()), median(other.throughput())
    known = served(cell, other, THROUGHPUT)
    if known is None or not shown or not against:
        return None
    return shown / against if contradicts(known.ratio, shown / against) else None


# --- In words ---


def marked(comparison: Comparison) -> str:
    """1.65x; ≈1.02x when level; 1.65x? when not told apart from 1, as ``RATIO_MARKS`` explains."""
    level, undecided = comparison.call == Call.LEVEL, comparison.call == Call.UNDECIDED
    return f"{'≈' if level else ''}{words.ratio(comparison.ratio)}{'?' if undecided else ''}"


def amount(ratio: float) -> str:
    """+16 %, −4.2 %, 2.4x: a ratio as a change, from twice on as a multiple."""
    if ratio >= 2:
        return f"{_number(ratio, times=True)}x"
    number = _number(ratio, times=False)
    return f"{number if number == '0' or number[0] == '−' else f'+{number}'} %"


def interval(comparison: Comparison) -> str:
    """(13 to 20), in the unit of ``amount``; empty where it tells nothing."""
    low, high = comparison.low, comparison.high
    if low is None or high is None or high > _WIDEST * low:
        return ""
    return f"({' to '.join(_number(end, times=comparison.ratio >= 2) for end in (low, high))})"


def signed_interval(comparison: Comparison) -> str:
    """+17.4 to +19.8, in percent; empty where it tells nothing."""
    ends = (round(100 * ((end or 1.0) - 1), 1) + 0.0 for end in (comparison.low, comparison.high))  # no -0.0
    return " to ".join(f"{end:+.1f}" for end in ends) if interval(comparison) else ""


def sized(comparison: Comparison) -> str:
    """+16 % (13 to 20); 2.4x (1.9 to 3.1) from twice on."""
    return f"{amount(comparison.ratio)} {interval(comparison)}".rstrip()


def _number(ratio: float, times: bool) -> str:
    value = ratio if times else 100 * (ratio - 1)
    text = f"{value:.0f}" if abs(value) >= 9.95 else f"{value:.1f}"
    return text.replace("-", "−") if float(text) else "0"
