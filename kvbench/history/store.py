"""Keeping runs: the small files of each in a folder of its own, never changed once there.

    DIR/<workload>/<run>/manifest.json  summary.csv  cells/<cell>/summary.json  release.json  verdict.json

Of each cell's summary.json only what trends need is kept: the cell's identity, whether it is valid, and of each repeat
the client's totals and latencies and the server's counters. The folder is meant for an orphan branch, where every byte
stays for ever. A verdict that is written after a run was kept does not make it another run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.files import flush, write_text
from kvbench.history.sentences import say
from kvbench.metrics.definitions import METRICS, SHIPPED
from kvbench.runs.folder import MANIFEST
from kvbench.runs.stored import RELEASE, OtherKind, StoredRun, command_of, read_object, read_stored_run, release_of

VERDICT = "verdict.json"
_NOT_MEASURED = (RELEASE, VERDICT)  # may be written later
_OF_CELL = ("cell_id", "config_id", "label", "is_baseline", "varied", "settings", "load", "valid", "invalid_reasons")
_OF_REPEAT = ("repeat", "started_at", "requests_sha256", "prefix_cache")
_OF_METRICS = (
    "completed", "failed", "duration_s", "output_throughput", "steady_output_throughput", "request_throughput",
    "goodput", "ttft_ms", "tpot_ms", "itl_ms", "e2el_ms", "total_input_tokens", "total_output_tokens",
    "steady_latency",
)  # fmt: skip
_FORMERLY_NOT = ("steady_latency", "prefix_cache")  # of repeats that an older version kept


class Skipped(Exception):
    """A folder is not a complete run of a sweep; the text says why."""


def add_run(source: Path, to: Path, release: str | None, *, incomplete: bool = False) -> tuple[str, Path, list[str]]:
    """Keeps the run in ``source`` under ``to``. Returns what was done, the folder, and notes on missing cells.

    Raises Skipped for what is not a run of a sweep, or is incomplete (unless ``incomplete``), and UsageError when
    another run has its name there; then nothing is written.
    """
    notes: list[str] = []
    try:
        run = read_stored_run(source, notes)
    except OtherKind as kind:
        raise Skipped(say("store.other_kind", folder=source, command=command_of(kind))) from None
    except ValueError as error:
        raise Skipped(say("store.not_kept", folder=source, error=error)) from None
    if not run.complete and not incomplete:
        raise Skipped(say("store.not_complete", folder=source))
    files = _kept_files(source, run, release)
    target = to / (run.workload.replace("/", "_").lstrip(".") or "workload") / source.resolve().name
    if not target.exists():
        _write_whole(target, files)
        return "added", target, notes
    _check_same(target, files)
    if release is None or (kept_as := release_of(target)) == release:
        return "there already", target, notes
    if kept_as is not None:
        raise UsageError(say("store.other_release", folder=target, release=kept_as))
    write_text(target / RELEASE, files[RELEASE].decode())
    return "marked", target, notes


def _kept_files(source: Path, run: StoredRun, release: str | None) -> dict[str, bytes]:
    """Path in the history's folder -> content; equal for equal runs."""
    paths = [source / name for name in (MANIFEST, "summary.csv", VERDICT)]
    files = {path.name: path.read_bytes() for path in paths if path.is_file()}
    for path in sorted((source / "cells").glob("*/summary.json")):
        with suppress(ValueError):  # read_stored_run noted it, and cells that are damaged otherwise
            summary = read_object(path)
            if str(summary.get("cell_id", path.parent.name)) in run.cells:
                files[f"cells/{path.parent.name}/summary.json"] = _cell_text(summary).encode()
    if release := release or run.release:
        files[RELEASE] = (json.dumps({"release": release}) + "\n").encode()
    return files


def _cell_text(summary: Mapping[str, Any], without: Sequence[str] = ()) -> str:
    added = (metric.path for metric in METRICS.values() if metric.name not in SHIPPED)
    kept_keys = (_OF_REPEAT, (*_OF_METRICS, *added))
    of_repeat, of_metrics = ([key for key in keys if key not in without] for keys in kept_keys)
    repeats = [
        {key: repeat[key] for key in of_repeat if key in repeat}
        | {"metrics": {key: repeat["metrics"][key] for key in of_metrics if key in repeat.get("metrics", {})}}
        | {"server": repeat.get("server", {})}
        for repeat in summary.get("repeats", ())
    ]
    kept = {key: summary[key] for key in _OF_CELL if key in summary} | {"repeats": repeats}
    return json.dumps(kept, separators=(",", ":")) + "\n"


def _check_same(target: Path, files: Mapping[str, bytes]) -> None:
    """Raises UsageError when the measured files differ."""
    kept = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}.difference(_NOT_MEASURED)
    wanted, different = set(files).difference(_NOT_MEASURED), []
    for name in sorted(wanted & kept):
        there, content = (target / name).read_bytes(), files[name]
        same = [content]
        if name.startswith("cells/"):
            same.append(_cell_text(json.loads(content), _FORMERLY_NOT).encode())
        if there not in same:
            different.append(name)
    if different := sorted(kept ^ wanted) or different:
        raise UsageError(say("store.other_content", folder=target, file=different[0]))


def _write_whole(target: Path, files: Mapping[str, bytes]) -> None:
    """Writes all files or none: beside ``target``, which is then renamed."""
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        for name, content in files.items():
            path = scratch / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            flush(path)
        scratch.rename(target)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise UsageError(say("store.not_written", folder=target, error=error.strerror)) from None
