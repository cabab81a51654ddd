"""The program that launches a preset: where it is, and whether it is what its preset needs. Asked before a launch."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from kvbench.common.errors import UsageError
from kvbench.targets.presets.preset import Preset

_ANSWER_S = 60.0  # a Python on a cold disk; a launcher that looks for GPUs first
_HAS_MODULE = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec(sys.argv[1]) else 3)"


def program_of(preset: Preset, given: str | None) -> str:
    """The Python that has the preset's module, or its program; ``given``: by the user.

    Raises UsageError when there is none, or it does not answer within a minute.
    """
    return _python(preset, given) if preset.module is not None else _binary(preset, given)


def _binary(preset: Preset, given: str | None) -> str:
    found = shutil.which(given or preset.program or "")
    if found is None:
        where = f"at {given!r}" if given else "on the PATH"
        raise UsageError(
            f"there is no program {preset.program!r} {where}, which launches {preset.title}: install it, or name it "
            "with --target-python PATH"
        )
    if (trouble := _trouble(found, "--version")) is not None:
        raise UsageError(
            f"{found} --version {trouble}: it cannot launch {preset.title}; name another with --target-python"
        )
    return found


def _python(preset: Preset, given: str | None) -> str:
    assert preset.module is not None
    variable = f"{preset.name.upper()}_PYTHON"
    chosen = given or os.environ.get(variable) or _python_with(preset.module)
    way = f"name one with --target-python PATH, or in {variable}"
    if not chosen or shutil.which(chosen) is None:
        raise UsageError(f"no Python with {preset.title} was found{f' at {chosen!r}' if chosen else ''}: {way}")
    if (trouble := _trouble(chosen, "-c", _HAS_MODULE, preset.module)) is not None:
        why = (
            f"has no module {preset.module!r}" if trouble == _exit_words(3) else f"is no Python that works ({trouble})"
        )
        raise UsageError(f"{chosen} {why}, so it cannot launch {preset.title}: {way}")
    return chosen


def _trouble(*command: str) -> str | None:
    """Why a command is of no use; None when it ends well."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_S, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"did not end within {_ANSWER_S:g} s"
    except OSError as error:
        return f"cannot be run: {error.strerror}"
    return None if done.returncode == 0 else _exit_words(done.returncode)


def _exit_words(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _python_with(module: str) -> str | None:
    """This Python where it has the module, else the one beside the server's own script."""
    if importlib.util.find_spec(module) is not None:
        return sys.executable
    script = shutil.which(module)
    python = Path(script).resolve().parent / "python" if script else None
    return str(python) if python and python.exists() else None
