"""Git commands."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.packages import ENGINE, IS_CHECKOUT, KERNELS, REPOSITORY

_LIMIT_S = 300.0  # a large checkout on a slow disk takes minutes
# `git rev-parse --local-env-vars`, less the configuration, by which CI says that it trusts a folder.
_SET_BY_A_HOOK = frozenset(
    f"GIT_{name}"
    for name in (
        "DIR", "WORK_TREE", "IMPLICIT_WORK_TREE", "INDEX_FILE", "PREFIX", "COMMON_DIR", "OBJECT_DIRECTORY",
        "ALTERNATE_OBJECT_DIRECTORIES", "GRAFT_FILE", "SHALLOW_FILE", "NO_REPLACE_OBJECTS", "REPLACE_REF_BASE",
    )
)  # fmt: skip
_PLAIN = ("-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false")


def git(folder: Path, *arguments: str, limit_s: float = _LIMIT_S) -> str:
    """The output of a git command that runs in ``folder``. Raises UsageError with what git said."""
    # Without what names a repository or an index: inside a hook that is the user's.
    kept = {name: value for name, value in os.environ.items() if name not in _SET_BY_A_HOOK}
    try:
        done = subprocess.run(
            ["git", *_PLAIN, *arguments],
            cwd=folder,
            env=kept | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"git {arguments[0]} took more than {limit_s:g} s in {folder}: look at the disk") from None
    except OSError as error:  # no git, no folder
        raise UsageError(f"git cannot be run in {folder} ({error.strerror}): install git, or name a folder") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith(("fatal:", "error:"))] or lines or ["it did not say why"]
        raise UsageError(f"git {' '.join(arguments[:2])} failed in {folder}: {errors[0]}")
    return done.stdout.decode(errors="surrogateescape")


def try_git(folder: Path, *arguments: str, limit_s: float = _LIMIT_S) -> str | None:
    """The output of a git command without space around it, None where it fails."""
    try:
        return git(folder, *arguments, limit_s=limit_s).strip()
    except UsageError:
        return None


def git_state(folder: Path | None = None) -> dict[str, Any]:
    """Commit of the kvbench that runs, and whether tracked files differ from it; an installed wheel has none.

    folder: of another repository
    """
    if folder is None and not IS_CHECKOUT:
        return {"sha": None, "short_sha": "nogit", "dirty": None}
    folder = folder or REPOSITORY
    sha = try_git(folder, "rev-parse", "HEAD", limit_s=10)
    changes = try_git(folder, "status", "--porcelain", "--untracked-files=no", limit_s=10)
    if sha is None or changes is None:
        return {"sha": None, "short_sha": "nogit", "dirty": None}
    return {"sha": sha, "short_sha": sha[:7], "dirty": bool(changes)}


def code_sha256() -> str:
    """Hash of all Python files of kvbench, engine and kernels as they run here, uncommitted changes included."""
    digest = hashlib.sha256()
    for name, folder in (("engine", ENGINE), ("kernels", KERNELS), ("kvbench", REPOSITORY / "kvbench")):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{name}/{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
