"""Pairs of two sides measured for another question than the gate's: how far apart are they in one metric?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from rich.console import Console

from kvbench.common.errors import MeasurementError
from kvbench.gate.compare.conclude import read_table
from kvbench.gate.compare.folder import LOCKSTEP, CompareFolder
from kvbench.gate.compare.request import CompareRequest
from kvbench.gate.compare.run import CALIBRATE, ComparisonPlan, ComparisonRun, parse_sides, run_plan
from kvbench.gate.policy import Policy
from kvbench.gate.timing.plan import PairedCell
from kvbench.gate.timing.rules import LEVELS, Look, MetricRule, TimingRules
from kvbench.gate.verdict.verdict import Verdict
from kvbench.workload.file import Workload

_ANY = 0.49  # of a look whose alpha nobody reads
_PAIR_S = 3.0  # engine time of a pair: launches scatter more than what longer loads would average away


@dataclass(frozen=True)
class PairQuestion:
    """A metric of the cells that ``request`` chooses, to be measured in pairs.

    request: without sides
    check: raises when the measurement must end; show: gets what is being done
    """

    request: CompareRequest
    workloads: Sequence[Workload]
    metric: str
    check: Callable[[], None]
    show: Callable[..., None]

    @property
    def rule(self) -> MetricRule:
        return MetricRule.of(self.metric, 0.0, dict.fromkeys(LEVELS, 0.0))

    def measure(
        self,
        request: CompareRequest,
        points: Sequence[int],
        is_decided: Callable[[Sequence[float]], bool],
        method: str | None = None,
    ) -> tuple[tuple[float, ...], str]:
        """Measures pairs of the sides of ``request`` until ``is_decided`` by their harms after some of ``points``.

        A harm is log(candidate / base) of a pair, positive where the candidate is worse; the mean over the cells.
        Returns the harms, and how they were measured: as before where ``method`` says how.
        Raises MeasurementError where a side cannot be built, started or measured, or lacks the metric.
        """
        # No verdict of the gate is wanted, as in calibrating. The looks say after which pairs `is_decided` is asked.
        rules = TimingRules((self.rule,), tuple(Look(pairs, _ANY, _ANY) for pairs in points))
        request = request.model_copy(update={"pairs": points[-1]})
        plan = ComparisonPlan(CALIBRATE, request, Policy(rules), parse_sides(request), self.workloads, method=method)
        with ExitStack() as held:
            make_run = partial(_PairSeries, check=self.check, show=self.show, decided=is_decided)
            folder, state, _ = run_plan(plan, Console(quiet=True), held, make_run)
            if state.void or state.stopped:
                raise MeasurementError(str(state.voids[-1]) if state.voids else state.stopped or "")
            return harms_of(folder, state.cells, rules, points[-1]), state.method


def harms_of(folder: CompareFolder, cells: Sequence[PairedCell], rules: TimingRules, most: int) -> tuple[float, ...]:
    """The harm of each whole pair in the first metric, up to ``most``. MeasurementError where a side lacks it."""
    pairs = range(1, min(folder.whole_pairs(cells), most) + 1)
    try:
        ratios = read_table(folder, cells, rules, pairs).log_ratio[:, :, 0]
    except ValueError as error:
        raise MeasurementError(str(error)) from None
    metric = rules.metrics[0]
    if np.isnan(ratios).any():
        raise MeasurementError(f"{metric.title} is missing: only one side has it, or neither")
    return tuple(float(harm) for harm in (-1.0 if metric.higher_is_better else 1.0) * ratios.mean(axis=1))


@dataclass
class _PairSeries(ComparisonRun):
    """A comparison whose looks are ``decided`` by another question, without a check over HTTP."""

    decided: Callable[[Sequence[float]], bool] = field(kw_only=True)
    stop_early = True
    pair_s = _PAIR_S

    def execute(self) -> Verdict | None:
        self.write("incomplete", void=None)
        stopped = (None if self.state.method == LOCKSTEP else self._compile()) or self._measure()
        self.write("complete", stopped=stopped)
        return None

    def is_decided(self, pair: int) -> bool:
        return self.decided(harms_of(self.folder, self.state.cells, self.policy.timing, pair))
