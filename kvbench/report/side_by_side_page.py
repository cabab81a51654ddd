"""The page and the Markdown of cells side by side: how they differ, what may be compared, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.common import text as words
from kvbench.common.files import write_text
from kvbench.effects.comparison import MARGINS, Call, Comparison, contradicts
from kvbench.metrics.definitions import SERVED, compared, figure
from kvbench.report.answers import joined
from kvbench.report.cells import uncertain_note
from kvbench.report.comparisons import JUDGED, THROUGHPUT, against, is_steady, marked, median, sized
from kvbench.report.figures import distributions, effects, kv
from kvbench.report.page import escape, render, render_markdown
from kvbench.report.provenance import brief
from kvbench.report.side_by_side import (
    MOST_SIDES,
    CellSide,
    Group,
    differences,
    left_to_engines,
    named,
    not_compared,
    pairs_of,
    ratios,
)
from kvbench.report.style import CONTIGUOUS, DASHES, OTHERS, PAGED, Drawing, LineStyle
from kvbench.report.tables import MEDIANS, UNCERTAIN, Value, mark_of
from kvbench.report.wording import say
from kvbench.runs.model import MeasuredCell

_MOST_DRAWN = 3  # groups whose latencies and KV are drawn


# --- The sentences ---


def headline(groups: Sequence[Group]) -> str:
    """A sentence on how output tokens/s changed."""
    first, *others = groups[0]
    by_letter: dict[str, list[Comparison | None]] = {side.letter: [] for side in others}
    for group, side in pairs_of(groups):
        by_letter[side.letter].append(_throughput(group[0], side))
    clock = first.cell.clock
    if len(groups) > 1:
        sides = "; ".join(f"{named(side, groups[0])} {_counted(by_letter[side.letter])}" for side in others)
        against_ = named(first, groups[0])
        return say("side_by_side.headline_cells", clock=clock, first=against_, cells=len(groups), sides=sides)
    by_side = {letter: ratio for letter, (ratio,) in by_letter.items()}
    rated = {letter: ratio for letter, ratio in by_side.items() if ratio}
    missing = words.listing([letter for letter, ratio in by_side.items() if ratio is None])
    bare = words.listing([letter for letter, ratio in rated.items() if ratio.low is None])
    changes = [f"{letter} {_ratio_words(ratio)}" for letter, ratio in rated.items()]
    changes.append(say("side_by_side.no_ratio_of", bool(missing), letters=missing))
    few = say("side_by_side.too_few", bool(bare), letters=bare)
    return say("side_by_side.headline", clock=clock, first=first.title, changes=joined(*changes), few=few)


def _counted(comparisons: Sequence[Comparison | None]) -> str:
    """Writes ``higher in 2, not told apart in 1 (0.98x to 1.32x), no ratio in 1``."""
    rated = [ratio for ratio in comparisons if ratio]
    calls = [ratio.call for ratio in rated]
    counts = [say("side_by_side.called_in", call, n=calls.count(call)) for call in Call if call in calls]
    text = ", ".join(counts)
    if len(rated) > 1:
        low, high = (words.ratio(pick(ratio.ratio for ratio in rated)) for pick in (min, max))
        text += say("side_by_side.from_to", low=low, high=high)
    return joined(text, say("side_by_side.without_ratio", n=len(comparisons) - len(rated)))


def _throughput(first: CellSide, side: CellSide) -> Comparison | None:
    return next((ratio for ratio in ratios(first, side) if ratio.metric == THROUGHPUT), None)


def _ratio_words(ratio: Comparison) -> str:
    if ratio.low is None:
        return words.ratio(ratio.ratio)
    return say("side_by_side.ratio", ratio.call, ratio=ratio.ratio, bounds=_ends(ratio))


def _ends(ratio: Comparison) -> str:
    """Writes ``1.52–1.80``; empty without an interval."""
    if ratio.low is None or ratio.high is None:
        return ""
    return f"{words.ratio(ratio.low)[:-1]}–{words.ratio(ratio.high)[:-1]}"


def _not_shared(groups: Sequence[Group]) -> Iterator[str]:
    """The cells of several runs that not all of them have."""
    for at, side in enumerate(groups[0] if len(groups) > 1 else ()):
        shared = {group[at].cell.cell_id for group in groups}
        if alone := [cell.cell_id for cell in side.run.by_load if cell.cell_id not in shared]:
            yield say("side_by_side.not_shared", letter=side.letter, cells=words.and_more(alone, 6))


def engine_time(groups: Sequence[Group]) -> list[str]:
    """Writes ``C against A: output tokens/s +65 % (46 to 87)`` for cells of one run, one of them the baseline."""
    sentences = []
    for group, side in pairs_of(groups):
        first, measured = group[0], side.run.engine_time
        if measured is None or first.run.folder != side.run.folder or first.cell.load != side.cell.load:
            continue
        comparisons = (against(measured.of, side.cell, first.cell, metric) for metric in JUDGED)
        changes = [
            say("side_by_side.change", one.call, title=figure(one.metric).title, size=sized(one))
            for one in comparisons
            if one
        ]
        if changes:
            texts = {"letter": side.letter, "first": first.letter, "changes": ", ".join(changes)}
            sentences.append(say("side_by_side.engine_time", **texts))
    return sentences


# --- The tables ---


def _side_rows(groups: Sequence[Group]) -> list[tuple[str, ...]]:
    """A row a letter: the run and cell that it stands for."""
    rows = []
    for side in groups[0]:
        cells, measured = say("side_by_side.cell_count", n=len(groups)), ", ".join(brief(side.run))
        if len(groups) == 1:
            cells, measured = side.title, "; ".join(filter(None, (measured, side.cell.doubt)))
        rows.append((side.letter, f"{side.run.workload} {side.run.folder.name}", cells, measured))
    return rows


def _effect_heads() -> tuple[str, ...]:
    shown = [figure(metric) for metric in compared()]
    return ("cell", "", *(say("side_by_side.head", one.unit or "other", title=one.title) for one in shown), "interval")


def _effect_row(group: Group, side: CellSide, again: bool) -> tuple[Value, ...]:
    """Makes the row of a side. With ``again`` its group names the cell once, since all sides are the same cell."""
    first, cell = group[0], side.cell
    by_metric, basis, title = {}, "", side.title
    if side is not first:
        by_metric = {ratio.metric: ratio for ratio in ratios(first, side)}
        basis = next((ratio.basis for ratio in by_metric.values()), say("side_by_side.without"))
        if again:
            title = ""
    entries = [_effect(metric, cell, first.cell, by_metric.get(metric)) for metric in compared()]
    name = Value(title, None, cell.doubt, "worse" * bool(cell.doubt))
    return (name, Value(named(side, group)), *entries, Value(basis))


def _effect(metric: str, cell: MeasuredCell, first: MeasuredCell, ratio: Comparison | None) -> Value:
    """A value; small: its ratio to that of the first cell, and the ratio of the values shown where it is another."""
    (value, few), (other, _) = _shown(metric, cell), _shown(metric, first)
    text = words.milliseconds(value) + UNCERTAIN * few if figure(metric).statistic else words.tokens_per_s(value)
    if value is not None and not is_steady(metric, cell):
        text += say("side_by_side.whole_run")
    if ratio is None:
        return Value(text, value)
    note = marked(ratio) + say("side_by_side.bounds", bounds=_ends(ratio))
    if value and other and contradicts(ratio.ratio, value / other):
        note += f"; {MEDIANS} {words.ratio(value / other)}"
    return Value(text, value, note, mark_of(ratio.call))


def _shown(metric: str, cell: MeasuredCell) -> tuple[float | None, bool]:
    """Returns a throughput's median over the repeats, or a percentile of all samples and whether they are few."""
    shown = figure(metric)
    if not shown.statistic:
        return median(cell.throughput()), False
    return cell.percentile(shown.metric.path, shown.statistic)


# --- The figures ---


def drawings(groups: Sequence[Group]) -> list[Drawing]:
    """The figures, of those groups that can be compared before the others."""
    comparable = sorted(groups, key=lambda group: not any(ratios(group[0], side) for side in group[1:]))
    drawn = [_effects_drawing([group for group in groups if group in comparable[:MOST_SIDES]])]
    for number, group in enumerate((group for group in groups if group in comparable[:_MOST_DRAWN]), start=1):
        drawn += _group_drawings(group, number, several=len(groups) > 1)
    return [drawing for drawing in drawn if drawing is not None]


def _effects_drawing(groups: Sequence[Group]) -> Drawing | None:
    """Draws each compared cell against the first of its group; None where no pair may be compared."""
    marks = []
    for group, side in pairs_of(groups):
        pair = side.title if len(groups) > 1 and len(group) == 2 else f"{side.letter} {side.title}"
        marks += [(pair, ratio, ratio.basis) for ratio in ratios(group[0], side)]
    if not marks:
        return None
    margin, calls = 100 * MARGINS[SERVED], [ratio.call for _, ratio, _ in marks]
    parts = ", ".join(f"{calls.count(call)} {name}" for call, name in effects.NAMES.items() if call in calls)
    title, caption = say("side_by_side.effects", n=len(marks), parts=parts), say("side_by_side.caption", margin=margin)
    return Drawing("effects", title, caption, effects.effects_figure(effects.effects_frame(marks), margin), 820)


def _group_drawings(group: Group, number: int, several: bool) -> Iterator[Drawing]:
    """Latencies and KV over time of one group, in the report's figures; each cell is named by its letter."""
    cells = []
    for side in group:
        name, what = named(side, group), side.run.folder.name if several else side.title
        cells.append(replace(side.cell, name=name + f" {what}" * (name == side.letter)))
    marked_cells = [replace(cell, name=cell.marked_name) for cell in cells]
    styles = zip((PAGED, CONTIGUOUS, *OTHERS), ("solid", "dash", *DASHES), strict=False)
    looks = {cell.name: LineStyle(*style) for cell, style in zip(marked_cells, styles, strict=False)}
    where = say("side_by_side.where", several, title=group[0].title)
    latencies, over_time = distributions.distributions(marked_cells), kv.timeline(cells)  # which marks them itself
    if len(latencies):
        shown, title = distributions.distributions_figure(latencies, looks), say("side_by_side.latencies", where=where)
        yield Drawing(f"distributions-{number}", title, _without(cells, latencies), shown, 500)
    if len(over_time):
        caption = " ".join(filter(None, (say("side_by_side.one_repeat"), _without(cells, over_time))))
        shown, width = kv.timeline_figure(over_time), max(480, 140 * len(cells) + 70)
        yield Drawing(f"timeline-{number}", say("side_by_side.kv", where=where), caption, shown, width)


def _without(cells: Sequence[MeasuredCell], shown: pd.DataFrame) -> str:
    """A sentence on the cells without samples or readings in a figure; empty where all have some."""
    there = set(shown["configuration"])
    missing = words.listing([cell.name[:1] for cell in cells if not {cell.name, cell.marked_name} & there])
    return say("side_by_side.nothing_stored", bool(missing), cells=missing)


# --- The files ---


def page(groups: Sequence[Group]) -> str:
    """The whole page."""
    drawn = drawings(groups)
    title = ", ".join(dict.fromkeys(side.run.workload for side in groups[0]))
    more = len(groups) > MOST_SIDES
    return render("side_by_side.html.j2", drawn, title=title, drawings=drawn, more_figures=more, **_facts(groups))


def markdown(groups: Sequence[Group]) -> str:
    """The same facts as the page, without its figures."""
    return render_markdown("side_by_side.md.j2", effects_table=_effects_markdown, **_facts(groups))


def _facts(groups: Sequence[Group]) -> dict[str, Any]:
    """The facts that both templates show."""
    return {
        "headline": headline(groups),
        "side_heads": ("", "run", "cell", "measured"),
        "side_rows": _side_rows(groups),
        "difference_heads": ("what differs", *(side.letter for side in groups[0])),
        "difference_rows": [(name, *row) for name, row in differences(groups)],
        "left_to_engines": left_to_engines(groups),
        "limits": [*not_compared(groups), *_not_shared(groups)],
        "engine_time": engine_time(groups),
        "effect_heads": _effect_heads(),
        "effect_rows": [[_effect_row(group, side, again=len(groups) > 1) for side in group] for group in groups],
        "ratio_note": say("side_by_side.ratio_note", uncertain=uncertain_note()),
    }


def _effects_markdown(heads: Sequence[str], groups: Sequence[Sequence[tuple[Value, ...]]]) -> str:
    rows = [[escape(f"{value.text} {value.note}") for value in row] for rows in groups for row in rows]
    return "\n".join(words.markdown_table(heads, rows, 2))


def write_side_by_side(groups: Sequence[Group], folder: Path) -> list[Path]:
    """Writes compare.html and compare.md."""
    paths = [folder / "compare.html", folder / "compare.md"]
    for path, text in zip(paths, (page(groups), markdown(groups)), strict=True):
        write_text(path, text)
    return paths
