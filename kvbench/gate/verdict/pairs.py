"""The page pairs.html: the change of each pair under each hypothesis, with its limits.

A panel for each metric, a row for each hypothesis, all rows of a panel on one scale, worse to the right. A tooltip
names the pair of a dot.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from kvbench.gate.sentences import say
from kvbench.gate.verdict import wording
from kvbench.gate.verdict.verdict import Finding, Verdict
from kvbench.gate.verdict.wording import is_number

ROWS = 80  # of one panel, the worst
_LABELS, _PLOT, _NUMBERS, _ROW, _HEAD, _FOOT = 300, 640, 230, 34, 26, 30  # px
_FARTHEST = 1e12  # the largest change that has a place of its own
_NAME, _LINES, _LINE = 42, 5, 16  # of a row's name: characters a line, lines at most, px a line
_DOTS, _MARKS = ("pair", "round", "repeat"), ("floor", "margin", "limit")


def _thresholds(finding: Finding) -> list[tuple[str, float]]:
    """The lines of a plot: floor and margin as changes to the worse side, and the limits of a ratio."""
    worse = wording.worse_sign(finding)
    shares = {name: finding.figure(name) for name in ("floor", "margin")}
    ends = [finding.figure(name) for name in ("min_ratio", "max_ratio")]
    lines = [(name, worse * abs(share)) for name, share in shares.items() if share is not None]
    return lines + [("limit", end - 1) for end in ends if end is not None]


class _Axis:
    """The scale of a panel in px, worse to the right; it includes 0."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        values = [0.0]
        for finding in findings:
            limits = (at for _, at in _thresholds(finding))
            values += filter(is_number, (*finding.series, *(finding.interval or ()), finding.change, *limits))
        low, high = (min(max(end, -_FARTHEST), _FARTHEST) for end in (min(values), max(values)))
        low, high = (low, high) if high - low > 1e-9 else (-0.001, 0.001)
        room = (high - low) * 0.04
        self.low, self.high, self.worse = low - room, high + room, wording.worse_sign(findings[0])

    def x(self, change: float) -> float:
        share = (min(max(change, self.low), self.high) - self.low) / (self.high - self.low)
        return round(_LABELS + _PLOT * (share if self.worse > 0 else 1 - share), 1)

    def ticks(self) -> list[float]:
        """Chooses five to ten round changes, 0 among them."""
        step = 10 ** math.floor(math.log10((self.high - self.low) / 5))
        step *= next(k for k in (1, 2, 5, 10) if (self.high - self.low) / (step * k) <= 9)
        return [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def pair_page(verdict: Verdict) -> str | None:
    drawn = [finding for finding in wording.worst_first(verdict.findings) if any(map(is_number, finding.series))]
    if not drawn:
        return None
    from kvbench.report.page import render  # needs packages that the counter gate in CI, without pairs, does not have

    panels: dict[tuple[str, bool | None], list[Finding]] = {}
    for finding in drawn:
        panels.setdefault((finding.metric or finding.title, finding.higher_is_better), []).append(finding)
    dots = {metric: "round" if findings[0].suite == "served" else "pair" for (metric, _), findings in panels.items()}
    if verdict.kind == "limits":
        dots = dict.fromkeys(dots, "repeat")
    marks = {name for finding in drawn for name, _ in _thresholds(finding)}
    effect = say("pairs.diamond", any(finding.interval for finding in drawn))
    clock = say("pairs.clock", verdict.facts.get("method") or "other")
    dots_shown = [say("pairs.dot", dot) for dot in _DOTS if dot in dots.values()]
    return render(
        "pairs.html.j2",
        [],
        title=f"{wording.LABELS[verdict.outcome]}: pairs",
        label=wording.LABELS[verdict.outcome],
        kicker=": ".join(filter(None, [f"kvbench {verdict.kind}", wording.sides(verdict)])),
        headline=wording.line(verdict.sentence),
        outcome=verdict.outcome,
        counted=wording.counted(verdict),
        caption=" ".join(filter(None, [*dots_shown, effect, clock])),
        marks=[(name, say("pairs.mark", name)) for name in _MARKS if name in marks],
        panels=[_panel(metric, findings, dots[metric]) for (metric, _), findings in panels.items()],
        width=_LABELS + _PLOT + _NUMBERS,
    )


def _panel(metric: str, findings: Sequence[Finding], dot: str) -> dict[str, Any]:
    shown = findings[:ROWS]
    axis = _Axis(shown)
    x, names = axis.x, [_name(finding) for finding in shown]
    height = max(_ROW, max(map(len, names)) * _LINE + 8)
    rows = []
    for i, (finding, name) in enumerate(zip(shown, names, strict=True)):
        middle = _HEAD + height * (i + 0.5)
        first = middle + 4.5 - (len(name) - 1) * _LINE / 2
        ends = [end for end in finding.interval or () if is_number(end)]
        numbers = f"{wording.percent(finding.change)} {wording.interval(finding.interval)}".strip()
        if bounds := wording.bounds(finding):
            numbers = f"{wording.number(finding.candidate)} ({numbers}), {bounds}"
        rows.append({
            "outcome": finding.outcome,
            "label": wording.LABELS[finding.outcome],
            "sentence": wording.line(finding.sentence),
            "numbers": numbers,
            "middle": middle,
            "name": [(first + _LINE * k, words) for k, words in enumerate(name)],
            "thresholds": [(kind, x(at)) for kind, at in _thresholds(finding)],
            "dots": [  # side by side where values are equal; the order says which
                (x(value), middle + (k % 3 - 1) * 6, f"{dot} {k + 1}: {wording.percent(value)}")
                for k, value in enumerate(finding.series)
                if is_number(value)
            ],
            "interval": [x(end) for end in ends] if len(ends) == 2 else None,
            "effect": x(finding.change) if is_number(finding.change) else None,
        })  # fmt: skip
    return {
        "metric": wording.line(metric),
        "direction": say("pairs.direction", {True: "less", False: "more"}.get(shown[0].higher_is_better, "other")),
        "rows": rows,
        "row_height": height,
        "head": _HEAD,
        "foot": _HEAD + height * len(shown),
        "height": _HEAD + height * len(shown) + _FOOT,
        "numbers_x": _LABELS + _PLOT + 14,
        "ticks": [(x(tick), f"{float(tick) * 100:+.6g} %" if tick else "0") for tick in axis.ticks()],
        "left_out": len(findings) - len(shown),
    }


def _name(finding: Finding) -> list[str]:
    """The finding's title in lines, without the middle of a very long one."""
    lines = textwrap.wrap(wording.line(finding.title), _NAME)
    short = textwrap.wrap(wording.shortened(finding.title, _NAME * (_LINES - 1)), _NAME)
    return lines if len(lines) <= _LINES else short[:_LINES]
