"""The runs in some folders, as the workspace lists them: read once, and again where their files have changed.

Only reads. A run is addressed by its slug, which is looked up among the folders found; no path is ever made of what a
reader sends. A run that holds a link to somewhere outside of the folders is not read.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from textwrap import shorten

from kvbench.common import text as words
from kvbench.common.errors import UsageError
from kvbench.history.runs import command_of, find_runs, read_object
from kvbench.report.compared_cells import run_facts
from kvbench.report.decision import headline
from kvbench.report.provenance import target, validity
from kvbench.runs.folder import MANIFEST
from kvbench.runs.model import MeasuredCell, Run
from kvbench.runs.quality import QUALITY
from kvbench.runs.read import read_run
from kvbench.workload.settings import slug

DAMAGED = "damaged"
STATES = ("valid", "wrong", "invalid", "incomplete", "empty", DAMAGED)
_READ_FILES = (MANIFEST, QUALITY, "cells/*/summary.json", "lockstep/effects.json")  # what the row of a run is made of
_LONGEST_SLUG, _LONGEST_REASON = 100, 400  # characters
_TIME = "%Y-%m-%d %H:%M"

Stamp = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class CellRow:
    """A cell that can be chosen. ``value``: its address, "slug/cell id"; ``doubt``: see ``MeasuredCell.doubt``."""

    value: str
    title: str
    doubt: str


@dataclass(frozen=True)
class RunRow:
    """A run as it is listed. ``state``: one of STATES; ``sentence``: its verdict, or why it cannot be read."""

    slug: str
    folder: Path
    stamp: Stamp
    workload: str
    started: str  # YYYY-MM-DD HH:MM, UTC
    state: str
    sentence: str
    model: str = ""
    machine: str = ""
    target: str = ""  # empty for the built-in engine
    cells: tuple[CellRow, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.name

    def matches(self, text: str, **facts: str) -> bool:
        """Whether every word of ``text`` is in what is shown of it, and each of ``facts`` that is not empty equal."""
        every = (self.workload, self.name, self.sentence, self.model, self.machine, self.target, self.started)
        shown = " ".join(every).lower()
        return all(word in shown for word in text.lower().split()) and all(
            getattr(self, name) == value for name, value in facts.items() if value
        )


class Workspace:
    """The runs in ``folders``. Safe to use from several threads. Raises UsageError for a path that is no folder."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self._roots = tuple(folder.resolve() for folder in folders)
        self._lock = threading.Lock()
        self._known: dict[Path, _Known] = {}
        find_runs(self.folders)

    def rows(self, progress: Callable[[int, int], None] | None = None) -> list[RunRow]:
        """Every run, the newest first. ``progress`` is called with how many folders are looked at, and with all."""
        rows = [known.row for known in self._read(progress) if known.row]
        return sorted(rows, key=lambda row: (row.started, row.name), reverse=True)

    def notes(self) -> list[str]:
        """What is left out of the list, a sentence each."""
        kinds = Counter(known.kind for known in self._read() if known.kind)
        return [
            f"{words.plural(count, 'folder')} of {command_of(kind)} left out: this is a list of sweeps."
            for kind, count in sorted(kinds.items())
        ]

    def row(self, name: str) -> RunRow:
        """The run with the slug ``name``. Raises UsageError when there is none."""
        found = next((row for row in self.rows() if row.slug == name), None)
        if found is None:
            raise UsageError("there is no such run in this workspace: choose one from the list")
        return found

    def run(self, row: RunRow) -> Run:
        """The run of a row, read now. Raises UsageError when it cannot be read."""
        try:
            return self._open(row.folder)
        except Exception as error:
            raise UsageError(f"{row.workload} {row.name} cannot be read: {_reason(error, row.folder)}") from None

    def cells(self, values: Iterable[str]) -> list[tuple[Run, MeasuredCell]]:
        """The cells with these addresses. Raises UsageError for one that is not there."""
        runs: dict[str, Run] = {}
        found = []
        for value in values:
            name, _, cell_id = value.partition("/")
            if name not in runs:
                runs[name] = self.run(self.row(name))
            cell = next((cell for cell in runs[name].cells if cell.cell_id == cell_id), None)
            if cell is None:
                raise UsageError(f"run {name} has no such cell: choose one from the list")
            found.append((runs[name], cell))
        return found

    def _read(self, progress: Callable[[int, int], None] | None = None) -> list[_Known]:
        with self._lock:
            known: dict[Path, _Known] = {}
            taken: set[str] = set()
            folders = find_runs(self.folders)
            for folder in folders:
                if progress:
                    progress(len(known), len(folders))
                name = _free_slug(folder, taken)
                taken.add(name)
                before, stamp = self._known.get(folder), _stamp(folder)
                same = before is not None and (before.slug, before.stamp) == (name, stamp)
                known[folder] = before if same else self._look(folder, name, stamp)
            self._known = known
            return list(known.values())

    def _look(self, folder: Path, name: str, stamp: Stamp) -> _Known:
        """Whatever is wrong with a folder becomes its row: one damaged run must not take the others away."""
        try:
            if kind := self._kind(folder):
                return _Known(name, stamp, kind=kind)
            return _Known(name, stamp, _row(self._open(folder), name, stamp))
        except Exception as error:
            started = max((modified for _, modified, _ in stamp), default=0)
            when = datetime.fromtimestamp(started / 1e9, UTC).strftime(_TIME)
            reason = _reason(error, folder)
            return _Known(name, stamp, RunRow(name, folder, stamp, folder.parent.name, when, DAMAGED, reason))

    def _kind(self, folder: Path) -> str:
        """The command that a folder is of, where that is not ``kvbench sweep``."""
        self._check_link(folder / MANIFEST)
        return str(read_object(folder / MANIFEST).get("kind") or "")

    def _open(self, folder: Path) -> Run:
        for path, names, files in os.walk(folder):
            for each in (*names, *files):
                self._check_link(Path(path, each))
        run = read_run(folder)
        if run.damaged and not run.cells:
            raise UsageError(run.damaged[0])
        return run

    def _check_link(self, path: Path) -> None:
        """Raises UsageError for a link to somewhere outside of the folders."""
        if path.is_symlink() and not any(path.resolve().is_relative_to(root) for root in self._roots):
            raise UsageError(f"{path.name} is a link that leads out of the folder, which is not followed")


@dataclass(frozen=True)
class _Known:
    """What is known of a folder at ``stamp``: its row, or the other command that it is of."""

    slug: str
    stamp: Stamp
    row: RunRow | None = None
    kind: str = ""


def _free_slug(folder: Path, taken: set[str]) -> str:
    """Letters, digits, dots, dashes and underscores: good in an address and as a file's name."""
    name = f"{slug(folder.parent.name)}-{slug(folder.name)}"[:_LONGEST_SLUG]
    numbered = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(each for each in numbered if each not in taken)


def _stamp(folder: Path) -> Stamp:
    """Changes when one of the files does that a row is made of."""
    found = []
    for path in sorted(path for pattern in _READ_FILES for path in folder.glob(pattern)):
        with suppress(OSError):  # gone meanwhile, or a link to nothing
            state = path.stat()
            found.append((str(path.relative_to(folder)), state.st_mtime_ns, state.st_size))
    return tuple(found)


def _row(run: Run, name: str, stamp: Stamp) -> RunRow:
    known = run_facts(run)
    cells = [CellRow(f"{name}/{c.cell_id}", f"{c.name}, {c.load.short}", c.doubt) for c in run.by_load]
    return RunRow(
        slug=name,
        folder=run.folder,
        stamp=stamp,
        workload=run.workload,
        started=_time(str(run.manifest.get("started") or "")),
        state=validity(run).status,
        sentence=headline(run),  # the verdict on a run, here only
        model=known.get("model", ""),
        machine=known.get("GPUs") or known.get("processor", ""),
        target=target(run),
        cells=tuple(cells),
    )


def _time(started: str) -> str:
    try:
        return datetime.fromisoformat(started).astimezone(UTC).strftime(_TIME)
    except ValueError:
        return started


def _reason(error: Exception, folder: Path) -> str:
    """What is wrong with a folder, in a sentence: ours, or what Python said of it."""
    text = str(error) if isinstance(error, ValueError) else f"its files are damaged ({type(error).__name__}: {error})"
    return shorten(text.replace(str(folder), folder.name), _LONGEST_REASON, placeholder=" ...")
