"""The manifest of a run: what was measured, with what, on what. Nothing private beyond the command line."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

import kvbench
from kvbench.runs.folder import FORMAT

_PACKAGES = ("torch", "triton", "transformers", "locust", "numpy", "numba", "gevent", "fastapi", "uvicorn", "pydantic")


def versions() -> dict[str, str | None]:
    """Installed versions, read from package metadata: torch need not be imported to know its version."""
    found: dict[str, str | None] = {"kvbench": kvbench.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _output(command: Sequence[str], cwd: Path | None = None) -> str | None:
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
    sha = _output(["git", "rev-parse", "HEAD"], folder)
    if sha is None:
        return {"sha": None, "short_sha": "nogit", "dirty": None}
    changes = _output(["git", "status", "--porcelain", "--untracked-files=no"], folder)
    return {"sha": sha, "short_sha": sha[:7], "dirty": bool(changes)}


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory in bytes, operating system."""
    return {
        "cpu": {
            "model": _cpu_model(),
            "architecture": platform.machine(),
            "cores": usable_cores(),
            "cores_total": os.cpu_count(),
        },
        "memory_bytes": psutil.virtual_memory().total,
        "os": f"{platform.system()} {platform.release()}",
    }


def usable_cores() -> int:
    """Cores this process may run on (a container may have fewer than the machine)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def gpus() -> list[dict[str, str]]:
    """One row a GPU from nvidia-smi: name, memory, driver, clocks; empty without one."""
    fields = ("name", "memory.total", "driver_version", "clocks.sm", "clocks.mem", "power.limit")
    text = _output(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"])
    rows = [[value.strip() for value in line.split(",")] for line in (text or "").splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def environment() -> dict[str, Any]:
    """Code, versions and machine: what two parts of one run must share."""
    return {"git": git_state(), "versions": versions(), **machine(), "gpus": gpus()}


def build_manifest(
    *, workload: Mapping[str, Any], workload_file: str | None, profile: str, seed: int, plan: list[Any], extra: Any
) -> dict[str, Any]:
    """Everything known before the first launch; the sweep adds what the servers tell (``add_server``)."""
    return {
        "format": FORMAT,
        "status": "incomplete",
        "workload": dict(workload),
        "workload_name": workload["name"],
        "workload_file": workload_file,
        "profile": profile,
        "command": ["kvbench", *sys.argv[1:]],
        **environment(),
        "device": None,  # a server's to say, as are dtype, kernels and threads
        "seeds": {"workload": seed, "order": seed, "model": workload["model"].get("seed", 0)},
        "shared_machine": True,  # load client and engine run on the same machine
        "started": None,
        "ended": None,
        "model": None,
        "plan": plan,
        "failures": [],
        **extra,
    }


def add_server(manifest: dict[str, Any], config_id: str, told: Mapping[str, Any]) -> None:
    """Put down what the first server of a configuration says of itself, and what all of them ran on.

    ``device``, ``dtype``, ``kernel_backend`` and ``num_threads`` are what the servers settled on (``resolved`` of
    /server_info), not what was asked for; None when no server tells.
    """
    manifest.setdefault("servers", {}).setdefault(config_id, dict(told))
    resolved = [each["resolved"] for each in manifest["servers"].values() if each.get("resolved")]
    manifest["device"] = _listed(_device_name(manifest, each) for each in resolved)
    for key in ("dtype", "kernel_backend", "num_threads"):
        manifest[key] = _listed(each.get(key) for each in resolved)


def _device_name(manifest: Mapping[str, Any], resolved: Mapping[str, Any]) -> str | None:
    """The GPU's name, or this machine's processor for a server that runs here on the CPU."""
    here = resolved.get("device") == "cpu" and manifest.get("shared_machine")
    return resolved.get("device_name") or (manifest["cpu"]["model"] if here else resolved.get("device"))


def _listed(values: Iterable[Any]) -> Any:
    """The value that all have, the different ones as a text, None when there is none."""
    different = list(dict.fromkeys(value for value in values if value is not None))
    return ", ".join(map(str, different)) if len(different) > 1 else next(iter(different), None)
