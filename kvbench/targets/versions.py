"""Which version of a server is measured: from its API, or from the package's metadata."""

from __future__ import annotations

import functools
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbench.targets.base import HttpTarget

_ASK_S = 60.0


def version_of(target: HttpTarget, program: str) -> str | None:
    """None when the server does not tell."""
    asked = target.preset.version
    if asked.path is not None:
        told = target.json_at(asked.path)
        found = told.get(asked.key) if isinstance(told, dict) else None
        return str(found) if found else None
    if not program:  # a server that was running before: which Python it has is not known
        return None
    return next(filter(None, (package_version(program, name) for name in asked.packages)), None)


@functools.cache
def package_version(python: str, package: str) -> str | None:
    """The version of a package of another Python."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=_ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
