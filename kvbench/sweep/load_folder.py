"""The folder of ``kvbench load --output-dir``: that of a sweep of one cell, with what the load came to beside it.

    manifest.json    first, with status "incomplete"; ``kind`` load, and what a resumed load must agree in
    cells/, requests/, calibration.json     as in a sweep's folder (kvbench/runs/folder.py)
    metrics.json     the load's result, in vllm bench serve's field names and kvbench's own
    requests.parquet, load.json, ...        the files of the load, linked from cells/<cell>/loads/1
    runs/<number>-r<rate>/...               --find-max-rate: one load a run
    search.json                             --find-max-rate: runs and answer

A load, or a run of a search, is finished or is measured anew: with --resume an unfinished or an invalid load is removed
and sent again, and a search goes on from its finished runs, under the conditions they were measured in.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvbench.common.errors import UsageError
from kvbench.common.files import as_stored, read_json, utc_now
from kvbench.common.records import read_record
from kvbench.common.text import and_more
from kvbench.metrics.canaries import WRONG_ANSWERS
from kvbench.runs.folder import DONE, MANIFEST, RunFolder
from kvbench.runs.manifest import StoredManifest, environment_differences
from kvbench.runs.results import COMPLETE, CellLoad, Manifest, WarmUpResult
from kvbench.sweep.rate_search import INVALID
from kvbench.sweep.show_load import StoredLoad
from kvbench.workload.file import differing_keys

METRICS = "metrics.json"
RUNS = "runs"
_LOCK = ".lock"
_FILES_OF_A_LOAD = (  # what a load that is begun anew removes; whatever else lies in the folder stays
    "cells", "logs", "requests*", "server.parquet", "load.json", "counters.json", METRICS, WRONG_ANSWERS, "spec.json",
    "client.log", "search.json", RUNS,
)  # fmt: skip
_SAME = {"workload", "load", "target", "search", "sharing"}  # what a resumed folder must agree in


class SearchRuns(RunFolder):
    """The runs of a search as loads: run 3 at 4 requests/s is in ``runs/03-r4``."""

    def load(self, cell_id: str, repeat: int) -> Path:
        return self.path / RUNS / f"{repeat:02d}-{cell_id}"


class LoadManifest(Manifest):
    """The manifest of a load. ``target``: the server; ``search``: the options of a search; ``valid`` once it ended."""

    kind: Literal["load"] = "load"
    seed: int | None = None
    load: CellLoad = CellLoad()
    search: Mapping[str, Any] | None = None
    sharing: Mapping[str, int | None] = {}
    valid: bool | None = None
    refused: str | None = None
    wrong_answers: str | None = None
    warm_up: WarmUpResult | None = None


@dataclass
class LoadFolder(StoredManifest):
    """One folder and its manifest. ``finished``: it holds a whole load, or a search with its answer."""

    finished: bool = False

    def finish(self, **facts: Any) -> None:
        """Marks the folder complete, without empty logs: everything is written."""
        for log in self.path.rglob("client.log"):
            if log.stat().st_size == 0:
                log.unlink()
        self.replace(status=COMPLETE, ended=utc_now(), **facts)

    def show_at_top(self, load: Path) -> None:
        """Links the files of the finished ``load`` into the folder itself, where a user of one load looks for them."""
        for file in load.iterdir():
            if file.name != DONE:
                (self.path / file.name).unlink(missing_ok=True)
                try:
                    os.link(file, self.path / file.name)
                except OSError:  # no file system for links
                    shutil.copy(file, self.path / file.name)

    def run(self, number: int, name: str) -> Path:
        """The folder of a run of a search; what an interrupted one left is removed."""
        for stale in (*(self.path / RUNS).glob(f"{number:02d}-*"), self.path / RUNS / f"failed-{number}"):
            shutil.rmtree(stale, ignore_errors=True)
        return self.path / RUNS / f"{number:02d}-{name}"

    def metrics(self, load: Path) -> StoredLoad:
        """metrics.json of a load in this folder. Raises UsageError where it is damaged."""
        return read_record(StoredLoad, load / METRICS, "remove it, and go on with --resume")

    def finished_runs(self) -> Iterator[tuple[Path, StoredLoad]]:
        """Folder and metrics.json of the runs that ended, in their order."""
        files = (self.path / RUNS).glob(f"[0-9]*/{METRICS}")
        for path in sorted(files, key=lambda path: int(path.parent.name.partition("-")[0])):  # 100 comes after 11
            yield path.parent, self.metrics(path.parent)


def open_folder(path: Path, manifest: LoadManifest, *, resume: bool) -> LoadFolder:
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
    folder.replace()
    return folder


def _resumed(path: Path, manifest: LoadManifest) -> LoadFolder:
    data = read_json(path / MANIFEST)
    if not isinstance(data, dict) or data.get("kind") != "load":
        raise UsageError(f"{path} is not the folder of a load: give the one that --output-dir named")
    stored = read_record(LoadManifest, path / MANIFEST, "give a new --output-dir")
    then, now = (as_stored(record.model_dump(include=_SAME)) for record in (stored, manifest))
    if keys := differing_keys(then, now):
        raise UsageError(
            f"{path} was begun with another load; it differs in {and_more(keys)}: give the same command again, or a "
            "new --output-dir"
        )
    folder = LoadFolder(path, stored)
    finding = stored.refused or stored.wrong_answers  # and no fault of the measurement
    again = stored.valid is False and not finding
    if stored.complete and (not again or stored.search):
        folder.finished = True
    elif not any(kept.trial is None or kept.trial.cause != INVALID for _, kept in folder.finished_runs()):
        for stale in (stale for pattern in _FILES_OF_A_LOAD for stale in path.glob(pattern)):
            shutil.rmtree(stale) if stale.is_dir() and not stale.is_symlink() else stale.unlink()
        folder.manifest = manifest
    elif differences := environment_differences(stored, manifest)[0]:
        raise UsageError(
            f"{path} was begun under other conditions than now: {'; '.join(differences)}. Go back to those, or "
            "give a new --output-dir"
        )
    return folder
