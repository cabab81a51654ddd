"""The report as GitHub-flavoured Markdown, for a CI summary: the first line is the verdict."""

from __future__ import annotations

import json
import re
from typing import Any

from kvbench.common import text as words
from kvbench.report.breakdown import (
    CLASS_METRICS,
    EFFECT_HEADS,
    ClassRow,
    class_name,
    class_rows,
    effect_rows,
    turn_rows,
)
from kvbench.report.client_quality import QUALITY_NOTE, quality_columns, quality_rows, quality_sentences
from kvbench.report.comparisons import paging
from kvbench.report.conclusions import conclusions, reservation
from kvbench.report.kv import SECTION, ledger_columns, ledger_note, ledger_rows, ledger_sentence
from kvbench.report.plateaus import PLATEAU_HEADS, PLATEAU_NOTE, plateau_rows
from kvbench.report.provenance import environment, made_from, reproduce, skipped_notes, warnings
from kvbench.report.sentence import headline
from kvbench.report.style import RATIO_MARKS
from kvbench.report.tables import UNCERTAIN_NOTE, Value, columns, rows
from kvbench.report.validity import validity
from kvbench.runs.model import Run

STATUS_WORDS = {
    "valid": "The measurement is valid.",
    "invalid": "**The measurement is invalid**, in part or whole:",
    "incomplete": "**The run is incomplete**:",
    "empty": "**Nothing was measured.**",
}


def markdown(run: Run) -> str:
    """The whole report as text and tables."""
    state = validity(run)
    context = [text for text in (made_from(run), *(reservation(p) for p in paging(run)[-1:])) if text]
    lines = [f"**{escape(headline(run))}**", ""]
    for text in context:
        lines += [f"{escape(words.upper_first(text))}", ""]
    lines += [STATUS_WORDS[state.status], ""]
    lines += [f"- {escape(reason)}" for reason in state.reasons]
    lines += [f"- Note: {escape(text)}" for text in warnings(run)]
    lines += ["", "## All cells", "", *_cells(run), ""]
    for conclusion in conclusions(run):
        lines += [f"## {escape(conclusion.title)}", "", *(f"- {escape(p)}" for p in conclusion.points), ""]
    lines += _ledger(run)
    changed = effect_rows(run)
    if changed:
        lines += [
            "## One setting changed alone from the baseline",
            "",
            *_table(
                ["setting", "change", "load", *EFFECT_HEADS],
                [
                    [
                        row.effect.title,
                        row.effect.change,
                        row.effect.comparison.load.short,
                        *(_entry(v) for v in row.values),
                    ]
                    for row in changed
                ],
            ),
            "",
        ]
    lines += _groups("By class", "class", class_rows(run))
    lines += _groups("By turn of the conversation", "turn", turn_rows(run))
    if steps := plateau_rows(run):
        body = [list(row.values) for row in steps]
        lines += ["## Step by step of the rate", "", *_table(list(PLATEAU_HEADS), body), "", escape(PLATEAU_NOTE), ""]
    if skipped := skipped_notes(run):
        lines += ["## Not run", "", *(f"- {escape(note)}" for note in skipped), ""]
    if run.cells:
        quality = [[_entry(value) for value in row.values] for row in quality_rows(run)]
        lines += ["## How good was the measurement", ""]
        lines += [line for sentence in quality_sentences(run) for line in (escape(sentence), "")]
        lines += [*_table([c.title for c in quality_columns(run)], quality), "", escape(QUALITY_NOTE), ""]
    lines += _origin(run)
    return "\n".join(lines)


def _groups(title: str, head: str, rows_: list[ClassRow]) -> list[str]:
    if not rows_:
        return []
    heads = [head, "load", "configuration", "requests", *(f"{m[:-3].upper()} {w}" for m, w in CLASS_METRICS)]
    body = [
        [class_name(row), row.cell.load.short, row.cell.name, str(row.n), *(v.text for v in row.values)]
        for row in rows_
    ]
    return [f"## {title}", "", *_table(heads, body), ""]


def _ledger(run: Run) -> list[str]:
    body = [[_entry(value) for value in row.values] for row in ledger_rows(run)]
    if not body:
        return []
    heads = [column.title.replace("-", "") for column in ledger_columns(run)]
    said = ledger_sentence(run)
    return [
        f"## {SECTION}",
        "",
        *([escape(said), ""] if said else []),
        *_table(heads, body),
        "",
        escape(ledger_note(run)),
        "",
    ]


def _origin(run: Run) -> list[str]:
    lines: list[str] = []
    command = reproduce(run)
    if command:
        lines += ["## Reproduce", "", "```sh", command.replace("```", ""), "```", ""]
    lines += ["## Environment", "", *_table(["what", "value"], [[k, v] for k, v in environment(run)]), ""]
    lines += [
        "<details><summary>Manifest</summary>",
        "",
        "```json",
        json.dumps(dict(run.manifest), indent=1, default=str).replace("```", "'''"),
        "```",
        "",
        "</details>",
        "",
    ]
    return lines


def escape(text: Any) -> str:
    """Text from outside as plain text: no HTML, no table breaks, no links, no emphasis."""
    flat = re.sub(r"\s+", " ", str(text)).strip()
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", flat)


def _cells(run: Run) -> list[str]:
    shown = columns(run)
    body = [[_entry(value) for value in row.values] for row in rows(run)]
    body += [[f"{cell} (not measured)", *("–" for _ in shown[1:])] for cell in run.missing]
    lines = _table([column.title.replace("-", "") for column in shown], body)
    lines += [
        "",
        escape(
            f'Ratios are paired by repeat: {RATIO_MARKS}. TTFT is of the whole run; "steady" of the requests due '
            "in the steady window only."
        ),
    ]
    if slo := words.slo_words(run.load_section.get("slo")):
        lines += ["", escape(f"Goodput: requests/s that met {slo}.")]
    if any(v.uncertain for row in rows(run) for v in row.values):
        lines += ["", escape(UNCERTAIN_NOTE)]
    return lines


def _entry(value: Value) -> str:
    note = value.note.replace("\n", ", ")
    return f"{value.text} ({note})" if note else value.text


def _table(heads: list[str], body: list[list[str]]) -> list[str]:
    if not body:
        return ["(none)"]
    numeric = ["---" if i == 0 else "--:" for i in range(len(heads))]
    return [
        f"| {' | '.join(escape(entry) for entry in entries)} |"
        if entries is not numeric
        else f"| {' | '.join(numeric)} |"
        for entries in (heads, numeric, *body)
    ]
