"""The Python environment of a build: layered on the one that runs, installed by pip, or made by the user's command.

Layered: a venv of its own whose ``.pth`` file lists the source first and then the folders that the running kvbench
imports its dependencies from. That takes a second and gives both sides the very same torch. ``.pth`` files in those
folders are not read again, so an editable install of the running kvbench there does not come along.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.common import processes
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.packages import HOUSE

PACKAGES = ("kvbench", "engine", "kernels")
LAYERED, PIP, COMMAND = "layered", "pip", "command"
_LAYER_FILE = "kvbench_layers.pth"
_VENV_LIMIT_S, _ASK_LIMIT_S = 120.0, 60.0
_POLL_S = 0.05
# What the environment says of itself: where the packages come from, and what is installed.
_QUESTION = """
import hashlib, importlib.metadata as metadata, importlib.util as util, json, platform, sys
found = {}
for name in sys.argv[1].split(","):
    spec = util.find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    found[name] = (spec.origin or (places[0] if places else None)) if spec else None
versions = {}
for each in metadata.distributions():
    name = each.metadata["Name"]
    if name and name.lower() != "kvbench":
        versions.setdefault(name.lower().replace("_", "-"), each.version)
versions["python"] = platform.python_version()
print(json.dumps({"packages": found, "versions": versions}))
"""


@dataclass(frozen=True)
class Environment:
    """What the built Python says of itself. ``packages``: where each of PACKAGES would be imported from."""

    python: Path
    packages: Mapping[str, str | None]
    versions: Mapping[str, str]


def is_kvbench(source: Path) -> bool:
    """Whether it holds the built-in engine and its harness."""
    return all((source / name / "__init__.py").is_file() for name in PACKAGES)


def same_dependencies(source: Path, running: Path = HOUSE) -> bool:
    """Whether both name the same dependencies and the same pins."""
    ours, theirs = _dependencies(running), _dependencies(source)
    return ours is not None and ours == theirs


def _dependencies(folder: Path) -> tuple[Any, ...] | None:
    """Requirements, least Python and pins, each sorted; None where the folder does not tell."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        pins = (folder / "constraints.txt").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, KeyError):
        return None
    lines = sorted(line.split("#")[0].strip().lower() for line in pins)
    return project.get("requires-python"), sorted(project.get("dependencies", ())), [line for line in lines if line]


def make_layered(env: Path, source: Path, log: Path) -> Path:
    """A venv at ``env`` on top of the running one. The path of its Python."""
    python = _make_venv(env, log, pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(env), "platbase": str(env)}))
    (site / _LAYER_FILE).write_text("".join(f"{p}\n" for p in (source, *running_layers())), encoding="utf-8")
    return python


def running_layers() -> list[Path]:
    """The folders that we import dependencies from: ``sys.path`` less Python's own and those that hold a kvbench."""
    own = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    found = []
    for entry in sys.path:
        path = Path(entry)
        if not entry or not path.is_absolute() or not path.is_dir():
            continue
        if path.resolve() in own or path.name == "lib-dynload" or is_kvbench(path):
            continue
        found.append(path)
    return list(dict.fromkeys(found))


def install(env: Path, source: Path, log: Path, limit_s: float) -> Path:
    """A venv at ``env`` with ``source`` and what it needs, by pip. Raises MeasurementError when that fails."""
    python = _make_venv(env, log, pip=True)
    pins = source / "constraints.txt"
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    command += ["-c", str(pins)] if pins.is_file() else []
    _run([*command, "-e", str(source)], log, limit_s, "pip install", cwd=source, env=in_venv(env))
    return python


def run_command(env: Path, source: Path, text: str, log: Path, limit_s: float) -> Path:
    """A venv at ``env``, and the user's build command run in ``source`` with it. Raises UsageError, MeasurementError.

    ``{python}`` and ``{worktree}`` in the command are replaced; a shell runs it, so ``&&`` and ``$VARIABLES`` work.
    """
    python = _make_venv(env, log, pip=True)
    command = filled(text, python, source, quote=shlex.quote)
    _run(["/bin/sh", "-e", "-c", command], log, limit_s, "--build-cmd", cwd=source, env=in_venv(env))
    return python


def filled(text: str, python: Path, source: Path, *, quote: Any = str) -> str:
    """``text`` with the paths in the place of ``{python}`` and ``{worktree}``."""
    return text.replace("{python}", quote(str(python))).replace("{worktree}", quote(str(source)))


def in_venv(env: Path) -> dict[str, str | None]:
    """The variables by which programs find a venv."""
    path = f"{env / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {"VIRTUAL_ENV": str(env), "PATH": path, "PYTHONHOME": None, "PYTHONPATH": None}


def ask(python: Path, env: Mapping[str, str | None]) -> Environment:
    """What ``python`` finds, started with ``env``. Raises MeasurementError when it does not start."""
    merged = {k: v for k, v in {**os.environ, **env}.items() if v is not None}
    try:
        told = subprocess.run(
            [str(python), "-c", _QUESTION, ",".join(PACKAGES)],
            env=merged, cwd="/", capture_output=True, text=True, timeout=_ASK_LIMIT_S, check=True,
        )  # fmt: skip
        answer = json.loads(told.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise MeasurementError(f"the built Python {python} does not start: {' '.join(said)}") from None
    return Environment(python, answer["packages"], answer["versions"])


def require_source(found: Environment, source: Path) -> None:
    """MeasurementError when a package would come from elsewhere: then something else would be measured."""
    for name, place in found.packages.items():
        if place is None or (source / name).resolve() not in Path(place).resolve().parents:
            raise MeasurementError(
                f"the build of {source} would import {name!r} from {place or 'nowhere'}, so it is not what would be "
                "measured: take that package away from there (pip uninstall), or build with --build-cmd"
            )


def _make_venv(env: Path, log: Path, *, pip: bool) -> Path:
    command = [sys.executable, "-I", "-m", "venv", *(() if pip else ("--without-pip",)), str(env)]
    _run(command, log, _VENV_LIMIT_S, "python -m venv", cwd=env.parent, env={})
    return env / "bin" / "python"


def _run(
    command: Sequence[str], log: Path, limit_s: float, title: str, *, cwd: Path, env: Mapping[str, str | None]
) -> None:
    """Runs it to its end; what it says goes to the end of ``log``. Raises MeasurementError, UsageError."""
    with log.open("ab") as file:
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        try:
            child = processes.launch(command, stdout=file, stderr=subprocess.STDOUT, cwd=cwd, env=env)
        except OSError as error:
            raise UsageError(f"{command[0]} cannot be run: {error.strerror}") from None
        deadline = time.monotonic() + limit_s
        try:
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            code = child.poll()
        finally:
            processes.stop(child)
    if code == 0:
        return
    how = f"took more than {limit_s:g} s and was stopped" if code is None else f"ended with exit code {code}"
    raise MeasurementError(f"{title} {how}; its log is {log}, the last lines:\n{processes.last_lines(log, count=5)}")
