"""Runs of sweeps read from disk, and the series made of them: one metric of one cell on one machine over time.

A run is in results/<workload>/<run>/, or what ``kvbench history add`` kept of it: only manifest.json and
cells/*/summary.json are read. A run that cannot be read is skipped with a note.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.parsing import parse_json
from kvbench.metrics.latency import has_steady_latency
from kvbench.runs.folder import MANIFEST
from kvbench.runs.metric_names import load_values, value_of
from kvbench.runs.model import NOT_OF_REQUESTS, Repeat
from kvbench.runs.results import Manifest, RepeatSummary

RELEASE = "release.json"
"""Beside a manifest.json in a history: {"release": the name that `kvbench history add --release` was given}."""

REFERENCE = "reference"  # the folder of runs that came with the repository, in results/
VALID, INVALID, INCOMPLETE = "valid", "invalid", "incomplete"


@dataclass(frozen=True)
class Metric:
    """A metric, named as in kvbench/runs/metric_names.py. ``better``: +1 if more is, -1 if less is, else 0."""

    name: str
    title: str
    unit: str
    better: int


_THROUGHPUT = "output_throughput"
_WHOLE_RUN = (_THROUGHPUT, "p95_ttft_ms", "p95_itl_ms")
_STEADY = "steady_"  # before the name of a metric that is of the steady window; without it, of the whole run
METRICS = (  # of the steady window, then the same of the whole run
    Metric(_STEADY + _THROUGHPUT, "output throughput", "tokens/s", +1),
    Metric(_THROUGHPUT, "output throughput (whole run)", "tokens/s", +1),
    Metric("steady_p95_ttft_ms", "p95 TTFT", "ms", -1),
    Metric("p95_ttft_ms", "p95 TTFT (whole run)", "ms", -1),
    Metric("steady_p95_itl_ms", "p95 ITL", "ms", -1),
    Metric("p95_itl_ms", "p95 ITL (whole run)", "ms", -1),
    Metric("kv_cache_usage_perc", "peak KV use", "share", 0),
    Metric("kv_waste_share", "reserved, empty KV", "share", -1),
    Metric("prefix_cache_hit_rate", "prefix hit rate", "share", +1),
)


@dataclass(frozen=True)
class StoredCell:
    """A cell in one run. ``values``: metric name -> one value for each repeat.

    ``definition``: hash of its settings, its load and the workload's requests.
    """

    valid: bool
    definition: str
    values: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, eq=False)
class StoredRun:
    """One run of a sweep. ``place``: machine, device and model as (name, value), equal within a series."""

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
        return f"{self.sha[:7] if self.sha else 'no commit'}{'+' if self.dirty else ''}"


@dataclass(frozen=True, eq=False)
class TrendPoint:
    """A metric of a cell in one run. Only the state ``valid`` counts. ``values``: one for each repeat."""

    run: StoredRun
    state: str
    values: tuple[float, ...]

    @property
    def value(self) -> float:
        """The median over the repeats."""
        return statistics.median(self.values)


@dataclass(frozen=True, eq=False)
class Series:
    """One metric of one cell on one machine, oldest run first, without runs that did not measure it."""

    workload: str
    cell: str
    metric: Metric
    place: tuple[tuple[str, str], ...]
    definition: str
    points: tuple[TrendPoint, ...]

    @property
    def counted(self) -> tuple[TrendPoint, ...]:
        """Valid cells of complete runs."""
        return tuple(point for point in self.points if point.state == VALID)

    @property
    def machine(self) -> str:
        return ", ".join(value for _, value in self.place)

    @property
    def change(self) -> float | None:
        """From the counted run before the last to the last: new / old - 1; None without two, or where old is 0."""
        last = [point.value for point in self.counted[-2:]]
        return last[1] / last[0] - 1 if len(last) == 2 and last[0] else None


def all_series(runs: Iterable[StoredRun]) -> list[Series]:
    """Every metric of every cell that has a value in any run, by workload, machine, cell and definition.

    The whole run is left out where every run has the steady window; else it is there of all, to compare like with like.
    """
    points: dict[tuple[Any, ...], list[TrendPoint]] = {}
    first_seen: dict[str, int] = {}  # definition -> rank
    for run in runs:
        for cell, stored in run.cells.items():
            state = INCOMPLETE if not run.complete else VALID if stored.valid else INVALID
            rank = first_seen.setdefault(stored.definition, len(first_seen))
            natural = tuple((int(p), "") if p.isdecimal() else (-1, p) for p in re.split(r"(\d+)", cell))  # c4 < c32
            for number, metric in enumerate(METRICS):
                if values := stored.values.get(metric.name):
                    key = (run.workload, run.place, natural, rank, number, cell, stored.definition)
                    points.setdefault(key, []).append(TrendPoint(run, state, values))
    return [
        Series(workload, cell, METRICS[number], place, definition, tuple(found))
        for (workload, place, natural, rank, number, cell, definition), found in sorted(
            points.items(), key=itemgetter(0)
        )
        if METRICS[number].name not in _WHOLE_RUN
        or len(points.get((workload, place, natural, rank, number - 1, cell, definition), ())) < len(found)
    ]


class OtherKind(ValueError):
    """A run of another command than ``kvbench sweep``; its text is the kind."""


def command_of(kind: object) -> str:
    """The command that wrote a manifest of this ``kind``, for a message; a path is a script of the repository."""
    return f"`{kind}`" if "/" in str(kind) else f"`kvbench {kind}`"


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Folders with a manifest.json, or with cells that lost it, under ``paths``, none of them inside another.

    Links to folders are not followed.

    Raises UsageError for a path that is no folder.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise UsageError(f"there is no folder {str(path)!r}: give one that holds runs, such as results/")
        for folder, names, files in os.walk(path):
            if MANIFEST in files or ("cells" in names and any(Path(folder).glob("cells/*/summary.json"))):
                found[Path(folder).resolve()] = None
                names.clear()
            names[:] = sorted(name for name in names if not name.startswith("."))
    return list(found)


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
    """The runs of sweeps in ``folders`` in the order of their start, each once, and notes on those that are skipped."""
    runs: dict[tuple[str, str, datetime], StoredRun] = {}
    notes: list[str] = []
    others: Counter[str] = Counter()
    for folder in folders:
        try:
            run = read_run(folder, notes)
        except OtherKind as kind:
            others[str(kind)] += 1
        except ValueError as error:
            notes.append(f"{_shown(folder)} is skipped: {error}")
        else:
            known = runs.setdefault((run.workload, run.name, run.started), run)
            if run.release and not known.release:
                runs[run.workload, run.name, run.started] = run
    for kind, count in sorted(others.items()):
        notes.append(f"{count} of {command_of(kind)} skipped: a trend is of runs of `kvbench sweep`")
    return sorted(runs.values(), key=lambda run: (run.started, run.name)), notes


def _shown(folder: Path) -> str:
    """mixed/20260101T000000Z-abcdefg: a note may stand in a page that is published, so it has no machine path."""
    return f"{folder.parent.name}/{folder.name}"


def read_run(folder: Path, notes: list[str]) -> StoredRun:
    """Raises ValueError (OtherKind for another command's run). A cell that cannot be read becomes a note."""
    manifest = read_object(folder / MANIFEST)
    workload = manifest.get("workload")
    if (kind := manifest.get("kind")) is not None:
        raise OtherKind(str(kind))
    if not isinstance(manifest.get("plan"), list) or not isinstance(workload, Mapping):
        raise ValueError("its manifest.json is not that of a sweep")
    if (written := manifest.get("format", Manifest.FORMAT)) != Manifest.FORMAT:
        raise ValueError(f"it has the format {written!r}, and this kvbench reads {Manifest.FORMAT}")
    try:
        started = datetime.fromisoformat(str(manifest.get("started")))
    except ValueError:
        raise ValueError(f"its manifest says {manifest.get('started')!r} for its start, which is no time") from None
    load = {key: value for key, value in (workload.get("load") or {}).items() if key not in NOT_OF_REQUESTS}
    cells = {}
    for path in sorted((folder / "cells").glob("*/summary.json")):
        try:
            summary = read_object(path)
            cells[str(summary.get("cell_id", path.parent.name))] = _cell(summary, workload.get("seed"), load)
        except ValueError as error:
            notes.append(f"cell {path.parent.name} of {_shown(folder)} is skipped: {error}")
    git = manifest.get("git") or {}
    return StoredRun(
        folder=folder,
        workload=str(manifest.get("workload_name") or workload.get("name") or folder.parent.name),
        started=started if started.tzinfo else started.replace(tzinfo=UTC),
        complete=manifest.get("status") == "complete",
        sha=git.get("sha"),
        dirty=bool(git.get("dirty")),
        release=release_of(folder),
        versions={name: str(value) for name, value in (manifest.get("versions") or {}).items() if value is not None},
        place=_place(manifest),
        cells=cells,
    )


def _cell(summary: Mapping[str, Any], seed: Any, load: Mapping[str, Any]) -> StoredCell:
    """``seed`` and ``load``: the part of the workload that decides the requests of every cell."""
    repeats = summary.get("repeats")
    if not isinstance(repeats, list):
        raise ValueError("it has no repeats")
    flat = [_values(repeat) for repeat in repeats]
    values = {
        metric.name: tuple(value for each in flat if (value := value_of(each, metric.name)) is not None)
        for metric in METRICS
    }
    steady = len(values[_STEADY + _THROUGHPUT]) == len(repeats)  # one window for all repeats
    steady_latency = steady and all(has_steady_latency(repeat.get("metrics") or {}) for repeat in repeats)
    for name in _WHOLE_RUN:
        if not (steady if name == _THROUGHPUT else steady_latency):
            del values[_STEADY + name]
    requests = {"seed": seed, "load": load}
    what = {"settings": summary.get("settings"), "load": summary.get("load"), "workload": requests}
    return StoredCell(
        valid=bool(summary.get("valid", False)),
        definition=sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:8],
        values={name: found for name, found in values.items() if found},
    )


def _values(repeat: Mapping[str, Any]) -> dict[str, float]:
    stored = RepeatSummary.parse(repeat)
    known = Repeat(stored.repeat, stored.metrics, stored.server, cache=stored.prefix_cache)
    hits, queries = known.prefix_hits or (0.0, 0.0)
    return load_values(stored.metrics, stored.server, hits / queries if queries else None)


def _place(manifest: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What runs of one series must share; not versions, which are what is compared."""
    cpu, of_workload = manifest.get("cpu") or {}, manifest["workload"].get("model") or {}
    model = manifest.get("model") or of_workload
    if isinstance(model, Mapping):
        model = next((model[key] for key in ("name", "config", "path") if model.get(key)), None)
    device, backend, profile = (manifest.get(key) for key in ("device", "backend", "profile"))
    if simulated := manifest.get("simulated"):  # on any machine: what counts is what it is a simulation of
        names = ("cost_model", "ops", "calibration")
        known = {"device": device, "model": model, "profile": profile and f"profile {profile}"}
        known |= {name: simulated.get(name) for name in names}
        return tuple((name, str(value)) for name, value in known.items() if value)
    facts = {
        "cpu": cpu.get("model"),
        "cores": f"{cpu['cores']} cores" if cpu.get("cores") else None,
        "gpu": " + ".join(str(gpu["name"]) for gpu in manifest.get("gpus") or ()),
        "device": device if device != cpu.get("model") else None,
        "backend": backend if backend != "kvbench" else None,
        "model": model,
        "dtype": of_workload.get("dtype") if isinstance(of_workload, Mapping) else None,
        "profile": f"profile {profile}" if profile else None,
    }
    return tuple((name, str(value)) for name, value in facts.items() if value)


def release_of(folder: Path) -> str | None:
    """The release that a run is marked as."""
    return read_object(folder / RELEASE).get("release") if (folder / RELEASE).is_file() else None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file. ValueError for anything else."""
    try:
        data = parse_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return data
