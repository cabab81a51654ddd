"""The state of a git checkout, as one helper for all who ask git."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvbench


def output_of(command: Sequence[str], cwd: Path | None = None) -> str | None:
    """The command's output, None when it is missing, fails, or takes more than 10 s."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def git_state(folder: Path | None = None) -> dict[str, Any]:
    """Commit of the kvbench that runs, and whether tracked files differ from it."""
    folder = folder or Path(kvbench.__file__).resolve().parent.parent
    sha = output_of(["git", "rev-parse", "HEAD"], folder)
    if sha is None:
        return {"sha": None, "short_sha": "nogit", "dirty": None}
    changes = output_of(["git", "status", "--porcelain", "--untracked-files=no"], folder)
    return {"sha": sha, "short_sha": sha[:7], "dirty": bool(changes)}
