"""A verdict on the terminal: the verdict first, what did not pass, what moved with it, how to do it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbench.gate.verdict import text as wording
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS, Finding, Verdict

ROWS = 20
MOVED_ROWS = 12
_STYLES = {FAIL: "bold red", INVALID: "bold red", EMPTY: "bold red", INCONCLUSIVE: "bold yellow", PASS: "bold green"}
_SHORT = {INCONCLUSIVE: "unclear"}  # as every column is wanted at 80 characters
_UNITS = {"tokens/s": "tok/s", "per 1,000 output tokens": "per 1,000 tok"}
_WORDS = ("what", "moved with it")
_SENTENCE = 2_000


def print_verdict(verdict: Verdict, console: Console) -> None:
    """All a person needs of it; nothing from outside is read as markup. Commands are never wrapped."""
    label = Text(wording.LABELS[verdict.outcome], style=_STYLES[verdict.outcome])
    console.print(Text.assemble(label, "  ", wording.line(verdict.sentence, _SENTENCE)))
    known = ", ".join(f"{role} {words}" for role, words in wording.sides(verdict))
    for told in (known, wording.counted(verdict)):
        if told:
            console.print(Text(told, style="dim"))
    findings = wording.worst_first(verdict.findings)
    _print_findings(findings, console)
    _print_reasons(findings, verdict.sentence, console)
    _print_moved(verdict, console)
    for note in verdict.notes:
        console.print(Text(f"note: {wording.line(note, _SENTENCE)}"), soft_wrap=": kvbench " in note)
    for title, command in (("reproduce", verdict.reproduce), ("accept", verdict.accept)):
        if command:
            console.print(Text(f"{title}:"), Text(wording.clean(command)), soft_wrap=True)


def _print_findings(findings: list[Finding], console: Console) -> None:
    """What did not pass, and what passed with numbers; other passes are only counted."""
    told = [f for f in findings if f.outcome != PASS or f.candidate is not None or f.change is not None]
    headed = _headed(told)[:ROWS]
    rows = [
        (
            head,
            Text(_SHORT.get(finding.outcome, wording.LABELS[finding.outcome]), style=_STYLES[finding.outcome]),
            name,
            *(Text(wording.number(value)) for value in (finding.base, finding.candidate)),
            Text(wording.percent(finding.change)),
            Text(wording.interval(finding.interval)),
        )
        for head, name, finding in headed
    ]
    if rows:
        console.print(_table(("", "what", "base", "candidate", "change", "95 %"), rows))
    _print_rest(findings, [finding for _, _, finding in headed], console)


def _headed(findings: list[Finding]) -> list[tuple[str, Text, Finding]]:
    """What the rows of a comparison stand under, and what is left to name them by: cells under their metric, or the
    metrics of an only cell under it. Of one outcome, those under one head follow one another.
    """
    named = [(finding, *wording.metric_and_place(finding)) for finding in findings]
    by_place = len({place for _, _, place in named}) == 1
    found = []
    for finding, metric, place in named:
        titled = _titled(metric, finding.unit)
        head, name = ("", titled) if not place else (place, titled) if by_place else (titled.plain, Text(place))
        found.append((head, name, finding))
    heads = [head for head, _, _ in found]
    return sorted(found, key=lambda each: (wording.RANKS[each[2].outcome], heads.index(each[0])))


def _print_rest(findings: list[Finding], shown: list[Finding], console: Console) -> None:
    """How many were left out, by outcome."""
    left = Counter(f.outcome for f in findings) - Counter(f.outcome for f in shown)
    told = [f"{left[outcome]:,} more {name}" for outcome, name in wording.NAMES.items() if left[outcome]]
    if told and shown:
        console.print(Text(f"… and {', '.join(told)}"))


def _print_reasons(findings: list[Finding], said: str, console: Console) -> None:
    """Why the worst did not pass, as far as ``said``, the first line, does not have it already."""
    for text, finding in wording.explained([f for f in findings if f.outcome != PASS], 5, said):
        console.print(Text(f"- {wording.line(text, _SENTENCE)}"))
        for detail in finding.details[:6]:
            console.print(Text(f"    {wording.line(detail, 400)}"))
        if len(finding.details) > 6:
            console.print(Text(f"    … and {len(finding.details) - 6:,} more lines in verdict.json"))


def _print_moved(verdict: Verdict, console: Console) -> None:
    if not verdict.moved:
        return
    places = [each.where for each in verdict.moved]
    moved = sorted(verdict.moved, key=lambda each: places.index(each.where))
    rows = [
        (
            wording.line(each.where, 80),
            _titled(each.title or each.name, each.unit),
            *(Text(wording.number(value)) for value in (each.base, each.candidate)),
            Text(wording.percent(each.change)),
            Text(wording.percent(each.share, signed=False)),
        )
        for each in moved[:MOVED_ROWS]
    ]
    console.print(_table(("moved with it", "base", "candidate", "change", "share"), rows))
    if len(moved) > MOVED_ROWS:
        console.print(Text(f"… and {len(moved) - MOVED_ROWS:,} more that moved, in verdict.json"))


def _titled(title: str, unit: str | None) -> Text:
    """The title with the unit, unless it says it itself."""
    unit = _UNITS.get(unit or "", wording.line(unit or "", 16))
    return Text(wording.shortened(title, 120) + (f" ({unit})" if unit and unit not in title else ""))


def _table(heads: Sequence[str], rows: Sequence[tuple[str, *tuple[Text, ...]]]) -> Table:
    """Each row begins with its head, which is a line of its own above the rows that have it in common.

    Columns that say nothing are left out. Words fold, numbers stand whole and to the right.
    """
    entries = [row[1:] for row in rows]
    used = [i for i in range(len(heads)) if any(entry[i].plain not in ("", wording.NONE) for entry in entries)]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0, header_style="bold")
    for i in used:
        words = heads[i] in _WORDS
        left = words or not heads[i]
        table.add_column(heads[i], justify="left" if left else "right", no_wrap=not words, overflow="fold")
    known = ""
    for head, *entry in rows:
        if head and head != known:
            table.add_row(*(Text(head, style="bold") if heads[i] in _WORDS else "" for i in used))
        known = head
        indent = "  " if head else ""
        table.add_row(*(Text(indent) + entry[i] if heads[i] in _WORDS else entry[i] for i in used))
    return table
