"""The cells of a sweep, and the order in which they run: pure functions of the workload.

A *configuration* is one set of engine settings, a *load point* one concurrency or rate, a *cell* the pair of them.
A *block* is one fresh server of one configuration in one repeat, with the loads that run against it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.workload.file import Workload
from kvbench.workload.load_section import LoadPoint
from kvbench.workload.settings import ONLY_WITH, Settings, applies, config_id_of, defaults_beside, effective, label_of

_MOST_COUNTED = 500  # combinations: more are not told apart just for a note
Check = Callable[[Settings], Any]  # settings -> capacity; ValueError for impossible ones


@dataclass(frozen=True)
class Configuration:
    """One set of engine settings. ``varied``: those that differ from the baseline."""

    config_id: str
    label: str
    settings: Settings
    varied: Settings
    is_baseline: bool


@dataclass(frozen=True)
class Cell:
    """One configuration under one load point."""

    cell_id: str
    configuration: Configuration
    load: LoadPoint

    @classmethod
    def of(cls, configuration: Configuration, load: LoadPoint) -> Cell:
        """Makes the cell with the name that every command gives it."""
        return cls(f"{configuration.config_id}-{load.load_id}", configuration, load)


@dataclass(frozen=True)
class Block:
    """One server launch: ``cells`` share a configuration and run in this order. ``repeat`` counts from 1.

    ``alone``: each cell of the configuration has a block of its own, since each needs a new server.
    """

    repeat: int
    configuration: Configuration
    cells: tuple[Cell, ...]
    alone: bool = False

    @property
    def block_id(self) -> str:
        load = f"-{self.cells[0].load.load_id}" if self.alone else ""
        return f"{self.configuration.config_id}{load}-{self.repeat}"

    def split(self) -> tuple[Block, ...]:
        """Returns one block a cell, in the same order."""
        return tuple(Block(self.repeat, self.configuration, (cell,), alone=True) for cell in self.cells)


@dataclass(frozen=True)
class Design:
    """All cells, in the order of the tables. ``notes``: sentences about what was left out."""

    configurations: tuple[Configuration, ...]
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()

    def only(self, cells: Iterable[Cell], notes: Iterable[str] = ()) -> Design:
        """Returns the design with some of its cells, and further notes."""
        chosen = tuple(cells)
        kept = {cell.configuration.config_id for cell in chosen}
        configurations = tuple(c for c in self.configurations if c.config_id in kept)
        return Design(configurations, chosen, (*self.notes, *notes))


def normalise(settings: Settings) -> Settings:
    """Returns the settings without None (the default) and without those that mean nothing beside the others."""
    return {k: v for k, v in settings.items() if v is not None and applies(k, settings)}


def make_design(
    engine: Settings, sweep: Mapping[str, Sequence[Any]], loads: Sequence[LoadPoint], design: str
) -> Design:
    """Makes the baseline plus one variable at a time, or the full product, each under every load point.

    The baseline's own value need not be listed under ``sweep``. Configurations that differ only in settings without a
    meaning, or in whether a default is named, are one configuration; the notes say how many were dropped and why.
    """
    baseline = dict(engine)
    values = {
        key: ([baseline[key]] if key in baseline else []) + [v for v in listed if v != baseline.get(key, object())]
        for key, listed in sweep.items()
    }
    if design == "one_at_a_time":
        changes = [{key: value} for key, listed in values.items() for value in listed]
    else:
        changes = [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]
    unique: dict[str, Settings] = {}  # by the settings that the engine would use
    repeated: list[Settings] = []
    for candidate in [baseline, *(baseline | change for change in changes)]:
        settings = normalise(candidate)
        kept = unique.setdefault(_key(normalise(defaults_beside(settings) | settings)), settings)
        if kept is not settings and kept is not next(iter(unique.values())):
            repeated.append(candidate)
    notes = [_repeated_note(repeated, values)] if repeated else []
    notes += _useless_values([*unique.values()], values)
    configurations = _name([*unique.values()], tuple(sweep))
    cells = tuple(Cell.of(c, load) for c in configurations for load in loads)
    return Design(configurations, cells, tuple(notes))


def _key(settings: Settings) -> str:
    """Returns a text that is equal for equal settings. Unlike a hash it takes any value, and True and 1 differ."""
    return repr(sorted(settings.items()))


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _repeated_note(repeated: Sequence[Settings], swept: Iterable[str]) -> str:
    """Says how many configurations were dropped and why; ``repeated``: before they were normalised."""
    reasons = [
        f"{key} (only with {ONLY_WITH[key][0]} {_yaml(ONLY_WITH[key][1])})"
        for key in swept
        if any(not applies(key, settings) for settings in repeated)
    ]
    what = f"settings that mean nothing there: {', '.join(reasons)}" if reasons else "naming a default"
    return f"{len(repeated)} of the configurations differ from others only in {what}; each is run once"


def _useless_values(unique: Sequence[Settings], values: Mapping[str, Sequence[Any]]) -> list[str]:
    """A sentence for each setting with a swept value that no configuration has. ``unique[0]`` is the baseline."""
    notes = []
    for key in (key for key in values if key in ONLY_WITH):
        had = [effective(settings, key) for settings in unique if applies(key, settings)]
        lost = [_yaml(v) for v in values[key] if v is not None and v not in had]
        if lost:
            other, needed = ONLY_WITH[key]
            notes.append(
                f"sweeping {key} changes nothing ({', '.join(lost)}): it needs {other} {_yaml(needed)} and the "
                f"baseline has {_yaml(effective(unique[0], other))}"
            )
    return notes


def _name(unique: Sequence[Settings], swept: Sequence[str]) -> tuple[Configuration, ...]:
    baseline = unique[0]
    taken: set[str] = set()
    named = []
    for settings in unique:
        varied = {  # None: back to the default
            key: settings.get(key)
            for key in swept
            if applies(key, settings) and effective(settings, key) != effective(baseline, key)
        }
        config_id = config_id_of(settings, varied)
        if config_id.lower() in taken:  # also on file systems that fold case
            config_id = f"{config_id}-{hashlib.sha256(_key(settings).encode()).hexdigest()[:6]}"
        taken.add(config_id.lower())
        named.append(Configuration(config_id, label_of(settings, varied), settings, varied, settings is baseline))
    return tuple(named)


def _matching(cells: Iterable[Cell], patterns: Sequence[str]) -> list[Cell]:
    return [cell for cell in cells if any(fnmatch.fnmatchcase(cell.cell_id, pattern) for pattern in patterns)]


def select(design: Design, patterns: Sequence[str]) -> Design:
    """Returns the cells that match any of the globs (all, when there is none).

    Raises UsageError with the list of cells when a glob matches nothing: a typo must not shrink a sweep silently.
    """
    ids = [cell.cell_id for cell in design.cells]
    for pattern in patterns:
        if not fnmatch.filter(ids, pattern):
            raise UsageError(f"--only {pattern!r} matches no cell: the cells are {', '.join(ids)}")
    return design.only(_matching(design.cells, patterns)) if patterns else design


def design_of(workload: Workload, only: Sequence[str] = ()) -> Design:
    """The cells of a workload, and the combinations of settings that ``only`` names beside a one-at-a-time design."""
    design = make_design(workload.engine, workload.sweep, workload.load_points, workload.design)
    ids = {cell.cell_id for cell in design.cells}
    patterns = [pattern for pattern in only if not fnmatch.filter(ids, pattern)]
    if not patterns or workload.design == "full":
        return design
    every = make_design(workload.engine, workload.sweep, workload.load_points, "full")
    added = every.only(_matching((cell for cell in every.cells if cell.cell_id not in ids), patterns))
    return Design((*design.configurations, *added.configurations), (*design.cells, *added.cells), design.notes)


def _combinations_note(workload: Workload, design: Design) -> list[str]:
    """Says how many combinations of the values in ``design`` a one-at-a-time design leaves out, if any."""
    measured = len(design.configurations)
    values = {}
    for key in workload.sweep:
        values[key] = [*{repr(value := c.settings.get(key)): value for c in design.configurations}.values()]
    every = math.prod(map(len, values.values()))
    if workload.design == "one_at_a_time" and measured < every <= _MOST_COUNTED:  # some of them mean the same
        every = len(make_design(workload.engine, values, workload.load_points, "full").configurations)
    if workload.design == "full" or every <= measured:
        return []
    alone = f"{measured} are measured, each value alone beside the baseline"
    return [f"skipped {every - measured} of {every} combinations: {alone}; design: full (--design full) measures all"]


def plan_sweep(
    workload: Workload,
    only: Sequence[str] = (),
    check: Check | None = None,
    *,
    refuses: Callable[[Settings], str | None] | None = None,
    fresh: Callable[[Settings], bool] = lambda settings: False,
) -> tuple[Design, tuple[Block, ...]]:
    """Returns the cells, and the blocks in the order in which they run.

    ``only``: patterns of cell ids. ``check``: gives a configuration's capacity; ValueError for an impossible one.
    ``refuses``: why another engine cannot have a configuration, which is then skipped. ``fresh``: whether a
    configuration needs a new server for an empty prefix cache.
    """
    design = design_of(workload, only)
    if refuses is not None:
        design = without_refused(design, refuses)
    elif check is not None and workload.design == "full":
        design = _without_impossible(design, check)
    design = select(design, only)
    if not only:
        design = dataclasses.replace(design, notes=(*design.notes, *_combinations_note(workload, design)))
    blocks = plan_blocks(design, workload.load.repeats, workload.seed)
    if workload.load.cache_state != "steady":
        blocks = tuple(part for b in blocks for part in (b.split() if fresh(b.configuration.settings) else (b,)))
    return design, blocks


def without_refused(design: Design, refuses: Callable[[Settings], str | None]) -> Design:
    """The design without the configurations that the target cannot have; a note names each with the reason.

    The baseline stays: it was checked before.
    """
    reasons = {c.config_id: refuses(c.settings) for c in design.configurations if not c.is_baseline}
    skipped = {config_id: reason for config_id, reason in reasons.items() if reason is not None}
    return _without(design, skipped, [f"skipped {config_id}: {reason}" for config_id, reason in skipped.items()])


def _without(design: Design, config_ids: Container[str], notes: Sequence[str]) -> Design:
    return design.only((cell for cell in design.cells if cell.configuration.config_id not in config_ids), notes)


def _without_impossible(design: Design, check: Check) -> Design:
    """A full design without the combinations that the engine refuses; a note names each with the engine's reason.

    Left out are only combinations whose values are all accepted elsewhere. A value that is refused everywhere is a
    mistake in the file; it stays, and ``preflight`` raises it.
    """
    refused: dict[str, str] = {}
    accepted: set[tuple[str, str]] = set()
    for configuration in design.configurations:
        try:
            check(configuration.settings)
        except ValueError as error:
            refused[configuration.config_id] = str(error)
        else:
            accepted |= _values_of(configuration)
    reasons: dict[str, list[str]] = {}
    for configuration in design.configurations:
        config_id = configuration.config_id
        if config_id in refused and _values_of(configuration) <= accepted and not configuration.is_baseline:
            reasons.setdefault(refused[config_id], []).append(config_id)
    skipped = {config_id for ids in reasons.values() for config_id in ids}
    return _without(design, skipped, [f"skipped {', '.join(ids)}: {reason}" for reason, ids in reasons.items()])


def _values_of(configuration: Configuration) -> set[tuple[str, str]]:
    return {(key, repr(value)) for key, value in configuration.settings.items()}


def capacities(design: Design, check: Check) -> dict[str, Any]:
    """Returns what ``check`` says of each configuration, by its id. Raises UsageError for an impossible one."""
    capacity = {}
    for configuration in design.configurations:
        try:
            capacity[configuration.config_id] = check(configuration.settings)
        except ValueError as error:
            raise UsageError(f"configuration {configuration.config_id}: {error}") from None
    return capacity


def plan_blocks(design: Design, repeats: int, seed: int) -> tuple[Block, ...]:
    """Plans every (cell, repeat) once, grouped by server launch, in an order that depends on ``seed`` only.

    The order is random within each repeat, so that a drift of the machine spreads over the configurations. Repeats
    follow one another, so that an interrupted sweep has whole repeats. Within a repeat all configurations get their
    loads in the same order, so that what an earlier load leaves behind (a cache in the state ``steady``, a warm
    processor) is the same on both sides of a paired comparison. A load's place is drawn from its own name, so that
    ``--only`` does not change the order of the others.
    """
    blocks = []
    for repeat in range(1, repeats + 1):
        configurations = list(design.configurations)
        random.Random(f"kvbench-order/{seed}/{repeat}").shuffle(configurations)
        places = {
            cell.load.load_id: random.Random(f"kvbench-loads/{seed}/{repeat}/{cell.load.load_id}").random()
            for cell in design.cells
        }
        ordered = sorted(design.cells, key=lambda cell: places[cell.load.load_id])
        for configuration in configurations:
            cells = tuple(c for c in ordered if c.configuration.config_id == configuration.config_id)
            blocks.append(Block(repeat, configuration, cells))
    return tuple(blocks)
