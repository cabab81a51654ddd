"""Cells of any runs side by side as a page and as Markdown: what differs, what cannot be compared, then the effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from kvbench.common import text as words
from kvbench.common.files import write_text
from kvbench.report import kv
from kvbench.report.changes import ENGINE_TIME, IS_LEVEL, OPEN, change_between
from kvbench.report.changes import METRICS as CHANGES
from kvbench.report.compared_cells import (
    METRICS,
    MOST_SIDES,
    Group,
    RatioToFirst,
    Side,
    differences,
    headline,
    named,
    not_compared,
    ratios,
)
from kvbench.report.figures import distributions, effects
from kvbench.report.page import escape, render
from kvbench.report.provenance import brief
from kvbench.report.style import CONTIGUOUS, DASHES, OTHERS, PAGED, Drawing, LineStyle
from kvbench.report.tables import MEDIANS, UNCERTAIN, UNCERTAIN_NOTE, Value
from kvbench.runs.model import MeasuredCell
from kvbench.runs.ratios import contradicts

_MOST_DRAWN = 3  # groups whose latencies and KV are drawn
_KINDS = ("TTFT", "TPOT", "ITL")  # of latencies, whose values are milliseconds
_RATIO_NOTE = (
    "Ratio to A and its 95 % interval: cells of one run are paired by repeat (t interval of the log ratios); of two "
    "runs the repeats are independent (Welch's interval of the logs), and what differs between two days is not in it. "
    "≈ means level (within 5 %), ? not told apart from 1. No interval is made of fewer than 3 repeats. "
    f"{UNCERTAIN_NOTE}"
)


def page(groups: Sequence[Group]) -> str:
    """The whole page."""
    drawn = drawings(groups)
    return render(
        "side_by_side.html.j2",
        drawn,
        title=", ".join(dict.fromkeys(side.run.workload for side in groups[0])),
        headline=headline(groups),
        side_heads=_SIDE_HEADS,
        side_rows=_side_rows(groups),
        difference_heads=_difference_heads(groups),
        difference_rows=[(name, *values) for name, values in differences(groups)],
        not_compared=not_compared(groups),
        not_shared=_not_shared(groups),
        engine_time=engine_time(groups),
        effect_heads=_EFFECT_HEADS,
        effect_rows=_effect_rows(groups),
        ratio_note=_RATIO_NOTE,
        more_figures=len(groups) > MOST_SIDES,
        drawings=drawn,
    )


def drawings(groups: Sequence[Group]) -> list[Drawing]:
    """The figures, of those groups that can be compared before the others."""
    comparable = sorted(groups, key=lambda group: not any(ratios(group[0], side) for side in group[1:]))
    shown = [group for group in groups if group in comparable[:MOST_SIDES]]
    first = [group for group in groups if group in comparable[:_MOST_DRAWN]]
    found = [effects.compared_drawing(shown)]
    for number, group in enumerate(first, start=1):
        found += _of_group(group, number, several=len(groups) > 1)
    return [drawing for drawing in found if drawing is not None]


def _of_group(group: Group, number: int, several: bool) -> list[Drawing]:
    """Latencies and KV over time of one group, in the report's figures; each cell is named by its letter."""
    cells = []
    for side in group:
        name = named(side, group)
        if name == side.letter:
            name = f"{name} {side.run.folder.name if several else side.title}"
        cells.append(replace(side.cell, name=name))
    styles = zip((PAGED, CONTIGUOUS, *OTHERS), ("solid", "dash", *DASHES), strict=False)
    looks = {cell.name: LineStyle(*style) for cell, style in zip(cells, styles, strict=False)}
    of, found = f": {group[0].title}" if several else "", []
    marked = [replace(cell, name=cell.marked_name) for cell in cells]
    looks |= {cell.name: looks[plain.name] for cell, plain in zip(marked, cells, strict=True)}
    latencies, over_time = distributions.distributions(marked), kv.timeline(cells)  # which marks them itself
    if len(latencies):
        figure = distributions.distributions_figure(latencies, looks)
        found.append(Drawing(f"distributions-{number}", f"Latencies{of}", _without(cells, latencies), figure, 500))
    if len(over_time):
        caption = f"One repeat each, that of median throughput. {_without(cells, over_time)}".rstrip()
        figure, width = kv.timeline_figure(over_time), max(480, 140 * len(cells) + 70)
        found.append(Drawing(f"timeline-{number}", f"KV over time{of}", caption, figure, width))
    return found


def _without(cells: Sequence[MeasuredCell], shown: pd.DataFrame) -> str:
    """Which cells are not in a figure, since they have no samples or readings; empty where all are."""
    there = set(shown["configuration"])
    missing = [cell.name[:1] for cell in cells if not {cell.name, cell.marked_name} & there]
    return f"Nothing stored of {words.listing(missing)}." if missing else ""


_SIDE_HEADS = ("", "run", "cell", "measured")


def _side_rows(groups: Sequence[Group]) -> list[tuple[str, ...]]:
    """Which run and cell each letter stands for."""
    rows = []
    for side in groups[0]:
        cells = words.plural(len(groups), "cell") if len(groups) > 1 else side.title
        measured = ", ".join(brief(side.run)) + (f"; {side.cell.doubt}" if side.cell.doubt and len(groups) == 1 else "")
        rows.append((side.letter, f"{side.run.workload} {side.run.folder.name}", cells, measured))
    return rows


def _difference_heads(groups: Sequence[Group]) -> tuple[str, ...]:
    return ("what differs", *(side.letter for side in groups[0]))


def _not_shared(groups: Sequence[Group]) -> list[str]:
    """Of several runs: the cells that not all of them have."""
    if len(groups) == 1:
        return []
    found = []
    for at, side in enumerate(groups[0]):
        shared = {group[at].cell.cell_id for group in groups}
        if alone := [cell.cell_id for cell in side.run.by_load if cell.cell_id not in shared]:
            found.append(f"In {side.letter} but not in every run: {words.and_more(alone, 6)}.")
    return found


def engine_time(groups: Sequence[Group]) -> list[str]:
    """C against A: output tokens/s +65 % (46 to 87), ...: of cells of one run, one of which is its baseline."""
    found = []
    for first, side in ((group[0], side) for group in groups for side in group[1:]):
        if first.run.folder != side.run.folder or first.cell.load != side.cell.load:
            continue
        every = (change_between(side.run, side.cell, first.cell, metric, ENGINE_TIME) for metric in CHANGES)
        said = [f"{CHANGES[each.metric]} {_CALLS.get(each.call, '')}{each}" for each in every if each]
        if said:
            found.append(f"{side.letter} against {first.letter}: {', '.join(said)}.")
    return found


_CALLS = {OPEN: "not decided, ", IS_LEVEL: "level, "}

_EFFECT_HEADS = ("cell", "", *(f"{m.title}{', ms' if m.title.endswith(_KINDS) else ''}" for m in METRICS), "interval")


def _effect_rows(groups: Sequence[Group]) -> list[list[tuple[Value, ...]]]:
    """A list of rows a group: the cell's values and, below each, its ratio to the first cell's."""
    return [[_effect_row(group, side, again=len(groups) > 1) for side in group] for group in groups]


def _effect_row(group: Group, side: Side, again: bool) -> tuple[Value, ...]:
    """``again``: all sides of the group are the same cell, which is named once."""
    first = group[0]
    found = {each.metric.title: each for each in ratios(first, side)} if side is not first else {}
    basis = next(iter(found.values())).basis if found else "" if side is first else "no ratio"
    values = []
    for metric in METRICS:
        (value, few), ratio = metric.value(side.cell), found.get(metric.title)
        text = words.milliseconds(value) + UNCERTAIN * few if metric.name else words.tokens_per_s(value)
        text += "" if value is None or metric.is_steady(side.cell) else " (whole run)"
        values.append(
            Value(text, value, _ratio_note(ratio, value, metric.value(first.cell)[0]), ratio.mark if ratio else "")
        )
    doubt = side.cell.doubt
    title = "" if again and side is not first else side.title
    return (Value(title, None, doubt, "worse" if doubt else ""), Value(named(side, group)), *values, Value(basis))


def _ratio_note(ratio: RatioToFirst | None, value: float | None, first: float | None) -> str:
    """The ratio with its interval, and that of the values shown where it is another."""
    if ratio is None:
        return ""
    text = f"{ratio} ({ratio.bounds})" if ratio.interval else str(ratio)
    shown = value / first if value and first else ratio.ratio
    return f"{text}; {MEDIANS} {words.ratio(shown)}" if contradicts(ratio.ratio, shown) else text


def markdown(groups: Sequence[Group]) -> str:
    """The same facts as the page, without its figures."""
    rows = [[escape(text) for text in row] for row in _side_rows(groups)]
    lines = [f"# {escape(headline(groups))}", "", *words.markdown_table(_SIDE_HEADS, rows, 4), ""]
    different = [[escape(text) for text in (name, *values)] for name, values in differences(groups)]
    lines += ["## What differs", ""]
    heads = _difference_heads(groups)
    lines += words.markdown_table(heads, different, len(heads)) if different else ["Nothing that a manifest tells."]
    lines += [""]
    if limits := [*not_compared(groups), *_not_shared(groups)]:
        lines += ["## What cannot be compared", "", *(f"- {escape(text)}" for text in limits), ""]
    if known := engine_time(groups):
        lines += ["## Engine time", "", *(f"- {escape(text)}" for text in known), ""]
    found = (row for rows in _effect_rows(groups) for row in rows)
    rated = [[escape(f"{value.text} {value.note}".strip()) for value in row] for row in found]
    return "\n".join([*lines, "## Effects", "", *words.markdown_table(_EFFECT_HEADS, rated, 2), "", _RATIO_NOTE, ""])


def write_side_by_side(groups: Sequence[Group], folder: Path) -> list[Path]:
    """Writes compare.html and compare.md."""
    paths = [folder / "compare.html", folder / "compare.md"]
    for path, text in zip(paths, (page(groups), markdown(groups)), strict=True):
        write_text(path, text)
    return paths
