"""Builds of git refs: source and Python environment in a cache outside the repository, made once and kept.

    $XDG_CACHE_HOME/kvbench/builds/<commit>-<digest>/
      source/     the ref's files (a git worktree; of a changed working tree a copy)
      env/        the Python that runs them
      numba/      machine code that Numba compiled for them
      build.json  written last: without it, or with another source than it names, the build is made anew
      build.log   what git, pip and the build command printed

The environment is layered, installed by pip, or made by the user's command. Layered: a venv whose ``.pth`` file lists
the source first and then the folders that the running kvbench imports its dependencies from. That takes a second and
gives both sides the very same torch. ``.pth`` files in those folders are not read again, so an editable install of the
running kvbench there does not come along.

The user's checkout, index and hooks are left alone (see ``kvbench/common/git.py``). A build in use is locked (flock,
shared), so that a second kvbench neither rebuilds nor removes it. The newest ``KEPT`` are kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from kvbench.common import processes
from kvbench.common.errors import MeasurementError, UsageError, storage_sentence
from kvbench.common.files import write_json
from kvbench.common.git import git, try_git
from kvbench.common.packages import REPOSITORY, missing_for_engine
from kvbench.gate.sentences import say

WORKING_TREE = "."
PACKAGES = ("kvbench", "engine", "kernels")
LAYERED, PIP, COMMAND = "layered", "pip", "command"
KEPT = 10
BUILD_LIMIT_S = 1800.0  # of pip or a build command: an engine with kernels of its own compiles for long
_VENV_LIMIT_S, _START_LIMIT_S, _POLL_S = 120.0, 60.0, 0.2
_STATE, _FORMAT = "build.json", 1
_LAYER_FILE = "kvbench_layers.pth"
_LARGEST_COPY = 1 << 30
# Run by the built Python: where our packages would be imported from, and what is installed.
_INSPECT = """
import importlib.metadata, importlib.util, json, platform, sys
origins, versions = {}, {"python": platform.python_version()}
for name in sys.argv[1].split(","):
    spec = importlib.util.find_spec(name)
    origins[name] = next(iter(spec.submodule_search_locations or ()), spec.origin) if spec else None
for each in importlib.metadata.distributions():
    name = (each.metadata["Name"] or "kvbench").lower().replace("_", "-")
    if name != "kvbench":
        versions.setdefault(name, each.version)
print(json.dumps([origins, versions]))
"""


@dataclass(frozen=True)
class Commit:
    """A commit of a repository, or its working tree with changes.

    ``repo``: its top folder; ``ref``: as it was given; ``sha``, ``subject``: of the commit (HEAD for a working tree).
    ``changes``: a digest of the files, None where they are those of the commit.
    """

    repo: Path
    ref: str
    sha: str
    subject: str
    changes: str | None = None

    @property
    def name(self) -> str:
        """Short, and different for different files."""
        return self.sha[:10] + say("build.dirty", bool(self.changes), digest=(self.changes or "")[:8])


@dataclass(frozen=True)
class Build:
    """A commit that can be launched. ``how``: LAYERED, PIP or COMMAND; ``fresh``: made now, so nothing is compiled."""

    commit: Commit
    folder: Path
    how: str
    versions: Mapping[str, str]
    fresh: bool

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def python(self) -> Path:
        return self.folder / "env" / "bin" / "python"

    @property
    def log(self) -> Path:
        return self.folder / "build.log"

    @property
    def env(self) -> dict[str, str | None]:
        """Environment variables for a server of this build (None: unset)."""
        return _variables(self.folder, self.how)

    @property
    def digest(self) -> str:
        return _sha256(sorted(self.versions.items()))[:16]

    def facts(self) -> dict[str, object]:
        return asdict(self.commit) | {
            "repo": str(self.commit.repo),
            "short_sha": self.commit.sha[:7],
            "dirty": self.commit.changes is not None,
            "build": self.how,
            "build_folder": str(self.folder),
            "environment": self.digest,
            "versions": dict(self.versions),
        }


@dataclass
class Builds:
    """The builds that this process uses, each locked until the ``with`` block ends.

    ``root``: the cache that they stay in. ``build_cmd``: used instead of layering and pip. ``limit_s``: of one build.
    """

    root: Path = field(default_factory=lambda: builds_folder())
    rebuild: bool = False
    build_cmd: str | None = None
    limit_s: float = BUILD_LIMIT_S
    tell: Callable[[str], None] = lambda text: None
    _made: dict[str, Build] = field(default_factory=dict)
    _locks: dict[str, IO[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Builds:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._locks.values():
            file.close()

    def build(self, commit: Commit) -> Build:
        """Takes the build of ``commit`` from the cache, or makes it. Raises MeasurementError, UsageError."""
        # Another repository, build command, Python or kvbench is another build of the same commit.
        made_with = (str(commit.repo), self.build_cmd or "", sys.executable, sys.version, str(REPOSITORY), _FORMAT)
        key = f"{commit.name}-{_sha256(made_with)[:8]}"
        if key not in self._made:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                self._made[key] = self._locked_build(key, commit)
                self._drop_oldest()
            except OSError as error:
                raise MeasurementError(storage_sentence(error, self.root) or f"{self.root}: {error}") from None
        return self._made[key]

    def _locked_build(self, key: str, commit: Commit) -> Build:
        folder = self.root / key
        lock = self._locks[key] = (self.root / f"{key}.lock").open("ab")
        if not self.rebuild:
            self._lock(lock, fcntl.LOCK_SH, commit)
            if kept := _kept(commit, folder):
                return kept
        self._lock(lock, fcntl.LOCK_EX, commit)
        made = None if self.rebuild else _kept(commit, folder)  # another kvbench may have made it meanwhile
        made = made or self._make(commit, folder)
        self._lock(lock, fcntl.LOCK_SH, commit)
        return made

    def _lock(self, file: IO[bytes], how: int, commit: Commit) -> None:
        """Waits for another kvbench, as long as two builds may take. Raises MeasurementError after that."""
        limit_s, waited_s = 2 * self.limit_s, 0.0
        while waited_s < limit_s:
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(file, how | fcntl.LOCK_NB)
            if not waited_s:
                self.tell(say("build.waiting", name=commit.name))
            time.sleep(_POLL_S)
            waited_s += _POLL_S
        raise MeasurementError(say("build.held", name=commit.name, limit_s=limit_s))

    def _make(self, commit: Commit, folder: Path) -> Build:
        subject = say("build.subject", bool(commit.subject), subject=commit.subject)
        self.tell(say("build.building", name=commit.name, subject=subject))
        _discard(folder)
        folder.mkdir(parents=True)
        check_out(commit, folder / "source")
        how = self._make_environment(commit, folder)
        build = Build(commit, folder, how, installed_versions(folder, how), fresh=True)
        write_json(folder / _STATE, {"format": _FORMAT, **asdict(commit), "how": how})
        return build

    def _make_environment(self, commit: Commit, folder: Path) -> str:
        """Makes ``env/`` and returns how it was made."""
        source, env, log = folder / "source", folder / "env", folder / "build.log"
        python, pins = env / "bin" / "python", source / "constraints.txt"
        if self.build_cmd:
            how, title = COMMAND, "--build-cmd"
            command = ["/bin/sh", "-e", "-c", fill(self.build_cmd, python, source)]
        elif is_kvbench(source) and same_dependencies(source) and not missing_for_engine():
            _make_venv(env, log, pip=False)
            site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(env), "platbase": str(env)}))
            (site / _LAYER_FILE).write_text("".join(f"{p}\n" for p in (source, *running_layers())), encoding="utf-8")
            return LAYERED
        elif (source / "pyproject.toml").is_file() or (source / "setup.py").is_file():
            how, title = PIP, "pip install"
            command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
            if pins.is_file():
                command += ["-c", str(pins)]
            command += ["-e", f"{source}[engine]" if is_kvbench(source) else str(source)]
            self.tell(say("build.installing", name=commit.name, log=log))
        else:
            raise UsageError(say("build.unknown", name=commit.name, repo=commit.repo))
        _make_venv(env, log, pip=True)
        run_to_end(command, log, self.limit_s, title, cwd=source, env=_variables(folder, how, importable=False))
        return how

    def _drop_oldest(self) -> None:
        """Removes all but the ``KEPT`` last used, except those in use; half-built ones count as oldest."""
        folders = sorted((p for p in self.root.iterdir() if p.is_dir()), key=_last_used, reverse=True)
        for folder in folders[KEPT:]:
            with (self.root / f"{folder.name}.lock").open("ab") as lock, contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _discard(folder)


def builds_folder() -> Path:
    """The folder that builds are kept in: below $XDG_CACHE_HOME, else ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "kvbench" / "builds"


def _kept(commit: Commit, folder: Path) -> Build | None:
    """The build in ``folder``, None if it is incomplete or its source was changed."""
    try:
        state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        if state["format"] != _FORMAT or state["sha"] != commit.sha or not is_intact(commit, folder / "source"):
            return None
        versions = installed_versions(folder, state["how"])
        os.utime(folder / _STATE)
    except (OSError, ValueError, KeyError, MeasurementError):
        return None
    return Build(commit, folder, state["how"], versions, fresh=False)


def _discard(folder: Path) -> None:
    """Removes a build, its state first, so that an interruption leaves none that looks complete."""
    (folder / _STATE).unlink(missing_ok=True)
    remove_source(folder / "source")
    shutil.rmtree(folder, ignore_errors=True)


def _last_used(folder: Path) -> float:
    try:
        return (folder / _STATE).stat().st_mtime
    except OSError:
        return 0.0


def _sha256(data: object) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


# --- source: the files of a ref


def find_commit(repo: Path, ref: str) -> Commit:
    """The commit that ``ref`` names in ``repo``; ``.``: the working tree as it is. Raises UsageError."""
    top = top_folder(repo)
    if top is None:
        raise UsageError(say("build.no_repository", repo=str(repo), ref=ref))
    sha = find_sha(top, "HEAD" if ref == WORKING_TREE else ref)
    if sha is None:
        raise UsageError(say("build.no_commit", ref=ref, top=top))
    subject = git(top, "log", "-1", "--format=%s", sha).strip()
    return Commit(top, ref, sha, subject, _changes(top) if ref == WORKING_TREE else None)


def top_folder(repo: Path) -> Path | None:
    """The top of the working tree that ``repo`` lies in, None where there is none."""
    top = try_git(repo, "rev-parse", "--show-toplevel")
    return Path(top) if top else None


def find_sha(top: Path, ref: str) -> str | None:
    """The sha of the commit that ``ref`` names, None where it names none."""
    return try_git(top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")


def check_out(commit: Commit, folder: Path) -> None:
    """Writes the files of ``commit`` into ``folder``, which is not there yet. Raises UsageError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if commit.changes is None:
        # --force twice: an earlier folder of this name may still be registered, though somebody has removed it.
        git(commit.repo, "worktree", "add", "--force", "--force", "--detach", str(folder), commit.sha)
        return
    for name in _files(commit.repo):
        to = folder / name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(commit.repo / name, to, follow_symlinks=False)
    if _changes(commit.repo) != commit.changes:
        raise UsageError(say("build.changed", repo=commit.repo))


def is_intact(commit: Commit, folder: Path) -> bool:
    """Tests whether ``folder`` holds ``commit`` with its tracked files unchanged."""
    if not folder.is_dir() or commit.changes is not None:
        return folder.is_dir()  # a copy is named after its contents
    if top_folder(folder) != folder.resolve() or find_sha(folder, "HEAD") != commit.sha:
        return False
    return try_git(folder, "status", "--porcelain", "--untracked-files=no") == ""


def remove_source(folder: Path) -> None:
    """Removes the folder and the repository's record of it as a worktree."""
    common = try_git(folder, "rev-parse", "--path-format=absolute", "--git-common-dir")
    if common and (folder / ".git").is_file():
        try_git(Path(common), "worktree", "remove", "--force", "--force", str(folder))
    shutil.rmtree(folder, ignore_errors=True)


def _changes(top: Path) -> str | None:
    """Digests every file that git tracks or would add; None where nothing differs from HEAD."""
    if not git(top, "status", "--porcelain", "--untracked-files=all").strip():
        return None
    digest, total = hashlib.sha256(), 0
    for name in _files(top):
        path = top / name
        state = path.lstat()
        total += state.st_size
        if total > _LARGEST_COPY:
            raise UsageError(say("build.too_large", top=top, gib=_LARGEST_COPY >> 30))
        content = os.readlink(path).encode() if stat.S_ISLNK(state.st_mode) else path.read_bytes()
        digest.update(f"{name}\0{state.st_mode:o}\0{len(content)}\0".encode(errors="surrogateescape"))
        digest.update(content)
    return digest.hexdigest()


def _files(top: Path) -> list[str]:
    """Lists tracked and new files that git does not ignore, without nested repositories."""
    names = git(top, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return [n for n in sorted({*names} - {""}) if (top / n).is_symlink() or (top / n).is_file()]


# --- environment: the Python that runs them


def is_kvbench(source: Path) -> bool:
    """Tests whether it holds the built-in engine and its harness."""
    return all((source / name / "__init__.py").is_file() for name in PACKAGES)


def same_dependencies(source: Path) -> bool:
    """Tests whether it has the same requirements and pins as the running kvbench."""
    return (ours := _dependencies(REPOSITORY)) is not None and ours == _dependencies(source)


def _dependencies(folder: Path) -> tuple[object, ...] | None:
    """Least Python, requirements and pins; None where the folder has no such files."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        pins = (folder / "constraints.txt").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, KeyError):
        return None
    lines = sorted(line.split("#")[0].strip().lower() for line in pins)
    needs = [*project.get("dependencies", ()), *project.get("optional-dependencies", {}).get("engine", ())]
    return project.get("requires-python"), sorted(needs), [line for line in lines if line]


def running_layers() -> list[Path]:
    """The folders that we import dependencies from: ``sys.path`` without Python's own and those that hold a kvbench."""
    own = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    paths = [Path(entry) for entry in dict.fromkeys(sys.path) if entry and Path(entry).is_absolute()]
    return [
        path for path in paths
        if path.is_dir() and path.resolve() not in own and path.name != "lib-dynload" and not is_kvbench(path)
    ]  # fmt: skip


def fill(text: str, python: Path, source: Path) -> str:
    """Puts the paths, quoted for a shell, in place of ``{python}`` and ``{worktree}``."""
    return text.replace("{python}", shlex.quote(str(python))).replace("{worktree}", shlex.quote(str(source)))


def _variables(folder: Path, how: str, *, importable: bool = True) -> dict[str, str | None]:
    """The environment variables of a build (None: unset). ``importable``: with its source on the path.

    The working folder is not on the path, since it may hold another kvbench. Numba's cache is the build's own, so that
    two builds never share machine code.
    """
    variables: dict[str, str | None] = {"PYTHONPATH": None, "PYTHONHOME": None}
    if how != LAYERED:
        path = f"{folder / 'env' / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        variables |= {"VIRTUAL_ENV": str(folder / "env"), "PATH": path}
    if importable:
        variables["PYTHONSAFEPATH"] = "1"
        if is_kvbench(folder / "source"):
            variables |= {"PYTHONPATH": str(folder / "source"), "NUMBA_CACHE_DIR": str(folder / "numba")}
    return variables


def installed_versions(folder: Path, how: str) -> dict[str, str]:
    """The versions in the environment of the build in ``folder``.

    Raises MeasurementError when its Python does not start, or would import our packages from elsewhere than its source.
    """
    python, source = folder / "env" / "bin" / "python", folder / "source"
    env = {k: v for k, v in {**os.environ, **_variables(folder, how)}.items() if v is not None}
    try:
        done = subprocess.run(
            [str(python), "-c", _INSPECT, ",".join(PACKAGES)],
            env=env, cwd="/", capture_output=True, text=True, timeout=_START_LIMIT_S, check=True,
        )  # fmt: skip
        origins, versions = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise MeasurementError(say("build.no_python", python=python, error=" ".join(last))) from None
    for name, origin in origins.items():
        here = origin is not None and Path(origin).resolve() == (source / name).resolve()
        if is_kvbench(source) and not here:
            raise MeasurementError(say("build.other_source", source=source, name=name, origin=origin or "nowhere"))
    return versions


def _make_venv(env: Path, log: Path, *, pip: bool) -> None:
    command = [sys.executable, "-I", "-m", "venv", str(env)]
    if not pip:
        command.append("--without-pip")
    run_to_end(command, log, _VENV_LIMIT_S, "python -m venv", cwd=env.parent, env={})


def run_to_end(
    command: Sequence[str], log: Path, limit_s: float, title: str, *, cwd: Path, env: Mapping[str, str | None]
) -> None:
    """Runs a command to its end, its output into ``log``. Raises MeasurementError when it fails or takes too long."""
    with log.open("ab") as file:
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        child = processes.launch(command, stdout=file, stderr=subprocess.STDOUT, cwd=cwd, env=env)
        try:
            code = child.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            processes.stop(child)
    if code == 0:
        return
    how = say("build.how", code is None, code=code, limit_s=limit_s)
    raise MeasurementError(say("build.failed", title=title, how=how, log=log, lines=processes.last_lines(log, count=5)))
