"""The report as one HTML file that needs nothing else: no network, no fonts, no second file."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

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
from kvbench.report.comparisons import LEVEL, NOT_TOLD, SCATTER, paging
from kvbench.report.conclusions import conclusions, reservation, tiles
from kvbench.report.figures import drawings
from kvbench.report.kv import SECTION, ledger_columns, ledger_note, ledger_rows
from kvbench.report.plateaus import PLATEAU_HEADS, PLATEAU_NOTE, plateau_rows
from kvbench.report.provenance import (
    brief,
    code_paths,
    environment,
    made_from,
    repeats_are,
    reproduce,
    skipped_notes,
    warnings,
)
from kvbench.report.sentence import headline
from kvbench.report.style import RATIO_MARKS, Drawing, looks
from kvbench.report.tables import UNCERTAIN_NOTE, columns, rows
from kvbench.report.validity import validity
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Run

BANNERS = {
    "valid": "Valid measurement, complete run",
    "invalid": "Invalid measurement, in part or whole: do not rely on it",
    "incomplete": "Incomplete run",
    "empty": "Nothing was measured",
}
CLASS_HEADS = (
    "class",
    "load",
    "configuration",
    "requests",
    *(f"{m[:-3].upper()} {w}" for m, w in CLASS_METRICS),
)
SAMPLES_PER_CELL = 2
SAMPLE_CHARACTERS = 600


def page(run: Run) -> str:
    """The whole page. Everything that came from outside is escaped by the template."""
    drawn = drawings(run)
    template = _environment().from_string(_asset("page.html.j2"))
    return template.render(
        run=run,
        **_findings(run),
        **_tables(run),
        **_reading(run),
        **_origin(run),
        drawings=drawn,
        loop_index={drawing.key: i for i, drawing in enumerate(drawn)},
        figures_json=Markup(figures_json(drawn)),
        css=Markup(_asset("page.css")),
        js=Markup(_asset("page.js")),
        plotly_js=Markup(get_plotlyjs()),
    )


def _findings(run: Run) -> dict[str, Any]:
    """What was found, and whether it holds."""
    workload = run.manifest.get("workload")
    return {
        "verdict": headline(run),
        "description": workload.get("description") if isinstance(workload, dict) else None,
        "brief": brief(run),
        "context": [text for text in (made_from(run), *(reservation(p) for p in paging(run)[-1:])) if text],
        "state": validity(run),
        "banner": BANNERS[validity(run).status],
        "warnings": warnings(run),
        "tiles": tiles(run),
        "conclusions": conclusions(run),
    }


def _tables(run: Run) -> dict[str, Any]:
    """Heads, rows and captions of the tables."""
    body = rows(run)
    loads = [row.cell.load for row in body]
    return {
        "ledger_title": SECTION,
        "ledger_columns": ledger_columns(run),
        "ledger_rows": ledger_rows(run),
        "ledger_note": ledger_note(run),
        "columns": columns(run),
        "rows": body,
        "looks": looks(run),
        "group_starts": {i for i in range(1, len(loads)) if loads[i] != loads[i - 1]},
        "slo": words.slo_words(run.load_section.get("slo")),
        "uncertain": UNCERTAIN_NOTE if any(v.uncertain for r in body for v in r.values) else "",
        "uncertain_note": UNCERTAIN_NOTE,
        "effect_rows": effect_rows(run),
        "effect_heads": EFFECT_HEADS,
        "class_groups": _by_load(run, class_rows(run)),
        "turn_groups": _by_load(run, turn_rows(run)),
        "class_name": class_name,
        "class_heads": CLASS_HEADS,
        "plateau_rows": plateau_rows(run),
        "plateau_heads": PLATEAU_HEADS,
        "plateau_note": PLATEAU_NOTE,
        "quality_sentences": quality_sentences(run),
        "quality_open": validity(run).status == "invalid",
        "quality_columns": quality_columns(run),
        "quality_rows": quality_rows(run),
        "quality_note": QUALITY_NOTE,
    }


def _reading(run: Run) -> dict[str, Any]:
    """How to read it."""
    return {
        "level_percent": f"{LEVEL:.0%}".replace("%", " %"),
        "scatter": f"{SCATTER:g}",
        "not_told": NOT_TOLD,
        "ratio_marks": RATIO_MARKS,
        "repeats_are": repeats_are(run),
        "code_paths": code_paths(run),
    }


def _origin(run: Run) -> dict[str, Any]:
    """Where it came from, and what is not in it."""
    return {
        "skipped": skipped_notes(run),
        "samples": samples(run),
        "command": reproduce(run),
        "environment": environment(run),
        "manifest": json.dumps(dict(run.manifest), indent=2, default=str),
    }


def _by_load(run: Run, rows_: list[ClassRow]) -> list[tuple[MeasuredLoad, list[ClassRow]]]:
    groups = [(load, [row for row in rows_ if row.cell.load == load]) for load in reversed(run.loads)]
    return [group for group in groups if group[1]]


def figures_json(drawn: list[Drawing]) -> str:
    """The figures as a JSON array that is safe inside a script element."""
    text = "[" + ",".join(drawing.figure.to_json() for drawing in drawn) + "]"
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def samples(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """A few stored outputs a configuration, from its highest load: (configuration, [(what, text)])."""
    found = []
    for name in run.configs:
        cells = [cell for cell in run.cells if cell.name == name]
        texts = _cell_samples(max(cells, key=lambda cell: cell.load))
        if texts:
            found.append((name, texts))
    return found


def _cell_samples(cell: MeasuredCell) -> list[tuple[str, str]]:
    path = cell.folder / "samples.jsonl"
    if not path.is_file():
        return []
    found: list[tuple[str, str]] = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # a line cut short by a kill
            if isinstance(row, dict) and (text := row.get("text") or row.get("output")):
                head = ", ".join(
                    f"{key} {row[key]}"
                    for key in ("repeat", "index", "class", "prompt_tokens", "output_tokens", "finish_reason")
                    if key in row
                )
                found.append((head, _shorten(str(text))))
            if len(found) == SAMPLES_PER_CELL:
                break
    return found


def _shorten(text: str) -> str:
    return text if len(text) <= SAMPLE_CHARACTERS else text[:SAMPLE_CHARACTERS] + " …"


def _environment() -> Environment:
    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters["shy"] = soft_hyphens
    made.filters["capitalize_first"] = words.upper_first
    return made


def soft_hyphens(title: str) -> Markup:
    """pre-empted -> pre&shy;empted: where a narrow column may break."""
    return Markup(str(escape(title)).replace("-", "&shy;"))


def _asset(name: str) -> Any:
    return files("kvbench.report").joinpath("templates", name).read_text(encoding="utf-8")
