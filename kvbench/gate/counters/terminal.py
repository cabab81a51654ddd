"""A counter verdict on the terminal, to be read in a minute: what began it, what moved, what to type."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbench.gate.verdict.text import LABELS, percent
from kvbench.gate.verdict.verdict import INVALID, PASS, Moved, Verdict

_ROWS = 12


def print_counters(verdict: Verdict, console: Console) -> None:
    """Sentences and commands are never broken, and nothing is read as markup."""
    style = "bold green" if verdict.outcome == PASS else "bold red"
    lines: list[Text] = [Text.assemble((LABELS[verdict.outcome], style), "  ", verdict.sentence)]
    if verdict.base:
        told = f"accepted {verdict.base['accepted']} at {str(verdict.base['sha'])[:12]}: {verdict.base['reason']}"
        lines.append(Text(told, style="dim"))
    lines += [Text(f"- {note}") for note in verdict.notes]
    for line in lines:
        console.print(line, soft_wrap=True)
    if verdict.moved and verdict.outcome != INVALID:
        console.print(_table(verdict.moved[:_ROWS]))
        if len(verdict.moved) > _ROWS:
            console.print(Text(f"and {len(verdict.moved) - _ROWS} more counters"))
    for title, command in (("reproduce", verdict.reproduce), ("accept", verdict.accept)):
        if command and (verdict.outcome != PASS or verdict.accept):
            console.print(Text(f"{title}: {command}"), soft_wrap=True)


def _table(moved: tuple[Moved, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("counter", no_wrap=True)
    for head in ("accepted", "now", "change", "where"):
        table.add_column(head, justify="right", no_wrap=True)
    for each in moved:
        change = "new" if each.change is None else percent(each.change)
        table.add_row(each.title, f"{each.base:,}", f"{each.candidate:,}", change, each.where)
    return table
