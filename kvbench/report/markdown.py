"""The report as GitHub-flavoured Markdown, for a CI summary: below the workload's name comes the verdict."""

from __future__ import annotations

import json
import re
from typing import Any

from kvbench.common import text as words
from kvbench.report.page import context
from kvbench.report.provenance import environment, reproduce, skipped_notes, validity, warnings
from kvbench.report.sections import Section, sections
from kvbench.report.tables import Value
from kvbench.report.wording import conclusions, headline
from kvbench.runs.model import Run

_STATUS = {
    "valid": "The measurement is valid.",
    "invalid": "**The measurement is invalid**, in part or whole:",
    "incomplete": "**The run is incomplete**:",
    "empty": "**No load was measured.**",
}


def markdown(run: Run) -> str:
    """The whole report as text and tables."""
    state = validity(run)
    lines = [f"# {escape(run.workload)}", "", f"**{escape(headline(run))}**", ""]
    lines += [line for text in context(run) for line in (escape(text), "")]
    lines += [_STATUS[state.status], ""]
    lines += [f"- {escape(reason)}" for reason in state.reasons]
    lines += [f"- Note: {escape(text)}" for text in warnings(run)]
    lines += [""]
    for conclusion in conclusions(run):
        lines += [f"## {escape(conclusion.title)}", "", *(f"- {escape(p)}" for p in conclusion.points), ""]
    for section in sections(run):
        lines += _section(section)
    if skipped := skipped_notes(run):
        lines += ["## Not run", "", *(f"- {escape(note)}" for note in skipped), ""]
    if command := reproduce(run):
        lines += ["## Reproduce", "", "```sh", command.replace("```", ""), "```", ""]
    facts = [[escape(name), escape(text)] for name, text in environment(run)]
    lines += ["## Environment", "", *words.markdown_table(["what", "value"], facts, 2), ""]
    manifest = json.dumps(dict(run.manifest), indent=1, default=str).replace("```", "'''")
    lines += ["<details><summary>Manifest</summary>", "", "```json", manifest, "```", "", "</details>", ""]
    return "\n".join(lines)


def _section(section: Section) -> list[str]:
    table = section.table
    heads = [escape(column.title) for column in table.columns]
    body = [[_entry(value) for value in row.values] for row in table.rows]
    above = [line for text in section.sentences if text for line in (escape(text), "")]
    rows = words.markdown_table(heads, body, table.numbers_from)
    return [f"## {section.title}", "", *above, *rows, "", escape(section.note), ""]


def _entry(value: Value) -> str:
    note = value.note.replace("\n", ", ")
    return escape(f"{value.text} ({note})" if note else value.text)


def escape(text: Any) -> str:
    """Text from outside as plain text: no HTML, no table breaks, no links, no emphasis, no soft hyphens."""
    flat = re.sub(r"\s+", " ", str(text)).strip().replace("\u00ad", "")
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", flat)
