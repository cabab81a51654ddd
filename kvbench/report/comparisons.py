"""Pure functions from a Run to comparisons of its configurations, without any wording.

The unit of every comparison is the repeat; the verdict on a ratio: ``runs/ratios.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvbench.common import text as words
from kvbench.runs.model import DOUBTS, MeasuredCell, MeasuredLoad, Run, all_steady, all_steady_latency
from kvbench.runs.ratios import HIGHER, LOWER, SAME, UNCLEAR, Ratio, RepeatSpread, contradicts, paired_ratio
from kvbench.workload.settings import applies, effective, setting_title

NOT_TOLD = "not told apart"
RATIO_MARKS = f"≈ means level, ? {NOT_TOLD} from 1"
_ASKED = ("layout", "page_size", "kv_cache_dtype")
SCATTER = 1.5  # largest over smallest throughput of one cell's repeats from which on they are said to scatter


def spread(values: Mapping[int, float]) -> RepeatSpread | None:
    """Median, min and max of per-repeat values; None when there are none."""
    known = list(values.values())
    return RepeatSpread(float(np.median(known)), min(known), max(known), len(known)) if known else None


def median(values: Mapping[int, float]) -> float | None:
    """The median of per-repeat values; None when there are none."""
    return float(np.median(list(values.values()))) if values else None


@dataclass(frozen=True)
class PairedComparison:
    """Configuration ``a`` against ``b`` under the same load and the same requests; no ratios where one is invalid."""

    a: MeasuredCell
    b: MeasuredCell
    throughput: Ratio | None
    ttft: Ratio | None  # p95
    tpot: Ratio | None  # p50
    itl: Ratio | None  # p95

    @property
    def load(self) -> MeasuredLoad:
        return self.a.load

    @property
    def valid(self) -> bool:
        return self.a.valid and self.b.valid

    @property
    def steady(self) -> bool:
        """Whether the throughputs compared are of the steady window; else of the whole run, of both: like with like."""
        return all_steady((self.a, self.b))

    @property
    def steady_latency(self) -> bool:
        """Tests whether the latencies compared are of the steady window, of both."""
        return all_steady_latency((self.a, self.b))

    @property
    def of_medians(self) -> float | None:
        """The ratio of the throughputs that tables show, where it visibly contradicts the paired one."""
        a, b = median(self.a.throughput()), median(self.b.throughput())
        if self.throughput is None or not a or not b:
            return None
        return a / b if contradicts(self.throughput.median, a / b) else None

    @property
    def doubt(self) -> str:
        """The worse of the two cells', as ``MeasuredCell.doubt``."""
        return min(filter(None, (self.a.doubt, self.b.doubt)), key=DOUBTS.index, default="")


def compare(a: MeasuredCell, b: MeasuredCell) -> PairedComparison:
    """Paired ratios a/b of what the report speaks about."""
    if not (a.valid and b.valid):
        return PairedComparison(a, b, None, None, None, None)
    steady, steady_latency = all_steady((a, b)), all_steady_latency((a, b))
    metrics = ("ttft_ms.p95", "tpot_ms.p50", "itl_ms.p95")
    latencies = (paired_ratio(*(cell.latency(metric, steady_latency) for cell in (a, b))) for metric in metrics)
    return PairedComparison(a, b, paired_ratio(a.throughput(steady), b.throughput(steady)), *latencies)


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


def not_varied(run: Run, base: MeasuredCell) -> list[str]:
    """Titles of the settings that every reader asks about and that no configuration at the baseline's load varies."""
    known = {*base.settings, *(_ASKED if run.is_built_in else ())}
    varied = {name for cell in run.at(base.load) for name in differing(cell, base)}
    return [setting_title(name) for name in _ASKED if name in known - varied]


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


def paging(run: Run) -> list[PairedComparison]:
    """Paged against contiguous, the pair of ``paging_pair``, at each load that has both, loads ascending."""
    chosen = paging_pair(run)
    pairs = [[run.cell(name, load) for name in chosen] for load in run.loads] if chosen else []
    return [compare(p, c) for p, c in pairs if p is not None and c is not None]


def baseline(run: Run, load: MeasuredLoad) -> MeasuredCell | None:
    """The baseline configuration at a load."""
    return next((cell for cell in run.at(load) if cell.is_baseline), None)


def reference(run: Run, load: MeasuredLoad) -> MeasuredCell | None:
    """What ratios in tables and figures are relative to: contiguous where measured, else the baseline."""
    pair = paging_pair(run)
    return (run.cell(pair[1], load) if pair else None) or baseline(run, load)


def ratio_to_reference(run: Run, cell: MeasuredCell) -> Ratio | None:
    """Of the throughput; None for the reference itself and where there is none."""
    ref = reference(run, cell.load)
    return None if ref is None or ref is cell else compare(cell, ref).throughput


def best(run: Run, load: MeasuredLoad) -> MeasuredCell | None:
    """The valid cell with the highest median of output tokens/s, all of one window; None when there is none."""
    valid = [cell for cell in run.at(load) if cell.valid]
    steady = all_steady(valid)
    known = [(value, cell) for cell in valid if (value := median(cell.throughput(steady))) is not None]
    return max(known, key=lambda pair: pair[0])[1] if known else None


def leaders(run: Run, load: MeasuredLoad) -> dict[str, dict[str, str]]:
    """By column of the table of all cells: the configurations that are not decided to be worse than the best value.

    SAME is the best one and what is level with it, UNCLEAR what is not told apart from it. Among valid cells, without
    percentiles of too few samples; empty where no cell is decided to be worse.
    """
    valid = [cell for cell in run.at(load) if cell.valid]
    steady = all_steady(valid)
    throughput = [(cell, median(cell.throughput(steady)), False) for cell in valid]
    settled, shown = all_steady_latency(valid), (("ttft_ms", "p95"), ("tpot_ms", "p50"))
    ttft, tpot = ([(c, *c.percentile(*which, settled)) for c in valid] for which in shown)
    return {
        "output_tokens_per_s": _leaders(throughput, lambda pair: pair.throughput, higher_is_better=True),
        "ttft_ms_p95": _leaders(ttft, lambda pair: pair.ttft),
        "tpot_ms_p50": _leaders(tpot, lambda pair: pair.tpot),
    }


def _leaders(
    values: Sequence[tuple[MeasuredCell, float | None, bool]],
    ratio: Callable[[PairedComparison], Ratio | None],
    higher_is_better: bool = False,
) -> dict[str, str]:
    """``values``: what tables show of each cell, and whether it is of too few samples."""
    known = [each for each in values if each[1] is not None]
    top, _, few = (max if higher_is_better else min)(known, key=lambda each: each[1], default=(None, None, True))
    if top is None or few:
        return {}
    others = {cell.name: ratio(compare(cell, top)) for cell, _, few in known if cell is not top and not few}
    verdicts = {name: r.verdict if r else UNCLEAR for name, r in others.items()}
    worse, better = (LOWER, HIGHER) if higher_is_better else (HIGHER, LOWER)
    if worse not in verdicts.values() or better in verdicts.values():  # better: paired ratios contradict the medians
        return {}
    return {top.name: SAME} | {name: verdict for name, verdict in verdicts.items() if verdict != worse}


def tokens_held(cell: MeasuredCell, base: MeasuredCell) -> float | None:
    """How many times as many tokens as ``base`` a configuration holds in the same memory; None where not known."""
    held, before = (one.capacity.get("capacity_tokens") for one in (cell, base))
    return held / before if held and before else None


def scatters(cell: MeasuredCell) -> RepeatSpread | None:
    """The spread of a cell's throughput where its repeats scatter by more than SCATTER; None where they do not."""
    s = spread(cell.throughput())
    return s if s is not None and s.low > 0 and s.high / s.low > SCATTER else None


@dataclass(frozen=True)
class Effect:
    """One setting changed alone from the baseline, at one load."""

    setting: str
    value: object
    baseline_value: object
    comparison: PairedComparison


def effects(run: Run) -> list[Effect]:
    """Every configuration that differs from the baseline in one setting; in the layout only without ``paging``."""
    found, layouts = [], bool(paging(run))
    for cell in run.cells:
        base = baseline(run, cell.load)
        changed = differing(cell, base) if base is not None and cell is not base else set()
        if base is None or len(changed) != 1 or (layouts and changed == {"layout"}):
            continue
        (setting,) = changed
        values = (effective(settings, setting) for settings in (cell.settings, base.settings))
        found.append(Effect(setting, *values, compare(cell, base)))
    return found


def marked_ratio(r: Ratio) -> str:
    """1.65x; ≈1.02x when level; 1.65x? when not told apart from 1."""
    return marked(r.median, r.verdict)


def marked(ratio: float, verdict: str) -> str:
    """A ratio with the mark of its verdict, as ``RATIO_MARKS`` explains."""
    return f"{'≈' if verdict == SAME else ''}{words.ratio(ratio)}{'?' if verdict == UNCLEAR else ''}"
