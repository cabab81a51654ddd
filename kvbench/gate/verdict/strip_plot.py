"""The pairs of a hypothesis as plain text, for where no image can be shown: a GitHub summary, a terminal, a log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvbench.gate.verdict import text as wording
from kvbench.gate.verdict.verdict import Finding

WIDTH = 60  # columns of the scale
DOTS = {"limits": "repeat"}  # what a dot is, by the kind of the verdict; else a pair


def strip(finding: Finding, width: int = WIDTH) -> list[str]:
    """The lines of one plot, worse to the right; none without pairs. ASCII, so that all columns are equally wide.

    p95 ITL, overall: FAIL, +10.1 % [+9.20, +11.0]
                                                   o  o 2o o o   o
                                                      [===*===]
    0----------M--------F-----------------------------------------
    0.00 %                                                  +11.4 %
    """
    series = [value for value in finding.series if wording.is_number(value)]
    if not series:
        return []
    worse = wording.worse_sign(finding)
    marks = thresholds(finding)
    bounds = [bound for bound in finding.interval or () if wording.is_number(bound)]
    centre = [finding.change] if wording.is_number(finding.change) else []
    low, high = scale([*series, *bounds, *centre, *(value for _, value in marks)])

    def column(change: float) -> int:
        share = (change - low) / (high - low)
        return round((share if worse > 0 else 1 - share) * (width - 1))

    dots = Counter(column(value) for value in series)
    lines = ["".join(" " if not dots[i] else "o" if dots[i] == 1 else str(min(9, dots[i])) for i in range(width))]
    if centre or len(bounds) == 2:
        lines.append(_effect_line([column(b) for b in bounds], [column(c) for c in centre], width))
    axis = ["-"] * width
    for letter, change in (("0", 0.0), *((name[0].upper(), value) for name, value in marks)):
        axis[column(change)] = letter
    ends = [wording.percent(end) for end in ((low, high) if worse > 0 else (high, low))]
    lines += ["".join(axis), ends[0] + ends[1].rjust(width - len(ends[0]))]
    head = f"{wording.shortened(finding.title, 120)}: {wording.LABELS[finding.outcome]}, {wording.change(finding)}"
    return [head, *(each.rstrip() for each in lines)]


def legend(findings: Sequence[Finding], dot: str = "pair") -> str:
    """What the signs of these plots mean, of those that are there."""
    marks = {name for finding in findings for name, _ in thresholds(finding)}
    effect = "[==*==] the effect and its 95 % interval" if any(f.interval for f in findings) else "* what is judged"
    known = [f"{name[0].upper()} {name}" for name in ("floor", "margin", "limit") if name in marks]
    return "   ".join([f"o one {dot} (a digit: so many)", effect, "0 no change", *known])


def thresholds(finding: Finding) -> list[tuple[str, float]]:
    """Floor and margin as changes with their sign, to the worse side; the ends that a ratio is held within."""
    worse = wording.worse_sign(finding)
    figures = [(name, finding.figures.get(name)) for name in ("floor", "margin")]
    found = [(name, worse * abs(value)) for name, value in figures if wording.is_number(value)]
    ends = [finding.figures.get(name) for name in ("min_ratio", "max_ratio")]
    return [*found, *(("limit", end - 1) for end in ends if wording.is_number(end))]


def scale(values: list[float]) -> tuple[float, float]:
    """The ends of an axis that has all the values and 0 on it, and a length."""
    low, high = min(0.0, *values), max(0.0, *values)
    return (low, high) if high - low > 1e-9 else (-0.001, 0.001)


def _effect_line(bounds: list[int], centre: list[int], width: int) -> str:
    """``[===*===]``"""
    cells = [" "] * width
    if len(bounds) == 2:
        first, last = sorted(bounds)
        cells[first : last + 1] = "=" * (last + 1 - first)
        cells[first], cells[last] = "[", "]"
    for i in centre:
        cells[i] = "*"
    return "".join(cells)
