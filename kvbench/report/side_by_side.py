"""Cells of any runs side by side: how they differ, which may be compared, and by how much.

In each group of cells all are compared with the first. Within one run ratios are paired by repeat, since the repeats
met the same requests and machine; between two runs the repeats are independent (Welch).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbench.common import text as words
from kvbench.common.errors import UsageError
from kvbench.effects.comparison import FEWEST, Comparison, independent, paired
from kvbench.metrics.definitions import compared
from kvbench.report.comparisons import is_steady, values
from kvbench.report.provenance import kv_capacity, model_of, server_facts, target
from kvbench.report.wording import say
from kvbench.runs.model import NOT_OF_REQUESTS, WRONG, MeasuredCell, Run
from kvbench.runs.server_info import ServerInfo
from kvbench.workload.settings import ENGINE_POLICY, applies, effective, setting_title, value_words

FEWEST_SIDES, MOST_SIDES = 2, 6  # cells in a group
_LETTERS = "ABCDEF"
_SAID_ELSEWHERE = ("model", "seed", "kv_budget")  # settings that have a fact of their own
_MUST_BE_EQUAL = (("clock", "times"), ("machine", "processor", "GPUs"), ("device", "device"), ("model", "model"))


@dataclass(frozen=True)
class CellSide:
    """A cell of a group. ``letter``: its short name in tables and figures."""

    letter: str
    run: Run
    cell: MeasuredCell

    @property
    def title(self) -> str:
        return f"{self.cell.name}, {self.cell.load.short}"


Group = tuple[CellSide, ...]


# --- Which cells stand beside each other ---


def one_group(cells: Sequence[tuple[Run, MeasuredCell]]) -> tuple[Group, ...]:
    """Gives each of two to six cells a letter. Raises UsageError for fewer, more, or one of them twice."""
    _check_sides("cell", [f"{cell.cell_id} of {run.folder}" for run, cell in cells])
    return (tuple(CellSide(letter, run, cell) for letter, (run, cell) in zip(_LETTERS, cells, strict=False)),)


def groups_of(*runs: Run) -> tuple[Group, ...]:
    """A group for each cell of the first run that two to six runs all have, the highest load first.

    Cells match by name, or those of different targets, whose names differ, by load and settings (``_alike``).

    Raises:
        UsageError: too few or many runs, one of them twice, or they share no cell.
    """
    _check_sides("run", [str(run.folder.resolve()) for run in runs])
    first, *others = runs
    groups = []
    for cell in first.by_load:
        cells = [cell, *(_matching(first, cell, other) for other in others)]
        if None not in cells:
            groups.append(tuple(map(CellSide, _LETTERS, runs, cells)))
    if not groups:
        raise UsageError(say("side_by_side.nothing_shared", cells="; ".join(map(_cells_of, runs))))
    return tuple(groups)


def _check_sides(what: str, names: Sequence[str]) -> None:
    """Raises UsageError for fewer than two runs or cells, more than six, or one of them twice."""
    if not FEWEST_SIDES <= len(names) <= MOST_SIDES:
        number = words.plural(len(names), what)
        raise UsageError(say("side_by_side.number", number=number, fewest=FEWEST_SIDES, most=MOST_SIDES))
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(say("side_by_side.twice", name=twice, what=what))


def _cells_of(run: Run) -> str:
    cells = words.and_more([cell.cell_id for cell in run.cells], 4)
    return say("side_by_side.cells_of", run=run.folder, cells=cells or say("side_by_side.none"))


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


def pairs_of(groups: Sequence[Group]) -> Iterator[tuple[Group, CellSide]]:
    return ((group, side) for group in groups for side in group[1:])


def named(side: CellSide, group: Group) -> str:
    """The letter, with the engine where those of the group differ: "B vLLM 0.32.0"."""
    engines = [_engine(one.run) for one in group]
    return say("side_by_side.named", len(set(engines)) > 1, letter=side.letter, engine=_engine(side.run))


def _engine(run: Run) -> str:
    return target(run) or say("side_by_side.built_in")


# --- What they were measured with ---


def facts(side: CellSide, settings: Iterable[str] = ()) -> dict[str, str]:
    """The machine, code, requests and settings that a cell was measured with, as text by name.

    ``settings``: further ones, at the built-in engine's default where the cell leaves them out.
    """
    run, cell = side.run, side.cell
    server = server_facts(run, cell)
    names = sorted({*cell.settings, *(settings if run.is_built_in else ())}.difference(_SAID_ELSEWHERE))
    by_title = {}
    for name in names:
        if applies(name, cell.settings):
            by_title[setting_title(name)] = value_words(name, effective(cell.settings, name))
    own = {
        "load": cell.load.label,
        "requests a repeat": _requests_sent(cell),
        "repeats": len(cell.repeats),
        **_requests(run),
        "KV budget": words.data_size(cell.capacity.kv_budget_bytes),
        "KV capacity": kv_capacity(cell.capacity),
    }
    return run_facts(run, server) | _stated(own | by_title)


def run_facts(run: Run, server: ServerInfo | None = None) -> dict[str, str]:
    """The machine and code that a run was measured with, by name. ``server``: what one of its servers reported."""
    manifest = run.manifest
    git, cpu, model = manifest.git, manifest.cpu, manifest.model or {}
    versions = {**manifest.versions, **(server.versions if server else {})}
    processor = say("side_by_side.cores", n=cpu.cores, model=cpu.model) if cpu.cores else cpu.model
    commit = say("side_by_side.commit", bool(git.dirty), sha=git.short_sha)
    machine = {
        "processor": processor,
        "memory": words.data_size(manifest.memory_bytes),
        "GPUs": " + ".join(str(gpu.name) for gpu in manifest.gpus),
        "GPU driver": ", ".join(sorted({str(gpu.driver_version) for gpu in manifest.gpus})),
        "operating system": manifest.os,
    }
    return _stated({
        "workload": run.workload,
        "target": _engine(run),
        "times": say("side_by_side.times", clock=run.clock, model=getattr(run.simulated, "cost_model", "")),
        "model": model_of(model or run.spec.get("model") or {}),
        "weights": model.get("weights_fingerprint"),
        "device": manifest.device,
        **({} if run.simulated else machine),
        "profile": manifest.profile,
        "commit": git.short_sha and commit,
        **{say("side_by_side.version", name=name): text for name, text in versions.items()},
    })  # fmt: skip


def _stated(named_values: Mapping[str, Any]) -> dict[str, str]:
    """The values as text, without what is not known."""
    return {name: str(value) for name, value in named_values.items() if value not in (None, "", "–")}


def _requests(run: Run) -> dict[str, str]:
    """The seed and the keys of the workload's load, dotted, that requests are drawn from."""
    load = {key: value for key, value in run.load_section.items() if key not in NOT_OF_REQUESTS}
    return {"seed": str(run.manifest.seeds.get("workload", run.spec.get("seed"))), **_flat(load, "load")}


def _flat(section: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """The values of a section and of those inside it as text, by their dotted keys."""
    flat = {}
    for key, value in section.items():
        name = f"{prefix}.{key}"
        if isinstance(value, Mapping):
            flat |= _flat(value, name)
        elif value is not None:
            flat[name] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def _requests_sent(cell: MeasuredCell) -> str:
    """Writes ``48``, or ``47 to 50`` where the repeats differ."""
    sent = sorted({r.metrics.sent for r in cell.repeats})
    return " to ".join(dict.fromkeys(map(str, sent[:1] + sent[-1:])))


def differences(groups: Sequence[Group]) -> list[tuple[str, tuple[str, ...]]]:
    """Lists the facts in which the sides of a group differ, each with its value on every side.

    Of several groups, a difference that only some of them have is named with their cells.
    """
    differing: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for group in groups:
        settings = {name for side in group for name in side.cell.settings}
        by_side = [facts(side, settings) for side in group]
        for name in dict.fromkeys(name for side_facts in by_side for name in side_facts):
            row = tuple(side_facts.get(name, "–") for side_facts in by_side)
            if len(set(row)) > 1:
                differing.setdefault((name, row), []).append(group[0].title)
    rows = []
    for (name, row), cells in differing.items():
        some = say("side_by_side.of_cells", len(cells) < len(groups), cells=words.and_more(cells, 2))
        rows.append((name + some, row))
    return rows


def left_to_engines(groups: Sequence[Group]) -> list[str]:
    """Writes which decisions different engines take by their own constants, since not every side has a setting."""
    sides = groups[0]
    if len({side.run.manifest.target for side in sides}) == 1:
        return []
    settings = (name for name in ENGINE_POLICY if any(name not in side.cell.settings for side in sides))
    names = words.listing([setting_title(name) for name in settings])
    return [say("side_by_side.left_to_engines", names=names)] if names else []


# --- Which of them are compared ---


def obstacles(first: CellSide, other: CellSide) -> list[str]:
    """Lists why no ratio of two cells is shown; empty where one is."""
    reasons = [why for side in (first, other) if (why := _in_doubt(side))]
    a, b = facts(first), facts(other)
    for what, *names in _MUST_BE_EQUAL:
        pairs = ((a.get(name, "none"), b.get(name, "none")) for name in names)
        reasons += [say("side_by_side.another", what=what, a=x, b=y) for x, y in pairs if x != y][:1]
    if not _same_load(first.cell, other.cell):
        loads = {"a": first.cell.load.label, "b": other.cell.load.label}
        return [*reasons, say("side_by_side.another", what="load", **loads)]
    ours, theirs = _requests(first.run), _requests(other.run)
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if ours.get(key) != theirs.get(key)]
    hashes = [{r.repeat: r.requests_sha256 for r in side.cell.repeats if r.requests_sha256} for side in (first, other)]
    if any(hashes[0][repeat] != hashes[1][repeat] for repeat in hashes[0].keys() & hashes[1].keys()):
        keys.append(say("side_by_side.hashes"))
    if _requests_sent(first.cell) != _requests_sent(other.cell):
        keys.append(say("side_by_side.sent"))
    if keys:
        reasons.append(say("side_by_side.other_requests", keys=words.and_more(keys, 4)))
    return reasons


def _in_doubt(side: CellSide) -> str:
    """Says why the figures of a cell do not count; empty where they do."""
    cell = side.cell
    why = ""
    if cell.doubt == "invalid":
        why = (cell.invalid_reasons or (say("side_by_side.no_reason"),))[0].rstrip(".")
    elif cell.doubt == WRONG:
        why = cell.wrong_answers[0]
    return say("side_by_side.doubt", cell.doubt or "none", letter=side.letter, why=why)


def not_compared(groups: Sequence[Group]) -> list[str]:
    """A sentence for each kind of reason for which pairs have no ratio, with the pairs it holds for.

    Reasons that differ in their numbers only are of one kind; the first is given.
    """
    kinds: dict[str, list[tuple[str, str]]] = {}
    pairs = list(pairs_of(groups))
    for group, side in pairs:
        several = {FEWEST_SIDES: "two_sides"}.get(len(group), "more_sides")
        form = {1: "one_group"}.get(len(groups), several)
        pair = say("side_by_side.pair", form, letter=side.letter, title=side.title, first=group[0].letter)
        for reason in obstacles(group[0], side):
            kinds.setdefault(re.sub(r"\d[\d.,]*", "#", reason), []).append((reason, pair))
    sentences = []
    for listed in kinds.values():
        named_pairs = words.and_more([pair for _, pair in listed])
        is_any = len(listed) == len(pairs) > 1
        sentences.append(say("side_by_side.no_ratio", is_any, pairs=named_pairs, reason=listed[0][0]))
    return sentences


def ratios(first: CellSide, other: CellSide) -> list[Comparison]:
    """The ratio of each metric that both cells have; empty where the cells must not be compared."""
    if obstacles(first, other):
        return []
    return [ratio for metric in compared() if (ratio := _ratio(first, other, metric)) is not None]


def _ratio(first: CellSide, other: CellSide, metric: str) -> Comparison | None:
    """Compares one metric; its ``basis`` says how, or why it has no interval."""
    a, b, clock = first.cell, other.cell, other.cell.clock
    steady = is_steady(metric, a, b)
    old, new = values(metric, a, steady), values(metric, b, steady)
    olds, news = ([value for value in side.values() if value > 0] for side in (old, new))
    same_run = first.run.folder == other.run.folder
    ratio = paired(metric, clock, new, old) if same_run else independent(metric, clock, news, olds)
    if ratio is None:
        return None
    if ratio.n < FEWEST:
        return replace(ratio, low=None, high=None, basis=say("side_by_side.no_interval", n=ratio.n))
    return replace(ratio, basis=say("side_by_side.basis", same_run, n=ratio.n, olds=len(olds), news=len(news)))
