"""A verdict on the terminal: its sentence, the findings, what moved with them, and the commands that go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbench.common.console import make_table, print_table
from kvbench.gate.verdict import wording
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS, Verdict

ROWS = 20
MOVED_ROWS = 12
_STYLES = {FAIL: "bold red", INVALID: "bold red", EMPTY: "bold red", INCONCLUSIVE: "bold yellow", PASS: "bold green"}
_STYLE_OF = {label: _STYLES[outcome] for outcome, label in wording.LABELS.items()}
_SENTENCE, _DETAIL = 2_000, 400  # characters
_REASONS, _DETAILS = 2, 3
_DROP_FIRST = ("base", "95 % interval (%)", "candidate")  # on a narrow terminal: the change is what was judged


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Prints a verdict of any gate. Nothing from outside is read as markup; commands are never wrapped."""
    label = Text(wording.LABELS[verdict.outcome], style=_STYLES[verdict.outcome])
    console.print(Text.assemble(label, "  ", wording.line(verdict.sentence, _SENTENCE)))
    for about in filter(None, (wording.sides(verdict), wording.counted(verdict))):
        console.print(Text(about, style="dim"))
    findings = wording.worst_first(verdict.findings)
    # What did not pass, and what passed with numbers; other passes are only counted.
    shown = [f for f in findings if f.outcome != PASS or f.candidate is not None or f.change is not None][:ROWS]
    if shown:
        rows = [[wording.LABELS[f.outcome], *_plain(wording.finding_row(f), f.unit, (1, 2))[:5]] for f in shown]
        print_table(console, _table(("outcome", *wording.FINDING_HEADS[:5]), rows, 2), drop_first=_DROP_FIRST)
        if left := Counter(f.outcome for f in findings) - Counter(f.outcome for f in shown):
            more = ", ".join(f"{left[o]:,} more {name}" for o, name in wording.NAMES.items() if left[o])
            console.print(Text(f"… and {more}"))
    failed = [finding for finding in findings if finding.outcome != PASS]
    for text, finding in wording.explained(failed, _REASONS, verdict.sentence):
        console.print(Text(f"- {wording.line(text, _SENTENCE)}"))
        for detail in finding.details[:_DETAILS]:
            console.print(Text(f"    {wording.line(detail, _DETAIL)}"))
        _print_more(len(finding.details) - _DETAILS, "lines in verdict.json", console, indent="    ")
    if verdict.moved:
        rows = [_plain(wording.moved_row(m), m.unit, (2, 3))[:6] for m in verdict.moved[:MOVED_ROWS]]
        print_table(console, _table(wording.MOVED_HEADS[:6], rows, 2), drop_first=_DROP_FIRST)
        _print_more(len(verdict.moved) - MOVED_ROWS, "that moved, in verdict.json", console)
    for note in verdict.notes:
        console.print(Text(f"note: {wording.line(note, _SENTENCE)}"), soft_wrap=": kvbench " in note)
    for title, command in (("reproduce", verdict.reproduce), ("accept", verdict.accept)):
        if command:
            console.print(Text(f"{title}: {wording.clean(command)}"), soft_wrap=True)


def _print_more(count: int, what: str, console: Console, indent: str = "") -> None:
    if count > 0:
        console.print(Text(f"{indent}… and {count:,} more {what}"))


def _plain(row: Sequence[str], unit: str | None, values: tuple[int, int]) -> list[str]:
    """A row with its unit behind the first entry instead of behind its values, which saves width."""
    unit = wording.line(unit or "", 24)
    if not unit or unit in ("bytes", "share", "count"):
        return list(row)
    entries = [entry.removesuffix(f" {unit}") if i in values else entry for i, entry in enumerate(row)]
    return [entries[0] if unit in entries[0] else f"{entries[0]} ({unit})", *entries[1:]]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int) -> Table:
    """Makes a table without the columns that are empty throughout."""
    used, entries = wording.used_columns(heads, rows)
    styled = [(Text(first, style=_STYLE_OF.get(first, "")), *rest) for first, *rest in entries]
    texts = sum(head in heads[:numbers_from] for head in used)
    return make_table(used, styled, numbers_from=texts, tight=True)
