"""The manifest of a run: what was measured, with what, on what. Nothing private beyond the command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from kvbench.common.machine import environment
from kvbench.runs.results import INCOMPLETE, Manifest
from kvbench.runs.server_info import ServerInfo


def build_manifest(
    *, workload: Mapping[str, Any], workload_file: str | None, profile: str, seed: int, plan: list[Any], extra: Any
) -> dict[str, Any]:
    """Everything known before the first launch; ``add_server`` adds what the servers report."""
    return {
        "format": Manifest.FORMAT,
        "status": INCOMPLETE,
        "workload": dict(workload),
        "workload_name": workload["name"],
        "workload_file": workload_file,
        "profile": profile,
        "command": ["kvbench", *sys.argv[1:]],
        **environment(),
        "device": None,  # the servers report it, and dtype, kernels and threads
        "seeds": {"workload": seed, "order": seed, "model": workload["model"].get("seed", 0)},
        "shared_machine": True,  # load client and engine run on the same machine
        "started": None,
        "ended": None,
        "model": None,
        "plan": plan,
        "failures": [],
        **extra,
    }


def add_server(manifest: dict[str, Any], config_id: str, info: ServerInfo) -> None:
    """Stores the report of a configuration's first server on itself, and what all servers ran on.

    ``device``, ``dtype``, ``kernel_backend`` and ``num_threads`` are what the servers settled on (``resolved`` of
    /server_info), not what was requested; different values are joined to one text; None when no server reports any.
    """
    manifest.setdefault("servers", {}).setdefault(config_id, info.to_json())
    resolved = [each["resolved"] for each in manifest["servers"].values() if each.get("resolved")]
    for key in ("device", "dtype", "kernel_backend", "num_threads"):
        values = [_device_name(manifest, each) if key == "device" else each.get(key) for each in resolved]
        different = list(dict.fromkeys(value for value in values if value is not None))
        manifest[key] = ", ".join(map(str, different)) if len(different) > 1 else next(iter(different), None)


def add_notes(manifest: dict[str, Any], info: ServerInfo) -> list[str]:
    """Stores the notes on a server, each once; returns those that are new."""
    stored = manifest.setdefault("notes", [])
    new = [note for note in info.server.notes if note not in stored]
    stored += new
    return new


def _device_name(manifest: Mapping[str, Any], resolved: Mapping[str, Any]) -> str | None:
    """The GPU's name, or this machine's processor for a server that runs here on the CPU."""
    here = resolved.get("device") == "cpu" and manifest.get("shared_machine")
    return resolved.get("device_name") or (manifest["cpu"]["model"] if here else resolved.get("device"))
