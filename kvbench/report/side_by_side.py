"""Cells of any runs side by side, as page and Markdown: how they differ, which may be compared, and by how much.

In each group of cells all are compared with the first. Within one run ratios are paired by repeat, since the repeats
met the same requests and machine; between two runs the repeats are independent (Welch).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.common import text as words
from kvbench.common.errors import UsageError
from kvbench.common.files import write_text
from kvbench.effects.comparison import FEWEST, MARGINS, Call, Comparison, contradicts, independent, paired
from kvbench.metrics.definitions import SERVED, compared, figure
from kvbench.report.cells import uncertain_note
from kvbench.report.comparisons import JUDGED, NOT_TOLD, THROUGHPUT, against, is_steady, marked, median, sized, values
from kvbench.report.figures import distributions, effects, kv
from kvbench.report.page import escape, render
from kvbench.report.provenance import brief, kv_capacity, model_of, server_facts, target
from kvbench.report.style import CONTIGUOUS, DASHES, OTHERS, PAGED, Drawing, LineStyle
from kvbench.report.tables import MEDIANS, UNCERTAIN, Value, mark_of
from kvbench.runs.model import NOT_OF_REQUESTS, WRONG, MeasuredCell, Run
from kvbench.runs.server_info import ServerInfo
from kvbench.workload.settings import applies, effective, setting_title, value_words

FEWEST_SIDES, MOST_SIDES = 2, 6  # cells in a group
BUILT_IN = "the built-in engine"
_LETTERS = "ABCDEF"
_SAID_ELSEWHERE = ("model", "seed", "kv_budget")  # settings that have a fact of their own
_MUST_BE_EQUAL = (("clock", "times"), ("machine", "processor", "GPUs"), ("device", "device"), ("model", "model"))
_MOST_DRAWN = 3  # groups whose latencies and KV are drawn
_CALLS = {Call.UNDECIDED: "not decided, ", Call.LEVEL: "level, "}
_CALLED = {Call.BETTER: "higher", Call.WORSE: "lower", Call.LEVEL: "level", Call.UNDECIDED: NOT_TOLD}
_SIDE_HEADS = ("", "run", "cell", "measured")
_RATIO_NOTE = (
    "Ratio to A and its 95 % interval: cells of one run are paired by repeat (t interval of the log ratios); of two "
    "runs the repeats are independent (Welch's interval of the logs), and what differs between two days is not in it. "
    "≈ means level (within 5 %), ? not told apart from 1. No interval is made of fewer than 3 repeats. "
    f"{uncertain_note()}"
)


@dataclass(frozen=True)
class CellSide:
    """One cell of a group. ``letter``: its short name in tables and figures."""

    letter: str
    run: Run
    cell: MeasuredCell

    @property
    def title(self) -> str:
        return f"{self.cell.name}, {self.cell.load.short}"


Group = tuple[CellSide, ...]


# --- Which cells stand beside each other ---


def one_group(cells: Sequence[tuple[Run, MeasuredCell]]) -> tuple[Group, ...]:
    """Two to six cells, each with a letter of its own. Raises UsageError for fewer, more, or one of them twice."""
    if not FEWEST_SIDES <= len(cells) <= MOST_SIDES:
        raise UsageError(
            f"{words.plural(len(cells), 'cell')} cannot be put side by side: choose {FEWEST_SIDES} to {MOST_SIDES}"
        )
    if len({(run.folder, cell.cell_id) for run, cell in cells}) < len(cells):
        raise UsageError("a cell cannot be put beside itself: choose each once")
    return (tuple(CellSide(letter, run, cell) for letter, (run, cell) in zip(_LETTERS, cells, strict=False)),)


def groups_of(*runs: Run) -> tuple[Group, ...]:
    """A group for each cell of the first run that two to six runs all have, the highest load first.

    Cells match by name, or those of different targets, whose names differ, by load and settings (``_alike``).

    Raises:
        UsageError: too few or many runs, one of them twice, or they share no cell.
    """
    if not FEWEST_SIDES <= len(runs) <= MOST_SIDES:
        raise UsageError(
            f"{words.plural(len(runs), 'run')} cannot be put side by side: give {FEWEST_SIDES} to {MOST_SIDES}"
        )
    folders = [run.folder.resolve() for run in runs]
    if twice := next((folder for folder in folders if folders.count(folder) > 1), None):
        raise UsageError(f"{twice} cannot be put beside itself: give each run once")
    first, *others = runs
    groups = []
    for cell in first.by_load:
        cells = [cell, *(_matching(first, cell, other) for other in others)]
        if None not in cells:
            groups.append(tuple(map(CellSide, _LETTERS, runs, cells)))
    if not groups:
        listed = [f"{run.folder} has {words.and_more([c.cell_id for c in run.cells], 4) or 'none'}" for run in runs]
        raise UsageError(
            f"the runs share no measured cell ({'; '.join(listed)}): put cells of other names side by side in "
            "`kvbench view`"
        )
    return tuple(groups)


def _matching(first: Run, cell: MeasuredCell, other: Run) -> MeasuredCell | None:
    """The cell of ``other`` that stands for ``cell`` of ``first``: of that name, else the only one that is alike.

    A cell that is alike to several cells of ``first`` stands for none of them, whichever run is given first.
    """
    named = next((one for one in other.cells if one.cell_id == cell.cell_id), None)
    if named or target(first) == target(other):
        return named
    names = _varied(first) | _varied(other)
    alike = [one for one in other.cells if _alike(cell, one, names)]
    if len(alike) != 1 or sum(_alike(one, alike[0], names) for one in first.cells) != 1:
        return None
    return alike[0]


def _varied(run: Run) -> set[str]:
    """Settings in which the run's cells differ."""
    names = {name for cell in run.cells for name in cell.settings}
    return {name for name in names if len({str(cell.settings.get(name)) for cell in run.cells}) > 1}


def _same_load(a: MeasuredCell, b: MeasuredCell) -> bool:
    return (a.load, a.load.label) == (b.load, b.load.label)


def _alike(a: MeasuredCell, b: MeasuredCell, names: Iterable[str]) -> bool:
    """Tests whether both have the same load and the same value of each of ``names`` that both engines have."""
    shared = a.settings.keys() & b.settings.keys() & set(names)
    return _same_load(a, b) and all(a.settings[name] == b.settings[name] for name in shared)


def _pairs(groups: Sequence[Group]) -> Iterator[tuple[Group, CellSide]]:
    return ((group, side) for group in groups for side in group[1:])


def named(side: CellSide, group: Group) -> str:
    """The letter, with the engine where those of the group differ: "B vLLM 0.32.0"."""
    engines = [target(one.run) or BUILT_IN for one in group]
    return f"{side.letter} {engines[group.index(side)]}" if len(set(engines)) > 1 else side.letter


# --- What they were measured with ---


def facts(side: CellSide, settings: Iterable[str] = ()) -> dict[str, str]:
    """The machine, code, requests and settings that a cell was measured with, as text by name.

    ``settings``: further ones, at the built-in engine's default where the cell leaves them out.
    """
    run, cell = side.run, side.cell
    server = server_facts(run, cell)
    names = sorted({*cell.settings, *(settings if run.is_built_in else ())}.difference(_SAID_ELSEWHERE))
    told = {setting_title(n): value_words(n, effective(cell.settings, n)) for n in names if applies(n, cell.settings)}
    own = {
        "load": cell.load.label,
        "requests a repeat": _requests_sent(cell),
        "repeats": len(cell.repeats),
        **_requests(run),
        "KV budget": words.data_size(cell.capacity.kv_budget_bytes),
        "KV capacity": kv_capacity(cell.capacity),
    }
    return run_facts(run, server) | _known(own | told)


def run_facts(run: Run, server: ServerInfo | None = None) -> dict[str, str]:
    """The machine and code that a run was measured with, by name. ``server``: what one of its servers reported."""
    manifest = run.manifest
    git, cpu, model = manifest.git, manifest.cpu, manifest.model or {}
    versions = {**manifest.versions, **(server.versions if server else {})}
    changes = " with uncommitted changes" if git.dirty else ""
    cores = f", {words.plural(cpu.cores, 'core')}" if cpu.cores else ""
    machine = {
        "processor": f"{cpu.model}{cores}" if cpu.model or cores else None,
        "memory": words.data_size(manifest.memory_bytes),
        "GPUs": " + ".join(str(gpu.name) for gpu in manifest.gpus),
        "GPU driver": ", ".join(sorted({str(gpu.driver_version) for gpu in manifest.gpus})),
        "operating system": manifest.os,
    }
    return _known({
        "workload": run.workload,
        "target": target(run) or BUILT_IN,
        "times": f"{run.clock} ({run.simulated.cost_model})" if run.simulated else run.clock,
        "model": model_of(model or run.spec.get("model") or {}),
        "weights": model.get("weights_fingerprint"),
        "device": manifest.device,
        **({} if run.simulated else machine),
        "profile": manifest.profile,
        "commit": git.short_sha and f"{git.short_sha}{changes}",
        **{f"version of {name}": text for name, text in versions.items()},
    })  # fmt: skip


def _known(named_values: Mapping[str, Any]) -> dict[str, str]:
    """The values as text, without what is not known."""
    return {name: str(value) for name, value in named_values.items() if value not in (None, "", "–")}


def _requests(run: Run) -> dict[str, str]:
    """The seed and the keys of the workload's load, dotted, that requests are drawn from."""
    flat = {"seed": str(run.manifest.seeds.get("workload", run.spec.get("seed")))}

    def add(section: Mapping[str, Any], prefix: str) -> None:
        for key, value in section.items():
            if isinstance(value, Mapping):
                add(value, f"{prefix}{key}.")
            elif value is not None:
                flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)

    add({key: value for key, value in run.load_section.items() if key not in NOT_OF_REQUESTS}, "load.")
    return flat


def _requests_sent(cell: MeasuredCell) -> str:
    """48; 47 to 50 where the repeats differ."""
    sent = sorted({r.metrics.sent for r in cell.repeats})
    return " to ".join(dict.fromkeys(map(str, (sent[0], sent[-1])))) if sent else ""


def differences(groups: Sequence[Group]) -> list[tuple[str, tuple[str, ...]]]:
    """(fact, its value on each side) for each fact in which the sides of a group differ.

    Of several groups, a difference that only some of them have is named with their cells.
    """
    differing: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for group in groups:
        settings = {name for side in group for name in side.cell.settings}
        every = [facts(side, settings) for side in group]
        for name in dict.fromkeys(name for side in every for name in side):
            told = tuple(side.get(name, "–") for side in every)
            if len(set(told)) > 1:
                differing.setdefault((name, told), []).append(group[0].title)
    return [
        (name if len(cells) == len(groups) else f"{name} ({words.and_more(cells, 2)})", told)
        for (name, told), cells in differing.items()
    ]


# --- Which of them are compared ---


def obstacles(first: CellSide, other: CellSide) -> list[str]:
    """Lists why no ratio of two cells is shown; empty where one is."""
    reasons = [why for side in (first, other) if (why := _in_doubt(side))]
    a, b = facts(first), facts(other)
    for what, *names in _MUST_BE_EQUAL:
        pairs = ((a.get(name, "none"), b.get(name, "none")) for name in names)
        reasons += [f"another {what}: {x} and {y}" for x, y in pairs if x != y][:1]
    if not _same_load(first.cell, other.cell):
        return [*reasons, f"another load: {first.cell.load.label} and {other.cell.load.label}"]
    ours, theirs = _requests(first.run), _requests(other.run)
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if ours.get(key) != theirs.get(key)]
    hashes = [{r.repeat: r.requests_sha256 for r in side.cell.repeats if r.requests_sha256} for side in (first, other)]
    if any(hashes[0][repeat] != hashes[1][repeat] for repeat in hashes[0].keys() & hashes[1].keys()):
        keys += ["the requests sent (their hashes)"]
    keys += ["requests a repeat"] if _requests_sent(first.cell) != _requests_sent(other.cell) else []
    return [*reasons, f"other requests: {words.and_more(keys, 4)}"] if keys else reasons


def _in_doubt(side: CellSide) -> str:
    """Says why the figures of a cell do not count; empty where they do."""
    cell = side.cell
    if cell.doubt == "invalid":
        reason = (cell.invalid_reasons or ("no reason recorded",))[0]
        return f"{side.letter} is an invalid measurement ({reason.rstrip('.')})"
    if cell.doubt == WRONG:
        return f"{side.letter} answered canaries wrongly ({cell.wrong_answers[0]})"
    return f"the server of {side.letter} refused requests, so it did less work" if cell.doubt else ""


def not_compared(groups: Sequence[Group]) -> list[str]:
    """A sentence for each kind of reason for which pairs have no ratio, with the pairs it holds for.

    Reasons that differ in their numbers only are of one kind; the first is given.
    """
    kinds: dict[str, list[tuple[str, str]]] = {}
    pairs = list(_pairs(groups))
    for group, side in pairs:
        pair = side.title if len(groups) > 1 else f"{side.letter} against {group[0].letter}"
        if len(groups) > 1 and len(group) > FEWEST_SIDES:
            pair = f"{side.letter} {pair}"
        for reason in obstacles(group[0], side):
            kinds.setdefault(re.sub(r"\d[\d.,]*", "#", reason), []).append((reason, pair))
    sentences = []
    for listed in kinds.values():
        every = len(listed) == len(pairs) > 1
        which = "any pair" if every else words.and_more([pair for _, pair in listed])
        sentences.append(f"No ratio of {which}: {listed[0][0]}.")
    return sentences


def ratios(first: CellSide, other: CellSide) -> list[Comparison]:
    """The ratio of each metric that both cells have; empty where the cells must not be compared."""
    if obstacles(first, other):
        return []
    return [ratio for metric in compared() if (ratio := _ratio(first, other, metric)) is not None]


def _ratio(first: CellSide, other: CellSide, metric: str) -> Comparison | None:
    """``basis``: how it was made, or why it has no interval."""
    a, b, clock = first.cell, other.cell, other.cell.clock
    steady = is_steady(metric, a, b)
    old, new = values(metric, a, steady), values(metric, b, steady)
    if first.run.folder == other.run.folder:
        ratio = paired(metric, clock, new, old)
        basis = f"paired by repeat, {ratio.n} repeats" if ratio else ""
    else:
        olds, news = ([value for value in side.values() if value > 0] for side in (old, new))
        ratio = independent(metric, clock, news, olds)
        basis = f"Welch, {len(olds)} and {len(news)} repeats"
    if ratio is None or ratio.n >= FEWEST:
        return ratio and replace(ratio, basis=basis)
    return replace(ratio, low=None, high=None, basis=f"{words.plural(ratio.n, 'repeat')}: no interval")


def _bounds(ratio: Comparison) -> str:
    """1.52–1.80; why there is no interval where there is none."""
    if ratio.low is None or ratio.high is None:
        return ratio.basis
    return f"{words.ratio(ratio.low)[:-1]}–{words.ratio(ratio.high)[:-1]}"


# --- In words ---


def headline(groups: Sequence[Group]) -> str:
    """A sentence on how output tokens/s changed."""
    every = [(side.letter, _throughput(group[0], side)) for group, side in _pairs(groups)]
    first, *others = groups[0]
    if len(groups) > 1:
        said = "; ".join(
            f"{named(side, groups[0])} {_called([ratio for letter, ratio in every if letter == side.letter])}"
            for side in others
        )
        where = f"against {named(first, groups[0])} in {len(groups)} cells"
        return f"Output tokens/s as {first.cell.clock} {where}: {said}."
    parts = [f"{letter} {_ratio_words(ratio)}" for letter, ratio in every if ratio]
    if left := [letter for letter, ratio in every if ratio is None]:
        parts.append(f"no ratio of {words.listing(left)}")
    bare = [letter for letter, ratio in every if ratio and ratio.low is None]
    too_few = f" (of {words.listing(bare)} too few repeats for an interval)" if bare else ""
    return f"Output tokens/s as {first.cell.clock} against A, {first.title}: {', '.join(parts)}{too_few}."


def _called(every: Sequence[Comparison | None]) -> str:
    """higher in 2, not told apart in 1 (0.98x to 1.32x), no ratio in 1."""
    known = [ratio for ratio in every if ratio]
    calls = [ratio.call for ratio in known]
    text = ", ".join(f"{name} in {count}" for call, name in _CALLED.items() if (count := calls.count(call)))
    if len(known) > 1:
        low, high = (words.ratio(pick(ratio.ratio for ratio in known)) for pick in (min, max))
        text += f" ({low} to {high})"
    none = len(every) - len(known)
    return ", ".join(filter(None, (text, f"no ratio in {none}" if none else "")))


def _throughput(first: CellSide, side: CellSide) -> Comparison | None:
    return next((ratio for ratio in ratios(first, side) if ratio.metric == THROUGHPUT), None)


def _ratio_words(ratio: Comparison) -> str:
    if ratio.low is None:
        return words.ratio(ratio.ratio)
    called = f"{_CALLED[ratio.call]}, " if ratio.call in (Call.LEVEL, Call.UNDECIDED) else ""
    return f"{called}{words.ratio(ratio.ratio)} ({_bounds(ratio)})"


def _side_rows(groups: Sequence[Group]) -> list[tuple[str, ...]]:
    """A row a letter: the run and cell that it stands for."""
    rows = []
    for side in groups[0]:
        cells = words.plural(len(groups), "cell") if len(groups) > 1 else side.title
        measured = ", ".join(brief(side.run)) + (f"; {side.cell.doubt}" if side.cell.doubt and len(groups) == 1 else "")
        rows.append((side.letter, f"{side.run.workload} {side.run.folder.name}", cells, measured))
    return rows


def _not_shared(groups: Sequence[Group]) -> list[str]:
    """The cells of several runs that not all of them have."""
    if len(groups) == 1:
        return []
    sentences = []
    for at, side in enumerate(groups[0]):
        shared = {group[at].cell.cell_id for group in groups}
        if alone := [cell.cell_id for cell in side.run.by_load if cell.cell_id not in shared]:
            sentences.append(f"In {side.letter} but not in every run: {words.and_more(alone, 6)}.")
    return sentences


def engine_time(groups: Sequence[Group]) -> list[str]:
    """C against A: output tokens/s +65 % (46 to 87), ...: of cells of one run, one of which is its baseline."""
    sentences = []
    for group, side in _pairs(groups):
        first = group[0]
        if first.run.folder != side.run.folder or first.cell.load != side.cell.load:
            continue
        known = side.run.engine_time
        every = (against(known.of, side.cell, first.cell, metric) for metric in JUDGED) if known else ()
        if said := [f"{figure(one.metric).title} {_CALLS.get(one.call, '')}{sized(one)}" for one in every if one]:
            sentences.append(f"{side.letter} against {first.letter}: {', '.join(said)}.")
    return sentences


def _effect_heads() -> tuple[str, ...]:
    figures = [figure(metric) for metric in compared()]
    return ("cell", "", *(f"{each.title}{', ms' * (each.unit == 'ms')}" for each in figures), "interval")


def _effect_rows(groups: Sequence[Group]) -> list[list[tuple[Value, ...]]]:
    """A list of rows a group: the cell's values and, below each, its ratio to the first cell's."""
    return [[_effect_row(group, side, again=len(groups) > 1) for side in group] for group in groups]


def _effect_row(group: Group, side: CellSide, again: bool) -> tuple[Value, ...]:
    """``again``: all sides of the group are the same cell, which is named once."""
    first, cell = group[0], side.cell
    by_metric = {ratio.metric: ratio for ratio in ratios(first, side)} if side is not first else {}
    basis = next((ratio.basis for ratio in by_metric.values()), "" if side is first else "no ratio")
    entries = [_effect(metric, cell, first.cell, by_metric.get(metric)) for metric in compared()]
    title = Value("" if again and side is not first else side.title, None, cell.doubt, "worse" if cell.doubt else "")
    return (title, Value(named(side, group)), *entries, Value(basis))


def _effect(metric: str, cell: MeasuredCell, first: MeasuredCell, ratio: Comparison | None) -> Value:
    """A value; small: its ratio to that of the first cell, and the ratio of the values shown where it is another."""
    (value, few), (against, _) = _shown(metric, cell), _shown(metric, first)
    text = words.milliseconds(value) + UNCERTAIN * few if figure(metric).statistic else words.tokens_per_s(value)
    text += "" if value is None or is_steady(metric, cell) else " (whole run)"
    if ratio is None:
        return Value(text, value)
    note = marked(ratio) if ratio.low is None else f"{marked(ratio)} ({_bounds(ratio)})"
    if value and against and contradicts(ratio.ratio, value / against):
        note += f"; {MEDIANS} {words.ratio(value / against)}"
    return Value(text, value, note, mark_of(ratio.call))


def _shown(metric: str, cell: MeasuredCell) -> tuple[float | None, bool]:
    """Median over the repeats of a throughput; a latency's percentile over all samples, and whether they are few."""
    shown = figure(metric)
    if not shown.statistic:
        return median(cell.throughput()), False
    return cell.percentile(shown.metric.path, shown.statistic)


# --- The figures ---


def drawings(groups: Sequence[Group]) -> list[Drawing]:
    """The figures, of those groups that can be compared before the others."""
    comparable = sorted(groups, key=lambda group: not any(ratios(group[0], side) for side in group[1:]))
    every = [_effects_drawing([group for group in groups if group in comparable[:MOST_SIDES]])]
    for number, group in enumerate((group for group in groups if group in comparable[:_MOST_DRAWN]), start=1):
        every += _of_group(group, number, several=len(groups) > 1)
    return [drawing for drawing in every if drawing is not None]


def _effects_drawing(groups: Sequence[Group]) -> Drawing | None:
    """Each compared cell against the first of its group; None where no pair may be compared."""
    marks = []
    for group, side in _pairs(groups):
        pair = side.title if len(groups) > 1 and len(group) == 2 else f"{side.letter} {side.title}"
        marks += [(pair, ratio, ratio.basis) for ratio in ratios(group[0], side)]
    if not marks:
        return None
    margin, calls = 100 * MARGINS[SERVED], [ratio.call for _, ratio, _ in marks]
    caption = (
        f"Change against A, served; 95 % intervals; the grey band: ±{margin:.0f} %. A mark at the edge lies beyond it."
    )
    parts = [f"{calls.count(call)} {name}" for call, name in effects.NAMES.items() if call in calls]
    title = f"Of {words.plural(len(marks), 'change')} against A: {', '.join(parts)}"
    return Drawing("effects", title, caption, effects.effects_figure(effects.effects_frame(marks), margin), 820)


def _of_group(group: Group, number: int, several: bool) -> list[Drawing]:
    """Latencies and KV over time of one group, in the report's figures; each cell is named by its letter."""
    cells = []
    for side in group:
        name = named(side, group)
        if name == side.letter:
            name = f"{name} {side.run.folder.name if several else side.title}"
        cells.append(replace(side.cell, name=name))
    marked_cells = [replace(cell, name=cell.marked_name) for cell in cells]
    styles = zip((PAGED, CONTIGUOUS, *OTHERS), ("solid", "dash", *DASHES), strict=False)
    looks = {cell.name: LineStyle(*style) for cell, style in zip(marked_cells, styles, strict=False)}
    where, drawn = f": {group[0].title}" if several else "", []
    latencies, over_time = distributions.distributions(marked_cells), kv.timeline(cells)  # which marks them itself
    if len(latencies):
        shown = distributions.distributions_figure(latencies, looks)
        drawn.append(Drawing(f"distributions-{number}", f"Latencies{where}", _without(cells, latencies), shown, 500))
    if len(over_time):
        caption = f"One repeat each, that of median throughput. {_without(cells, over_time)}".rstrip()
        shown, width = kv.timeline_figure(over_time), max(480, 140 * len(cells) + 70)
        drawn.append(Drawing(f"timeline-{number}", f"KV over time{where}", caption, shown, width))
    return drawn


def _without(cells: Sequence[MeasuredCell], shown: pd.DataFrame) -> str:
    """A sentence on the cells without samples or readings in a figure; empty where all have some."""
    there = set(shown["configuration"])
    missing = [cell.name[:1] for cell in cells if not {cell.name, cell.marked_name} & there]
    return f"Nothing stored of {words.listing(missing)}." if missing else ""


# --- The files ---


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
        difference_heads=("what differs", *(side.letter for side in groups[0])),
        difference_rows=[(name, *told) for name, told in differences(groups)],
        not_compared=not_compared(groups),
        not_shared=_not_shared(groups),
        engine_time=engine_time(groups),
        effect_heads=_effect_heads(),
        effect_rows=_effect_rows(groups),
        ratio_note=_RATIO_NOTE,
        more_figures=len(groups) > MOST_SIDES,
        drawings=drawn,
    )


def markdown(groups: Sequence[Group]) -> str:
    """The same facts as the page, without its figures."""
    rows = [[escape(text) for text in row] for row in _side_rows(groups)]
    lines = [f"# {escape(headline(groups))}", "", *words.markdown_table(_SIDE_HEADS, rows, 4), ""]
    different = [[escape(text) for text in (name, *told)] for name, told in differences(groups)]
    lines += ["## What differs", ""]
    heads = ("what differs", *(side.letter for side in groups[0]))
    lines += words.markdown_table(heads, different, len(heads)) if different else ["Nothing that a manifest tells."]
    lines += [""]
    if limits := [*not_compared(groups), *_not_shared(groups)]:
        lines += ["## What cannot be compared", "", *(f"- {escape(text)}" for text in limits), ""]
    if known := engine_time(groups):
        lines += ["## Engine time", "", *(f"- {escape(text)}" for text in known), ""]
    effect_rows = [row for rows in _effect_rows(groups) for row in rows]
    rated = [[escape(f"{value.text} {value.note}".strip()) for value in row] for row in effect_rows]
    return "\n".join([*lines, "## Effects", "", *words.markdown_table(_effect_heads(), rated, 2), "", _RATIO_NOTE, ""])


def write_side_by_side(groups: Sequence[Group], folder: Path) -> list[Path]:
    """Writes compare.html and compare.md."""
    paths = [folder / "compare.html", folder / "compare.md"]
    for path, text in zip(paths, (page(groups), markdown(groups)), strict=True):
        write_text(path, text)
    return paths
