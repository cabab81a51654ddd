"""The folder of ``kvbench load --output-dir``. Its manifest says "incomplete" until all is written.

    manifest.json    first, with status "incomplete": command, workload, versions, machine, target, calibration
    requests.parquet, load.json, counters.json, server.parquet, metrics.json      one load
    runs/<number>-r<rate>/...                                                     --find-max-rate: one folder a run
    search.json                                                                   --find-max-rate: runs and answer

A load, or a run of a search, is finished or is measured anew: with --resume an unfinished or an invalid load is removed
and sent again, and a search goes on from its finished runs, under the conditions they were measured in.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.files import as_stored, read_json, utc_now, write_json
from kvbench.common.machine import environment
from kvbench.common.text import and_more
from kvbench.metrics.canaries import WRONG_ANSWERS
from kvbench.runs.folder import MANIFEST
from kvbench.runs.resume import environment_differences
from kvbench.workload.design import LoadPoint
from kvbench.workload.file import Workload, differing_keys

METRICS = "metrics.json"
RUNS = "runs"
COMPLETE, INCOMPLETE = "complete", "incomplete"
_LOCK = ".lock"
INVALID = "invalid"  # why a run of a search tells nothing: it was disturbed
_FILES_OF_A_LOAD = (  # what a load that is begun anew removes; whatever else lies in the folder stays
    "requests*", "server.parquet", "load.json", "counters.json", METRICS, WRONG_ANSWERS, "spec.json", "client.log",
    "search.json", RUNS,
)  # fmt: skip
_SAME = ("workload", "load", "target", "search", "sharing")  # what a resumed folder must agree in


@dataclass
class LoadFolder:
    """One folder and its manifest. ``finished``: it holds a whole load, or a search with its answer."""

    path: Path
    manifest: dict[str, Any]
    finished: bool = False

    def update(self, **facts: Any) -> None:
        """Put further facts into the manifest, at once."""
        self.manifest |= facts
        write_json(self.path / MANIFEST, self.manifest)

    def finish(self, **facts: Any) -> None:
        """Everything is written: empty logs are removed and the folder is complete."""
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

    def finished_runs(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Folder and metrics.json of the runs that ended, in their order."""
        found = (self.path / RUNS).glob(f"*/{METRICS}")
        for path in sorted(found, key=lambda path: int(path.parent.name.partition("-")[0])):  # 100 comes after 11
            yield path.parent, read_json(path)


def describe(workload: Workload, point: LoadPoint, target: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The manifest of a load, before anything is sent. ``target``: url, model, preset; never a key."""
    return {
        "format": 1,
        "kind": "load",
        "status": INCOMPLETE,
        "command": ["kvbench", *sys.argv[1:]],
        "workload": as_stored(workload.resolved),
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
        **environment(),
        "started": utc_now(),
        "ended": None,
        **more,
    }


def open_folder(path: Path, manifest: dict[str, Any], *, resume: bool) -> LoadFolder:
    """The folder, its manifest written; the caller holds its lock. Raises UsageError if it holds something else."""
    if resume and (path / MANIFEST).is_file():
        folder = _resumed(path, manifest)
    elif held := sorted(p.name for p in path.iterdir() if p.name != _LOCK):
        raise UsageError(
            f"--output-dir {path} is not empty (it holds {held[0]}): give a new folder, or --resume to go on with the "
            "load that was begun there"
        )
    else:
        folder = LoadFolder(path, manifest)
    folder.update()
    return folder


def _resumed(path: Path, manifest: dict[str, Any]) -> LoadFolder:
    stored = read_json(path / MANIFEST)
    if not isinstance(stored, dict) or stored.get("kind") != "load":
        raise UsageError(f"{path} is not the folder of a load: give the one that --output-dir named")
    now = as_stored({key: manifest.get(key) for key in _SAME})
    if keys := differing_keys({key: stored.get(key) for key in _SAME}, now):
        raise UsageError(
            f"{path} was begun with another load; it differs in {and_more(keys)}: give the same command again, or a "
            "new --output-dir"
        )
    folder = LoadFolder(path, stored)
    found = stored.get("refused") or stored.get("wrong_answers")  # a finding, and no fault of the measurement
    again = stored.get("valid") is False and not found
    if stored.get("status") == COMPLETE and (not again or stored.get("search")):
        folder.finished = True
    elif not any((kept.get("trial") or {}).get("cause") != INVALID for _, kept in folder.finished_runs()):
        for each in (found for pattern in _FILES_OF_A_LOAD for found in path.glob(pattern)):
            shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
        folder.manifest = manifest
    elif differences := environment_differences(stored, manifest)[0]:
        raise UsageError(
            f"{path} was begun under other conditions than now: {'; '.join(differences)}. Go back to those, or "
            "give a new --output-dir"
        )
    return folder
