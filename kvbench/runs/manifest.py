"""The manifest of a run: what was measured, with what, on what. Nothing private beyond the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvbench.common.machine import environment
from kvbench.common.records import write_record
from kvbench.runs.folder import MANIFEST
from kvbench.runs.results import INCOMPLETE, Manifest, PlannedBlock
from kvbench.runs.server_info import Resolved, ServerInfo
from kvbench.workload.design import Block
from kvbench.workload.file import Workload

M = TypeVar("M", bound=Manifest)


@dataclass
class StoredManifest:
    """The manifest of a run that is being measured; ``path``: of the run's folder."""

    path: Path
    manifest: Manifest

    def replace(self, **changes: Any) -> None:
        """Replaces fields of the manifest and writes it."""
        self.manifest = self.manifest.model_copy(update=changes)
        write_record(self.path / MANIFEST, self.manifest)


def new_manifest(record: type[M], workload: Workload, blocks: Sequence[Block], **facts: Any) -> M:
    """Everything known before the first launch; ``with_server`` adds what the servers report."""
    known = {
        "status": INCOMPLETE,
        "workload": dict(workload.resolved),
        "workload_name": workload.resolved["name"],
        "workload_file": None,
        "profile": workload.profile,
        "command": ["kvbench", *sys.argv[1:]],
        **environment(),
        "device": None,  # the servers report it, and dtype, kernels and threads
        "seeds": {
            "workload": workload.seed, "order": workload.seed, "model": workload.resolved["model"].get("seed", 0)
        },
        "shared_machine": True,  # load client and engine run on the same machine
        "started": None,
        "ended": None,
        "model": None,
        "plan": tuple(
            PlannedBlock(
                block_id=block.block_id,
                repeat=block.repeat,
                configuration=block.configuration.config_id,
                cells=tuple(cell.cell_id for cell in block.cells),
            )
            for block in blocks
        ),
        "failures": (),
    }  # fmt: skip
    return record(**known | facts)


def with_server(manifest: Manifest, config_id: str, info: ServerInfo) -> Manifest:
    """The manifest with the report of a configuration's first server on itself, and with what all servers ran on.

    ``device``, ``dtype``, ``kernel_backend`` and ``num_threads`` are what the servers settled on (``resolved`` of
    /server_info), not what was requested; different values are joined to one text; None when no server reports any.
    """
    servers = {**manifest.servers, config_id: manifest.servers.get(config_id, info)}
    resolved = [server.resolved for server in servers.values()]
    settled = {"device": [_device_name(manifest, each) for each in resolved]}
    settled |= {name: [getattr(each, name) for each in resolved] for name in ("dtype", "kernel_backend", "num_threads")}
    update: dict[str, Any] = {"servers": servers}
    for name, values in settled.items():
        different = list(dict.fromkeys(value for value in values if value is not None))
        update[name] = ", ".join(map(str, different)) if len(different) > 1 else next(iter(different), None)
    return manifest.model_copy(update=update)


def _device_name(manifest: Manifest, resolved: Resolved) -> str | None:
    """The GPU's name, or this machine's processor for a server that runs here on the CPU."""
    here = resolved.device == "cpu" and manifest.shared_machine
    return resolved.device_name or (manifest.cpu.model if here else resolved.device)
