"""Finds and reads stored runs for trends and choices between runs.

A run is in results/<workload>/<run>/, or what ``kvbench history add`` kept of it: only manifest.json and
cells/*/summary.json are read. A run that cannot be read is skipped with a note.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.parsing import parse_json
from kvbench.metrics.definitions import METRICS, SHIPPED, Figure, figure
from kvbench.runs.folder import MANIFEST
from kvbench.runs.metric_names import value_of, values_of
from kvbench.runs.model import NOT_OF_REQUESTS
from kvbench.runs.results import CellSummary, Manifest

RELEASE = "release.json"
"""Beside a manifest.json in a history: {"release": the name that `kvbench history add --release` was given}."""

REFERENCE = "reference"  # the folder of runs that came with the repository, in results/
_NAMES = (
    "output_throughput", "p95_ttft_ms", "p95_itl_ms", "kv_cache_usage_perc", "kv_waste_share", "prefix_cache_hit_rate",
)  # fmt: skip


def trend_figures() -> list[Figure]:
    """The figures that a history follows: a selection, and every metric that was added to METRICS.

    Of the steady window, then the same of the whole run.
    """
    added = [metric for metric in METRICS.values() if metric.name not in SHIPPED]
    plain = [figure(name) for name in _NAMES]
    plain += [Figure(metric, statistic) for metric in added for statistic in metric.statistics or ("",)]
    return [window for one in plain for window in ((one.of_steady(True), one) if one.metric.steady else (one,))]


@dataclass(frozen=True)
class StoredCell:
    """A cell in one run. ``values``: one for each repeat, by figure.

    ``definition``: hash of its settings, its load and the workload's requests.
    """

    valid: bool
    definition: str
    values: Mapping[Figure, tuple[float, ...]]


@dataclass(frozen=True, eq=False)
class StoredRun:
    """A run of a sweep. ``place``: machine, device and model as (name, value), equal within a series."""

    folder: Path
    workload: str
    started: datetime
    complete: bool
    sha: str | None
    dirty: bool
    release: str | None
    versions: Mapping[str, str]
    place: tuple[tuple[str, str], ...]
    cells: Mapping[str, StoredCell]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def commit(self) -> str:
        """Seven digits, with a + where files differed from the commit."""
        return ((self.sha or "")[:7] or "no commit") + "+" * self.dirty


class OtherKind(ValueError):
    """A run of another command than ``kvbench sweep``; its text is the kind."""


def command_of(kind: object) -> str:
    """The command that wrote a manifest of this ``kind``, for a message; a path is a script of the repository."""
    if "/" in str(kind):
        return f"`{kind}`"
    return f"`kvbench {kind}`"


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Folders with a manifest.json, or with cells that lost it, under ``paths``, none of them inside another.

    Links to folders are not followed.

    Raises UsageError for a path that is no folder.
    """
    runs: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise UsageError(f"there is no folder {str(path)!r}: give one that holds runs, such as results/")
        for folder, names, files in os.walk(path):
            if MANIFEST in files or ("cells" in names and any(Path(folder).glob("cells/*/summary.json"))):
                runs[Path(folder).resolve()] = None
                names.clear()
            names[:] = sorted(name for name in names if not name.startswith("."))
    return list(runs)


def own_runs(paths: Sequence[Path], runs: Sequence[StoredRun]) -> tuple[list[StoredRun], list[str]]:
    """``runs`` without those that came with the repository, if there are others, and notes on what is left out.

    Those are in the folder ``reference`` of one of ``paths``; naming that folder itself keeps them.
    """
    own, notes, named = list(runs), [], {path.resolve() for path in paths}
    for shipped in (path / REFERENCE for path in paths):
        others = [run for run in own if shipped.resolve() not in run.folder.parents]
        if others and len(others) < len(own) and shipped.resolve() not in named:
            notes.append(f"the runs in {shipped} are left out, since there are others: name it to see them too")
            own = others
    return own, notes


def read_runs(folders: Iterable[Path]) -> tuple[list[StoredRun], list[str]]:
    """Reads the runs of sweeps, each once and ordered by their start, with notes on those that are skipped."""
    runs: dict[tuple[str, str, datetime], StoredRun] = {}
    notes: list[str] = []
    others: Counter[str] = Counter()
    for folder in folders:
        try:
            run = read_stored_run(folder, notes)
        except OtherKind as kind:
            others[str(kind)] += 1
        except ValueError as error:
            notes.append(f"{_shown(folder)} is skipped: {error}")
        else:
            same = runs.setdefault((run.workload, run.name, run.started), run)
            if run.release and not same.release:
                runs[run.workload, run.name, run.started] = run
    for kind, count in sorted(others.items()):
        notes.append(f"{count} of {command_of(kind)} skipped: a trend is of runs of `kvbench sweep`")
    return sorted(runs.values(), key=lambda run: (run.started, run.name)), notes


def _shown(folder: Path) -> str:
    """mixed/20260101T000000Z-abcdefg: a note may stand in a page that is published, so it has no machine path."""
    return f"{folder.parent.name}/{folder.name}"


def read_stored_run(folder: Path, notes: list[str]) -> StoredRun:
    """Raises ValueError (OtherKind for another command's run). A cell that cannot be read becomes a note."""
    stored = read_object(folder / MANIFEST)
    if (kind := stored.get("kind")) is not None:
        raise OtherKind(str(kind))
    if not {"plan", "workload"} <= stored.keys():
        raise ValueError("its manifest.json is not that of a sweep")
    try:
        manifest = Manifest.parse(stored)
    except ValueError as error:
        raise ValueError(f"its manifest.json cannot be read: {error}") from None
    try:
        started = datetime.fromisoformat(str(manifest.started))
    except ValueError:
        raise ValueError(f"its manifest says {manifest.started!r} for its start, which is no time") from None
    load = {key: value for key, value in manifest.load_section.items() if key not in NOT_OF_REQUESTS}
    requests = {"seed": manifest.workload.get("seed"), "load": load}
    cells = {}
    for path in sorted((folder / "cells").glob("*/summary.json")):
        try:
            data = read_object(path)
            cells[str(data.get("cell_id", path.parent.name))] = _cell(data, requests)
        except ValueError as error:
            notes.append(f"cell {path.parent.name} of {_shown(folder)} is skipped: {error}")
    return StoredRun(
        folder=folder,
        workload=manifest.workload_name or str(manifest.workload.get("name") or folder.parent.name),
        started=started if started.tzinfo else started.replace(tzinfo=UTC),
        complete=manifest.complete,
        sha=manifest.git.sha,
        dirty=bool(manifest.git.dirty),
        release=release_of(folder),
        versions={name: version for name, version in manifest.versions.items() if version is not None},
        place=_place(manifest),
        cells=cells,
    )


def _cell(data: Mapping[str, Any], requests: Mapping[str, Any]) -> StoredCell:
    """A stored cell. ``requests``: the part of the workload that decides the requests of every cell."""
    if "repeats" not in data:
        raise ValueError("it has no repeats")
    summary = CellSummary.parse(data)
    loads = [values_of(repeat.metrics, repeat.server, repeat.prefix_cache) for repeat in summary.repeats]
    throughput = figure(_NAMES[0]).of_steady(True).name
    has_steady = None not in [value_of(load, throughput) for load in loads]  # all repeats are of one window
    has_steady_latency = has_steady and all(repeat.metrics.has_steady_latency for repeat in summary.repeats)
    kept = {}
    for shown in trend_figures():
        numbers = tuple(value for load in loads if (value := value_of(load, shown.name)) is not None)
        if numbers and (not shown.steady or (has_steady_latency if shown.statistic else has_steady)):
            kept[shown] = numbers
    what = {"settings": data.get("settings"), "load": data.get("load"), "workload": requests}
    definition = sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return StoredCell(summary.is_valid, definition, kept)


def _place(manifest: Manifest) -> tuple[tuple[str, str], ...]:
    """The facts that runs of one series share; not versions, which are what is compared."""
    declared = manifest.workload.get("model") or {}
    model: Any = manifest.model or declared
    if isinstance(model, Mapping):
        model = next((model[key] for key in ("name", "config", "path") if model.get(key)), None)
    profile = manifest.profile and f"profile {manifest.profile}"
    if manifest.simulated:  # on any machine: what counts is what it is a simulation of
        facts = {"device": manifest.device, "model": model, "profile": profile}
        facts |= {name: getattr(manifest.simulated, name) for name in ("cost_model", "ops", "calibration")}
    else:
        cpu = manifest.cpu
        facts = {
            "cpu": cpu.model,
            "cores": cpu.cores and f"{cpu.cores} cores",
            "gpu": " + ".join(str(gpu.name) for gpu in manifest.gpus),
            "device": manifest.device if manifest.device != cpu.model else None,
            "backend": manifest.backend if manifest.backend != "kvbench" else None,
            "model": model,
            "dtype": declared.get("dtype") if isinstance(declared, Mapping) else None,
            "profile": profile,
        }
    return tuple((name, str(value)) for name, value in facts.items() if value)


def release_of(folder: Path) -> str | None:
    return read_object(folder / RELEASE).get("release") if (folder / RELEASE).is_file() else None


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises ValueError for anything else."""
    try:
        data = parse_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return data
