"""The Python that the parts run in: the one that is here, plus wheels from a folder, in a virtual environment.

Standard library only. What is installed here already is seen and never changed: the environment lies in a temporary
folder, looks through to this Python's packages (also where this Python is a virtual environment itself, whose packages
a nested one does not see by itself), and torch, triton and transformers are pinned to what is there.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import site
import subprocess
import sys
import time
import venv
from dataclasses import dataclass, field
from pathlib import Path

from ci.gpu.requirements import read_requirements

PINNED = ("torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy")
PIP_SECONDS = 120.0  # for one call
PROBE_SECONDS = 60.0
_FOLDERS = re.compile(r"(?<![\w:/])(?:file://)?/(?:[^\s/'\"]+/)+")  # of absolute paths, up to the name

_PROBE = """
import importlib.util, json, sys
def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
print(json.dumps([name for name in sys.argv[1:] if not there(name)]))
"""


@dataclass
class PartEnvironment:
    """The environment of the parts: its ``python``, and notes on failed installations for the summary."""

    python: str = sys.executable
    notes: list[str] = field(default_factory=list)

    def missing(self, names: list[str]) -> list[str]:
        """Lists the import ``names`` that this environment lacks. Imports nothing."""
        done = subprocess.run(
            [self.python, "-c", _PROBE, *names], capture_output=True, text=True, timeout=PROBE_SECONDS, check=True
        )
        return json.loads(done.stdout)


def prepare(folder: Path, wheels: Path | None, ends: float = math.inf) -> PartEnvironment:
    """The environment in ``folder``, with whatever of the requirements is missing here and is among ``wheels``.

    ``ends``: when to stop installing, by time.monotonic; what is not there by then is a note.
    """
    if wheels is None:
        return PartEnvironment()
    home = folder / "venv"
    nested = sys.prefix != sys.base_prefix
    venv.EnvBuilder(system_site_packages=not nested, with_pip=False, symlinks=True).create(home)
    environment = PartEnvironment(str(home / "bin" / "python"))
    if nested:
        _look_through(home, site.getsitepackages())
    wanted = [name for name in read_requirements() if not _installed(name)]
    if wanted:
        _install(environment, folder, wheels, wanted, ends)
    return environment


def _look_through(home: Path, places: list[str]) -> None:
    """Append ``places``, and what their own .pth files name, to the environment's import path."""
    inside = next((home / "lib").glob("python*/site-packages"))
    lines = [f"import site; site.addsitedir({place!r})\n" for place in places]
    (inside / "_look_through.pth").write_text("".join(lines), encoding="utf-8")


def _installed(requirement: str) -> bool:
    try:
        importlib.metadata.version(requirement)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _install(environment: PartEnvironment, folder: Path, wheels: Path, wanted: list[str], ends: float) -> None:
    """Installs all at once; where that fails, one by one.

    So a missing wheel costs only the parts that need it.
    """
    pins = folder / "constraints.txt"
    versions = {name: importlib.metadata.version(name) for name in PINNED if _installed(name)}
    pins.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()), encoding="utf-8")
    command = [
        sys.executable, "-m", "pip", "--isolated", "--python", environment.python, "install", "--quiet", "--no-index",
        "--disable-pip-version-check", "--no-cache-dir", "--find-links", str(wheels), "--constraint", str(pins),
    ]  # fmt: skip
    if _pip(command, wanted, ends) is None:
        return
    for number, name in enumerate(wanted):
        if time.monotonic() >= ends:
            environment.notes.append(f"no time left to install {', '.join(wanted[number:])} from {wheels.name}")
            return
        if reason := _pip(command, [name], ends):
            environment.notes.append(f"{name} could not be installed from {wheels.name}: {reason}")


def _pip(command: list[str], names: list[str], ends: float) -> str | None:
    """Runs pip: None when it succeeded, else its error, without paths of this machine."""
    seconds = max(0.0, min(PIP_SECONDS, ends - time.monotonic()))
    try:
        done = subprocess.run([*command, *names], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"pip took more than {seconds:.0f} s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return _FOLDERS.sub("", errors[-1])[:200] if errors else f"pip ended with code {done.returncode}"
