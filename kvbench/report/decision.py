"""The decisions that a run supports: a verdict on each configuration, one conclusion, an answer on each setting.

Nothing here is a sentence: `headline.py`, `answers.py` and `next_steps.py` put decisions into words.

A configuration pays where its throughput is ahead and neither p95 TTFT nor p95 ITL is behind. It is a risk where a p95
is behind, or anything at another load or in the other clock. Where throughput is level, or set by the arrivals of an
open loop, a p95 ahead is better. Nothing is advised before the quality of its answers was measured (``quality.py``)
and found within the limits; the baseline may be kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from kvbench.effects.comparison import MARGINS, Call, Comparison
from kvbench.metrics.definitions import figure
from kvbench.report.comparisons import JUDGED, THROUGHPUT, Comparisons, differing, served, short_name, tokens_held
from kvbench.report.limits import Break, CellLimit, breaks, limits
from kvbench.report.provenance import Validity, validity
from kvbench.report.quality import Quality, is_quantised, qualities
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Run
from kvbench.workload.settings import effective

_LEAST_ROOM = 1.1  # times the baseline's tokens in the same memory: from here on it is said
_MOST_COMBINED = 4  # answers on combinations of settings


class Worth(StrEnum):
    """The worth of a configuration beside the baseline."""

    PAYS = "pays"
    PAYS_LITTLE = "pays little"  # the gain may be as small as a change that is called level
    RISK = "pays at a risk"
    COSTS = "costs"
    NO_CHANGE = "no change"
    UNDECIDED = "not decided"
    BETTER_P95 = "better p95"
    WORSE_P95 = "worse p95"
    MIXED_P95 = "one p95 better, one worse"


@dataclass(frozen=True)
class Candidate:
    """A configuration against the baseline, at one load.

    ``p95``: metric -> its comparison. ``elsewhere``: what is decided at other loads, and here in the other clock.
    """

    cell: MeasuredCell
    base: MeasuredCell
    throughput: Comparison | None
    p95: Mapping[str, Comparison]
    quality: Quality
    elsewhere: tuple[tuple[MeasuredLoad, Comparison], ...] = ()

    @property
    def name(self) -> str:
        return short_name(self.cell, self.base)

    @property
    def changed(self) -> set[str]:
        return differing(self.cell, self.base)

    @property
    def worst(self) -> tuple[MeasuredLoad, Comparison] | None:
        """The largest decided loss: a p95, or something at another load or in the other clock."""
        comparisons = [*((self.cell.load, one) for one in self.p95.values()), *self.elsewhere]
        losses = [(load, one) for load, one in comparisons if one.call == Call.WORSE]
        return max(losses, key=lambda loss: _times_worse(loss[1]), default=None)

    @property
    def throughput_call(self) -> Call:
        return self.throughput.call if self.throughput else Call.UNDECIDED

    @property
    def best_p95(self) -> Comparison | None:
        """The p95 that is furthest ahead; None where none is."""
        better = (one for one in self.p95.values() if one.call == Call.BETTER)
        return min(better, key=lambda one: one.ratio, default=None)

    @property
    def best(self) -> Comparison | None:
        """The comparison that the configuration wins by: its throughput, or the p95 that is furthest ahead."""
        if self.verdict == Worth.BETTER_P95:
            return self.best_p95
        return self.throughput or self.best_p95

    @property
    def won_by(self) -> Comparison:
        """The same of a configuration that is known to be ahead."""
        assert self.best is not None, self.name
        return self.best

    @property
    def verdict(self) -> Worth:
        """The verdict by the rule in this module's docstring; a gain is not graded."""
        call, better, worse = self.throughput_call, self.best_p95 is not None, self.worst is not None
        # In closed loop an undecided throughput may yet be lower.
        is_settled = call == Call.LEVEL or self.cell.load.mode == "open"
        cases = (
            (Worth.COSTS, call == Call.WORSE),
            (Worth.RISK, call == Call.BETTER and worse),
            (Worth.PAYS, call == Call.BETTER),
            (Worth.MIXED_P95, worse and better),
            (Worth.WORSE_P95, worse),
            (Worth.BETTER_P95, better and is_settled),
            (Worth.NO_CHANGE, call == Call.LEVEL),
            (Worth.UNDECIDED, True),
        )
        return next(verdict for verdict, holds in cases if holds)

    @property
    def graded(self) -> Worth:
        """The verdict, which tells a gain that may be as small as a level change from a larger one."""
        gain = self.throughput
        if self.verdict == Worth.PAYS and gain and gain.low is not None and gain.low < 1 + MARGINS[gain.clock]:
            return Worth.PAYS_LITTLE
        return self.verdict

    @property
    def here(self) -> Candidate:
        """The same without what is decided at other loads."""
        return replace(self, elsewhere=tuple((load, one) for load, one in self.elsewhere if load == self.cell.load))

    @property
    def room(self) -> float | None:
        """The tokens that fit into the same bytes, over the baseline's; None below a tenth more."""
        times = tokens_held(self.cell, self.base) or 0.0
        return times if times >= _LEAST_ROOM else None

    @property
    def would_be_set(self) -> bool:
        """Tests whether its speed speaks for it, so that the safety of its answers matters."""
        wanted = self.verdict in (Worth.PAYS, Worth.BETTER_P95, Worth.RISK)
        return wanted or (is_quantised(self.cell) and self.verdict != Worth.COSTS)

    def inverse(self, quality: Quality) -> Candidate:
        """The baseline against the configuration. ``quality``: of the baseline's answers."""
        throughput = self.throughput and self.throughput.inverse()
        p95 = {metric: one.inverse() for metric, one in self.p95.items()}
        elsewhere = tuple((load, one.inverse()) for load, one in self.elsewhere)
        return Candidate(self.base, self.cell, throughput, p95, quality, elsewhere)


def _times_worse(loss: Comparison) -> float:
    """Returns how many times worse a decided loss is, whichever direction its metric has."""
    return 1 / loss.ratio if figure(loss.metric).higher_is_better else loss.ratio


def _candidate(cell: MeasuredCell, base: MeasuredCell, comparisons: Comparisons, quality: Quality) -> Candidate:
    """A configuration against the baseline at its load."""
    decisive, elsewhere = dict(comparisons.decisive[cell.cell_id]), []
    for metric, decided in decisive.items():
        clocks = [by_cell[cell.cell_id] for by_cell in (comparisons.engine, comparisons.served)]
        elsewhere += [(cell.load, one[metric]) for one in clocks if metric in one and one[metric].call != decided.call]
    for other in comparisons.cells:
        if other.name == cell.name and other.load != cell.load:
            elsewhere += [(other.load, one) for one in comparisons.decisive[other.cell_id].values()]
    decided_elsewhere = tuple((load, one) for load, one in elsewhere if one.decided)
    return Candidate(cell, base, decisive.pop(THROUGHPUT, None), decisive, quality, decided_elsewhere)


def wins(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that pay, the fastest first; without any, those with a better p95, the best p95 first.

    In open loop the best p95 comes first in any case: the arrivals set the throughput.
    """
    pays = [one for one in candidates if one.verdict == Worth.PAYS]
    if pays and pays[0].cell.load.mode != "open":
        return pays
    faster = [one for one in candidates if one.verdict == Worth.BETTER_P95]
    return sorted(pays or faster, key=lambda one: one.best_p95.ratio if one.best_p95 else 1.0)


def safe_ones(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates whose answers were measured and found within the limits."""
    return [one for one in candidates if one.quality.safe]


def open_ones(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that a measurement of their answers may yet find safe."""
    return [one for one in candidates if one.quality.open]


class Advice(StrEnum):
    """The conclusion of a run, which the report's first sentence says."""

    NOT_SERVED = "not served"  # no load was finished over HTTP
    ALONE = "alone"  # one configuration, nothing to compare it with
    NO_BASELINE = "no baseline"  # at the load that the report speaks of
    NOT_TOLD = "not told"  # every comparison is undecided
    WOULD_BRING = "would bring"  # better in a simulation
    SHIP = "ship"  # better, and its answers are safe
    WRONG_ANSWERS = "wrong answers"  # better, but with wrong answers under load
    OUTSIDE = "outside"  # better, but its answers are outside the limits
    UNMEASURED = "unmeasured"  # better, its answers were not measured
    DOUBTFUL = "doubtful"  # better, its answers were measured with other weights or code
    RISK = "risk"  # faster, but something else is worse
    PAGING = "paging"  # keep the paged baseline, which is better than contiguous
    PAGING_RISK = "paging risk"  # the paged baseline has one p95 better than contiguous, and one worse
    ONLY = "only"  # the only other configuration is not ahead
    KEEP = "keep"  # the baseline: nothing is ahead


@dataclass(frozen=True)
class Conclusion:
    """The conclusion of a run. ``candidate``: what is advised, or the only one; None where there is no such one."""

    advice: Advice
    candidate: Candidate | None = None

    @property
    def advised(self) -> Candidate:
        """The candidate of an advice that has one."""
        assert self.candidate is not None, self.advice
        return self.candidate


class Question(StrEnum):
    """The kinds of question that a report answers."""

    PAGING = "paging"
    PAGE_SIZE = "page size"
    SETTING = "setting"
    COMBINATION = "combination"


@dataclass(frozen=True)
class SettingAnswer:
    """The answer of a run on one setting, or on a combination of several.

    setting: its name; empty for paging and combinations
    candidates: what was compared: each page size, or paged against contiguous at each load, the highest first
    decided: whose verdict is the answer; None where the baseline is kept or no load decides
    """

    subject: Question
    candidates: tuple[Candidate, ...]
    decided: Candidate | None
    setting: str = ""


@dataclass(frozen=True)
class Decision:
    """A run's comparisons, quality, limits and candidates, computed once: everything else in a report reads them.

    qualities: of the answers, by configuration id; limits: of every valid cell, the highest load first
    breaks: where each configuration breaks as the load grows
    by_load: every configuration beside the baseline, the largest throughput first
    """

    run: Run
    comparisons: Comparisons
    validity: Validity
    qualities: Mapping[str, Quality]
    limits: tuple[CellLimit, ...]
    breaks: tuple[Break, ...]
    by_load: Mapping[MeasuredLoad | None, tuple[Candidate, ...]]

    @classmethod
    def of(cls, run: Run) -> Decision:
        """The decision on a run."""
        comparisons, by_id = Comparisons.of(run), qualities(run)
        seen = tuple(limits(comparisons))
        by_load = {}
        for load, base in comparisons.baselines.items():
            others = [cell for cell in comparisons.at(load) if base and cell is not base]
            candidates = [_candidate(cell, base, comparisons, by_id[cell.config_id]) for cell in others]
            candidates.sort(key=lambda one: getattr(one.throughput, "ratio", 0.0), reverse=True)
            by_load[load] = tuple(candidates)
        return cls(run, comparisons, validity(run), by_id, seen, tuple(breaks(comparisons, seen)), by_load)

    @property
    def load(self) -> MeasuredLoad | None:
        """The load that the report speaks of; None of a run without any."""
        return self.comparisons.load

    @property
    def base(self) -> MeasuredCell | None:
        """The baseline at that load."""
        return self.comparisons.base

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The configurations beside the baseline at that load."""
        return self.by_load.get(self.load, ())

    @property
    def pair(self) -> tuple[str, str] | None:
        """Names of the paged and the contiguous configuration that are compared."""
        return self.comparisons.pair

    @property
    def clock(self) -> str:
        """The clock of the answers that name no other."""
        return next((one.clock for _, one in self.comparisons.changes), self.run.clock)

    def paged_against_contiguous(self, load: MeasuredLoad) -> Candidate:
        """The pair at a load that has both, as served only where neither is the baseline."""
        paged, contiguous = self.comparisons.pairs[load]
        base = self.comparisons.baselines[load]
        for one in self.by_load[load]:
            if contiguous is base and one.cell is paged:
                return one
            if paged is base and one.cell is contiguous:
                return self._inverse(one)
        ratios = {metric: one for metric in JUDGED if (one := served(paged, contiguous, metric))}
        return Candidate(paged, contiguous, ratios.pop(THROUGHPUT, None), ratios, self.qualities[paged.config_id])

    def _inverse(self, one: Candidate) -> Candidate:
        return one.inverse(self.qualities[one.base.config_id])

    @cached_property
    def conclusion(self) -> Conclusion:
        """The advice of the run."""
        if self.load is None:
            return Conclusion(Advice.NOT_SERVED)
        if len(self.comparisons.reported) == 1:
            return Conclusion(Advice.ALONE)
        if self.base is None:
            return Conclusion(Advice.NO_BASELINE)
        if all(one.verdict == Worth.UNDECIDED for one in self.candidates):
            return Conclusion(Advice.NOT_TOLD)
        if ahead := wins(self.candidates):
            return self._of_winners(ahead)
        risks = (Conclusion(Advice.RISK, one) for one in self.candidates if one.verdict == Worth.RISK)
        return next(risks, None) or self._without_winners()

    def _of_winners(self, ahead: Sequence[Candidate]) -> Conclusion:
        """The best configuration whose answers are safe; else what its quality leaves open, or why not."""
        safe = safe_ones(ahead)
        best = (safe or open_ones(ahead) or ahead)[0]
        cases = (
            (Advice.WOULD_BRING, self.run.simulated),  # no answers to judge
            (Advice.SHIP, safe),
            (Advice.WRONG_ANSWERS, best.quality.wrong),
            (Advice.OUTSIDE, best.quality.outside),
            (Advice.UNMEASURED, not best.quality.figures),
            (Advice.DOUBTFUL, True),
        )
        return Conclusion(next(advice for advice, holds in cases if holds), best)

    def _without_winners(self) -> Conclusion:
        """Concludes where nothing is ahead: a paged baseline may still be ahead of contiguous."""
        for one in self.candidates:
            if not self.pair or {one.cell.name, one.base.name} != set(self.pair):
                continue
            kept = self._inverse(one)
            if kept.verdict in (Worth.PAYS, Worth.RISK, Worth.BETTER_P95) and kept.best:
                return Conclusion(Advice.PAGING, kept)
            if kept.verdict == Worth.MIXED_P95 and kept.best_p95:
                return Conclusion(Advice.PAGING_RISK, kept)
        if len(self.candidates) == 1:
            return Conclusion(Advice.ONLY, self.candidates[0])
        return Conclusion(Advice.KEEP)

    @cached_property
    def answers(self) -> tuple[SettingAnswer, ...]:
        """The answers: paging, page size, KV dtypes, then each other setting changed alone; combinations last."""
        if self.base is None:
            return ()
        alone: dict[str, list[Candidate]] = {}
        combined = []
        for one in self.candidates:
            if len(one.changed) > 1:
                combined.append(SettingAnswer(Question.COMBINATION, (one,), one))
            elif one.changed and not (self.pair and one.changed == {"layout"}):
                alone.setdefault(*one.changed, []).append(one)
        answers = [self._paging_answer()] if self.pair else []
        for name in sorted(alone, key=lambda name: (name != "page_size", name != "kv_cache_dtype")):
            if name == "page_size":
                ahead = wins(alone[name])
                best = next(iter(safe_ones(ahead) or open_ones(ahead)), None)
                answers.append(SettingAnswer(Question.PAGE_SIZE, tuple(alone[name]), best, name))
            else:
                answers += [SettingAnswer(Question.SETTING, (one,), one, name) for one in alone[name]]
        return (*answers, *combined[:_MOST_COMBINED])

    def _paging_answer(self) -> SettingAnswer:
        """Compares paged with contiguous: the highest load that has a verdict decides."""
        pairs = [self.paged_against_contiguous(load) for load in reversed(self.comparisons.pairs)]
        spoken = [one for one in pairs if one.cell.load == self.load or one.here.verdict != Worth.UNDECIDED]
        with_verdict = [one for one in spoken if one.verdict != Worth.UNDECIDED]
        return SettingAnswer(Question.PAGING, tuple(pairs), next(iter(with_verdict or spoken), None))

    def measured_together(self, *parts: Candidate) -> bool:
        """Tests whether one configuration has the changes of all ``parts``."""
        return any(all(_has_changes(one, part) for part in parts) for one in self.candidates)


def _has_changes(one: Candidate, part: Candidate) -> bool:
    """Tests whether ``one`` has the value that ``part`` gives to each setting that it changes."""
    settings, wanted = one.cell.settings, part.cell.settings
    return all(effective(settings, name) == effective(wanted, name) for name in part.changed)
