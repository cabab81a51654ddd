"""The file summary.md: the verdict as GitHub-flavoured Markdown, its first line the verdict itself."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvbench.common.text import markdown_table, upper_first
from kvbench.gate.verdict import wording
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS, Verdict

SUMMARY_BYTES = 1024 * 1024  # GitHub refuses a step's summary beyond it, all of it
DETAILED = 3  # findings of one outcome whose details are shown
_ROWS = (200, 50, 20, 5, 1, 0)  # of each table: fewer where the summary is too long
_SENTENCE, _DETAIL = 2_000, 400  # characters
_FULL = "verdict.json and junit.xml have all"


def summary(verdict: Verdict, limit: int = SUMMARY_BYTES) -> str:
    """The summary in at most ``limit`` bytes of UTF-8: tables are cut first, and say so.

    The first line is never cut: the result is empty if not even that fits.
    """
    first = first_line(verdict) + "\n"
    note = f"\nThe rest was cut: a summary may have {limit:,} bytes more; {_FULL}.\n"
    shorter = (*(lambda rows=rows: _summary(verdict, rows) for rows in _ROWS), lambda: first + note, lambda: first)
    return next((text for make in shorter if len((text := make()).encode()) <= limit), "")


def first_line(verdict: Verdict) -> str:
    return f"**{wording.LABELS[verdict.outcome]}** - {escape(verdict.sentence, _SENTENCE)}"


def escape(text: object, limit: int | None = None) -> str:
    """Puts ``text`` into one line with all marks of HTML and Markdown escaped."""
    flat = wording.line(text, limit).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_~\[\]|#$])", r"\\\1", flat)


def _summary(verdict: Verdict, rows: int) -> str:
    about = [escape(wording.sides(verdict)), wording.counted(verdict)]
    about_line = ". ".join(upper_first(part) for part in about if part)
    lines = [first_line(verdict), ""]
    if about_line:
        lines += [f"{about_line}.", ""]
    for outcome, title in ((FAIL, "Failed"), (INVALID, "Invalid"), (INCONCLUSIVE, "Inconclusive")):
        lines += _findings(verdict, outcome, title, rows)
    if verdict.outcome == EMPTY or not verdict.findings:
        lines += ["Nothing was compared, which is not a pass.", ""]
    if verdict.moved:
        moved = _table(wording.MOVED_HEADS, [wording.moved_row(m) for m in verdict.moved[:rows]], numbers_from=2)
        lines += ["### What moved with it", "", *moved, *_more(len(verdict.moved) - rows, "that moved"), ""]
    if verdict.notes:
        notes = [f"- {escape(note, _SENTENCE)}" for note in verdict.notes[:rows]]
        lines += ["### Notes", "", *notes, *_more(len(verdict.notes) - rows, "notes"), ""]
    for title, command in (("Reproduce", verdict.reproduce), ("Accept an intended change", verdict.accept)):
        if command:
            ticks = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", command))])  # no line of it ends the block
            lines += [f"### {title}", "", f"{ticks}sh", *wording.clean(command).split("\n"), ticks, ""]
    if passed := wording.worst_first(verdict.of(PASS)):
        table = _table(wording.FINDING_HEADS, [wording.finding_row(f) for f in passed[:rows]])
        lines += _folded(f"{len(passed):,} passed", [*table, *_more(len(passed) - rows, "that passed")])
    facts = [
        (f"{role} {wording.spaced(key)}".strip(), wording.line(wording.fact(value, key), _DETAIL))
        for role, facts_of_role in (("", verdict.facts), ("base", verdict.base), ("candidate", verdict.candidate))
        for key, value in facts_of_role.items()
        if value not in (None, "", [], {}, ())
    ]
    if facts:
        lines += _folded("The run", _table(("fact", "value"), facts[:60], 2))
    return "\n".join(lines)


def _findings(verdict: Verdict, outcome: str, title: str, rows: int) -> list[str]:
    """The findings of one outcome: their table, if they have numbers, and sentences with details."""
    findings = wording.worst_first(verdict.of(outcome))
    if not findings:
        return []
    entries = [wording.finding_row(finding) for finding in findings[:rows]]
    has_numbers = any(entry not in ("", wording.NONE) for row in entries for entry in row[1:])
    table, most, shown = [], _ROWS[0], ""
    if has_numbers:
        table, most, shown = _table(wording.FINDING_HEADS, entries), 20, verdict.sentence
    lines = [f"### {title} ({len(findings):,})", "", *table]
    for i, (text, finding) in enumerate(wording.explained(findings, min(rows, most), shown)):
        lines.append(f"- {escape(text, _SENTENCE)}")
        if i < DETAILED:
            lines += [f"  - {escape(detail, _DETAIL)}" for detail in finding.details[:8]]
            lines += [f"  - {line}" for line in _more(len(finding.details) - 8, "lines")[1:]]
    return [*lines, *_more(len(findings) - rows, title.lower()), ""]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int = 1) -> list[str]:
    """A Markdown table with its entries escaped, and an empty line; nothing without rows."""
    if not rows:
        return []
    used, entries = wording.used_columns(heads, rows)
    return [*markdown_table(used, [list(map(escape, row)) for row in entries], numbers_from), ""]


def _folded(title: str, lines: Sequence[str]) -> list[str]:
    return [f"<details><summary>{title}</summary>", "", *lines, "</details>", ""]


def _more(count: int, what: str) -> list[str]:
    return ["", f"… and {count:,} more {what}; {_FULL}."] * (count > 0)
