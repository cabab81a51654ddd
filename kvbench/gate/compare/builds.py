"""Builds of git refs: source and environment in a cache outside the repository, made once and kept.

    $XDG_CACHE_HOME/kvbench/builds/<commit>-<digest>/
      source/     the ref's files (a git worktree; of a changed working tree a copy)
      env/        the Python that runs them
      numba/      machine code that Numba compiled for them
      build.json  written last: without it, or with another source than it names, the build is made anew
      build.log   what git, pip and the build command said

A build that is in use is locked (flock, shared), so that a second kvbench neither rebuilds nor removes it. The newest
``KEPT`` are kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from kvbench.common.errors import MeasurementError, UsageError, storage_sentence
from kvbench.common.files import write_json
from kvbench.gate.compare import environments, worktrees
from kvbench.gate.compare.worktrees import Commit

KEPT = 10
BUILD_LIMIT_S = 1800.0  # of pip or a build command: an engine with kernels of its own compiles for long
_STATE, _LOG, _FORMAT = "build.json", "build.log", 1
_POLL_S = 0.2


@dataclass(frozen=True)
class Build:
    """A ref that can be launched.

    ``how``: layered, pip or command (see ``environments``); ``digest``: of the installed versions, equal for equal
    environments; ``fresh``: it was made now, so nothing is compiled yet; ``seconds`` that took.
    """

    commit: Commit
    folder: Path
    python: Path
    how: str
    versions: Mapping[str, str]
    digest: str
    fresh: bool
    seconds: float

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def log(self) -> Path:
        return self.folder / _LOG

    @property
    def env(self) -> dict[str, str | None]:
        """What a server of this build is started with, beside our environment.

        The source first, and the working folder not at all: it may hold another kvbench. Machine code apart, so that
        two builds never share what one of them compiled.
        """
        return _env(self.folder, self.source, self.how)

    def facts(self) -> dict[str, Any]:
        """For a manifest."""
        return {
            "ref": self.commit.ref,
            "sha": self.commit.sha,
            "short_sha": self.commit.sha[:7],
            "dirty": self.commit.changes is not None,
            "changes": self.commit.changes,
            "subject": self.commit.subject,
            "repo": str(self.commit.repo),
            "build": self.how,
            "build_folder": str(self.folder),
            "environment": self.digest,
            "versions": dict(self.versions),
        }


@dataclass
class Builds:
    """The builds of one kvbench, each locked until ``close``.

    ``rebuild``: make every one anew, once. ``build_cmd``: in the place of layering and pip. ``say``: told what is done.
    """

    root: Path = field(default_factory=lambda: builds_folder())
    rebuild: bool = False
    build_cmd: str | None = None
    limit_s: float = BUILD_LIMIT_S
    say: Callable[[str], None] = lambda text: None
    _made: dict[str, Build] = field(default_factory=dict)
    _locks: dict[str, IO[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Builds:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives the builds free; they stay in the cache."""
        for file in self._locks.values():
            file.close()
        self._locks.clear()
        self._made.clear()

    def build(self, commit: Commit) -> Build:
        """The build of ``commit``: of this kvbench, kept from before, or made now. MeasurementError, UsageError."""
        key = self._key(commit)
        if key not in self._made:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                self._made[key] = self._locked_build(key, commit)
                self._drop_oldest()
            except OSError as error:
                raise MeasurementError(storage_sentence(error, self.root) or f"{self.root}: {error}") from None
        return self._made[key]

    def _key(self, commit: Commit) -> str:
        """Another repository, build command, Python or kvbench is another build of the same commit."""
        told = (str(commit.repo), self.build_cmd or "", sys.executable, sys.version, str(environments.HOUSE), _FORMAT)
        return f"{commit.name}-{hashlib.sha256(json.dumps(told).encode()).hexdigest()[:8]}"

    def _locked_build(self, key: str, commit: Commit) -> Build:
        folder = self.root / key
        lock = self._locks[key] = (self.root / f"{key}.lock").open("ab")
        if not self.rebuild:
            self._lock(lock, fcntl.LOCK_SH, commit)
            if kept := self._kept(commit, folder):
                return kept
        self._lock(lock, fcntl.LOCK_EX, commit)
        made = None if self.rebuild else self._kept(commit, folder)  # another kvbench may have made it meanwhile
        made = made or self._make(commit, folder)
        self._lock(lock, fcntl.LOCK_SH, commit)
        return made

    def _lock(self, file: IO[bytes], how: int, commit: Commit) -> None:
        """Waits for another kvbench, with a word, but not for ever."""
        deadline, told = time.monotonic() + 2 * self.limit_s, False
        while True:
            try:
                return fcntl.flock(file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise MeasurementError(
                        f"another kvbench has held the build of {commit.name} for {2 * self.limit_s:g} s: wait for it "
                        "to end, or leave --rebuild out"
                    ) from None
            if not told:
                self.say(f"waiting for another kvbench, which builds or uses {commit.name}")
                told = True
            time.sleep(_POLL_S)

    def _kept(self, commit: Commit, folder: Path) -> Build | None:
        """The build that lies there, if it is whole and still what it says."""
        try:
            state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
            python = Path(state["python"])
            if (
                state["format"] != _FORMAT
                or state["sha"] != commit.sha
                or not worktrees.intact(commit, folder / "source")
            ):
                return None
            found = self._asked(folder, python, state["how"])
        except (OSError, ValueError, KeyError, MeasurementError):
            return None
        os.utime(folder / _STATE)
        return Build(commit, folder, python, state["how"], found.versions, _digest(found), False, 0.0)

    def _make(self, commit: Commit, folder: Path) -> Build:
        self.say(f"building {commit.name}{f' ({commit.subject})' if commit.subject else ''}")
        began = time.monotonic()
        _discard(folder)
        folder.mkdir(parents=True)
        source, env, log = folder / "source", folder / "env", folder / _LOG
        worktrees.check_out(commit, source)
        if self.build_cmd:
            how, python = environments.COMMAND, environments.run_command(env, source, self.build_cmd, log, self.limit_s)
        elif environments.is_kvbench(source) and environments.same_dependencies(source):
            how, python = environments.LAYERED, environments.make_layered(env, source, log)
        elif (source / "pyproject.toml").is_file() or (source / "setup.py").is_file():
            self.say(f"installing what {commit.name} depends on; pip writes to {log}")
            how, python = environments.PIP, environments.install(env, source, log, self.limit_s)
        else:
            raise UsageError(
                f"{commit.name} of {commit.repo} has neither pyproject.toml nor setup.py, so pip cannot build it: say "
                "how with --build-cmd (true, if nothing has to be built)"
            )
        found = self._asked(folder, python, how)
        state = {"format": _FORMAT, **asdict(commit), "repo": str(commit.repo), "python": str(python), "how": how}
        write_json(folder / _STATE, state)
        seconds = time.monotonic() - began
        return Build(commit, folder, python, how, found.versions, _digest(found), True, seconds)

    def _asked(self, folder: Path, python: Path, how: str) -> environments.Environment:
        source = folder / "source"
        found = environments.ask(python, _env(folder, source, how))
        if environments.is_kvbench(source):
            environments.require_source(found, source)
        return found

    def _drop_oldest(self) -> None:
        """All but the newest ``KEPT``, by last use, less those that somebody uses; half-built ones count as oldest."""
        folders = sorted((p for p in self.root.iterdir() if p.is_dir()), key=_last_used, reverse=True)
        for folder in folders[KEPT:]:
            with (self.root / f"{folder.name}.lock").open("ab") as lock, contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _discard(folder)


def builds_folder() -> Path:
    """Where builds are kept: below $XDG_CACHE_HOME, else ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "kvbench" / "builds"


def _env(folder: Path, source: Path, how: str) -> dict[str, str | None]:
    variables: dict[str, str | None] = {"PYTHONPATH": None, "PYTHONHOME": None, "PYTHONSAFEPATH": "1"}
    if environments.is_kvbench(source):
        variables |= {"PYTHONPATH": str(source), "NUMBA_CACHE_DIR": str(folder / "numba")}
    if how != environments.LAYERED:
        variables = environments.in_venv(folder / "env") | variables
    return variables


def _digest(found: environments.Environment) -> str:
    """Of the installed versions: equal where the same is installed."""
    return hashlib.sha256(json.dumps(sorted(found.versions.items())).encode()).hexdigest()[:16]


def _discard(folder: Path) -> None:
    """The state first: what is interrupted from here on counts as not built."""
    (folder / _STATE).unlink(missing_ok=True)
    worktrees.remove(folder / "source")
    shutil.rmtree(folder, ignore_errors=True)


def _last_used(folder: Path) -> float:
    try:
        return (folder / _STATE).stat().st_mtime
    except OSError:
        return 0.0
