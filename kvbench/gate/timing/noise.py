"""The noise of a runner, from pairs of one build against itself (A/A), and whether the gate's limits suit it.

For each metric and level: how pairs scatter, whether they lean to one side, whether a pair hangs on the one before, the
smallest regression that each look shows with 80 % power, and the smallest margin within which each look shows an
unchanged candidate with 80 % power (``power.py``). A sd from 20 pairs is known to within -24 % and +46 %
(95 %, chi-squared with 19 degrees of freedom), one from 8 pairs to within -34 % and +104 %: hence 20 or more.

Which side of a pair goes first is tossed for, so even a drifting or autocorrelated machine gives pairs that lean to no
side and do not hang on each other. If they do, the two sides differ in more than the build.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from kvbench.common.text import plural
from kvbench.gate.timing.pairs import Hypotheses, PairTable, hypotheses
from kvbench.gate.timing.power import critical_t_of, effective_tests, smallest_detectable, smallest_margin
from kvbench.gate.timing.rules import CELL, CLASS, OVERALL, MetricRule, TimingRules
from kvbench.gate.timing.signflip import critical_t

FORMAT = "kvbench-noise/2"
ENOUGH_PAIRS = 20
FEWEST_PAIRS = 4
_SURE = 0.01  # a bias this improbable, over all hypotheses of the table, is one
_AT = {OVERALL: "over all cells", CLASS: "of a class", CELL: "of a cell"}
_WAYS_OUT = "lengthen the loads, or quieten the machine"


@dataclass(frozen=True)
class Noise:
    """Of one metric at one level, over its ``hypotheses`` (cells, classes or the whole).

    ``stands_for``: the levels whose margins they are held to (a cell that is alone in its class is that class too);
    those of one level that stand for others have a line of their own.
    ``sd`` of log(candidate / base) of pairs, in the median and the ``worst`` of them, which is ``where``. ``bias``:
    candidate / base - 1 where it is surest that there is one, and ``bias_p`` its two-sided p, adjusted for all
    hypotheses of the table. ``autocorrelation``: of one pair with the next, median. ``detectable`` and ``margin``: by
    look (pairs), relative changes for the worse, in the median; ``worst_detectable`` and ``worst_margin`` likewise;
    None where so few pairs show nothing.
    """

    metric: str
    level: str
    stands_for: tuple[str, ...]
    hypotheses: int
    sd: float
    worst: float
    where: str
    bias: float
    bias_p: float
    autocorrelation: float
    detectable: Mapping[int, float | None]
    worst_detectable: Mapping[int, float | None]
    margin: Mapping[int, float | None]
    worst_margin: Mapping[int, float | None]


@dataclass(frozen=True)
class RunnerNoise:
    """The noise of a runner, from ``pairs`` A/A pairs of ``cells`` cells."""

    pairs: int
    cells: int
    each: tuple[Noise, ...]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunnerNoise:
        """What ``to_json`` gave, also after JSON has made text of the looks. ValueError for another format."""
        if data.get("format") != FORMAT:
            raise ValueError(f"a runner's noise of format {data.get('format')!r}: this kvbench reads {FORMAT}")
        each = tuple(Noise(**{k: _stored(v) for k, v in line.items()}) for line in data["each"])
        return cls(data["pairs"], data["cells"], each)

    def of(self, metric: str, level: str | None = None) -> tuple[Noise, ...]:
        """The lines of a metric, at one level or all."""
        return tuple(each for each in self.each if each.metric == metric and level in (None, each.level))


def _stored(value: Any) -> Any:
    """A field of Noise as JSON gives it back: tuples as lists, looks as text."""
    if isinstance(value, list):
        return tuple(value)
    return {int(look): share for look, share in value.items()} if isinstance(value, Mapping) else value


def noise_of(table: PairTable, rules: TimingRules) -> RunnerNoise:
    """The noise that an A/A table has, at the looks of ``rules``. ValueError under 4 pairs or without any metric."""
    if table.pairs < FEWEST_PAIRS:
        raise ValueError(f"{plural(table.pairs, 'pair')} do not show a runner's noise: measure {ENOUGH_PAIRS} or more")
    tested = hypotheses(table)
    if not tested.each:
        raise ValueError("no cell has any of the metrics: there is no noise to look at")
    t_criticals = {look.pairs: _critical_t(tested.harm, look.pairs, look.alpha) for look in rules.looks}
    lines = []
    for metric in table.metrics:
        groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for i, h in enumerate(tested.each):
            if h.metric == metric:
                groups.setdefault((h.level, h.stands_for), []).append(i)
        lines += [_noise(tested, columns, t_criticals, rules) for columns in groups.values()]
    return RunnerNoise(table.pairs, len(table.cells), tuple(lines))


def _critical_t(harm: np.ndarray, pairs: int, alpha: float) -> float:
    """By the flips of the first pairs; for more pairs than there are, as many independent tests as explain it."""
    known = min(len(harm), pairs)
    first = harm[:known] - harm[:known].mean(axis=0)
    if known == pairs:
        return critical_t(first, alpha)
    at = max(alpha, 2.0**-known)
    tests = effective_tests(critical_t(first, at), known, at, harm.shape[1])
    return critical_t_of(tests, pairs, alpha)


def _noise(tested: Hypotheses, columns: Sequence[int], t_criticals: Mapping[int, float], rules: TimingRules) -> Noise:
    first = tested.each[columns[0]]
    metric = first.metric
    y = tested.log_ratio()[:, columns]
    sd, mean = y.std(axis=0, ddof=1), y.mean(axis=0)
    t = np.divide(mean, sd / np.sqrt(len(y)), out=np.zeros_like(mean), where=sd > 0)
    leaning, worst = int(np.abs(t).argmax()), int(sd.argmax())
    apart = y - mean
    moving = (apart[1:] * apart[:-1]).sum(axis=0)
    hanging = np.divide(moving, (apart**2).sum(axis=0), out=np.zeros_like(mean), where=sd > 0)

    def by_look(of_sd: float) -> tuple[dict[int, float | None], dict[int, float | None]]:
        shown, within = {}, {}
        for look in rules.looks:
            seen = float(smallest_detectable(of_sd, look.pairs, t_criticals[look.pairs]))
            least = float(smallest_margin(of_sd, look.pairs, look.alpha_pass))
            shown[look.pairs] = metric.relative_of(seen) if np.isfinite(seen) else None
            within[look.pairs] = metric.relative_of(least) if np.isfinite(least) else None
        return shown, within

    (detectable, margin), (worst_detectable, worst_margin) = by_look(float(np.median(sd))), by_look(float(sd[worst]))
    return Noise(
        metric=metric.name,
        level=first.level,
        stands_for=first.stands_for,
        hypotheses=len(columns),
        sd=float(np.median(sd)),
        worst=float(sd[worst]),
        where=tested.each[columns[worst]].where,
        bias=float(np.expm1(mean[leaning])),
        bias_p=min(1.0, float(2 * stats.t.sf(abs(t[leaning]), len(y) - 1)) * len(tested.each)),
        autocorrelation=float(np.median(hanging)),
        detectable=detectable,
        worst_detectable=worst_detectable,
        margin=margin,
        worst_margin=worst_margin,
    )


def warnings_of(noise: RunnerNoise, rules: TimingRules) -> tuple[str, ...]:
    """Where ``rules`` ask for more than this runner can show after their last look, and what its pairs say of it."""
    said = []
    if noise.pairs < ENOUGH_PAIRS:
        said.append(f"{noise.pairs} A/A pairs: a runner's noise is known from {ENOUGH_PAIRS} or more")
    last = rules.looks[-1].pairs
    if known := [sorted(line.detectable) for line in noise.each if last not in line.detectable]:
        return (
            *said,
            f"the runner's noise was worked out for looks at {known[0]} pairs and the last look is now at {last}: "
            "calibrate again",
        )
    for metric in rules.metrics:
        lines = noise.of(metric.name)
        said += [text for text in (_floor_warning(metric, lines, last), _margin_warning(metric, lines, last)) if text]
        said += [text for line in lines if (text := _leaning(line, noise.pairs))]
    return tuple(said)


def _floor_warning(metric: MetricRule, lines: Sequence[Noise], last: int) -> str | None:
    low = [line for line in lines if (seen := line.worst_detectable[last]) is None or seen > metric.floor]
    if not low:
        return None
    seen = ", ".join(f"{_share(line.worst_detectable[last])} {_place(line)}" for line in low)
    return (
        f"{metric.name}: the floor of {_share(metric.floor)} is below the smallest regression that this runner shows, "
        f"at {last} pairs {seen}: raise the floor, {_WAYS_OUT}"
    )


def _margin_warning(metric: MetricRule, lines: Sequence[Noise], last: int) -> str | None:
    narrow = []
    for line in lines:
        least, margin = line.worst_margin[last], metric.margin_at(line.stands_for)
        if least is None or least > margin:
            narrow.append(f"{_share(margin)} {_place(line)}, where {_share(least)} is the least")
    if not narrow:
        return None
    return (
        f"{metric.name}: an unchanged candidate would often stay inconclusive after {last} pairs; too narrow are the "
        f"margins {'; '.join(narrow)}: widen them, {_WAYS_OUT}"
    )


def _place(line: Noise) -> str:
    """The place with the worst noise of a line: ``over all cells``, ``of class mixed``, ``of mixed/paged-p16-c32``."""
    if line.level == OVERALL:
        return "over all cells"
    return f"of class {line.where}" if line.level == CLASS else f"of {line.where}"


def _leaning(line: Noise, pairs: int) -> str | None:
    if line.bias_p <= _SURE:
        return (
            f"{line.metric} {_AT[line.level]}: one build differs from itself by {line.bias * 100:+.2g} % "
            f"(p = {line.bias_p:.2g}): look for what the two sides do not share (environment, cache, port, device)"
        )
    if line.level == OVERALL and abs(line.autocorrelation) > 3 / np.sqrt(pairs):
        return (
            f"{line.metric} {_AT[line.level]}: a pair hangs on the one before (autocorrelation "
            f"{line.autocorrelation:+.2f}), which it cannot if the order within each pair is tossed for: look at it"
        )
    return None


def _share(share: float | None) -> str:
    return "nothing" if share is None else f"{share * 100:.3g} %"
