"""Going on with a run: only with the workload, the code, the versions and the machine that it was started with.

Loads measured under different conditions look alike in the results folder, and a table that mixes them compares the
conditions, not the configurations. So a difference is refused, by name, unless ``--force`` asks for it; then every
environment stays in the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.files import utc_now
from kvbench.common.machine import environment
from kvbench.runs.folder import RunFolder
from kvbench.workload.file import Workload, differing_keys

# Servers that agree in these settings must agree in their weights and in what they run on.
_IDENTITY = ("model", "load_format", "seed", "dtype", "device", "kernel_backend", "num_threads")
_SERVED = ("target", "serve_cmd", "preset", "target_args", "target_python", "exact")
_OF_A_RUNNING_SERVER = ("model", "vocab_size", "max_model_len", "tokenizer")  # what was measured; not how it is reached
_MIX = "or add --force to go on all the same: the manifest then keeps both, and the results are a mixture"


def reopen(
    run: RunFolder, workload: Workload, served: Mapping[str, Any], *, force: bool, something_left: bool
) -> tuple[dict[str, Any], list[str]]:
    """The manifest of a run to go on with, and remarks for the user.

    ``served``: the manifest's words for the target, as they are now. A run with nothing left is opened whatever has
    changed: nothing will be measured. Raises UsageError when something differs and ``force`` is not given.
    """
    manifest = run.manifest()
    require_same_workload(manifest, workload, run)
    opened = manifest | {"status": "incomplete", "failures": []}
    if not something_left:
        return opened, []
    now = environment()
    differences, remarks = environment_differences(manifest, now)
    differences += _changed(*({key: facts.get(key) for key in _SERVED} for facts in (manifest, served)))
    asked = [facts.get("target_options") or {} for facts in (manifest, served)]
    differences += _changed(*({key: each.get(key) for key in _OF_A_RUNNING_SERVER} for each in asked))
    if differences and not force:
        raise UsageError(
            f"{run.path} was started under other conditions than now: {'; '.join(differences)}. Go back to those, "
            f"start a new run without --resume, {_MIX}"
        )
    entry = {"at": utc_now(), **now, "forced": force, "differences": differences, "remarks": remarks}
    opened["resumed"] = [*manifest.get("resumed", []), entry]
    return opened, remarks + [f"--force: this run now mixes conditions: {d}" for d in differences]


def require_same_workload(manifest: Mapping[str, Any], workload: Workload, run: RunFolder) -> None:
    """Raises UsageError when ``workload`` is not the one the run was started with; names the keys."""
    now = json.loads(json.dumps(workload.resolved, default=str))  # as the manifest's went
    keys = differing_keys(manifest["workload"], now)
    if keys:
        raise UsageError(
            f"{run.path} was started with another workload; it differs in {_first(keys)}: resume it with "
            "`kvbench sweep --resume FOLDER` alone (the stored workload), or start a new run without --resume"
        )


def _first(keys: Sequence[str], most: int = 5) -> str:
    more = len(keys) - most
    return ", ".join(keys[:most]) + (f" and {more} more" if more > 0 else "")


def environment_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What makes the two incomparable, and what only might; both shaped as ``manifest.environment()``.

    What ``before`` does not record is not compared.
    """
    differences, remarks = _git_differences(before.get("git") or {}, now["git"])
    differences += _changed(before.get("versions") or {}, now["versions"])
    cpu = before.get("cpu") or {}
    differences += [f"processor {text}" for text in _changed(cpu, now["cpu"], ("model", "architecture", "cores"))]
    if "gpus" in before and (then := _gpu_names(before["gpus"])) != (here := _gpu_names(now["gpus"])):
        differences.append(f"GPUs ({then} then, {here} now)")
    return differences, remarks


def _git_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    if "sha" not in before:
        return [], []
    if before["sha"] != now["sha"]:
        return [f"commit ({before.get('short_sha')} then, {now['short_sha']} now)"], []
    if bool(before.get("dirty")) != bool(now["dirty"]):
        then, here = (("some" if state.get("dirty") else "none") for state in (before, now))
        return [f"uncommitted changes ({then} then, {here} now)"], []
    if now["dirty"]:
        return [], [
            "the working tree has uncommitted changes, as it had when the run was started: nobody checks that they "
            "are the same"
        ]
    return [], []


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str] | None = None) -> list[str]:
    chosen = sorted(set(before) & set(now)) if keys is None else [k for k in keys if k in before and k in now]
    return [
        f"{key} ({_word(before[key])} then, {_word(now[key])} now)" for key in chosen if before[key] != now[key]
    ]  # fmt: skip


def _word(value: Any) -> str:
    return "none" if value is None else str(value)


def _gpu_names(gpus: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{gpu.get('name')} with driver {gpu.get('driver_version')}" for gpu in gpus) or "none"


def server_differences(manifest: Mapping[str, Any], config_id: str, told: Mapping[str, Any]) -> list[str]:
    """What a server says of itself (/server_info) against the servers that this run has measured before.

    Compared with the server of the same configuration, else with one of the same model and the same device settings:
    weights, what the server settled on, and its versions. What either does not tell is not compared.
    """
    servers: Mapping[str, Mapping[str, Any]] = manifest.get("servers") or {}
    engine = told.get("engine") or {}
    alike = (
        other
        for other in servers.values()
        if all((other.get("engine") or {}).get(key) == engine.get(key) for key in _IDENTITY)
    )
    known = servers.get(config_id) or next(alike, None)
    if known is None:
        return []
    weights = ("weights_fingerprint",)
    found = _changed(_told(known, "model"), _told(told, "model"), weights)
    for section in ("resolved", "versions"):
        found += [f"the server's {text}" for text in _changed(_told(known, section), _told(told, section))]
    return found


def _told(server: Mapping[str, Any], section: str) -> dict[str, Any]:
    return {key: value for key, value in (server.get(section) or {}).items() if value not in (None, "")}


def accept_server(manifest: dict[str, Any], config_id: str, told: Mapping[str, Any], *, force: bool) -> None:
    """Raises UsageError when this server must not be measured in this run; with ``force`` it is put down instead."""
    found = server_differences(manifest, config_id, told)
    if not found:
        return
    if not force:
        raise UsageError(
            f"the server of {config_id} is not what this run has measured so far: {'; '.join(found)}. Serve the "
            f"same again, start a new run without --resume, {_MIX}"
        )
    entry = manifest["resumed"][-1]  # --force comes with --resume only
    entry["differences"] = [*entry["differences"], *(text for text in found if text not in entry["differences"])]
    kept = {key: told.get(key) for key in ("model", "resolved", "versions")}
    entry.setdefault("servers", {})[config_id] = kept
