"""Absolute limits on one run: pure functions from its cells and a policy's limits to findings.

Which value of a cell a limit holds: the median over the repeats, each a fresh server, or with ``every: true`` each
repeat by itself. A ratio is paired: the two configurations' values of the same repeat, which had the same requests, are
divided, and the median of those is held (again, or each of them), which is not the ratio of the medians. The KLD of a
quantised KV is of a configuration and has no repeats (kvbench/quality/measure.py).

A value from an invalid cell says nothing, so its limits are ``invalid``. Failed requests and pages that stay owned are
the exception, since they make a cell invalid themselves: beyond their limit they have failed and leaked.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from kvbench.gate.verdict.text import number, quantity
from kvbench.gate.verdict.verdict import FAIL, INVALID, PASS, Finding
from kvbench.quality.result import QualityResult
from kvbench.report.comparisons import paging_pair
from kvbench.runs import metric_names
from kvbench.runs.model import Cell, Run
from kvbench.workload.settings import effective

KINDS = ("metric", "slo", "ratio", "kld")  # as the policy writes them; an slo is the metric goodput_share
KLD_STATISTICS = ("mean", "p95", "p99", "max", "same_argmax")
SUITE = "limit"
_COUNTED = ("failure_rate", "failed", "pages_owned_after")
_MAX_REASONS = 3


@dataclass(frozen=True)
class Limit:
    """One line of a policy's ``limits:``.

    ``what``: a metric, or of a KLD its statistic. ``low`` and ``high`` may be reached. ``cells``: globs, see
    ``matches``. ``every``: each repeat and not their median. ``of`` over ``to``: globs over configuration ids; without
    them paged over contiguous, the two configurations that differ least.
    """

    kind: Literal["metric", "ratio", "kld"]
    what: str
    low: float | None = None
    high: float | None = None
    cells: tuple[str, ...] = ("*",)
    every: bool = False
    of: tuple[str, ...] = ()
    to: tuple[str, ...] = ()
    name: str | None = None

    @property
    def label(self) -> str:
        """What it holds, in ids and titles."""
        if self.name is not None:
            return self.name
        return {"metric": self.what, "ratio": f"ratio of {self.what}", "kld": f"KLD {self.what}"}[self.kind]

    def about(self, where: str) -> str:
        return f"{self.name}: {where}" if self.name is not None else f"{self.label} of {where}"

    @property
    def direction(self) -> bool | None:
        """Whether higher is better; None where the limit has two ends."""
        return None if self.low is not None and self.high is not None else self.high is None

    def bounds(self, unit: str) -> str:
        """at least 1 ms and at most 2 ms"""
        both = (("at least", self.low), ("at most", self.high))
        return " and ".join(f"{how} {quantity(bound, unit)}" for how, bound in both if bound is not None)

    def excess(self, value: float) -> float:
        """By how much ``value`` is beyond the limit; 0 or less within it."""
        over = -math.inf if self.high is None else value - self.high
        under = -math.inf if self.low is None else self.low - value
        return max(over, under)


def matches(name: str, globs: Iterable[str]) -> bool:
    """Whether any glob fits ``name``, ``<workload>/<cell id>``; one without a slash is of what follows the slash."""
    last = name.rpartition("/")[2]
    return any(fnmatchcase(name if "/" in glob else last, glob) for glob in globs)


def judge_limits(
    run: Run, limits: Sequence[Limit], quality: QualityResult | None = None, doubt: str | None = None
) -> tuple[Finding, ...]:
    """Every limit against each cell, pair of cells or configuration that it names.

    ``quality``: the KLD measured for this run; ``doubt``: why it does not belong to it.
    """
    found: dict[str, Finding] = {}
    for limit in limits:
        if limit.kind == "kld":
            made = _judge_kld(run, limit, quality, doubt)
        else:
            made = (_judge_metric if limit.kind == "metric" else _judge_ratio)(run, limit)
        for finding in made:
            same = sum(key == finding.id or key.startswith(f"{finding.id} (") for key in found)
            kept = replace(finding, id=f"{finding.id} ({same + 1})") if same else finding
            found[kept.id] = kept
    return tuple(found.values())


def _judge_metric(run: Run, limit: Limit) -> list[Finding]:
    cells = [cell for cell in run.cells if matches(_name(run, cell), limit.cells)]
    if not cells:
        return [_no_cell(run, limit)]
    return [_of_cell(run, cell, limit) for cell in cells]


def _of_cell(run: Run, cell: Cell, limit: Limit) -> Finding:
    measured = metric_names.measured(cell, limit.what)
    where = _name(run, cell)
    if not measured.values:
        return _invalid(limit, where, _unmeasured(cell, limit.what))
    if None not in measured.values and (lost := len(cell.repeats) - len(measured.values)):
        return _invalid(limit, where, f"missing in {lost} of {len(cell.repeats)} repeats; measure this cell again")
    values, unit = list(measured.values.values()), metric_names.unit_of(limit.what)
    details = [f"in each repeat: {', '.join(quantity(value, unit) for value in values)}"] if len(values) > 1 else []
    if measured.uncertain:
        details.append("it rests on fewer samples than such a percentile needs: send more requests for a firm one")
    found = _held(limit, where, values, unit, details)
    if cell.valid or (limit.what in _COUNTED and found.outcome == FAIL):
        return found
    return _invalid(limit, where, _reasons(cell))


def _judge_ratio(run: Run, limit: Limit) -> list[Finding]:
    pairs = [pair for pair in _pairs(run, limit) if matches(_name(run, pair[0]), limit.cells)]
    if not pairs:
        if limit.of:
            what = f"a cell of {', '.join(limit.of)} and one of {', '.join(limit.to)} at one load"
        else:
            what = "a paged and a contiguous cell at one load"
        return [
            _invalid(limit, run.workload, f"this run does not have {what} among the cells that the limit names; its "
                     f"configurations are {', '.join(sorted({c.config_id for c in run.cells}))}")
        ]  # fmt: skip
    return [_of_pair(run, limit, *pair) for pair in pairs]


def _pairs(run: Run, limit: Limit) -> list[tuple[Cell, Cell]]:
    if limit.of:
        return [
            (a, b)
            for a in run.cells if matches(a.config_id, limit.of)
            for b in run.at(a.load) if matches(b.config_id, limit.to) and b is not a
        ]  # fmt: skip
    chosen = paging_pair(run)
    if chosen is None:
        return []
    found = [(run.cell(chosen[0], load), run.cell(chosen[1], load)) for load in run.loads]
    return [(paged, contiguous) for paged, contiguous in found if paged is not None and contiguous is not None]


def _of_pair(run: Run, limit: Limit, a: Cell, b: Cell) -> Finding:
    where = f"{_name(run, a)} over {b.config_id}"
    for cell in (a, b):
        if not cell.valid:
            return _invalid(limit, where, f"{cell.cell_id}: {_reasons(cell)}")
    left, right = (metric_names.measured(cell, limit.what).values for cell in (a, b))
    both = sorted(left.keys() & right.keys(), key=lambda repeat: repeat or 0)
    for cell, known in ((a, left), (b, right)):
        if not known:
            return _invalid(limit, where, f"{cell.cell_id}: {_unmeasured(cell, limit.what)}")
    if len(both) < max(len(a.repeats), len(b.repeats)) and None not in both:
        return _invalid(limit, where, f"{limit.what} is not known in every repeat of both, so they cannot be paired")
    if any(right[repeat] <= 0 for repeat in both):
        return _invalid(limit, where, f"{limit.what} of {b.cell_id} is 0, so there is no ratio to it")
    ratios = [left[repeat] / right[repeat] for repeat in both]
    unit = metric_names.unit_of(limit.what)
    medians = (quantity(statistics.median(values[repeat] for repeat in both), unit) for values in (left, right))
    details = [
        f"ratio in each repeat: {', '.join(number(value) for value in ratios)}",
        f"median of {a.config_id} {next(medians)}, of {b.config_id} {next(medians)}; the limit holds the ratio within "
        "each repeat, not that of these two",
    ]
    found = _held(limit, where, ratios, "", details, of="of the paired ratios ")
    assert found.candidate is not None
    return replace(
        found,
        change=found.candidate - 1,
        figures={f"{name}_ratio": bound for name, bound in found.figures.items()},
        series=tuple(value - 1 for value in ratios),
    )


def _judge_kld(run: Run, limit: Limit, quality: QualityResult | None, doubt: str | None) -> list[Finding]:
    quantised = dict.fromkeys(
        cell.config_id
        for cell in run.cells
        if effective(cell.settings, "kv_cache_dtype") != "auto" and matches(_name(run, cell), limit.cells)
    )
    if not quantised:
        return [_no_cell(run, limit, " with a quantised KV")]
    return [_of_configuration(run, limit, config_id, quality, doubt) for config_id in quantised]


def _of_configuration(
    run: Run, limit: Limit, config_id: str, quality: QualityResult | None, doubt: str | None
) -> Finding:
    where = f"{run.workload}/{config_id}"
    known = quality.configurations.get(config_id) if quality is not None else None
    if quality is None or known is None or known.get(limit.what) is None:
        return _invalid(limit, where, _no_kld(run))
    if doubt:
        return _invalid(limit, where, doubt)
    unit = "share" if limit.what == "same_argmax" else "nats"
    details = [f"over {known['positions']:,} positions; weights: {quality.weights}"]
    return _held(limit, where, [float(known[limit.what])], unit, details)


def _no_kld(run: Run) -> str:
    git = run.manifest.get("git") or {}
    code = git.get("short_sha") or git.get("sha")
    which = (
        f" with the code of the run (commit {code}), or with other code and then this gate with --force" if code else ""
    )
    return f"not measured: run `kvbench quality {run.folder}`{which}; it takes minutes on a CPU"


def _held(
    limit: Limit, where: str, values: Sequence[float], unit: str, details: Sequence[str], of: str = ""
) -> Finding:
    """The finding on the median of ``values``, or on the worst of them where each is held. ``of``: what they are."""
    judged = statistics.median(values)
    if limit.every:
        judged = max(values, key=limit.excess)
    broken = limit.excess(judged) > 0
    which = ("the worst repeat has " if limit.every else f"the median {of}is ") if len(values) > 1 else ""
    return Finding(
        id=_id(limit, where),
        suite=SUITE,
        title=f"{limit.about(where)}, {limit.bounds('' if unit == 'ms' else unit)}",
        outcome=FAIL if broken else PASS,
        sentence=f"{limit.about(where)}: {which}{quantity(judged, unit)}, {_bounds(limit, judged, unit)}",
        metric=limit.what,
        unit=None if unit == "share" else unit or None,
        higher_is_better=limit.direction,
        candidate=judged,
        figures={name: bound for name, bound in (("min", limit.low), ("max", limit.high)) if bound is not None},
        details=tuple(details),
    )


def _invalid(limit: Limit, where: str, why: str) -> Finding:
    return Finding(
        id=_id(limit, where),
        suite=SUITE,
        title=f"{limit.about(where)}",
        outcome=INVALID,
        sentence=f"{limit.about(where)}: {why}",
        metric=limit.what,
    )


def _no_cell(run: Run, limit: Limit, kind: str = "") -> Finding:
    cells = ", ".join(cell.cell_id for cell in run.cells)
    why = f"no cell{kind} of this run fits {', '.join(limit.cells)}; mend the globs or remove the limit: it has {cells}"
    return _invalid(limit, f"{run.workload} ({', '.join(limit.cells)})", why)


def _unmeasured(cell: Cell, what: str) -> str:
    if what in ("goodput_share", "goodput", "steady_goodput"):
        return "not measured, because the workload has no SLO: give it load.slo and run the sweep again"
    near = metric_names.nearest(cell, what)
    hint = f"did you mean {near}?" if near else "the server may not tell it; remove the limit or choose another metric"
    return f"not measured in this run; {hint}"


def _reasons(cell: Cell) -> str:
    shown, more = cell.invalid_reasons[:_MAX_REASONS], len(cell.invalid_reasons) - _MAX_REASONS
    said = "; ".join(shown) or "no reason was stored"
    return f"the measurement of this cell is invalid ({said}{f'; and {more} more' if more > 0 else ''}): measure again"


def _bounds(limit: Limit, value: float, unit: str) -> str:
    if limit.low is not None and value < limit.low:
        return f"below the limit of {quantity(limit.low, unit)}"
    if limit.high is not None and value > limit.high:
        return f"above the limit of {quantity(limit.high, unit)}"
    return f"the limit is {limit.bounds(unit)}"


def _name(run: Run, cell: Cell) -> str:
    return f"{run.workload}/{cell.cell_id}"


def _id(limit: Limit, where: str) -> str:
    return f"{SUITE}/{where}/{limit.label}"
