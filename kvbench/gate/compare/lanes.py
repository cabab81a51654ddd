"""What a comparison measures, settled before anything is launched: both sides of each workload, cell by cell."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.files import read_json
from kvbench.gate.compare.builds import Builds
from kvbench.gate.compare.sides import OpenSide, Side, open_side, require_used, same_sides
from kvbench.gate.timing.plan import BASE, CANDIDATE, SIDES, Match, match_designs
from kvbench.runs.folder import RunFolder
from kvbench.sweep.plan import SweepOptions, preflight
from kvbench.targets.builtin import ServerRefusedError
from kvbench.workload.design import Cell, Configuration, Design, make_design, select
from kvbench.workload.file import Workload

_NOT_FRESH = (
    "a server that runs already is not launched anew for each pair: what its one launch differs in from another launch "
    "counts as a change"
)


@dataclass(frozen=True)
class Lane:
    """One workload on both sides. ``capacity``: by side and configuration id."""

    name: str
    sides: Mapping[str, OpenSide]
    matches: tuple[Match, ...]
    capacity: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @property
    def notes(self) -> list[str]:
        found = [f"{self.name}, {side}: {note}" for side in SIDES for note in self.sides[side].notes]
        if any(side.choice.probes for side in self.sides.values()):
            found.append(_NOT_FRESH)
        same = same_sides(self.sides[BASE], self.sides[CANDIDATE])
        return found + ([same] if same else [])

    def warm(self, folder: Path, say: Callable[[str], None]) -> None:
        """One launch of each configuration of a side that may compile at its first start: pair 1 must not pay for it.

        A launch that fails is said, and left to the pairs: they tell a server that fails from one that failed once.
        Raises UsageError for a command that does not take the settings.
        """
        for side, opened in self.sides.items():
            if not opened.needs_first_launch or not (opened.build is None or opened.build.fresh):
                continue
            for match in self.matches:
                configuration = match.of(side)
                say(f"starting {side} ({opened.name}, {configuration.label}) once, unmeasured: it compiles then")
                log = folder / side / self.name / "logs" / f"first-launch-{configuration.config_id}.log"
                try:
                    opened.first_launch(configuration.settings, log)
                except ServerRefusedError as error:
                    raise UsageError(f"{side} ({opened.name}) did not start: {error}{opened.refusal_hint}") from None
                except MeasurementError as error:
                    say(f"note: {side} did not start: {error}; the pairs will tell whether it ever does")

    def close(self) -> None:
        for opened in self.sides.values():
            opened.close()


def open_lanes(
    sides: Mapping[str, Side],
    workloads: Sequence[Workload],
    options: Mapping[str, Any],
    builds: Builds,
) -> tuple[Lane, ...]:
    """Builds what has to be built. Raises UsageError, and MeasurementError where a build fails."""
    require_used([sides[BASE], sides[CANDIDATE]], options)
    names = [workload.name for workload in workloads]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"two workloads are called {twice[0]!r}: they need different names, so change `name:` in one")
    lanes: list[Lane] = []
    try:
        for workload in workloads:
            lanes.append(_open_lane(workload, sides, options, builds))
    except BaseException:
        close_lanes(lanes)
        raise
    if not any(lane.matches for lane in lanes):
        raise UsageError(f"{' and '.join(names)}: there is no cell to compare")
    return tuple(lanes)


def close_lanes(lanes: Sequence[Lane]) -> None:
    for lane in lanes:
        lane.close()


def _open_lane(workload: Workload, sides: Mapping[str, Side], options: Mapping[str, Any], builds: Builds) -> Lane:
    opened: dict[str, OpenSide] = {}
    try:
        for name in SIDES:
            # Its own copy: what one side's target settles must not reach the other's.
            own = dataclasses.replace(workload, resolved=copy.deepcopy(dict(workload.resolved)))
            opened[name] = open_side(sides[name], own, options, builds)
        designs, capacity = {}, {}
        for name, side in opened.items():
            designs[name], capacity[name] = _design(side, options["only"])
        return Lane(workload.name, opened, match_designs(workload.name, designs[BASE], designs[CANDIDATE]), capacity)
    except BaseException:
        for side in opened.values():
            side.close()
        raise


def _design(side: OpenSide, only: Sequence[str]) -> tuple[Design, Mapping[str, Mapping[str, Any]]]:
    """The side's cells, and what each configuration holds. Raises UsageError for one that cannot be."""
    if side.stored is not None:
        return select(_measured(RunFolder(side.stored), side.workload), only), {}
    workload = side.workload
    choice = side.choice
    sweep = SweepOptions(
        only=tuple(only), check=choice.check, refuses=choice.refuses, fresh=choice.fresh, require=choice.require
    )
    design, _ = sweep.plan(workload)
    capacity, _ = preflight(workload, design, sweep)
    return design, capacity


def _measured(run: RunFolder, workload: Workload) -> Design:
    """What the run says that it measured: of its workload all or, with --only, a part, or what its target made of it.

    A URL has one configuration, whatever the workload sweeps. Those of the workload come first, in its order.
    """
    known = make_design(workload.engine, workload.sweep, workload.load_points, workload.design)
    ids = [configuration.config_id for configuration in known.configurations]
    planned: dict[str, set[str]] = {}
    for block in run.manifest()["plan"]:
        planned.setdefault(block["configuration"], set()).update(block["cells"])
    cells: list[Cell] = []
    for config_id in sorted(planned, key=lambda each: ids.index(each) if each in ids else len(ids)):
        told = _told(run, min(planned[config_id]))
        label, settings, varied = told.get("label", config_id), told.get("settings", {}), told.get("varied", {})
        configuration = Configuration(config_id, label, settings, varied, told.get("is_baseline", False))
        made = [Cell(f"{config_id}-{load.load_id}", configuration, load) for load in workload.load_points]
        cells += [cell for cell in made if cell.cell_id in planned[config_id]]
    return Design(tuple({cell.configuration.config_id: cell.configuration for cell in cells}.values()), tuple(cells))


def _told(run: RunFolder, cell_id: str) -> Mapping[str, Any]:
    """What a cell's summary says of its configuration; empty where the run has none."""
    path = run.cell(cell_id) / "summary.json"
    return read_json(path) if path.is_file() else {}
