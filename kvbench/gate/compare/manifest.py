"""The manifest of a comparison: what is compared, how to repeat it, and what must be equal on both sides.

Model, device, versions and requests must be equal: a difference in them would be taken for the candidate's. What a
server does not report is not compared.
"""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.files import utc_now, write_json
from kvbench.common.git import git_state
from kvbench.common.machine import environment
from kvbench.gate.compare.folder import FORMAT, KIND, CompareFolder
from kvbench.gate.compare.sides import RUN, OpenSide, PairedWorkload
from kvbench.gate.policy import Policy
from kvbench.gate.timing.plan import BASE, SIDES, Match, cell_rows
from kvbench.runs.folder import RunFolder, create_run
from kvbench.runs.resume import environment_differences
from kvbench.workload.file import Workload

# Options that the command that repeats the comparison has.
_REPEATED = (
    "workloads", "profile", "overrides", "seed", "only", "policy", "repo", "build_cmd", "target", "exact",
    "target_python", "target_args", "serve_cmd", "preset", "model", "vocab_size", "max_model_len", "tokenizer",
    "api_key_env", "tls_ca_file", "no_tls_verify", "start_timeout", "max_minutes", "method", "no_calibration", "force",
)  # fmt: skip
_FLAG = {"overrides": "-o", "workloads": "--workload"}
# Options that name files and folders: kept absolute, since a comparison may be resumed from another folder.
PATHS = ("policy", "repo", "noise", "store", "tokenizer", "tls_ca_file")
_OF_A_BUILD = ("sha", "changes", "build", "environment")
_NOT_RANDOM = (
    "stored runs, whose order was not random: the stated probabilities hold only if nothing but the candidate changed "
    "between them"
)
_ONE_LAUNCH = (
    "a running server is one launch, in no random order with others: the stated probabilities do not cover what "
    "another launch would change"
)
# What must be equal, by section of /server_info -> the engine setting that may make it differ on purpose.
_FACTS: Mapping[str, Mapping[str, str]] = {
    "served_model": {"vocab_size": "model", "max_model_len": "max_model_len"},
    "model": {"weights_fingerprint": "model", "num_parameters": "model"},
    "resolved": {"device": "device", "device_name": "device"}
    | {name: name for name in ("dtype", "kernel_backend", "num_threads")},
}


def new_comparison(
    options: Mapping[str, Any],
    given: Sequence[Workload],
    workloads: Sequence[PairedWorkload],
    policy: Policy,
    subcommand: str,
    notes: Sequence[str],
    method: str,
) -> CompareFolder:
    """A new folder with its manifest; ``given``: the workloads before the sides' own settings.

    ``method``: how pairs are measured.

    Raises UsageError where it cannot be made, or stored runs are not comparable.
    """
    sides = workloads[0].sides
    stored = {side: sides[side].stored for side in SIDES if sides[side].stored}
    differences = stored_differences(stored, workloads) if stored else []
    if differences and not options["force"]:
        raise UsageError(f"base and candidate differ: {'; '.join(differences)}; --force compares them all the same")
    running = any(side.choice.runs_already for each in workloads for side in each.sides.values())
    folder = CompareFolder(create_run(options["output_dir"], KIND, git_state()["short_sha"]).path, stored)
    seed = options["order_seed"]
    manifest = {
        "format": FORMAT,
        "kind": KIND,
        "status": "incomplete",
        "subcommand": subcommand,
        "method": method,
        "command": ["kvbench", *sys.argv[1:]],
        "reproduce": reproduce_command(options, sides, subcommand),
        **{side: {**sides[side].facts, "name": sides[side].name} for side in SIDES},
        "workloads": {
            each.name: {side: dict(each.sides[side].choice.workload.resolved) for side in SIDES} for each in workloads
        },
        "given": [{"workload": dict(each.resolved), "profile": each.profile} for each in given],
        "cells": _cells(workloads),
        "order_seed": secrets.randbits(32) if seed is None else seed,
        "order": {},
        "options": {key: _absolute(key, value) for key, value in options.items() if key != "resume"}
        | {side: pinned(sides[side]) for side in SIDES},
        "policy": policy.to_json(),
        "stored": {side: str(path.resolve()) for side, path in stored.items()},
        "servers": {side: {} for side in SIDES},
        "differences": differences,
        "notes": [*notes, *(note for each in workloads for note in each.notes)],
        "doubt": _NOT_RANDOM if stored else _ONE_LAUNCH if running else None,
        "resumed": [],
        "voids": [],  # attempts at pairs that were no measurement
        "void": None,  # the pair that was given up
        "seconds": [],  # that each pair took
        "pair_s": 0.0,  # how long one more is expected to take, 0 where that is not known
        "pairs": 0,
        "early_looks": [],  # pairs after which --max-minutes ended it
        **environment(),
        "started": utc_now(),
        "ended": None,
    }
    write_json(folder.manifest_path, manifest)
    return folder


def reproduce_command(options: Mapping[str, Any], sides: Mapping[str, OpenSide], subcommand: str) -> str:
    """The command that repeats it, with commits in place of branches and tags."""
    words = ["kvbench", subcommand]
    for side in SIDES if subcommand == "compare" else (BASE,):
        words.append(pinned(sides[side]) if _is_commit(sides[side]) else sides[side].side.given)
    for name in _REPEATED:
        value, flag = options.get(name), _FLAG.get(name, f"--{name.replace('_', '-')}")
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            for each in value if isinstance(value, tuple | list) else (value,):
                words += [flag, str(each)]
    return shlex.join(words)


def pinned(side: OpenSide) -> str:
    """The side as a text that means the same in any folder: a ref as its commit, unless it has uncommitted changes."""
    if _is_commit(side):
        return side.build.commit.sha[:12]
    text = str(Path(side.side.text).expanduser().resolve()) if side.side.kind == RUN else side.side.text
    return f"{side.side.kind}:{text}"


def _is_commit(side: OpenSide) -> bool:
    return side.build is not None and side.build.commit.changes is None


def _absolute(name: str, value: Any) -> Any:
    if name == "workloads":
        return [str(Path(each).resolve()) for each in value]
    return str(Path(value).resolve()) if name in PATHS and value else value


def _cells(workloads: Sequence[PairedWorkload]) -> list[dict[str, str]]:
    return cell_rows([match for each in workloads for match in each.matches])


def resume(manifest: dict[str, Any], workloads: Sequence[PairedWorkload], *, force: bool) -> list[str]:
    """Notes in the manifest that measuring goes on; returns remarks for the user.

    Raises UsageError where code, environment, versions or machine differ from those so far, unless ``force``: the
    manifest then says so. Other cells than it began with are always refused.
    """
    if _cells(workloads) != manifest["cells"]:
        raise UsageError("this kvbench makes other cells of the workload than it began with: start a new comparison")
    now = environment()
    found, remarks = environment_differences(manifest, now)
    for side in SIDES:
        then, here = manifest[side], workloads[0].sides[side].facts
        changed = [key for key in _OF_A_BUILD if key in then and then[key] != here.get(key)]
        if "changes" in changed:
            found.append(f"{side} is a working tree whose files have changed since")
        elif changed:
            found.append(f"{side} has another {' and '.join(changed)} than before")
    if found and not force:
        raise UsageError(
            f"the comparison was begun under other conditions than now: {'; '.join(found)}. Go back to those, start a "
            "new one without --resume, or add --force to mix both: the verdict then says so"
        )
    manifest["options"]["force"] = manifest["options"]["force"] or force
    manifest["resumed"] += [{"at": utc_now(), **now, "forced": force, "differences": found, "remarks": remarks}]
    mixed = [f"--force: pairs were measured under different conditions: {each}" for each in found]
    manifest["notes"] += [note for note in mixed if note not in manifest["notes"]]
    return remarks


def stored_differences(stored: Mapping[str, Path], workloads: Sequence[PairedWorkload]) -> list[str]:
    """What must be equal in two runs and is not: machine, versions, servers, requests; not their commits."""
    then, now = (RunFolder(stored[side]).manifest() for side in SIDES)
    found, _ = environment_differences({**then, "git": {}}, now)
    for match in (match for each in workloads for match in each.matches):
        servers = [
            (manifest.get("servers") or {}).get(match.of(side).config_id) or {}
            for side, manifest in zip(SIDES, (then, now), strict=True)
        ]
        found += server_differences(*servers, varied_settings(match))
    folder, cells = CompareFolder(Path(), stored), _cells(workloads)
    for repeat in range(1, folder.whole_pairs(cells) + 1):
        found += request_differences(folder, cells, repeat)
    return list(dict.fromkeys(found))


def server_differences(
    left: Mapping[str, Any], right: Mapping[str, Any], varied: frozenset[str] = frozenset()
) -> list[str]:
    """What two servers report differently, without what the settings in ``varied`` change on purpose.

    All package versions are compared, and the models' names unless both report a fingerprint of the weights.
    """
    servers, found = (left, right), []

    def compare(name: str, section: str, key: str) -> None:
        values = [(server.get(section) or {}).get(key) for server in servers]
        if None not in values and values[0] != values[1]:
            found.append(f"{name} ({values[0]} and {values[1]})")

    for section, keys in _FACTS.items():
        for key, setting in keys.items():
            if setting not in varied:
                compare(key, section, key)
    names = [_model_name(server) for server in servers]
    fingerprints = all((server.get("model") or {}).get("weights_fingerprint") for server in servers)
    if not fingerprints and all(names) and names[0] != names[1] and "model" not in varied:
        found.append(f"model ({names[0]} and {names[1]})")
    for name in sorted(left.get("versions") or {}):
        compare(f"version of {name}", "versions", name)
    return found


def _model_name(server: Mapping[str, Any]) -> str | None:
    """The model's name without folders."""
    name = (server.get("model") or {}).get("name") or (server.get("served_model") or {}).get("name")
    return PurePosixPath(str(name)).name if name else None


def varied_settings(match: Match) -> frozenset[str]:
    """The engine settings in which base and candidate differ on purpose."""
    a, b = match.base.settings, match.candidate.settings
    return frozenset(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


def record_server(
    manifest: dict[str, Any], match: Match, side: str, info: Mapping[str, Any], *, alone: bool, force: bool
) -> None:
    """Stores what the first server of a configuration reports, and compares every later one with it and with the
    other side's.

    ``alone``: it was launched for one load, since its prefix cache could not be emptied. Raises UsageError for a
    difference, unless ``force``: the manifest then says so.
    """
    names = {each: f"{match.workload}/{match.of(each).config_id}" for each in SIDES}
    servers = {each: manifest["servers"][each].get(names[each]) for each in SIDES}
    if servers[side] is None:
        servers[side] = manifest["servers"][side][names[side]] = dict(info)
    if alone and side not in (apart := manifest.setdefault("apart", {}).setdefault(match.key, [])):
        apart.append(side)
    if changed := server_differences(servers[side], info):
        what = f"the server of {side} is not the one that was launched before for {names[side]}: {'; '.join(changed)}"
        _refuse_or_store(manifest, [what], "serve the same again, or start a new comparison", force=force)
    if None not in servers.values():
        found = server_differences(*(servers[each] for each in SIDES), varied_settings(match))
        _refuse_or_store(manifest, found, "make them the same", force=force)


def request_differences(folder: CompareFolder, cells: Sequence[Mapping[str, Any]], pair: int) -> list[str]:
    """The cells whose two loads of a pair had different requests. ``cells``: rows of the manifest."""
    found = []
    for cell in cells:
        given = [(folder.done(cell, side, pair) or {}).get("requests_sha256") for side in SIDES]
        if all(given) and given[0] != given[1]:
            found.append(f"requests of {cell['name']}")
    return found


def require_same_requests(folder: CompareFolder, manifest: dict[str, Any], pair: int, *, force: bool) -> None:
    """Raises UsageError where the loads of a pair had different requests, unless ``force``: the manifest says so."""
    found = request_differences(folder, manifest["cells"], pair)
    _refuse_or_store(manifest, found, "give both the same vocabulary, length and kind of server", force=force)


def _refuse_or_store(manifest: dict[str, Any], found: Sequence[str], way_out: str, *, force: bool) -> None:
    if found and not force:
        raise UsageError(
            f"base and candidate are not the same in what must be equal: {'; '.join(found)}. Either {way_out}, or add "
            "--force to judge them all the same: the verdict then says what differed"
        )
    manifest["differences"] = sorted({*manifest["differences"], *found})
