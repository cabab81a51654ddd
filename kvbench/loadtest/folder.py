"""The folder of ``kvbench load --output-dir``: complete, or marked incomplete from the first moment on.

    manifest.json    first, with status "incomplete": command, workload, versions, machine, target, calibration
    requests.parquet, load.json, counters.json, server.parquet, metrics.json      one load
    runs/<number>-r<rate>/...                                                     --find-max-rate: one folder a run
    search.json                                                                   --find-max-rate: runs and answer
    invalid-<number>/...                                                          a load that was invalid, all of it

What a killed run leaves is resumable: a single load is sent again, as is a search that has no finished run, and the
manifest is then of this second time; a search goes on from its finished runs, under the conditions they were taken in.
A single load that ended as invalid is measured again, and its files are kept aside.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.files import read_json, utc_now, write_json
from kvbench.common.machine import environment
from kvbench.runs.folder import MANIFEST
from kvbench.runs.resume import environment_differences
from kvbench.workload.design import LoadPoint
from kvbench.workload.file import Workload, differing_keys

METRICS = "metrics.json"
RUNS = "runs"
COMPLETE, INCOMPLETE = "complete", "incomplete"
INVALID = "invalid"  # why a run of a search told nothing: it was disturbed, and --resume measures it again
_OF_ONE_TIME = ("requests-*", "server.parquet")  # which sending again need not write anew
_ASIDE = "invalid-"
_LOCK, _MOVING = ".lock", ".invalid"
_NAMED = 3  # keys of a difference that are told by name
_SAME = ("workload", "load", "target", "search")  # what a resumed folder must agree in


@dataclass
class LoadFolder:
    """One folder and its manifest. ``resumed``: it held a load or a search; ``aside``: where an invalid load went."""

    path: Path
    manifest: dict[str, Any]
    resumed: bool = False
    aside: Path | None = None

    @property
    def next_aside(self) -> Path:
        """Where this load goes if it is invalid and measured again."""
        return self.path / f"{_ASIDE}{1 + sum(1 for _ in self.path.glob(f'{_ASIDE}*'))}"

    def update(self, **facts: Any) -> None:
        """Put further facts into the manifest, at once."""
        self.manifest |= facts
        write_json(self.path / MANIFEST, self.manifest)

    def finish(self, **facts: Any) -> None:
        """Everything is written: the folder is complete, and what no one needs is gone."""
        for log in self.path.rglob("client.log"):
            if log.stat().st_size == 0:
                log.unlink()
        self.update(status=COMPLETE, ended=utc_now(), **facts)

    def run(self, number: int, name: str) -> Path:
        """An empty folder for a run of a search; what an interrupted one left is removed."""
        path = self.path / RUNS / f"{number:02d}-{name}"
        for stale in (self.path / RUNS).glob(f"{number:02d}-*"):
            shutil.rmtree(stale)
        path.mkdir(parents=True)
        return path

    def drop(self, path: Path) -> None:
        """A run of a search is gone: it is measured again, perhaps under another number."""
        shutil.rmtree(path)

    def finished_runs(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Folder and metrics.json of the runs that ended, in their order."""
        for path in sorted((self.path / RUNS).glob(f"*/{METRICS}")):
            yield path.parent, read_json(path)


def describe(workload: Workload, point: LoadPoint, target: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The manifest of a load, before anything is sent. ``target``: url, model, preset; never a key."""
    return {
        "format": 1,
        "kind": "load",
        "status": INCOMPLETE,
        "command": ["kvbench", *sys.argv[1:]],
        "workload": json.loads(json.dumps(dict(workload.resolved), default=str)),
        "workload_name": workload.name,
        "profile": workload.profile,
        "seed": workload.seed,
        "load": {
            "load_id": point.load_id,
            "mode": point.mode,
            "concurrency": point.concurrency,
            "request_rate": str(point.request_rate) if point.request_rate == float("inf") else point.request_rate,
            "num_requests": point.num_requests,
        },
        "target": dict(target),
        "search": None,
        **environment(),
        "started": utc_now(),
        "ended": None,
        **more,
    }


def open_folder(path: Path, manifest: dict[str, Any], *, resume: bool) -> LoadFolder:
    """The folder, its manifest written; the caller holds its lock. Raises UsageError if it holds something else."""
    folder = _reopened(path, manifest) if resume else _new(path, manifest)
    folder.update()
    return folder


def _new(path: Path, manifest: dict[str, Any]) -> LoadFolder:
    if held := sorted(p.name for p in path.iterdir() if p.name != _LOCK):
        raise UsageError(
            f"--output-dir {path} is not empty (it holds {held[0]}): give a new folder, or --resume to go on with the "
            "load that was begun there"
        )
    return LoadFolder(path, manifest)


def _reopened(path: Path, manifest: dict[str, Any]) -> LoadFolder:
    if not (path / MANIFEST).is_file():
        return _new(path, manifest)  # it was stopped before its first word, or never begun
    stored = read_json(path / MANIFEST)
    if not isinstance(stored, dict) or stored.get("kind") != "load":
        raise UsageError(f"{path} is not the folder of a load: give the one that --output-dir named")
    _require_same_sharing(path, stored.get("sharing"), manifest.get("sharing"))
    asked = {key: manifest.get(key) for key in _SAME}
    if keys := differing_keys({key: stored.get(key) for key in _SAME}, json.loads(json.dumps(asked, default=str))):
        named = ", ".join(keys[:_NAMED]) + (f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else "")
        raise UsageError(
            f"{path} was begun with another load; it differs in {named}: give the same command again, or a new "
            "--output-dir"
        )
    if stored.get("status") == COMPLETE and (stored.get("valid") is not False or stored.get("search")):
        return LoadFolder(path, stored, resumed=True)
    if stored.get("status") == COMPLETE:
        return LoadFolder(path, manifest, aside=_put_aside(path))
    if not any(_tells(read_json(run)) for run in (path / RUNS).glob(f"*/{METRICS}")):
        for stale in [p for pattern in _OF_ONE_TIME for p in path.glob(pattern)]:
            stale.unlink()
        shutil.rmtree(path / RUNS, ignore_errors=True)
        return LoadFolder(path, manifest, resumed=True)
    differences, _ = environment_differences(stored, manifest)
    if differences:
        raise UsageError(
            f"{path} was begun under other conditions than now: {'; '.join(differences)}. Go back to those, or "
            "give a new --output-dir"
        )
    return LoadFolder(path, stored, resumed=True)


def _require_same_sharing(path: Path, before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> None:
    """Raises UsageError: how many clients send is part of what is measured. Older manifests do not tell it."""
    if before is None or before == now:
        return
    raise UsageError(
        f"{path} was begun {_sharing_words(before)}, and this command is {_sharing_words(now or {})}: give the same "
        "command again, or a new --output-dir"
    )


def _sharing_words(sharing: Mapping[str, Any]) -> str:
    if sharing.get("workers"):
        return f"with --master --expect-workers {sharing['workers']}"
    return f"with --processes {sharing['processes']}" if sharing.get("processes") else "without --master or --processes"


def _tells(kept: Mapping[str, Any]) -> bool:
    """Whether a run of a search is one to go on from; invalid ones are measured again."""
    return (kept.get("trial") or {}).get("cause") != INVALID


def _put_aside(path: Path) -> Path:
    """Everything of an invalid load into a folder of its own; a killed one is gone on with. The manifest stays too."""
    aside, moving = LoadFolder(path, {}).next_aside, path / _MOVING
    moving.mkdir(exist_ok=True)
    for each in path.iterdir():
        if each.name not in (_LOCK, _MOVING, MANIFEST) and not each.name.startswith(_ASIDE):
            each.rename(moving / each.name)
    shutil.copy2(path / MANIFEST, moving)
    return moving.rename(aside)
