"""The report as GitHub-flavoured Markdown, for a CI summary: below the workload's name comes the verdict."""

from __future__ import annotations

import re
from typing import Any

from kvbench.common import text as words
from kvbench.report.document import Document
from kvbench.report.samples import OutputSamples
from kvbench.report.sections import Section
from kvbench.report.tables import Value


def markdown(report: Document) -> str:
    """The whole report as text and tables."""
    lines = [f"# {escape(report.title)}", "", f"**{escape(report.verdict)}**", ""]
    lines += [f"{report.banner}{f': {escape(report.counted)}' if report.counted else ''}.", ""]
    if report.details:
        listed = [f"- {escape(text)}" for text in report.details]
        lines += ["<details><summary>Why, and what limits the numbers</summary>", "", *listed, "", "</details>", ""]
    if report.answers:
        rows = [[escape(a.subject), escape(a.verdict), escape(a.evidence)] for a in report.answers]
        lines += ["## Answers", "", f"Against {escape(report.baseline)}.", ""]
        lines += [*words.markdown_table(["what", "answer", "numbers"], rows, 3), ""]
    if report.limits:
        rows = [[escape(text) for text in (line.load, line.limit, line.names, line.evidence)] for line in report.limits]
        lines += ["## What limited it", "", *words.markdown_table(["load", "limit", "where", "seen"], rows, 4), ""]
    for chapter in report.chapters:
        above = [line for text in chapter.sentences for line in (escape(text), "")]
        lines += [f"## {escape(chapter.title)}", "", *above]
        for section in chapter.sections:
            lines += _section(section, chapter.title)
        if report.samples and any(section.key == "outputs" for section in chapter.sections):
            lines += _samples(report.samples)
    if report.skipped:
        lines += ["## Not run", "", *(f"- {escape(note)}" for note in report.skipped), ""]
    lines += ["## Next, and where it came from", ""]
    for why, command in (*((step.why, step.command) for step in report.next_steps), ("run this again", report.command)):
        lines += [f"- {escape(words.upper_first(why))}{':' if command else ''}", ""]
        fence = "```" + "`" * command.count("`")  # longer than any in the command
        lines += [f"{fence}sh", command, fence, ""] if command else []
    facts = [[escape(name), escape(text)] for name, text in report.environment]
    lines += ["<details><summary>Environment</summary>", "", *words.markdown_table(["what", "value"], facts, 2), ""]
    manifest = report.manifest.replace("```", "'''")
    lines += ["</details>", "", "<details><summary>Manifest</summary>", "", "```json", manifest, "```", ""]
    lines += ["</details>", ""]
    return "\n".join(lines)


def _section(section: Section, chapter: str) -> list[str]:
    table = section.table
    heads = [escape(column.title) for column in table.columns]
    body = [[_entry(value) for value in row.values] for row in table.rows]
    title = [] if section.title == chapter else [f"### {escape(section.title)}", ""]
    above = [line for text in section.sentences if text for line in (escape(text), "")]
    below = [escape(section.note), ""] if section.note else []
    return [*title, *above, *words.markdown_table(heads, body, table.numbers_from), "", *below]


def _samples(samples: OutputSamples) -> list[str]:
    """The sampled requests, folded: the baseline's text and those that differ, as blocks that nothing interprets."""
    lines = ["<details><summary>Some of them</summary>", ""]
    for one in samples.requests:
        texts = [f"{samples.baseline}: {one.text}"]
        texts += [f"{v.configuration}, from {v.differs_at} on: {v.text}" for v in one.variants if v.differs_at]
        flat = [" ".join(text.split()).replace("```", "'''") for text in texts]
        lines += [f"Request {one.index} of repeat {one.repeat}, {escape(one.group)}:", "", "```text", *flat, "```", ""]
    return [*lines, "</details>", ""]


def _entry(value: Value) -> str:
    note = value.note.replace("\n", ", ")
    return escape(f"{value.text} ({note})" if note else value.text)


def escape(text: Any) -> str:
    """Text from outside as plain text: no HTML, no table breaks, no links, no emphasis, no soft hyphens."""
    flat = re.sub(r"\s+", " ", str(text)).strip().replace("\u00ad", "")
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", flat)
