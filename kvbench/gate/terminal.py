"""A verdict on the terminal: the verdict first, what did not pass, what moved with it, how to do it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbench.gate import wording
from kvbench.gate.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS, Finding, Verdict

ROWS = 20
MOVED_ROWS = 12
_STYLES = {FAIL: "bold red", INVALID: "bold red", EMPTY: "bold red", INCONCLUSIVE: "bold yellow", PASS: "bold green"}
_SHORT = {INCONCLUSIVE: "unclear"}  # as every column is wanted at 80 characters
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
    _print_reasons(findings, console)
    _print_moved(verdict, console)
    for note in verdict.notes:
        console.print(Text(f"note: {wording.line(note, _SENTENCE)}"))
    for title, command in (("reproduce", verdict.reproduce), ("accept", verdict.accept)):
        if command:
            console.print(Text(f"{title}:"), Text(wording.clean(command)), soft_wrap=True)


def _print_findings(findings: list[Finding], console: Console) -> None:
    """What did not pass, and what passed with numbers; other passes are only counted."""
    shown = [f for f in findings if f.outcome != PASS or f.candidate is not None or f.change is not None][:ROWS]
    heads = ("", "what", "base", "candidate", "change", "95 %")
    rows = [
        (
            Text(_SHORT.get(finding.outcome, wording.LABELS[finding.outcome]), style=_STYLES[finding.outcome]),
            _titled(finding.title or finding.id, finding.unit),
            *(Text(wording.number(value)) for value in (finding.base, finding.candidate)),
            Text(wording.percent(finding.change)),
            Text(wording.interval(finding.interval)),
        )
        for finding in shown
    ]
    if rows:
        console.print(_table(heads, rows))
    _print_rest(findings, shown, console)


def _print_rest(findings: list[Finding], shown: list[Finding], console: Console) -> None:
    """How many were left out, by outcome."""
    left = Counter(f.outcome for f in findings) - Counter(f.outcome for f in shown)
    told = [f"{left[outcome]:,} more {name}" for outcome, name in wording.NAMES.items() if left[outcome]]
    if told and shown:
        console.print(Text(f"… and {', '.join(told)}"))


def _print_reasons(findings: list[Finding], console: Console) -> None:
    """The sentence and the details of the worst that did not pass."""
    for finding in wording.explained([f for f in findings if f.outcome != PASS], 5):
        console.print(Text(f"- {wording.line(finding.sentence, _SENTENCE)}"))
        for detail in finding.details[:6]:
            console.print(Text(f"    {wording.line(detail, 400)}"))
        if len(finding.details) > 6:
            console.print(Text(f"    … and {len(finding.details) - 6:,} more lines in verdict.json"))


def _print_moved(verdict: Verdict, console: Console) -> None:
    if not verdict.moved:
        return
    moved = list(verdict.moved)
    heads = ("moved with it", "where", "base", "candidate", "change", "share")
    rows = [
        (
            _titled(each.title or each.name, each.unit),
            Text(wording.line(each.where, 80)),
            *(Text(wording.number(value)) for value in (each.base, each.candidate)),
            Text(wording.change(each)),
            Text(wording.percent(each.share, signed=False)),
        )
        for each in moved[:MOVED_ROWS]
    ]
    console.print(_table(heads, rows))
    if len(moved) > MOVED_ROWS:
        console.print(Text(f"… and {len(moved) - MOVED_ROWS:,} more that moved, in verdict.json"))


def _titled(title: str, unit: str | None) -> Text:
    """The title with the unit, unless it says it itself."""
    unit = wording.line(unit or "", 16)
    return Text(wording.shortened(title, 120) + (f" ({unit})" if unit and unit not in title else ""))


def _table(heads: Sequence[str], rows: Sequence[Sequence[Text]]) -> Table:
    """Without the columns that say nothing. Words fold, numbers stand whole and to the right."""
    used = [i for i in range(len(heads)) if any(row[i].plain not in ("", wording.NONE) for row in rows)]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for i in used:
        words = heads[i] in ("what", "where", "moved with it")
        left = words or not heads[i]
        table.add_column(heads[i], justify="left" if left else "right", no_wrap=not words, overflow="fold")
    for row in rows:
        table.add_row(*(row[i] for i in used))
    return table
