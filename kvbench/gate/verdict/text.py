"""How a verdict's texts and numbers are written, alike in the summary, JUnit, the terminal and the plots."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from kvbench.common.text import data_size
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS, Finding, Moved, Verdict

LABELS = {FAIL: "FAIL", INVALID: "INVALID", INCONCLUSIVE: "INCONCLUSIVE", PASS: "PASS", EMPTY: "NOTHING COMPARED"}
NAMES = {FAIL: "failed", INVALID: "invalid", INCONCLUSIVE: "inconclusive", PASS: "passed"}
RANKS = {FAIL: 0, INVALID: 1, INCONCLUSIVE: 2, PASS: 3}
SUITES = {"overall": 0, "class": 1, "cell": 2}  # the wider first; others after them, as they came
NONE = "–"
# What XML 1.0 cannot hold, escaped or not (https://www.w3.org/TR/xml/#charsets): control characters, lone surrogates.
# C1 controls are left out too: a terminal may act on them.
_UNWRITABLE = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ESCAPE_SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?)")
FRACTIONS = ("floor", "margin", "smallest_detectable")


def clean(text: object) -> str:
    """Text that every output can hold: no terminal colours, no control characters, no half of a character."""
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
    """Whether it is a finite number: NaN stands for one that could not be had, as None does."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: float | None) -> str:
    """Three significant figures, and all figures of a whole number: 0.00123, 12.3, 1,235."""
    if not is_number(value):
        return NONE
    if value == 0 or (float(value).is_integer() and abs(value) < 1e15):
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
    """A further number of a finding: a part of the base where it is about a change, else in the finding's unit."""
    if name in FRACTIONS and finding.change is not None:
        return percent(value, signed=False)
    return quantity(value, finding.unit if name in ("min", "max") else None)


def bounds(finding: Finding) -> str:
    """The limits that it was held to: ``>= 0.9``, ``<= 2 GiB``; empty without one."""
    found = [
        f"{sign} {figure(name, finding.figures[name], finding)}"
        for end, sign in (("min", ">="), ("max", "<="))
        for name in (end, f"{end}_ratio")
        if is_number(finding.figures.get(name))
    ]
    return " and ".join(found)


def figure_name(name: str) -> str:
    return line(name).replace("_", " ")


def worse_sign(finding: Finding) -> int:
    """+1 where more is worse, -1 where less is."""
    return -1 if finding.higher_is_better else 1


def badness(finding: Finding) -> float:
    """How far the change went to the worse (any way, where neither is better), in floors where there is one.

    -inf without a change.
    """
    if not is_number(finding.change):
        return -math.inf
    floor = finding.figures.get("floor")
    worse = abs(finding.change) if finding.higher_is_better is None else finding.change * worse_sign(finding)
    return worse / (abs(floor) if is_number(floor) and floor else 1.0)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Failures first, then the wider before the narrower, then the greater change."""
    return sorted(findings, key=lambda f: (RANKS[f.outcome], SUITES.get(f.suite, len(SUITES)), -badness(f)))


def explained(findings: Sequence[Finding], most: int, said: str) -> list[tuple[str, Finding]]:
    """What is said below a table, and of which finding: the sentence of the first, and of all that add to their rows.

    ``said``: the verdict's sentence, which stands at the top. What it has is not said again: a finding that has details
    is then called by its title, and one that has none is left out.
    """
    found = []
    for i, finding in enumerate(findings):
        known = line(finding.sentence) in line(said)
        if finding.details or (not known and (i == 0 or finding.change is None or finding.outcome != FAIL)):
            found.append(((finding.title or finding.id) if known else finding.sentence, finding))
    return found[:most]


def metric_and_place(finding: Finding) -> tuple[str, str]:
    """``p95 TTFT`` and ``mixed/paged-c8``, of a comparison's ``p95 TTFT of mixed/paged-c8``; else title and nothing."""
    title = line(finding.title or finding.id)
    if finding.suite in SUITES and (parts := re.fullmatch(r"(.*?) (?:of|over) (.*)", title)):
        return parts[1], parts[2]
    return title, ""


def counted(verdict: Verdict) -> str:
    """2 failed, 1 inconclusive, 60 passed"""
    counts = ((len(verdict.of(outcome)), name) for outcome, name in NAMES.items())
    return ", ".join(f"{count:,} {name}" for count, name in counts if count)


def sides(verdict: Verdict) -> list[tuple[str, str]]:
    """(``base``, its name and commit) and the same of the candidate, as far as known."""
    found = []
    for role, side in (("base", verdict.base), ("candidate", verdict.candidate)):
        name, sha = (line(side.get(key) or "", 200) for key in ("name", "sha"))
        short = sha[:12]
        words = name or short
        if name and short and not (sha[:7] in name or sha.startswith(name)):
            words = f"{name} ({short})"
        if words:
            found.append((role, words))
    return found


def fact(value: object, name: str = "") -> str:
    """A value of ``Verdict.facts`` or of a side in words. ``name``: whose; a seed is to be pasted as it is."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.endswith("seed"):
        return str(value)
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, list | tuple):
        return ", ".join(fact(each, name) for each in value)
    if isinstance(value, dict):
        return ", ".join(f"{line(key)} {fact(each, str(key))}" for key, each in value.items())
    return line(value) if value is not None else NONE
