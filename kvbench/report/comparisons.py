"""Compares the configurations of a run: which cells, in which metric and clock, and the words for it. Pure.

Engine time answers where it decides, since small effects show there; else the ratios paired by repeat that were served
over HTTP. The two clocks are never mixed in one figure, and each comparison says of which clock it is. All of a
simulated run is of the clock ``SIMULATED``, which stands where ``SERVED`` stands elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvbench.common import text as words
from kvbench.effects.comparison import Call, Comparison, contradicts, paired
from kvbench.metrics.definitions import THROUGHPUT, compared, figure
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Run, all_steady, all_steady_latency
from kvbench.workload.settings import applies, effective, phrase, setting_title

TTFT, ITL = "p95_ttft_ms", "p95_itl_ms"
JUDGED = (THROUGHPUT, TTFT, ITL)  # by which a configuration is ahead or behind
SCATTER = 1.5  # largest over smallest throughput of one cell's repeats from which on they are said to scatter
NOT_TOLD = "not told apart"
WHOLE_RUN = "whole run"  # of a figure or ratio that is not of the steady window
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
    if not values:
        return None
    every = list(values.values())
    return RepeatSpread(float(np.median(every)), min(every), max(every), len(every))


def median(values: Mapping[int, float]) -> float | None:
    """The median of per-repeat values; None when there are none."""
    return float(np.median(list(values.values()))) if values else None


def scatters(cell: MeasuredCell) -> RepeatSpread | None:
    """The spread of a cell's throughput where its repeats scatter by more than SCATTER; None where they do not."""
    rates = spread(cell.throughput())
    return rates if rates is not None and rates.high > SCATTER * rates.low > 0 else None


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
    """The difference to the baseline as a name: "page 8", "page 32 with FP8 KV (e4m3)", "contiguous".

    The baseline keeps its full name, and so does a configuration whose difference is not known.
    """
    changed = differing(cell, base or cell)
    if not changed or "layout" in changed:
        return cell.name
    page = f"page {cell.page_size}" * ("page_size" in changed)
    others = [phrase(name, effective(cell.settings, name)) for name in sorted(changed - {"page_size"})]
    return " with ".join(filter(None, [page, words.listing(others)]))


def tokens_held(cell: MeasuredCell, base: MeasuredCell) -> float | None:
    """The tokens that a configuration holds over those of ``base`` in the same memory; None where not known."""
    held, before = cell.capacity.capacity_tokens, base.capacity.capacity_tokens
    return held / before if held and before else None


def paging_pair(run: Run) -> tuple[str, str] | None:
    """Names of the paged and the contiguous configuration that differ least, the baseline first; None without."""
    pairs = [(p, c) for p in run.cells for c in run.cells if p.is_paged and c.is_contiguous]

    def difference(pair: tuple[MeasuredCell, MeasuredCell]) -> tuple[int, bool, int]:
        return len(differing(*pair)), not any(c.is_baseline for c in pair), abs((pair[0].page_size or 0) - 16)

    nearest = min(pairs, key=difference, default=None)
    return nearest and (nearest[0].name, nearest[1].name)


def best(cells: Sequence[MeasuredCell]) -> MeasuredCell | None:
    """The valid cell with the highest median of output tokens/s, all of one window; None when there is none."""
    valid = [cell for cell in cells if cell.valid]
    steady = all_steady(valid)
    rates = {cell.cell_id: median(cell.throughput(steady)) for cell in valid}
    measured = [cell for cell in valid if rates[cell.cell_id] is not None]
    return max(measured, key=lambda cell: rates[cell.cell_id], default=None)


def is_steady(metric: str, *cells: MeasuredCell) -> bool:
    """Tests whether a metric of ``cells`` is compared in the steady window, else over the whole run."""
    return all_steady_latency(cells) if figure(metric).statistic else all_steady(cells)


def values(metric: str, cell: MeasuredCell, steady: bool) -> dict[int, float]:
    """A metric by repeat: of the steady window, or of the whole run."""
    return cell.per_repeat(figure(metric).of_steady(steady).path)


def served(cell: MeasuredCell, other: MeasuredCell | None, metric: str) -> Comparison | None:
    """A configuration against another as served, by repeat; None where a cell is missing, in doubt or has no figure.

    ``basis`` says where it is of the whole run.
    """
    if other is None or not (cell.valid and other.valid):
        return None
    steady = is_steady(metric, cell, other)
    ratio = paired(metric, cell.clock, values(metric, cell, steady), values(metric, other, steady))
    return ratio if ratio is None or steady else replace(ratio, basis=WHOLE_RUN)


def median_ratio(cell: MeasuredCell, other: MeasuredCell, ratio: Comparison) -> float | None:
    """The ratio of the throughputs that tables show, where it visibly contradicts the paired ``ratio``."""
    shown, against = median(cell.throughput()), median(other.throughput())
    return shown / against if shown and against and contradicts(ratio.ratio, shown / against) else None


def leaders(cells: Sequence[MeasuredCell]) -> dict[str, dict[str, Call]]:
    """The configurations of a load that are not surely worse than the best value, by column of the large table.

    LEVEL is the best one and what is level with it, UNDECIDED what is not told apart from it. Among valid cells,
    without percentiles of too few samples; empty where no cell is decided to be worse.
    """
    valid = [cell for cell in cells if cell.valid]
    steady, settled = all_steady(valid), all_steady_latency(valid)
    shown = {"output_tokens_per_s": _leaders(THROUGHPUT, [(c, median(c.throughput(steady)), False) for c in valid])}
    for metric, which in (("ttft_ms", "p95"), ("tpot_ms", "p50")):
        entries = [(cell, *cell.percentile(metric, which, settled)) for cell in valid]
        shown[f"{metric}_{which}"] = _leaders(f"{which}_{metric}", entries)
    return shown


def _leaders(metric: str, shown: Sequence[tuple[MeasuredCell, float | None, bool]]) -> dict[str, Call]:
    """Finds the best cells and those level with it. ``shown``: cell, value in tables, whether of too few samples."""
    entries = [entry for entry in shown if entry[1] is not None]
    pick = max if figure(metric).higher_is_better else min
    top, _, few = pick(entries, key=lambda entry: entry[1], default=(None, None, True))
    if top is None or few:
        return {}
    others = {cell.name: served(cell, top, metric) for cell, _, few in entries if cell is not top and not few}
    calls = {name: ratio.call if ratio else Call.UNDECIDED for name, ratio in others.items()}
    if Call.WORSE not in calls.values() or Call.BETTER in calls.values():  # better: the ratios contradict the medians
        return {}
    return {top.name: Call.LEVEL} | {name: call for name, call in calls.items() if call != Call.WORSE}


# --- All cells of a run ---


@dataclass(frozen=True)
class SettingEffect:
    """One setting changed alone from the baseline ``base``, at one load."""

    setting: str
    value: object
    baseline_value: object
    cell: MeasuredCell
    base: MeasuredCell


@dataclass(frozen=True)
class Comparisons:
    """A run's configurations against the baseline, computed once for everything that is shown of it.

    clock: of what was served; cells: by configuration, then by load; loads: ascending
    load: the one that the report speaks of: the highest that decides anything, else the highest; None of no cells
    baselines, references: by load; tables show ratios to the latter: contiguous where measured, else the baseline
    names: cell id -> what distinguishes it from the baseline at its load
    pair, pairs: names of the paged and the contiguous configuration that are compared, and both by load
    not_varied: titles of the settings that every reader asks about and that no configuration at ``load`` varies
    served, engine: cell id -> metric -> against the baseline at its load, as served and in engine time
    decisive: the same from the clock that decides it: engine time before served
    to_reference: cell id -> its throughput against the reference at its load, as served; None where there is no ratio
    """

    clock: str
    cells: tuple[MeasuredCell, ...]
    loads: tuple[MeasuredLoad, ...]
    load: MeasuredLoad | None
    baselines: Mapping[MeasuredLoad | None, MeasuredCell | None]
    references: Mapping[MeasuredLoad, MeasuredCell | None]
    names: Mapping[str, str]
    pair: tuple[str, str] | None
    pairs: Mapping[MeasuredLoad, tuple[MeasuredCell, MeasuredCell]]
    not_varied: tuple[str, ...]
    served: Mapping[str, Mapping[str, Comparison]]
    engine: Mapping[str, Mapping[str, Comparison]]
    decisive: Mapping[str, Mapping[str, Comparison]]
    to_reference: Mapping[str, Comparison | None]

    @classmethod
    def of(cls, run: Run) -> Comparisons:
        """Compares all cells of a run."""
        baselines = {load: next((c for c in run.at(load) if c.is_baseline), None) for load in run.loads}
        served_by_cell, engine_by_cell, decisive = {}, {}, {}
        for cell in run.cells:
            in_turns, as_served = _against_baseline(run, cell, baselines[cell.load])
            served_by_cell[cell.cell_id] = as_served
            engine_by_cell[cell.cell_id] = in_turns
            decisive[cell.cell_id] = _decisive(in_turns, as_served)
        load, pair = _decided_load(run, decisive), paging_pair(run)
        pairs = {at: (run.cell(pair[0], at), run.cell(pair[1], at)) for at in run.loads} if pair else {}
        base = baselines.get(load)
        references = baselines | {at: contiguous for at, (_, contiguous) in pairs.items() if contiguous}
        to_reference = {cell.cell_id: served(cell, references[cell.load], THROUGHPUT) for cell in run.cells}
        names = {cell.cell_id: short_name(cell, baselines[cell.load]) for cell in run.cells}
        both_there = {at: both for at, both in pairs.items() if None not in both}
        varied = {name for cell in run.at(load) for name in differing(cell, base or cell)}
        asked = [name for name in _ASKED if name not in varied and base]
        not_varied = tuple(setting_title(name) for name in asked if run.is_built_in or name in base.settings)
        return cls(
            clock=run.clock, cells=run.cells, loads=tuple(run.loads), load=load, baselines=baselines,
            references=references, names=names, pair=pair, pairs=both_there, not_varied=not_varied,
            served=served_by_cell, engine=engine_by_cell, decisive=decisive, to_reference=to_reference,
        )  # fmt: skip

    @property
    def base(self) -> MeasuredCell | None:
        """The baseline at the load that the report speaks of."""
        return self.baselines.get(self.load)

    @property
    def reported(self) -> list[MeasuredCell]:
        """The cells at that load."""
        return self.at(self.load)

    @property
    def by_load(self) -> list[MeasuredCell]:
        """All cells in the order of the tables: the highest load first."""
        return [cell for load in reversed(self.loads) for cell in self.at(load)]

    @property
    def changes(self) -> list[tuple[MeasuredCell, Comparison]]:
        """Every cell at that load against the baseline, all in one clock: engine time where it has any, else served."""
        for by_clock in (self.engine, self.served):
            judged = [(cell, by_clock[cell.cell_id], metric) for cell in self.reported for metric in JUDGED]
            if changes := [(cell, ratios[metric]) for cell, ratios, metric in judged if metric in ratios]:
                return changes
        return []

    @property
    def alone(self) -> list[SettingEffect]:
        """Configurations that differ from the baseline in one setting; in the layout only where no pair is compared."""
        effects = []
        for cell in self.cells:
            base = self.baselines[cell.load] or cell
            changed = differing(cell, base)
            if len(changed) == 1 and not (self.pairs and changed == {"layout"}):
                (setting,) = changed
                both = (effective(settings, setting) for settings in (cell.settings, base.settings))
                effects.append(SettingEffect(setting, *both, cell, base))
        return effects

    def at(self, load: MeasuredLoad | None) -> list[MeasuredCell]:
        return [cell for cell in self.cells if cell.load == load]

    def cell(self, name: str, load: MeasuredLoad) -> MeasuredCell | None:
        return next((cell for cell in self.cells if cell.name == name and cell.load == load), None)

    def throughput_of(self, cell: MeasuredCell) -> Comparison | None:
        """Returns the throughput against the baseline, by the clock that decides it."""
        return self.decisive[cell.cell_id].get(THROUGHPUT)

    def as_served(self, cell: MeasuredCell, metric: str) -> Comparison | None:
        return self.served[cell.cell_id].get(metric)

    def between(self, cell: MeasuredCell, other: MeasuredCell, metric: str) -> Comparison | None:
        """A configuration against any other at its load: by the clock that decides where one is the baseline."""
        if not (cell.is_baseline or other.is_baseline):
            return served(cell, other, metric)
        return against(lambda cell_id, metric: self.decisive[cell_id].get(metric), cell, other, metric)


def against(
    to_baseline: Callable[[str, str], Comparison | None], cell: MeasuredCell, other: MeasuredCell, metric: str
) -> Comparison | None:
    """A configuration against the baseline, or the baseline against it; None where neither is the baseline.

    ``to_baseline``: a cell's id and a metric -> against the baseline.
    """
    if other.is_baseline:
        return to_baseline(cell.cell_id, metric)
    ratio = cell.is_baseline and to_baseline(other.cell_id, metric)
    return ratio.inverse() if ratio else None


def _against_baseline(
    run: Run, cell: MeasuredCell, base: MeasuredCell | None
) -> tuple[dict[str, Comparison], dict[str, Comparison]]:
    """Compares a cell with its baseline in engine time and as served, by metric; the baseline itself with nothing."""
    if base is None or base is cell:
        return {}, {}
    in_turns = {metric: run.engine_time.of(cell.cell_id, metric) for metric in JUDGED} if run.engine_time else {}
    as_served = {metric: served(cell, base, metric) for metric in (*JUDGED, *compared())}
    return {m: ratio for m, ratio in in_turns.items() if ratio}, {m: ratio for m, ratio in as_served.items() if ratio}


def _decisive(in_turns: Mapping[str, Comparison], as_served: Mapping[str, Comparison]) -> dict[str, Comparison]:
    """Takes what decides each metric: engine time, else what was served, if engine time does not exclude it."""
    decisive = {}
    for metric in JUDGED:
        ratios = [clock[metric] for clock in (in_turns, as_served) if metric in clock]
        if ratios:
            low, high = ratios[0].low or 0.0, ratios[0].high or math.inf
            decisive[metric] = next((one for one in ratios if one.decided and low <= one.ratio <= high), ratios[0])
    return decisive


def _decided_load(run: Run, decisive: Mapping[str, Mapping[str, Comparison]]) -> MeasuredLoad | None:
    """The heaviest load that is decided. Throughput decides in closed loop; in open loop the arrivals set it, so a p95
    decides as well."""
    for load in reversed(run.loads):
        metrics = JUDGED if load.mode == "open" else (THROUGHPUT,)
        ratios = [decisive[cell.cell_id] for cell in run.at(load)]
        if any(by_metric[metric].decided for by_metric in ratios for metric in metrics if metric in by_metric):
            return load
    return next(reversed(run.loads), None)


# --- In words ---


def marked(comparison: Comparison) -> str:
    """Writes `1.65x`, `≈1.02x` when level, `1.65x?` when not told apart from 1, as ``RATIO_MARKS`` explains."""
    level, undecided = (comparison.call == call for call in (Call.LEVEL, Call.UNDECIDED))
    return "≈" * level + words.ratio(comparison.ratio) + "?" * undecided


def percent_change(ratio: float | None) -> float | None:
    """Returns 16.0 for 1.16; None stays."""
    return None if ratio is None else 100 * (ratio - 1)


def amount(ratio: float) -> str:
    """Writes a ratio as a change, `+16 %` or `−4.2 %`, and from twice on as a multiple, `2.4x`."""
    if ratio >= 2:
        return f"{_number(ratio, times=True)}x"
    number = _number(ratio, times=False)
    grown = number != "0" and not number.startswith("−")
    return "+" * grown + f"{number} %"


def interval(comparison: Comparison) -> str:
    """Writes the interval, `(13 to 20)`, in the unit of ``amount``; empty where it tells nothing."""
    low, high = comparison.low, comparison.high
    if low is None or high is None or high > _WIDEST * low:
        return ""
    return f"({' to '.join(_number(end, times=comparison.ratio >= 2) for end in (low, high))})"


def signed_interval(comparison: Comparison) -> str:
    """Writes the interval in percent with signs, `+17.4 to +19.8`; empty where it tells nothing."""
    ends = (round(100 * ((end or 1.0) - 1), 1) + 0.0 for end in (comparison.low, comparison.high))  # no -0.0
    return " to ".join(f"{end:+.1f}" for end in ends) if interval(comparison) else ""


def sized(comparison: Comparison) -> str:
    """Writes `+16 % (13 to 20)`, from twice on `2.4x (1.9 to 3.1)`."""
    return f"{amount(comparison.ratio)} {interval(comparison)}".rstrip()


def _number(ratio: float, times: bool) -> str:
    value = ratio if times else 100 * (ratio - 1)
    text = f"{value:.0f}" if abs(value) >= 9.95 else f"{value:.1f}"
    return text.replace("-", "−") if float(text) else "0"
