"""summary.md: the verdict as GitHub-flavoured Markdown, its first line the verdict itself.

GitHub shows no image from a file of the job in a summary and strips ``data:`` URIs, so the pairs are drawn in text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from kvbench.common.text import markdown_table, upper_first
from kvbench.gate.verdict import wording
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS, Finding, Verdict

SUMMARY_BYTES = 1024 * 1024  # GitHub refuses a step's summary beyond it, all of it
PLOTS = 8
DETAILED = 3  # findings of one outcome whose details are shown
WIDTH = 60  # columns of a plot
_ROWS = (200, 50, 20, 5, 1, 0)  # of each table: fewer where the summary is too long
_SENTENCE, _DETAIL, _COMMAND = 2_000, 400, 4_000  # characters
_FULL = "verdict.json and junit.xml have all"


def summary(verdict: Verdict, limit: int = SUMMARY_BYTES) -> str:
    """The summary in at most ``limit`` bytes of UTF-8: tables are cut before anything else, and say so.

    The first line is never cut: where not even it fits, the answer is empty.
    """
    first = first_line(verdict) + "\n"
    note = f"\nThe rest was cut: a summary may have {limit:,} bytes more; {_FULL}.\n"
    texts = (*(lambda rows=rows: _summary(verdict, rows) for rows in _ROWS), lambda: first + note, lambda: first)
    return next((text for make in texts if len((text := make()).encode()) <= limit), "")


def first_line(verdict: Verdict) -> str:
    """**FAIL** - what was found"""
    return f"**{wording.LABELS[verdict.outcome]}** - {escape(wording.line(verdict.sentence, _SENTENCE))}"


def escape(text: object) -> str:
    """Text from outside as plain text in one line: no HTML, table breaks, links, emphasis, formulas."""
    flat = wording.line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_~\[\]|#$])", r"\\\1", flat)


def _summary(verdict: Verdict, rows: int) -> str:
    """The whole of it with at most ``rows`` rows a table."""
    about = [", ".join(map(escape, wording.sides(verdict))), wording.counted(verdict)]
    about_line = ". ".join(upper_first(part) for part in about if part)
    lines = [first_line(verdict), "", *([f"{about_line}.", ""] if about_line else [])]
    for outcome, title in ((FAIL, "Failed"), (INVALID, "Invalid"), (INCONCLUSIVE, "Inconclusive")):
        lines += _findings(verdict, outcome, title, rows)
    if verdict.outcome == EMPTY or not verdict.findings:
        lines += ["Nothing was compared, which is not a pass.", ""]
    if verdict.moved:
        moved = _table(wording.MOVED_HEADS, [wording.moved_row(m) for m in verdict.moved[:rows]], numbers_from=2)
        lines += ["### What moved with it", "", *moved, *_more(len(verdict.moved) - rows, "that moved"), ""]
    if verdict.notes:
        notes = [f"- {escape(wording.line(note, _SENTENCE))}" for note in verdict.notes[:rows]]
        lines += ["### Notes", "", *notes, *_more(len(verdict.notes) - rows, "notes"), ""]
    lines += [*_plots(verdict, rows), *_commands(verdict)]
    if passed := wording.worst_first(verdict.of(PASS)):
        table = _table(wording.FINDING_HEADS, [wording.finding_row(f) for f in passed[:rows]])
        body = [*table, *_more(len(passed) - rows, "that passed")]
        lines += _folded(f"{len(passed):,} passed", body)
    return "\n".join([*lines, *_facts(verdict)])


def _findings(verdict: Verdict, outcome: str, title: str, rows: int) -> list[str]:
    """The table of one outcome and sentences with details; the sentences alone where there are no numbers."""
    findings = wording.worst_first(verdict.of(outcome))
    if not findings:
        return []
    entries = [wording.finding_row(finding) for finding in findings[:rows]]
    has_numbers = any(entry not in ("", wording.NONE) for row in entries for entry in row[1:])
    table = _table(wording.FINDING_HEADS, entries) if has_numbers else []
    lines = [f"### {title} ({len(findings):,})", "", *table]
    most = min(rows, 20 if table else _ROWS[0])
    for i, (text, finding) in enumerate(wording.explained(findings, most, verdict.sentence if table else "")):
        lines.append(f"- {escape(wording.line(text, _SENTENCE))}")
        if i < DETAILED and finding.details:
            lines += [f"  - {escape(wording.line(detail, _DETAIL))}" for detail in finding.details[:8]]
            lines += [f"  - {each}" for each in _more(len(finding.details) - 8, "lines")[-1:]]
    return [*lines, *_more(len(findings) - rows, title.lower()), ""]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int = 1) -> list[str]:
    """A Markdown table of entries that are not escaped, and the empty line that ends it; nothing without rows."""
    if not rows:
        return []
    used, entries = wording.used_columns(heads, rows)
    return [*markdown_table(used, [list(map(escape, row)) for row in entries], numbers_from), ""]


def _plots(verdict: Verdict, rows: int) -> list[str]:
    """The pairs of what did not pass; of a verdict that passed, those of the whole."""
    with_pairs = [f for f in verdict.findings if any(map(wording.is_number, f.series))]
    chosen = wording.worst_first(f for f in with_pairs if f.outcome != PASS)
    chosen = chosen or wording.worst_first(f for f in with_pairs if f.suite == "overall")
    drawn = chosen[: min(rows, PLOTS)]
    if not drawn:
        return []
    dot = wording.dot_of(verdict)
    text = [legend(drawn, dot)] + [line for finding in drawn for line in ("", *strip(finding))]
    return [f"### The {dot}s (worse to the right)", "", *fence(text), *_more(len(chosen) - len(drawn), "plots"), ""]


def strip(finding: Finding, width: int = WIDTH) -> list[str]:
    """The lines of one plot, worse to the right, in ASCII, so that all columns are equally wide.

    p95 ITL, overall: FAIL, +10.1 % [+9.20, +11.0]
                                                   o  o 2o o o   o
                                                      [===*===]
    0----------M--------F-----------------------------------------
    0.00 %                                                  +11.4 %
    """
    low, high = wording.plot_range(finding)
    low, high = (low, high) if high - low > 1e-9 else (-0.001, 0.001)
    turned = wording.worse_sign(finding) < 0

    def column(change: float) -> int:
        share = (change - low) / (high - low)
        return round((1 - share if turned else share) * (width - 1))

    dots = Counter(column(value) for value in finding.series if wording.is_number(value))
    effect, axis = [" "] * width, ["-"] * width
    if finding.interval and all(map(wording.is_number, finding.interval)):
        first, last = sorted(map(column, finding.interval))
        effect[first : last + 1] = ["[", *"=" * (last - first - 1), "]"] if last > first else ["]"]
    if wording.is_number(finding.change):
        effect[column(finding.change)] = "*"
    for name, change in (("0", 0.0), *wording.thresholds(finding)):
        axis[column(change)] = name[0].upper()
    ends = [wording.percent(end) for end in ((high, low) if turned else (low, high))]
    lines = [
        f"{wording.shortened(finding.title, 120)}: {wording.LABELS[finding.outcome]}, {wording.change(finding)}",
        "".join(" " if not dots[i] else "o" if dots[i] == 1 else str(min(9, dots[i])) for i in range(width)),
        "".join(effect),
        "".join(axis),
        ends[0] + ends[1].rjust(width - len(ends[0])),
    ]
    return [line.rstrip() for line in lines if line.strip()]


def legend(findings: Sequence[Finding], dot: str) -> str:
    """The meaning of the signs in these plots."""
    marks = {name for finding in findings for name, _ in wording.thresholds(finding)}
    effect = "[==*==] the effect and its 95 % interval" if any(f.interval for f in findings) else "* what is judged"
    known = [f"{name[0].upper()} {name}" for name in ("floor", "margin", "limit") if name in marks]
    return "   ".join([f"o one {dot} (a digit: so many)", effect, "0 no change", *known])


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
    ]
    return _folded("The run", _table(("fact", "value"), rows[:60], 2)) if rows else []


def _folded(title: str, lines: Sequence[str]) -> list[str]:
    return [f"<details><summary>{title}</summary>", "", *lines, "</details>", ""]


def _more(count: int, what: str) -> list[str]:
    return ["", f"… and {count:,} more {what}; {_FULL}."] if count > 0 else []
