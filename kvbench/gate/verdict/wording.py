"""The numbers, names and sentences of a verdict in words, the same in every file, the terminal and the plots."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Sequence

from kvbench.common.text import data_size
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS, Finding, Moved, Verdict

LABELS = {FAIL: "FAIL", INVALID: "INVALID", INCONCLUSIVE: "INCONCLUSIVE", PASS: "PASS", EMPTY: "NOTHING COMPARED"}
NAMES = {FAIL: "failed", INVALID: "invalid", INCONCLUSIVE: "inconclusive", PASS: "passed"}  # worst first
NONE = "–"
FINDING_HEADS = ("what", "base", "candidate", "change", "95 % interval (%)", "p", "floor", "margin", "limit")
MOVED_HEADS = ("moved with it", "where", "base", "candidate", "change", "share", "95 % interval (%)")

_IN_DIGITS, _LARGEST = 1e15, sys.float_info.max  # larger numbers are written with an exponent
_SUITES = ("overall", "class", "cell")  # the wider first; others after them, as they came
# What XML 1.0 cannot hold, escaped or not (https://www.w3.org/TR/xml/#charsets): control characters, lone surrogates.
# C1 controls are left out too: a terminal may act on them.
_UNWRITABLE = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ESCAPE_SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?)")


def clean(text: object) -> str:
    """Takes terminal colours, control characters and lone surrogates out, so that every output can hold the text."""
    return _UNWRITABLE.sub("", _ESCAPE_SEQUENCE.sub("", str(text))).replace("\r\n", "\n").replace("\r", "\n")


def line(text: object, limit: int | None = None) -> str:
    """Cleans a text into one line of at most ``limit`` characters."""
    flat = re.sub(r"\s+", " ", clean(text)).strip()
    return flat if limit is None or len(flat) <= limit else flat[: limit - 2].rstrip() + " …"


def shortened(text: object, limit: int) -> str:
    """Cuts the middle out of a long line, because names of cells differ at the end."""
    flat = line(text)
    end = (limit - 1) * 2 // 3
    return flat if len(flat) <= limit else f"{flat[: limit - 1 - end]}…{flat[-end:]}"


def is_number(value: object) -> bool:
    """Tests whether it is a finite number; NaN and None stand for a missing one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: float | None) -> str:
    """Writes three significant figures, and all figures of a whole number: 0.00123, 12.3, 1,235."""
    if not is_number(value):
        return NONE
    if float(value).is_integer() and abs(value) < _IN_DIGITS:
        return f"{value:,.0f}"
    if not 1e-4 <= abs(value) < _IN_DIGITS:
        return f"{value:.2e}"
    decimals = 2 - math.floor(math.log10(float(f"{abs(value):.2e}")))
    return f"{value:,.{max(0, decimals)}f}"


def quantity(value: float | None, unit: str | None) -> str:
    """Writes a value with its unit: 12.3 ms, 2 GiB (the largest unit that keeps a whole), 15 %."""
    if not is_number(value):
        return NONE
    if unit == "bytes":
        return data_size(value)
    if unit == "share":
        return f"{number(value * 100)} %"
    return number(value) if unit in (None, "", "count") else f"{number(value)} {line(unit)}"


def percent(fraction: float | None, signed: bool = True, sign: str = " %") -> str:
    """Writes 0.1012 as +10.1 %: at most three significant figures, two decimals."""
    if not is_number(fraction):
        return NONE
    hundredths, plus = max(-_LARGEST, min(fraction * 100, _LARGEST)), "+" * signed
    if abs(hundredths) >= _IN_DIGITS:
        return f"{hundredths:{plus}.2e}{sign}"
    decimals = next(decimals for decimals, least in enumerate((99.95, 9.995, 0.0)) if abs(hundredths) >= least)
    words = f"{hundredths:{plus},.{decimals}f}"
    if float(words.replace(",", "")) == 0:
        words = words.lstrip("+-")
    return words + sign


def share(fraction: float | None) -> str:
    """Writes 0.04 as 4 %, for limits and what is compared with them; ``nothing`` for None."""
    if fraction is None:
        return "nothing"
    return f"{fraction * 100:.3g} %"


def interval(ends: tuple[float, float] | None) -> str:
    """Writes [+9.20, +11.0] in percent; empty without an interval."""
    if ends is None:
        return ""
    return "[" + ", ".join(percent(end, sign="") for end in ends) + "]"


def probability(p: float | None) -> str:
    """Writes 0.0039; below 0.0001 only that, since a p value is never 0."""
    if not is_number(p):
        return NONE
    return "< 0.0001" if p < 0.0001 else f"{p:.2g}"


def p_value(p: float | None) -> str:
    """Writes ``p = 0.0039`` or ``p < 0.0001``."""
    words = probability(p)
    return f"p {words}" if words.startswith("<") else f"p = {words}"


def figure(name: str, finding: Finding) -> str:
    """Writes one of a finding's figures: a share of the base in percent, a limit in the finding's unit."""
    value = finding.figure(name)
    if name in ("floor", "margin", "smallest_detectable") and finding.change is not None:
        return percent(value, signed=False)
    return quantity(value, finding.unit if name in ("min", "max") else None)


def bounds(finding: Finding) -> str:
    """Writes its limits: ``>= 0.9``, ``<= 2 GiB``; empty without one."""
    ends = (("min", ">="), ("min_ratio", ">="), ("max", "<="), ("max_ratio", "<="))
    return " and ".join(f"{s} {figure(name, finding)}" for name, s in ends if finding.figure(name) is not None)


def spaced(name: str) -> str:
    return line(name).replace("_", " ")


def finding_row(finding: Finding) -> tuple[str, ...]:
    return (
        line(finding.title or finding.id, 200),
        *(quantity(value, finding.unit) for value in (finding.base, finding.candidate)),
        percent(finding.change),
        interval(finding.interval),
        probability(finding.p),
        *(figure(name, finding) for name in ("floor", "margin")),
        bounds(finding),
    )


def moved_row(moved: Moved) -> tuple[str, ...]:
    return (
        line(moved.title or moved.name, 200),
        line(moved.where, 200),
        *(quantity(value, moved.unit) for value in (moved.base, moved.candidate)),
        percent(moved.change),
        percent(moved.share, signed=False),
        interval(moved.interval),
    )


def used_columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    used = [i for i in range(len(heads)) if any(row[i] not in ("", NONE) for row in rows)]
    return [heads[i] for i in used], [[row[i] for i in used] for row in rows]


def worse_sign(finding: Finding) -> int:
    return -1 if finding.higher_is_better else 1


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sorts by outcome, then overall before classes before cells, then by the change for the worse."""

    def key(finding: Finding) -> tuple[int, int, float]:
        suite = _SUITES.index(finding.suite) if finding.suite in _SUITES else len(_SUITES)
        size, floor = -math.inf, finding.figure("floor")
        if is_number(finding.change):
            size = abs(finding.change)
            if finding.higher_is_better is not None:
                size = finding.change * worse_sign(finding)
            if is_number(floor) and floor:
                size /= abs(floor)
        return list(NAMES).index(finding.outcome), suite, -size

    return sorted(findings, key=key)


def explained(findings: Sequence[Finding], most: int, sentence: str) -> list[tuple[str, Finding]]:
    """The sentences to print below a table of ``findings``, with their findings.

    Sentences that the verdict's ``sentence`` contains are left out, and those of failures after the first, whose rows
    say the same. A finding with details is always included, by its title if its sentence is left out.
    """
    sentences = []
    for i, finding in enumerate(findings):
        is_said = line(finding.sentence) in line(sentence)
        if finding.details or (not is_said and (i == 0 or finding.change is None or finding.outcome != FAIL)):
            sentences.append(((finding.title or finding.id) if is_said else finding.sentence, finding))
    return sentences[:most]


def counted(verdict: Verdict) -> str:
    """Writes ``2 failed, 1 inconclusive, 60 passed``."""
    counts = ((len(verdict.of(outcome)), name) for outcome, name in NAMES.items())
    return ", ".join(f"{count:,} {name}" for count, name in counts if count)


def sides(verdict: Verdict) -> str:
    """Names both sides as far as known: ``base main (0123456789ab), candidate HEAD (...)``."""
    names = []
    for role, side in (("base", verdict.base), ("candidate", verdict.candidate)):
        name, sha = (line(side.get(key) or "", 200) for key in ("name", "sha"))
        if name and sha and sha[:7] not in name and not sha.startswith(name):
            name = f"{name} ({sha[:12]})"
        if name or sha:
            names.append(f"{role} {name or sha[:12]}")
    return ", ".join(names)


def fact(value: object, name: str = "") -> str:
    """A value of ``Verdict.facts`` or of a side in words. ``name``: its key; a seed has no thousands separators."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return str(value) if name.endswith("seed") else number(value)
    if isinstance(value, list | tuple):
        return ", ".join(fact(entry, name) for entry in value)
    if isinstance(value, dict):
        return ", ".join(f"{line(key)} {fact(entry, str(key))}" for key, entry in value.items())
    return line(value) if value is not None else NONE
