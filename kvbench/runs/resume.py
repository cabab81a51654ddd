"""Resuming a run: only with the workload, code, versions and machine that it was started with.

Loads measured under different conditions look alike in the results folder, and a table that mixes them compares the
conditions, not the configurations. So a difference is refused, by name, unless ``--force`` is given; then the manifest
keeps every environment.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.files import as_stored, read_json, utc_now
from kvbench.common.machine import environment
from kvbench.common.text import and_more
from kvbench.runs.folder import RunFolder
from kvbench.runs.results import INCOMPLETE, Manifest
from kvbench.runs.server_info import ServerInfo
from kvbench.workload.file import Workload, differing_keys, resolve

# Servers that agree in these settings must agree in their weights and in what they run on.
_IDENTITY = ("model", "load_format", "seed", "dtype", "device", "kernel_backend", "num_threads")
_TARGET = ("target", "serve_cmd", "preset", "target_args", "target_python", "exact", "simulated")
_RUNNING_SERVER = ("model", "vocab_size", "max_model_len", "tokenizer")  # what was measured; not how it is reached
_MIX = "or add --force to continue anyway: the manifest then records both, and the results mix them"


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


def require_same_workload(run: RunFolder, workload: Workload) -> None:
    """Raises UsageError when ``run`` was started with another workload than ``workload``, as it runs on the target."""
    now = as_stored(workload.resolved)
    if keys := differing_keys(run.manifest().workload, now):
        raise UsageError(
            f"{run.path} was started with another workload; it differs in {and_more(keys, 5)}: resume it with "
            "`kvbench sweep --resume FOLDER` alone (the stored workload), or start a new run without --resume"
        )


def reopen(
    run: RunFolder,
    served: Mapping[str, Any],
    *,
    force: bool,
    something_left: bool,
    now: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """The manifest of a run to resume, and remarks for the user.

    ``served``: the manifest's entries for the target as it is now; ``now``: the environment of the machines that
    measure, None: this one's. A run with nothing left is opened even if something
    has changed: nothing will be measured. Raises UsageError when something differs and ``force`` is not given.
    """
    before = run.manifest().to_json()
    opened = read_json(run.manifest_path) | {"status": INCOMPLETE, "failures": []}
    if not something_left:
        return opened, []
    now = environment() if now is None else now
    differences, remarks = environment_differences(before, now)
    differences += _changed(*({key: facts.get(key) for key in _TARGET} for facts in (before, served)))
    options = [facts.get("target_options") or {} for facts in (before, served)]
    differences += _changed(*({key: each.get(key) for key in _RUNNING_SERVER} for each in options))
    if differences and not force:
        raise UsageError(
            f"{run.path} was started under other conditions than now: {'; '.join(differences)}. Go back to those, "
            f"start a new run without --resume, {_MIX}"
        )
    entry = {"at": utc_now(), **now, "forced": force, "differences": differences, "remarks": remarks}
    opened["resumed"] = [*before.get("resumed", ()), entry]
    return opened, remarks + [f"--force: this run now mixes conditions: {d}" for d in differences]


def environment_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What makes two environments incomparable, and what only might; both as ``machine.environment()`` returns them.

    What ``before`` does not record is not compared.
    """
    differences, remarks = _git_differences(before.get("git") or {}, now["git"])
    differences += _changed(before.get("versions") or {}, now["versions"])
    cpu = {key: value for key, value in (before.get("cpu") or {}).items() if key in ("model", "architecture", "cores")}
    differences += [f"processor {text}" for text in _changed(cpu, now["cpu"])]
    if "gpus" in before:
        differences += _changed({"GPUs": _gpu_names(before["gpus"])}, {"GPUs": _gpu_names(now["gpus"])})
    return differences, remarks


def resumed_differences(manifest: Manifest) -> list[str]:
    """What differed each time a run was resumed."""
    return list(dict.fromkeys(each for entry in manifest.resumed for each in entry.get("differences") or ()))


def _git_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    if "sha" not in before:
        return [], []
    if before["sha"] != now.get("sha"):
        return [f"commit ({before.get('short_sha')} then, {now.get('short_sha')} now)"], []
    if bool(before.get("dirty")) != bool(now.get("dirty")):
        then, here = (("some" if state.get("dirty") else "none") for state in (before, now))
        return [f"uncommitted changes ({then} then, {here} now)"], []
    if now.get("dirty"):
        return [], [
            "the working tree has uncommitted changes, as when the run was started; kvbench does not check that they "
            "are the same"
        ]
    return [], []


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Values that differ, of the keys that both have."""

    def word(value: Any) -> str:
        return "none" if value is None else str(value)

    keys = [key for key in sorted(before) if key in now and before[key] != now[key]]
    return [f"{key} ({word(before[key])} then, {word(now[key])} now)" for key in keys]


def _gpu_names(gpus: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{gpu.get('name')} with driver {gpu.get('driver_version')}" for gpu in gpus) or "none"


def server_differences(manifest: Mapping[str, Any], config_id: str, info: ServerInfo) -> list[str]:
    """How a server differs from the servers that this run has measured before.

    Compared with the server of the same configuration, else with one of the same model and the same device settings:
    weights, what the server settled on, and its versions. What either does not tell is not compared.
    """
    servers = {name: ServerInfo.model_validate(stored) for name, stored in (manifest.get("servers") or {}).items()}
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


def accept_server(manifest: dict[str, Any], config_id: str, info: ServerInfo, *, force: bool) -> None:
    """Raises UsageError when this server must not be measured in this run; with ``force`` it is recorded instead."""
    found = server_differences(manifest, config_id, info)
    if not found:
        return
    if not force:
        raise UsageError(
            f"the server of {config_id} is not what this run has measured so far: {'; '.join(found)}. Serve the "
            f"same again, start a new run without --resume, {_MIX}"
        )
    entry = manifest["resumed"][-1]  # --force comes with --resume only
    entry["differences"] = list(dict.fromkeys([*entry.get("differences", ()), *found]))
    told = info.model_dump(include={"model", "resolved", "versions"}, exclude_unset=True)
    entry.setdefault("servers", {})[config_id] = told
