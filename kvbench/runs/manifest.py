"""The manifest of a run: what was measured, with what, on what. Nothing private beyond the command line.

A run is resumed only with the workload, code, versions and machine that it was started with. Loads measured under
different conditions look alike in the results folder, and a table that mixes them compares the conditions, not the
configurations. So a difference is refused, by name, unless ``--force`` is given; then the manifest keeps every
environment.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvbench.common.errors import UsageError
from kvbench.common.files import as_stored, utc_now
from kvbench.common.machine import environment
from kvbench.common.records import write_record
from kvbench.common.text import and_more
from kvbench.runs.folder import MANIFEST
from kvbench.runs.results import (
    INCOMPLETE,
    Environment,
    GitState,
    Gpu,
    Manifest,
    MeasuredTarget,
    PlannedBlock,
    Resumed,
)
from kvbench.runs.server_info import Resolved, ServerInfo
from kvbench.workload.design import Block
from kvbench.workload.file import Workload, differing_keys, resolve

M = TypeVar("M", bound=Manifest)
# Servers that agree in these settings must agree in their weights and in what they run on.
_IDENTITY = ("model", "load_format", "seed", "dtype", "device", "kernel_backend", "num_threads")
_TARGET = {"target", "serve_cmd", "preset", "target_args", "target_python", "exact"}
_RUNNING_SERVER = {"model", "vocab_size", "max_model_len", "tokenizer"}  # what was measured; not how it is reached
_OF_A_PROCESSOR = {"model", "architecture", "cores"}
_MIX = "or add --force to continue anyway: the manifest then records both, and the results mix them"


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
    settled = {
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
        "plan": tuple(map(_planned, blocks)),
        "failures": (),
    }  # fmt: skip
    return record(**settled | facts)


def _planned(block: Block) -> PlannedBlock:
    cells = tuple(cell.cell_id for cell in block.cells)
    return PlannedBlock(
        block_id=block.block_id, repeat=block.repeat, configuration=block.configuration.config_id, cells=cells
    )


def with_server(manifest: Manifest, config_id: str, info: ServerInfo) -> Manifest:
    """The manifest with the report of a configuration's first server on itself, and with what all servers ran on.

    ``device``, ``dtype``, ``kernel_backend`` and ``num_threads`` are what the servers settled on (``resolved`` of
    /server_info), not what was requested; different values are joined to one text; None when no server reports any.
    """
    servers = {**manifest.servers, config_id: manifest.servers.get(config_id, info)}
    resolved = [server.resolved for server in servers.values()]
    settled = {"device": [_device_name(manifest, server) for server in resolved]}
    for name in ("dtype", "kernel_backend", "num_threads"):
        settled[name] = [getattr(server, name) for server in resolved]
    update: dict[str, Any] = {"servers": servers}
    for name, values in settled.items():
        different = list(dict.fromkeys(value for value in values if value is not None))
        update[name] = ", ".join(map(str, different)) if len(different) > 1 else next(iter(different), None)
    return manifest.model_copy(update=update)


def _device_name(manifest: Manifest, resolved: Resolved) -> str | None:
    """The GPU's name, or this machine's processor for a server that runs here on the CPU."""
    here = resolved.device == "cpu" and manifest.shared_machine
    return resolved.device_name or (manifest.cpu.model if here else resolved.device)


def stored_workload(manifest: Manifest) -> Workload:
    """The workload that a manifest keeps; runs of older versions do not tell their profile."""
    return resolve(manifest.workload, profile=manifest.profile or "cpu", source=None)


def planned_cells(manifest: Manifest, patterns: Sequence[str]) -> tuple[str, ...]:
    """The cells of a run's plan that match any of the globs. Raises UsageError when a glob matches none."""
    planned = list(dict.fromkeys(cell for block in manifest.plan for cell in block.cells))
    matched = {pattern: fnmatch.filter(planned, pattern) for pattern in patterns}
    if wrong := [pattern for pattern, cells in matched.items() if not cells]:
        raise UsageError(f"--only {wrong[0]!r} matches no cell of this run: its cells are {', '.join(planned)}")
    return tuple(cell for cell in planned if any(cell in cells for cells in matched.values()))


def require_same_workload(path: Path, manifest: Manifest, workload: Workload) -> None:
    """Raises UsageError when the run was started with another workload than ``workload``, as it runs on the target."""
    if keys := differing_keys(manifest.workload, as_stored(workload.resolved)):
        raise UsageError(
            f"{path} was started with another workload; it differs in {and_more(keys, 5)}: resume it with "
            "`kvbench sweep --resume FOLDER` alone (the stored workload), or start a new run without --resume"
        )


def reopen(
    path: Path, begun: Manifest, target: MeasuredTarget, *, force: bool, now: Environment | None = None
) -> tuple[Manifest, list[str]]:
    """The manifest of a run to resume, and remarks for the user. ``target``: as it is now; ``now``: None: this machine.

    Raises UsageError when something differs and ``force`` is not given.
    """
    now = now or Environment(**environment())
    differences, remarks = environment_differences(begun, now)
    differences += _changed(begun.model_dump(include=_TARGET), target.model_dump(include=_TARGET))
    machines = ({"simulated": side.simulated.to_json() if side.simulated else None} for side in (begun, target))
    differences += _changed(*machines)
    servers = (side.target_options.model_dump(include=_RUNNING_SERVER) for side in (begun, target))
    differences += _changed(*servers)
    if differences and not force:
        raise UsageError(
            f"{path} was started under other conditions than now: {'; '.join(differences)}. Go back to those, "
            f"start a new run without --resume, {_MIX}"
        )
    entry = Resumed(at=utc_now(), forced=force, differences=tuple(differences), remarks=tuple(remarks), **now.fields())
    begun = begun.model_copy(update={"resumed": (*begun.resumed, entry)})
    return begun, remarks + [f"--force: this run now mixes conditions: {difference}" for difference in differences]


def environment_differences(before: Environment, now: Environment) -> tuple[list[str], list[str]]:
    """Lists what makes two environments incomparable, and what only might, of what ``before`` records."""
    differences, remarks = _git_differences(before.git, now.git)
    differences += _changed(before.versions, now.versions)
    processors = (side.cpu.model_dump(include=_OF_A_PROCESSOR, exclude_unset=True) for side in (before, now))
    differences += [f"processor {text}" for text in _changed(*processors)]
    if "gpus" in before.model_fields_set:
        differences += _changed({"GPUs": _gpu_names(before.gpus)}, {"GPUs": _gpu_names(now.gpus)})
    return differences, remarks


def resumed_differences(manifest: Manifest) -> list[str]:
    """Lists what differed each time a run was resumed."""
    return list(dict.fromkeys(difference for entry in manifest.resumed for difference in entry.differences))


def _git_differences(before: GitState, now: GitState) -> tuple[list[str], list[str]]:
    if "sha" not in before.model_fields_set:
        return [], []
    if before.sha != now.sha:
        return [f"commit ({before.short_sha} then, {now.short_sha} now)"], []
    if bool(before.dirty) != bool(now.dirty):
        then, here = ("some" if state.dirty else "none" for state in (before, now))
        return [f"uncommitted changes ({then} then, {here} now)"], []
    if now.dirty:
        return [], [
            "the working tree has uncommitted changes, as when the run was started; kvbench does not check that they "
            "are the same"
        ]
    return [], []


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names the values that differ, of the keys that both have."""

    def word(value: Any) -> str:
        return "none" if value is None else str(value)

    keys = [key for key in sorted(before) if key in now and before[key] != now[key]]
    return [f"{key} ({word(before[key])} then, {word(now[key])} now)" for key in keys]


def _gpu_names(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"{gpu.name} with driver {gpu.driver_version}" for gpu in gpus) or "none"


def server_differences(servers: Mapping[str, ServerInfo], config_id: str, info: ServerInfo) -> list[str]:
    """Lists how a server differs from the ``servers`` that this run has measured before.

    Compared with the server of the same configuration, else with one of the same model and the same device settings:
    weights, what the server settled on, and its versions. What either does not tell is not compared.
    """
    alike = (other for other in servers.values() if _identity(other) == _identity(info))
    before = servers.get(config_id) or next(alike, None)
    if before is None:
        return []
    weights = [{"weights_fingerprint": server.model.weights_fingerprint} for server in (before, info)]
    differences = _changed(*map(_told, weights))
    for section in ("resolved", "versions"):
        then, now = (_told(dict(getattr(server, section))) for server in (before, info))
        differences += [f"the server's {text}" for text in _changed(then, now)]
    return differences


def _identity(server: ServerInfo) -> list[Any]:
    return [server.fact("engine", name) for name in _IDENTITY]


def _told(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that a server tells."""
    return {name: value for name, value in facts.items() if value not in (None, "")}


def accept_server(manifest: Manifest, config_id: str, info: ServerInfo, *, force: bool) -> Manifest:
    """The manifest, with what differs about this server noted. Raises UsageError for a difference without ``force``."""
    differences = server_differences(manifest.servers, config_id, info)
    if not differences:
        return manifest
    if not force:
        raise UsageError(
            f"the server of {config_id} differs from the one that this run has measured so far: "
            f"{'; '.join(differences)}. Serve that one again, start a new run without --resume, {_MIX}"
        )
    *earlier, last = manifest.resumed  # --force comes with --resume only
    facts = info.model_dump(include={"model", "resolved", "versions"}, exclude_unset=True)
    update = {
        "differences": tuple(dict.fromkeys([*last.differences, *differences])),
        "servers": {**last.servers, config_id: ServerInfo(**facts)},
    }
    return manifest.model_copy(update={"resumed": (*earlier, last.model_copy(update=update))})
