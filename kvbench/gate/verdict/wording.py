"""How the numbers and names of a verdict are written: the same in the summary, JUnit, the terminal and the plots."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from kvbench.common.text import data_size
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS, Finding, Moved, Verdict

LABELS = {FAIL: "FAIL", INVALID: "INVALID", INCONCLUSIVE: "INCONCLUSIVE", PASS: "PASS", EMPTY: "NOTHING COMPARED"}
NAMES = {FAIL: "failed", INVALID: "invalid", INCONCLUSIVE: "inconclusive", PASS: "passed"}  # worst first
NONE = "–"
_SUITES = ("overall", "class", "cell")  # the wider first; others after them, as they came
# What XML 1.0 cannot hold, escaped or not (https://www.w3.org/TR/xml/#charsets): control characters, lone surrogates.
# C1 controls are left out too: a terminal may act on them.
_UNWRITABLE = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ESCAPE_SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?)")
_FRACTIONS = ("floor", "margin", "smallest_detectable")
FINDING_HEADS = ("what", "base", "candidate", "change", "95 % interval (%)", "p", "floor", "margin", "limit")
MOVED_HEADS = ("moved with it", "where", "base", "candidate", "change", "share", "95 % interval (%)")


def clean(text: object) -> str:
    """Text that every output can hold: no terminal colours, no control characters, no lone surrogates."""
    return _UNWRITABLE.sub("", _ESCAPE_SEQUENCE.sub("", str(text))).replace("\r\n", "\n").replace("\r", "\n")


def line(text: object, limit: int | None = None) -> str:
    """`clean` in one line, of at most ``limit`` characters."""
    flat = re.sub(r"\s+", " ", clean(text)).strip()
    return flat if limit is None or len(flat) <= limit else flat[: limit - 2].rstrip() + " …"


def shortened(text: object, limit: int) -> str:
    """`line` with its middle left out: names of cells differ at the end."""
    flat = line(text)
    end = (limit - 1) * 2 // 3
    return flat if len(flat) <= limit else f"{flat[: limit - 1 - end]}…{flat[-end:]}"


def is_number(value: object) -> bool:
    """Whether it is a finite number: NaN stands for a missing one, as None does."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: float | None) -> str:
    """Three significant figures, and all figures of a whole number: 0.00123, 12.3, 1,235."""
    if not is_number(value):
        return NONE
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    if not 1e-4 <= abs(value) < 1e15:
        return f"{value:.2e}"
    decimals = 2 - math.floor(math.log10(float(f"{abs(value):.2e}")))
    return f"{value:,.{max(0, decimals)}f}"


def quantity(value: float | None, unit: str | None) -> str:
    """12.3 ms; bytes in the largest unit that keeps a whole: 2 GiB; a share in percent: 15 %."""
    if unit == "bytes" and is_number(value):
        return data_size(value)
    if unit == "share" and is_number(value):
        return f"{number(value * 100)} %"
    words = number(value)
    return words if words == NONE or unit in (None, "", "count") else f"{words} {line(unit)}"


def percent(fraction: float | None, signed: bool = True) -> str:
    """0.1012 -> +10.1 %"""
    words = percent_number(fraction, signed)
    return words if words == NONE else f"{words} %"


def percent_number(fraction: float | None, signed: bool = True) -> str:
    """0.1012 -> +10.1: at most three significant figures, two decimals."""
    if not is_number(fraction):
        return NONE
    hundredths = fraction * 100
    decimals = 0 if abs(hundredths) >= 99.95 else 1 if abs(hundredths) >= 9.995 else 2
    words = f"{hundredths:{'+' if signed else ''},.{decimals}f}"
    return words.lstrip("+-") if float(words.replace(",", "")) == 0 else words


def interval(ends: tuple[float, float] | None) -> str:
    """[+9.20, +11.0] in percent; empty without one."""
    return "" if ends is None else "[" + ", ".join(percent_number(end) for end in ends) + "]"


def change(found: Finding | Moved) -> str:
    """+10.1 % [+9.20, +11.0]"""
    return f"{percent(found.change)} {interval(found.interval)}".strip()


def probability(p: float | None) -> str:
    """0.0039; a p value is never 0."""
    return NONE if not is_number(p) else "< 0.0001" if p < 0.0001 else f"{p:.2g}"


def figure(name: str, value: float | None, finding: Finding) -> str:
    """A further number of a finding: in percent if it is a part of the base, else in the finding's unit."""
    if name in _FRACTIONS and finding.change is not None:
        return percent(value, signed=False)
    return quantity(value, finding.unit if name in ("min", "max") else None)


def bounds(finding: Finding) -> str:
    """Its limits: ``>= 0.9``, ``<= 2 GiB``; empty without one."""
    return " and ".join(
        f"{sign} {figure(name, finding.figures[name], finding)}"
        for end, sign in (("min", ">="), ("max", "<="))
        for name in (end, f"{end}_ratio")
        if is_number(finding.figures.get(name))
    )


def figure_name(name: str) -> str:
    return line(name).replace("_", " ")


def finding_row(finding: Finding) -> tuple[str, ...]:
    """The entries of a table with `FINDING_HEADS`."""
    return (
        line(finding.title or finding.id, 200),
        *(quantity(value, finding.unit) for value in (finding.base, finding.candidate)),
        percent(finding.change),
        interval(finding.interval),
        probability(finding.p),
        *(figure(name, finding.figures.get(name), finding) for name in ("floor", "margin")),
        bounds(finding),
    )


def moved_row(moved: Moved) -> tuple[str, ...]:
    """The entries of a table with `MOVED_HEADS`; the share is of the judged latency's difference."""
    return (
        line(moved.title or moved.name, 200),
        line(moved.where, 200),
        *(quantity(value, moved.unit) for value in (moved.base, moved.candidate)),
        percent(moved.change),
        percent(moved.share, signed=False),
        interval(moved.interval),
    )


def used_columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows without the columns that are empty throughout."""
    used = [i for i in range(len(heads)) if any(row[i] not in ("", NONE) for row in rows)]
    return [heads[i] for i in used], [[row[i] for i in used] for row in rows]


def worse_sign(finding: Finding) -> int:
    """+1 where more is worse, -1 where less is."""
    return -1 if finding.higher_is_better else 1


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Failures first, then the wider before the narrower, then the greater change for the worse, in floors."""

    def key(finding: Finding) -> tuple[int, int, float]:
        suite = _SUITES.index(finding.suite) if finding.suite in _SUITES else len(_SUITES)
        size = -math.inf
        if is_number(finding.change):
            either_way = finding.higher_is_better is None
            floor = finding.figures.get("floor")
            size = abs(finding.change) if either_way else finding.change * worse_sign(finding)
            size /= abs(floor) if is_number(floor) and floor else 1.0
        return list(NAMES).index(finding.outcome), suite, -size

    return sorted(findings, key=key)


def explained(findings: Sequence[Finding], most: int, said: str) -> list[tuple[str, Finding]]:
    """The sentences to print below a table of ``findings``, with their findings.

    Left out: a sentence that ``said`` (the verdict's) contains, and one of a failure whose row says the same. A finding
    with details is always there, by its title if its sentence is left out.
    """
    found = []
    for i, finding in enumerate(findings):
        known = line(finding.sentence) in line(said)
        if finding.details or (not known and (i == 0 or finding.change is None or finding.outcome != FAIL)):
            found.append(((finding.title or finding.id) if known else finding.sentence, finding))
    return found[:most]


def counted(verdict: Verdict) -> str:
    """2 failed, 1 inconclusive, 60 passed"""
    counts = ((len(verdict.of(outcome)), name) for outcome, name in NAMES.items())
    return ", ".join(f"{count:,} {name}" for count, name in counts if count)


def sides(verdict: Verdict) -> list[str]:
    """``base main (0123456789ab)`` and the same of the candidate, as far as known."""
    found = []
    for role, side in (("base", verdict.base), ("candidate", verdict.candidate)):
        name, sha = (line(side.get(key) or "", 200) for key in ("name", "sha"))
        known = name and (sha[:7] in name or sha.startswith(name))  # the name says the commit
        words = name if known else f"{name} ({sha[:12]})" if name and sha else sha[:12]
        if words:
            found.append(f"{role} {words}")
    return found


def fact(value: object, name: str = "") -> str:
    """A value of ``Verdict.facts`` or of a side. ``name``: whose; a seed is written as it is pasted."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return str(value) if name.endswith("seed") else number(value)
    if isinstance(value, list | tuple):
        return ", ".join(fact(each, name) for each in value)
    if isinstance(value, dict):
        return ", ".join(f"{line(key)} {fact(each, str(key))}" for key, each in value.items())
    return line(value) if value is not None else NONE


def thresholds(finding: Finding) -> list[tuple[str, float]]:
    """The lines of a plot: floor and margin as changes to the worse side, and the limits of a ratio."""
    worse = worse_sign(finding)
    figures = [(name, finding.figures.get(name)) for name in ("floor", "margin")]
    found = [(name, worse * abs(value)) for name, value in figures if is_number(value)]
    ends = [finding.figures.get(name) for name in ("min_ratio", "max_ratio")]
    return [*found, *(("limit", end - 1) for end in ends if is_number(end))]


def plot_range(finding: Finding) -> tuple[float, float]:
    """The least and the greatest change that a plot of the finding shows; 0 is always in it."""
    values = (*finding.series, *(finding.interval or ()), finding.change, *(at for _, at in thresholds(finding)))
    shown = [value for value in values if is_number(value)]
    return min(0.0, *shown), max(0.0, *shown)


def dot_of(verdict: Verdict) -> str:
    """What a dot of a plot is."""
    return "repeat" if verdict.kind == "limits" else "pair"
