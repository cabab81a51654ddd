"""summary.md: the verdict as GitHub-flavoured Markdown, its first line the verdict itself.

GitHub shows no image from a file of the job in a summary and strips ``data:`` URIs, so the pairs are drawn in text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvbench.common.text import upper_first
from kvbench.gate.verdict import strip_plot
from kvbench.gate.verdict import text as wording
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS, Finding, Verdict

SUMMARY_BYTES = 1024 * 1024  # GitHub refuses a step's summary beyond it, all of it
ROWS = 200  # of each table
PLOTS = 8
DETAILED = 3  # findings of one outcome whose details are shown
_FEWER_ROWS = (ROWS, 50, 20, 5, 1, 0)
_SENTENCE, _NAME, _DETAIL, _COMMAND = 2_000, 200, 400, 4_000  # characters
_FULL = "verdict.json and junit.xml have all"


def summary(verdict: Verdict, limit: int = SUMMARY_BYTES) -> str:
    """The summary in at most ``limit`` bytes of UTF-8: tables are cut before anything else, and say so.

    The first line is never cut away: where not even it fits, the answer is empty.
    """
    for rows in _FEWER_ROWS:
        text = _summary(verdict, rows)
        if _size(text) <= limit:
            return text
    first = first_line(verdict) + "\n"
    note = f"\nThe rest was cut: a summary may have {limit:,} bytes more; {_FULL}.\n"
    return next((text for text in (first + note, first) if _size(text) <= limit), "")


def first_line(verdict: Verdict) -> str:
    """**FAIL** - what was found"""
    return f"**{wording.LABELS[verdict.outcome]}** - {escape(wording.line(verdict.sentence, _SENTENCE))}"


def escape(text: object) -> str:
    """Text from outside as plain text in one line: no HTML, table breaks, links, emphasis, formulas."""
    flat = wording.line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_~\[\]|#$])", r"\\\1", flat)


def table(heads: Sequence[str], body: Sequence[Sequence[str]], numbers_from: int) -> list[str]:
    """A Markdown table of entries that are escaped already; columns that are empty throughout are left out."""
    used = [i for i in range(len(heads)) if any(row[i] not in ("", wording.NONE) for row in body)]
    rule = ["---:" if i >= numbers_from else "---" for i in used]
    rows = [[heads[i] for i in used], rule, *([row[i] for i in used] for row in body)]
    return ["| " + " | ".join(row) + " |" for row in rows]


def _summary(verdict: Verdict, rows: int) -> str:
    """The whole of it with at most ``rows`` rows a table."""
    lines = [first_line(verdict), "", *_sides(verdict)]
    for outcome, title in ((FAIL, "Failed"), (INVALID, "Invalid"), (INCONCLUSIVE, "Could not be told")):
        lines += _findings(verdict, outcome, title, rows)
    if verdict.outcome == EMPTY or not verdict.findings:
        lines += ["Nothing was compared, which is not a pass.", ""]
    lines += [*_moved(verdict, rows), *_notes(verdict, rows), *_plots(verdict, rows), *_commands(verdict)]
    passed = wording.worst_first(verdict.of(PASS))
    if passed:
        left = _more(len(passed) - rows, "that passed")
        lines += [f"<details><summary>{len(passed):,} passed</summary>", "", *_table(passed, rows), ""]
        lines += [*([*left, ""] if left else []), "</details>", ""]
    return "\n".join([*lines, *_facts(verdict)])


def _sides(verdict: Verdict) -> list[str]:
    known = [f"{role} {escape(words)}" for role, words in wording.sides(verdict)]
    counts = wording.counted(verdict)
    told = [", ".join(known)] if known else []
    return [". ".join(upper_first(part) for part in (*told, counts) if part) + ".", ""] if told or counts else []


def _findings(verdict: Verdict, outcome: str, title: str, rows: int) -> list[str]:
    """The table of one outcome, and sentences with details; without numbers the sentences alone."""
    findings = wording.worst_first(verdict.of(outcome))
    if not findings:
        return []
    drawn = _table(findings, rows)
    lines = [f"### {title} ({len(findings):,})", "", *drawn, *([""] if drawn else [])]
    told = wording.explained(findings, min(rows, 20 if drawn else ROWS), verdict.sentence if drawn else "")
    for i, (text, finding) in enumerate(told):
        lines.append(f"- {escape(wording.line(text, _SENTENCE))}")
        details = finding.details[:8] if i < DETAILED else ()
        lines += [f"  - {escape(wording.line(detail, _DETAIL))}" for detail in details]
        lines += [f"  - {each}" for each in _more(len(finding.details) - 8, "lines") if details]
    return [*lines, *_more(len(findings) - rows, f"that {'are ' if outcome != FAIL else ''}{_NAMES[outcome]}"), ""]


_NAMES = {FAIL: "failed", INVALID: "invalid", INCONCLUSIVE: "inconclusive"}


def _table(findings: Sequence[Finding], rows: int) -> list[str]:
    heads = ("what", "base", "candidate", "change", "95 % interval (%)", "p", "floor", "margin", "limit")
    body = [
        (
            escape(wording.line(f.title or f.id, _NAME)),
            *(escape(wording.quantity(value, f.unit)) for value in (f.base, f.candidate)),
            wording.percent(f.change),
            wording.interval(f.interval),
            escape(wording.probability(f.p)),
            *(escape(wording.figure(name, f.figures.get(name), f)) for name in ("floor", "margin")),
            escape(wording.bounds(f)),
        )
        for f in findings[:rows]
    ]
    said = any(entry not in ("", wording.NONE) for row in body for entry in row[1:])
    wanted = said or all(f.outcome == PASS for f in findings)  # a pass has no sentence below to name it
    return table(heads, body, numbers_from=1) if body and wanted else []


def _moved(verdict: Verdict, rows: int) -> list[str]:
    """Counters and step phases that moved with it, those that explain most first."""
    if not verdict.moved:
        return []
    moved = list(verdict.moved)
    heads = ("what", "where", "base", "candidate", "change", "95 % interval (%)", "of the latency's difference")
    body = [
        (
            escape(wording.line(m.title or m.name, _NAME)),
            escape(wording.line(m.where, _NAME)),
            *(escape(wording.quantity(value, m.unit)) for value in (m.base, m.candidate)),
            wording.percent(m.change),
            wording.interval(m.interval),
            wording.percent(m.share, signed=False),
        )
        for m in moved[:rows]
    ]
    found = [*table(heads, body, numbers_from=2), ""] if body else []
    left = _more(len(moved) - rows, "that moved")
    return ["### What moved with it", "", *found, *([*left, ""] if left else [])]


def _notes(verdict: Verdict, rows: int) -> list[str]:
    if not verdict.notes:
        return []
    notes = [f"- {escape(wording.line(note, _SENTENCE))}" for note in verdict.notes[:rows]]
    return ["### Notes", "", *notes, *_more(len(verdict.notes) - rows, "notes"), ""]


def _plots(verdict: Verdict, rows: int) -> list[str]:
    """The pairs of what did not pass; of a verdict that passed, those of the whole."""
    chosen = wording.worst_first(f for f in verdict.findings if f.outcome != PASS and f.series)
    chosen = chosen or wording.worst_first(f for f in verdict.findings if f.suite == "overall" and f.series)
    drawn = [(finding, lines) for finding in chosen[: min(rows, PLOTS)] if (lines := strip_plot.strip(finding))]
    if not drawn:
        return []
    dot = strip_plot.DOTS.get(verdict.kind, "pair")
    text = [strip_plot.legend([finding for finding, _ in drawn], dot)]
    text += [line for _, lines in drawn for line in ("", *lines)]
    left = _more(len(chosen) - len(drawn), "in pairs.html")
    return [f"### The {dot}s (worse to the right)", "", *fence(text), "", *([*left, ""] if left else [])]


def _commands(verdict: Verdict) -> list[str]:
    found = []
    for title, command in (("Reproduce", verdict.reproduce), ("Accept an intended change", verdict.accept)):
        if command and len(command) <= _COMMAND:
            found += [f"### {title}", "", *fence(wording.clean(command).split("\n"), "sh"), ""]
        elif command:
            found += [f"### {title}", "", f"The command has {len(command):,} characters: see verdict.json.", ""]
    return found


def fence(lines: Sequence[str], language: str = "") -> list[str]:
    """A code block that none of its lines can end."""
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    ticks = "`" * max(3, longest + 1)
    return [ticks + language, *lines, ticks]


def _facts(verdict: Verdict) -> list[str]:
    rows = [
        (f"{role} {wording.figure_name(key)}".strip(), wording.line(wording.fact(value, key), _DETAIL))
        for role, facts in (("", verdict.facts), ("base", verdict.base), ("candidate", verdict.candidate))
        for key, value in facts.items()
        if value not in (None, "", [], {}, ())
    ][:60]
    body = [(escape(wording.line(key, _NAME)), escape(value)) for key, value in rows]
    if not body:
        return []
    return ["<details><summary>The run</summary>", "", *table(("fact", "value"), body, 2), "", "</details>", ""]


def _more(count: int, what: str) -> list[str]:
    return [f"… and {count:,} more {what}; {_FULL}."] if count > 0 else []


def _size(text: str) -> int:
    return len(text.encode("utf-8"))
