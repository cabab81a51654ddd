"""Runs of sweeps read from disk: results/<workload>/<run>/, or what ``kvbench history add`` keeps of them.

Only manifest.json and cells/*/summary.json are read, so both look the same. A run that cannot be read is skipped with a
note.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.history.model import METRICS, StoredCell, StoredRun
from kvbench.runs.aggregate import flatten
from kvbench.runs.folder import FORMAT, MANIFEST
from kvbench.runs.metric_names import value_of

RELEASE = "release.json"
"""Beside a manifest.json in a history: {"release": the name that `kvbench history add --release` was given}."""


class OtherKind(ValueError):
    """A run of another command than ``kvbench sweep``; its text is the kind."""


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Folders with a manifest.json under ``paths``, none of them inside another. Links to folders are not followed.

    Raises UsageError for a path that is no folder.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise UsageError(f"there is no folder {str(path)!r}: give one that holds runs, such as results/")
        for folder, names, files in os.walk(path):
            if MANIFEST in files:
                found[Path(folder).resolve()] = None
                names.clear()
            names[:] = sorted(name for name in names if not name.startswith("."))
    return list(found)


def read_runs(folders: Iterable[Path]) -> tuple[list[StoredRun], list[str]]:
    """The runs of sweeps among ``folders`` by their start, each once, and a note for each that is skipped."""
    runs: dict[tuple[str, str, datetime], StoredRun] = {}
    notes: list[str] = []
    others: Counter[str] = Counter()
    for folder in folders:
        try:
            run = read_run(folder, notes)
        except OtherKind as kind:
            others[str(kind)] += 1
        except ValueError as error:
            notes.append(f"{folder} is skipped: {error}")
        else:
            known = runs.setdefault((run.workload, run.name, run.started), run)
            if run.release and not known.release:
                runs[run.workload, run.name, run.started] = run
    notes += [
        f"{count} of `kvbench {kind}` skipped: a trend is of runs of `kvbench sweep`"
        for kind, count in sorted(others.items())
    ]
    return sorted(runs.values(), key=lambda run: (run.started, run.name)), notes


def read_run(folder: Path, notes: list[str]) -> StoredRun:
    """Raises ValueError (OtherKind for another command's run). A cell that cannot be read becomes a note."""
    manifest = read_object(folder / MANIFEST)
    if (kind := manifest.get("kind")) is not None:
        raise OtherKind(str(kind))
    if not isinstance(manifest.get("plan"), list) or not isinstance(manifest.get("workload"), Mapping):
        raise ValueError("its manifest.json is not that of a sweep")
    if (written := manifest.get("format", FORMAT)) != FORMAT:
        raise ValueError(f"it has the format {written!r}, and this kvbench reads {FORMAT}")
    requests = _definition(manifest["workload"])
    cells = {}
    for path in sorted((folder / "cells").glob("*/summary.json")):
        try:
            summary = read_object(path)
            cells[str(summary.get("cell_id", path.parent.name))] = _cell(summary, requests)
        except ValueError as error:
            notes.append(f"cell {path.parent.name} of {folder} is skipped: {error}")
    git, versions = _mapping(manifest.get("git")), _mapping(manifest.get("versions"))
    return StoredRun(
        folder=folder,
        workload=str(manifest.get("workload_name") or manifest["workload"].get("name") or folder.parent.name),
        started=_time(manifest.get("started")),
        complete=manifest.get("status") == "complete",
        sha=str(git["sha"]) if git.get("sha") else None,
        dirty=bool(git.get("dirty")),
        release=_release(folder / RELEASE),
        versions={str(name): str(value) for name, value in versions.items() if value is not None},
        place=_place(manifest),
        cells=cells,
    )


def _cell(summary: Mapping[str, Any], requests: Mapping[str, Any]) -> StoredCell:
    repeats = summary.get("repeats")
    if not isinstance(repeats, list) or not all(isinstance(repeat, Mapping) for repeat in repeats):
        raise ValueError("it has no repeats")
    flat = [flatten({**_mapping(each.get("metrics")), "server": _mapping(each.get("server"))}) for each in repeats]
    values = {
        metric.name: tuple(value for each in flat if (value := value_of(each, metric.name)) is not None)
        for metric in METRICS
    }
    what = {"settings": summary.get("settings"), "load": summary.get("load"), "workload": requests}
    return StoredCell(
        valid=bool(summary.get("valid", False)),
        definition=sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:8],
        values={name: found for name, found in values.items() if found},
    )


def _definition(workload: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the workload that decides the requests of every cell; each cell has its own load and settings."""
    load = _mapping(workload.get("load"))
    own = ("repeats", "slo", "concurrency", "request_rate", "num_requests", "timeout_s")
    return {"seed": workload.get("seed"), "load": {key: value for key, value in load.items() if key not in own}}


def _place(manifest: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What two runs must share to be one trend. Versions are not in it: they are what is compared."""
    cpu, workload = _mapping(manifest.get("cpu")), _mapping(manifest.get("workload"))
    gpus = manifest.get("gpus") if isinstance(manifest.get("gpus"), list) else []
    model = manifest.get("model") or _mapping(workload.get("model"))
    named = (
        [model.get(key) for key in ("name", "config", "path") if model.get(key)] if isinstance(model, Mapping) else []
    )
    facts = {
        "cpu": cpu.get("model"),
        "cores": f"{cpu['cores']} cores" if cpu.get("cores") else None,
        "gpu": " + ".join(str(_mapping(gpu).get("name")) for gpu in gpus) or None,
        "device": manifest.get("device") if manifest.get("device") != cpu.get("model") else None,
        "backend": manifest.get("backend") if manifest.get("backend") != "kvbench" else None,
        "model": named[0] if named else (model if isinstance(model, str) else None),
        "dtype": _mapping(workload.get("model")).get("dtype"),
        "profile": f"profile {manifest['profile']}" if manifest.get("profile") else None,
    }
    return tuple((name, str(value)) for name, value in facts.items() if value)


def _release(path: Path) -> str | None:
    if not path.is_file():
        return None
    name = read_object(path).get("release")
    if not isinstance(name, str):
        raise ValueError(f"{path.name} names no release")
    return name


def _time(text: Any) -> datetime:
    """A time with its zone (UTC where it says none). ValueError for anything else."""
    try:
        time = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise ValueError(f"its manifest says {text!r} for its start, which is no time") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file. ValueError for anything else."""
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return data


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
