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
from kvbench.report.decision import Decision
from kvbench.report.headline import headline
from kvbench.report.provenance import target, validity
from kvbench.report.side_by_side import run_facts
from kvbench.report.wording import say
from kvbench.runs.folder import MANIFEST
from kvbench.runs.model import MeasuredCell, Run
from kvbench.runs.quality import QUALITY
from kvbench.runs.read import read_run
from kvbench.runs.stored import command_of, find_runs, read_object
from kvbench.workload.settings import slug

DAMAGED, OTHER = "damaged", "other"  # OTHER: of another command than `kvbench sweep`, which is the row's sentence
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


@dataclass(frozen=True)
class Filter:
    """A filter of the list; an empty value lets everything through."""

    text: str = ""
    workload: str = ""
    state: str = ""
    machine: str = ""

    def selects(self, row: RunRow) -> bool:
        """Tests whether the run shows every word of ``text`` and has the other values."""
        every = (row.workload, row.name, row.sentence, row.model, row.machine, row.target, row.started)
        shown = " ".join(every).lower()
        return all(word in shown for word in self.text.lower().split()) and all(
            getattr(self, name) in ("", getattr(row, name)) for name in ("workload", "state", "machine")
        )


class Workspace:
    """The runs in ``folders``. Safe to use from several threads. Raises UsageError for a path that is no folder."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self._roots = tuple(folder.resolve() for folder in folders)
        self._lock = threading.Lock()
        self._rows: dict[Path, RunRow] = {}
        find_runs(self.folders)

    def rows(self, progress: Callable[[int, int], None] | None = None) -> list[RunRow]:
        """Every run, the newest first. ``progress`` is called with how many folders are looked at, and with all."""
        rows = [row for row in self._read(progress) if row.state != OTHER]
        return sorted(rows, key=lambda row: (row.started, row.name), reverse=True)

    def notes(self) -> list[str]:
        """Says what is left out of the list, a sentence each."""
        kinds = Counter(row.sentence for row in self._read() if row.state == OTHER)
        return [
            say("view.left_out", folders=words.plural(count, "folder"), command=command_of(kind))
            for kind, count in sorted(kinds.items())
        ]

    def row(self, name: str) -> RunRow:
        """The run with the slug ``name``. Raises UsageError when there is none."""
        row = next((row for row in self.rows() if row.slug == name), None)
        if row is None:
            raise UsageError(say("view.no_such_run"))
        return row

    def run(self, row: RunRow) -> Run:
        """The run of a row, read now. Raises UsageError when it cannot be read."""
        try:
            return self._open(row.folder)
        except Exception as error:
            raise UsageError(say("view.unreadable", row=row, why=_reason(error, row.folder))) from None

    def cells(self, values: Iterable[str]) -> list[tuple[Run, MeasuredCell]]:
        """The cells with these addresses. Raises UsageError for one that is not there."""
        runs: dict[str, Run] = {}
        chosen = []
        for value in values:
            name, _, cell_id = value.partition("/")
            if name not in runs:
                runs[name] = self.run(self.row(name))
            cell = next((cell for cell in runs[name].cells if cell.cell_id == cell_id), None)
            if cell is None:
                raise UsageError(say("view.no_such_cell", run=name))
            chosen.append((runs[name], cell))
        return chosen

    def _read(self, progress: Callable[[int, int], None] | None = None) -> list[RunRow]:
        """A row of every folder, those of other commands too."""
        with self._lock:
            rows: dict[Path, RunRow] = {}
            slugs: set[str] = set()
            folders = find_runs(self.folders)
            for folder in folders:
                if progress:
                    progress(len(rows), len(folders))
                first = f"{slug(folder.parent.name)}-{slug(folder.name)}"[:_LONGEST_SLUG]  # a good file name
                numbered = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
                name = next(candidate for candidate in numbered if candidate not in slugs)
                slugs.add(name)
                row, stamp = self._rows.get(folder), _stamp(folder)
                same = row is not None and (row.slug, row.stamp) == (name, stamp)
                rows[folder] = row if same else self._look(folder, name, stamp)
            self._rows = rows
            return list(rows.values())

    def _look(self, folder: Path, name: str, stamp: Stamp) -> RunRow:
        """Makes the row of a folder, also of a damaged one: it must not take the others away."""
        modified = max((modified for _, modified, _ in stamp), default=0)
        when = datetime.fromtimestamp(modified / 1e9, UTC).strftime(_TIME)
        try:
            self._check_link(folder / MANIFEST)
            if kind := read_object(folder / MANIFEST).get("kind"):
                return RunRow(name, folder, stamp, folder.parent.name, when, OTHER, str(kind))
            return _row(self._open(folder), name, stamp)
        except Exception as error:
            return RunRow(name, folder, stamp, folder.parent.name, when, DAMAGED, _reason(error, folder))

    def _open(self, folder: Path) -> Run:
        for path, names, files in os.walk(folder):
            for name in (*names, *files):
                self._check_link(Path(path, name))
        run = read_run(folder)
        if run.damaged and not run.cells:
            raise UsageError(run.damaged[0])
        return run

    def _check_link(self, path: Path) -> None:
        """Raises UsageError for a link to somewhere outside of the folders."""
        if path.is_symlink() and not any(path.resolve().is_relative_to(root) for root in self._roots):
            raise UsageError(say("view.link", name=path.name))


def _stamp(folder: Path) -> Stamp:
    """Changes when one of the files does that a row is made of."""
    states = []
    for path in sorted(path for pattern in _READ_FILES for path in folder.glob(pattern)):
        with suppress(OSError):  # gone meanwhile, or a link to nothing
            state = path.stat()
            states.append((str(path.relative_to(folder)), state.st_mtime_ns, state.st_size))
    return tuple(states)


def _row(run: Run, name: str, stamp: Stamp) -> RunRow:
    facts, started = run_facts(run), run.manifest.started or ""
    with suppress(ValueError):
        started = datetime.fromisoformat(started).astimezone(UTC).strftime(_TIME)
    cells = [CellRow(f"{name}/{c.cell_id}", f"{c.name}, {c.load.short}", c.doubt) for c in run.by_load]
    return RunRow(
        slug=name,
        folder=run.folder,
        stamp=stamp,
        workload=run.workload,
        started=started,
        state=validity(run).status,
        sentence=headline(Decision.of(run)),  # the verdict on a run, here only
        model=facts.get("model", ""),
        machine=facts.get("GPUs") or facts.get("processor", ""),
        target=target(run),
        cells=tuple(cells),
    )


def _reason(error: Exception, folder: Path) -> str:
    """Says what is wrong with a folder in a sentence: ours, or Python's."""
    text = str(error) if isinstance(error, ValueError) else f"its files are damaged ({type(error).__name__}: {error})"
    return shorten(text.replace(str(folder), folder.name), _LONGEST_REASON, placeholder=" ...")
