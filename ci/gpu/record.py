"""The manifest of a GPU run: code, versions, machine, device, ceilings, and how each part ended. Standard library."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ci.gpu.environment import PartEnvironment
from ci.gpu.summary import PartEnd
from kvbench.common.packages import REPOSITORY

SOURCES = ("kernels", "engine", "kvbench", "ci")
PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "numpy", "numba", "locust", "fastapi", "uvicorn", "httptools",
    "uvloop", "pandas", "plotly",
)  # fmt: skip
_VERSIONS = """
import importlib.metadata, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


def begin(arguments: dict[str, Any]) -> dict[str, Any]:
    """Stores what is known before anything runs; only the names of paths, since a manifest is shown around."""
    return {
        "format": 1,
        "kind": "ci/gpu.sh",  # `kvbench view` and `history` leave it out
        "started": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "arguments": {key: getattr(value, "name", value) for key, value in arguments.items()},
        "git": git_state(REPOSITORY),
        "sources": sources_hash(REPOSITORY),
        "machine": {"os": platform.system(), "architecture": platform.machine(), "cores": os.cpu_count(),
                    "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")},
        "tools": {name: bool(shutil.which(name)) for name in ("nvidia-smi", "nvcc", "cc")},
    }  # fmt: skip


def finish(manifest: dict[str, Any], environment: PartEnvironment, outcomes: list[PartEnd], seconds: float) -> None:
    """Adds the parts' results, those of ``facts`` at the top level."""
    facts = next((outcome.data for outcome in outcomes if outcome.name == "facts"), {})
    manifest |= {key: facts[key] for key in ("device", "nvidia_smi", "nvidia_smi_after", "ceilings") if key in facts}
    manifest |= {
        "ceilings_how": facts.get("rows", []),
        "versions": versions(environment.python),
        "notes": environment.notes,
        "seconds": round(seconds, 1),
        "parts": [
            {"part": o.name, "status": o.status, "reason": o.reason, "seconds": round(o.seconds, 1),
             "headline": o.data.get("headline", ""), "device": o.device, "skipped": o.data.get("skipped", [])}
            for o in outcomes
        ],
    }  # fmt: skip


@functools.cache
def versions(python: str) -> dict[str, str | None]:
    """Reads the versions of the packages that the parts saw."""
    try:
        done = subprocess.run(
            [python, "-c", _VERSIONS, *PACKAGES], capture_output=True, text=True, timeout=60, check=True
        )
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}


def git_state(folder: Path) -> dict[str, Any]:
    """Reads the commit, and whether tracked files differ from it; both None where this is no checkout."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    sha = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no") if sha else None
    return {"sha": sha, "dirty": None if changes is None else bool(changes)}


def sources_hash(folder: Path) -> str:
    """Hashes paths and bytes of all Python sources that take part, to tie figures to code without git."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(path for name in SOURCES for path in (folder / name).rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
