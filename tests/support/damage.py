"""Damages files of a run's folder, one at a time, and runs the commands that read such folders.

Commands that draw figures take turns.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd

from kvbench.common.packages import REPOSITORY
from tests.support.decisions import Ended, kvbench, stored_pairs, unpack_run, write_comparison

POLICY = REPOSITORY / "ci" / "gates.yaml"
CELL = "cells/paged-p8-c3"
UNEXPECTED = "something unexpected went wrong"


# ---- damages of any file ----


def _replaced(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def _folder(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


ANY: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": lambda path: _replaced(path, b""),
    "truncated": lambda path: _replaced(path, path.read_bytes()[: path.stat().st_size // 2]),
    "last byte gone": lambda path: _replaced(path, path.read_bytes()[:-2]),
    "noise": lambda path: _replaced(path, random.Random(1).randbytes(500)),
    "zeros": lambda path: _replaced(path, bytes(path.stat().st_size)),
    "folder in its place": _folder,
    "symlink loop": _loop,
    "unreadable": lambda path: path.chmod(0),
}


# ---- damages of JSON ----


def _reworked(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda path: _replaced(path, json.dumps(change(json.loads(path.read_text()))).encode())


def _leaves(change: Callable[[Any], Any], kinds: type | tuple[type, ...]) -> Callable[[Path], None]:
    """A damage that changes every value of these kinds."""

    def rework(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rework(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [rework(inner) for inner in value]
        return change(value) if isinstance(value, kinds) and not isinstance(value, bool) else value

    return _reworked(rework)


JSON: dict[str, Callable[[Path], None]] = {
    "list for object": _reworked(lambda data: [data]),
    "null": lambda path: _replaced(path, b"null"),
    "a number": lambda path: _replaced(path, b"5"),
    "a text": lambda path: _replaced(path, b'"text"'),
    "empty object": lambda path: _replaced(path, b"{}"),
    "other version": _reworked(
        lambda data: {**data, "format": "99", "version": 99} if isinstance(data, dict) else data
    ),
    "numbers are texts": _leaves(str, (int, float)),
    "numbers are null": _leaves(lambda value: None, (int, float)),
    "numbers are huge": _leaves(lambda value: 1e308, (int, float)),
    "numbers are negative": _leaves(lambda value: -value - 1, (int, float)),
    "numbers are NaN": _leaves(lambda value: float("nan"), (int, float)),
    "numbers are beyond floats": _leaves(lambda value: 10**400, (int, float)),
    "texts are objects": _leaves(lambda value: {"text": value}, str),
    "texts are numbers": _leaves(lambda value: 7, str),
    "nested deeply": lambda path: _replaced(path, b'{"a":' * 50_000),
    "not UTF-8": lambda path: _replaced(path, path.read_bytes().replace(b"e", b"\xff")),
    "values are [null]": _reworked(lambda data: {key: [None] for key in data} if isinstance(data, dict) else [None]),
    "values are texts": _reworked(lambda data: dict.fromkeys(data, "text") if isinstance(data, dict) else "text"),
}
WRONG = ("text", [None], {"a": {"b": 1}}, None, 1e308, -1, True, "", [], {}, float("nan"), [[5]], "9" * 40)


@dataclass(frozen=True)
class WrongValue:
    """A damage that replaces one value of a JSON file."""

    place: tuple[str | int, ...]
    value: Any

    def __call__(self, path: Path) -> None:
        data = json.loads(path.read_text())
        inner = data
        for key in self.place[:-1]:
            inner = inner[key]
        inner[self.place[-1]] = self.value
        _replaced(path, json.dumps(data).encode())

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.place))} = {json.dumps(self.value)[:20]}"


def places(data: Any, before: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places of all values in a JSON value; of a list's members the first one's."""
    items = data.items() if isinstance(data, dict) else list(enumerate(data))[:1] if isinstance(data, list) else ()
    for key, inner in items:
        yield (*before, key)
        yield from places(inner, (*before, key))


def wrong_values(path: Path) -> list[WrongValue]:
    """Every place of the file with four wrong values in turn."""
    there = list(places(json.loads(path.read_text())))
    return [WrongValue(place, WRONG[(4 * i + j) % len(WRONG)]) for i, place in enumerate(there) for j in range(4)]


# ---- damages of Parquet and CSV ----


def _table(change: Callable[[pd.DataFrame], pd.DataFrame]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        table = pd.read_parquet(path)
        path.unlink()
        change(table).to_parquet(path)

    return damage


PARQUET: dict[str, Callable[[Path], None]] = {
    "other content": _table(lambda table: pd.DataFrame({"a": [1, 2], "b": ["x", None]})),
    "no rows": _table(lambda table: table.head(0)),
    "half of the columns": _table(lambda table: table[table.columns[::2]]),
    "all texts": _table(lambda table: table.astype(str)),
    "all NaN": _table(lambda table: pd.DataFrame(float("nan"), table.index, table.columns)),
    "huge": _table(lambda table: pd.DataFrame(1e308, table.index, table.columns)),
    "no columns": _table(lambda table: table[[]]),
    "lists": _table(lambda table: table.map(lambda value: [1.0, 2.0])),
    "end mark alone": lambda path: _replaced(path, b"PAR1" + bytes(90) + b"PAR1"),
}
CSV: dict[str, Callable[[Path], None]] = {
    "other content": lambda path: _replaced(path, b"a,b\n1,2\n"),
    "no rows": lambda path: _replaced(path, path.read_bytes().split(b"\n")[0]),
    "quotes": lambda path: _replaced(path, path.read_bytes() + b'\n"open'),
}


def damages_of(path: Path) -> dict[str, Callable[[Path], None]]:
    """The damages that fit a file, by name; those of single values are in ``wrong_values``."""
    kinds = {".json": JSON, ".parquet": PARQUET, ".csv": CSV}
    made = {**ANY, **kinds.get(path.suffix, {})}
    if os.geteuid() == 0:
        del made["unreadable"]  # root reads all
    return made


# ---- commands ----


@dataclass(frozen=True)
class Command:
    """``codes``: those that its documentation names for stored data; 4 where a file of its own cannot be written."""

    run: Callable[[Path, Path], Ended]
    codes: tuple[int, ...]


class _NoProcess(subprocess.Popen):
    """What a process is whose program may not be run."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "nothing is launched here", "a server")

    def __del__(self) -> None:
        """There is nothing to end."""


def _resume(run: Path, other: Path) -> Ended:
    words = ("--no-calibration", "--no-quality", "--lockstep-minutes", "0", "--wait-idle", "0", "--force")
    with mock.patch.object(subprocess, "Popen", _NoProcess):
        return kvbench("sweep", "--resume", run, *words)


COMMANDS: dict[str, Command] = {
    "report": Command(lambda run, other: kvbench("report", run), (0, 2, 4)),
    "gate": Command(lambda run, other: kvbench("gate", run, "--policy", POLICY), (0, 1, 2, 4, 5)),
    "recommend": Command(lambda run, other: kvbench("recommend", run), (0, 2, 4)),
    "history": Command(lambda run, other: kvbench("history", run.parent), (0, 2, 5)),
    "history add": Command(lambda run, other: kvbench("history", "add", run, "--to", run.parent / "kept"), (0, 2, 5)),
    "view": Command(lambda run, other: kvbench("view", run.parent, "--export", run.parent / "pages"), (0, 2, 5)),
    "side by side": Command(lambda run, other: kvbench("report", other, run, "--output-dir", run.parent), (0, 2, 4)),
    "compare": Command(
        lambda run, other: kvbench("compare", other, run, "--force", "--output-dir", run.parent), (0, 1, 2, 3, 4, 5)
    ),
    "sweep --dry-run": Command(lambda run, other: kvbench("sweep", "--resume", run, "--dry-run", "--force"), (0, 2)),
    "sweep --resume": Command(_resume, (0, 1, 2, 4)),
    "gate comparison": Command(lambda run, other: kvbench("gate", run), (0, 1, 2, 3, 4, 5)),
    "compare --resume": Command(lambda run, other: kvbench("compare", "--resume", run), (0, 1, 2, 3, 4, 5)),
}
SLOW = ("report", "view", "side by side", "sweep --resume")
OF_COMPARISON = ("gate comparison", "compare --resume", "history")
QUICK = ("gate", "recommend", "history", "history add", "compare", "sweep --dry-run")


def fault(command: Command, ended: Ended, noticed: Sequence[warnings.WarningMessage]) -> str | None:
    """What is wrong with how a command ended; None if it was a sentence with a documented exit code, or a result."""
    lines = ended.err.splitlines()
    if UNEXPECTED in ended.err or "Traceback" in ended.err + ended.out:
        return next(line for line in lines if UNEXPECTED in line or "Traceback" in line)
    if ended.code not in command.codes:
        return f"exit code {ended.code}: {ended.err[-300:]}"
    if ended.code == 2 and sum(line.startswith("error: ") for line in lines) != 1:
        return f"no sentence: {ended.err[-300:]}"
    if noticed:
        return f"a warning of Python's: {noticed[0].category.__name__}: {noticed[0].message}"
    return None


@dataclass(frozen=True)
class Trial:
    """A command on a folder with one damaged file."""

    command: str
    file: str
    damage: str
    apply: Callable[[Path], None]

    def __str__(self) -> str:
        return f"{self.command} | {self.file} | {self.damage}"


def is_damaged_here(file: str) -> bool:
    """Whether the file is tried: those of one cell and one of its loads stand for the others."""
    parts = Path(file).parts
    if parts[0] == "logs":
        return parts[-1] == "paged-p8-1.log"
    if parts[0] == "requests":
        return parts[-1].startswith("c3-2-")
    if parts[0] == "cells":
        return file.startswith(CELL) and ("loads" not in parts or parts[3] == "2")
    return "base" not in parts and ("loads" not in parts or parts[-2] == "2")


def trials(run: Path, quick: Sequence[str], slow: Sequence[str], values_each: int) -> Iterator[Trial]:
    """Every damage of every file with every quick command, and one of the slow ones in turn.

    ``values_each``: so many wrong values of each JSON file.
    """
    turn = 0
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        file = str(path.relative_to(run))
        if not is_damaged_here(file):
            continue
        damages = dict(damages_of(path))
        if path.suffix == ".json":
            wrong = wrong_values(path)
            damages |= {str(each): each for each in random.Random(file).sample(wrong, min(values_each, len(wrong)))}
        for name, damage in damages.items():
            turn += 1
            for command in (*quick, *([slow[turn % len(slow)]] if slow else ())):
                yield Trial(command, file, name, damage)


def try_one(trial: Trial, run: Path, work: Path) -> str | None:
    """Runs the trial on a copy of the run in ``work``; returns what is wrong with the answer."""
    folder = work / "results" / "damaged"
    shutil.copytree(run, folder, symlinks=True)
    with warnings.catch_warnings(record=True) as noticed:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", RuntimeWarning)
        trial.apply(folder / trial.file)
        noticed.clear()
        command = COMMANDS[trial.command]
        ended = command.run(folder, run)
    shutil.rmtree(work)
    return fault(command, ended, noticed)


def make_comparison(folder: Path) -> Path:
    """A finished comparison of one cell with stored pairs."""
    cell, pairs = stored_pairs()["gate/by-hand/slow-server-pairs.csv"]
    write_comparison(folder, cell, pairs)
    shutil.copyfile(REPOSITORY / "results/reference/gate/by-hand/slow-server-served.json", folder / "served.json")
    return folder


def make_runs(folder: Path) -> tuple[Path, Path]:
    """The run that is kept whole, with 3 repeats as stored, and a comparison."""
    return unpack_run(folder), make_comparison(folder / "comparison")
