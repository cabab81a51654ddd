"""The manifest of a comparison: everything that is known before its first launch, and how it is done again."""

from __future__ import annotations

import json
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.files import read_json, utc_now, write_json
from kvbench.common.git import git_state
from kvbench.common.machine import environment
from kvbench.common.packages import HOUSE
from kvbench.gate.compare.folder import FORMAT, KIND, CompareFolder
from kvbench.gate.compare.lanes import Lane
from kvbench.gate.compare.same_server import differences as server_differences
from kvbench.gate.compare.same_server import request_differences, varied_settings
from kvbench.gate.compare.side_text import RUN, parse_side
from kvbench.gate.compare.sides import OpenSide
from kvbench.gate.compare.values import whole_pairs
from kvbench.gate.policy import Policy
from kvbench.gate.timing.plan import BASE, SIDES, cell_rows
from kvbench.runs.folder import DONE, RunFolder, create_run
from kvbench.runs.resume import environment_differences
from kvbench.workload.file import Workload, load_workload

# Options that say what is compared, as words of the command that does it again.
_REPEATED = (
    "profile", "overrides", "seed", "only", "policy", "repo", "build_cmd", "target", "exact", "target_python",
    "target_args", "serve_cmd", "preset", "model", "vocab_size", "max_model_len", "tokenizer", "api_key_env",
    "tls_ca_file", "no_tls_verify", "start_timeout", "max_minutes", "no_calibration", "force",
)  # fmt: skip
_FLAG = {"overrides": "-o", "workloads": "--workload"}
# Options that name files and folders: kept absolute, since a comparison may be gone on with from another folder.
PATHS = ("policy", "repo", "noise", "store", "tokenizer", "tls_ca_file")
_OF_A_BUILD = ("sha", "changes", "build", "environment")
_STORED_RUNS = (
    "stored runs were not measured side by side in random order: whatever the machine did between them counts as the "
    "candidate's"
)
_NOT_RANDOM = (
    "stored runs, whose order was not random: the chances that are told hold only if nothing but the candidate changed "
    "between them"
)
_ONE_LAUNCH = (
    "a running server is one launch, in no random order with others: the chances that are told do not cover what "
    "another launch would change"
)


def new_comparison(
    options: Mapping[str, Any],
    workloads: Sequence[Workload],
    lanes: Sequence[Lane],
    policy: Policy,
    subcommand: str,
    notes: Sequence[str],
) -> CompareFolder:
    """A new folder with its manifest; ``workloads`` as they were before the sides' own settings.

    Raises UsageError where it cannot be made, or stored runs are not comparable.
    """
    sides = lanes[0].sides
    stored = {side: sides[side].stored for side in SIDES if sides[side].stored}
    differences = stored_differences(stored, lanes) if stored else []
    if differences and not options["force"]:
        raise UsageError(f"base and candidate differ: {'; '.join(differences)}; --force compares them all the same")
    running = any(side.choice.probes for lane in lanes for side in lane.sides.values())
    path = create_run(options["output_dir"], KIND, git_state()["short_sha"]).path
    seed = options["order_seed"]
    manifest = {
        "format": FORMAT,
        "kind": KIND,
        "status": "incomplete",
        "subcommand": subcommand,
        "command": ["kvbench", *sys.argv[1:]],
        "reproduce": reproduce_command(options, sides, subcommand),
        **{side: {**sides[side].facts, "name": sides[side].name} for side in SIDES},
        "workloads": {lane.name: {side: dict(lane.sides[side].workload.resolved) for side in SIDES} for lane in lanes},
        "given": [{"workload": dict(each.resolved), "profile": each.profile} for each in workloads],
        "cells": cell_rows([match for lane in lanes for match in lane.matches]),
        "order_seed": secrets.randbits(32) if seed is None else seed,
        "order": {},
        "options": {key: _absolute(key, value) for key, value in options.items() if key != "resume"}
        | {side: pinned(sides[side]) for side in SIDES},
        "policy": policy.to_json(),
        "stored": {side: str(folder.resolve()) for side, folder in stored.items()},
        "servers": {side: {} for side in SIDES},
        "differences": differences,
        "notes": [*notes, *(note for lane in lanes for note in lane.notes), *([_STORED_RUNS] if stored else [])],
        "doubt": _NOT_RANDOM if stored else _ONE_LAUNCH if running else None,
        "resumed": [],
        "voids": [],  # attempts at pairs that were no measurement
        "void": None,  # the pair that was given up
        "seconds": [],  # that each pair took
        "pairs": 0,
        "early_looks": [],  # pairs after which --max-minutes ended it
        **environment(),
        "started": utc_now(),
        "ended": None,
    }
    folder = CompareFolder(path, stored)
    write_json(folder.manifest_path, manifest)
    return folder


def reproduce_command(options: Mapping[str, Any], sides: Mapping[str, OpenSide], subcommand: str) -> str:
    """The command that does it again, with the commits in the place of names that move."""
    words = ["kvbench", subcommand]
    words += [_readable(sides[side], options) for side in (SIDES if subcommand == "compare" else (BASE,))]
    for name in ("workloads", *_REPEATED):
        value = options.get(name)
        if value in (None, False, ()):
            continue
        flag = _FLAG.get(name, f"--{name.replace('_', '-')}")
        if value is True:
            words.append(flag)
            continue
        for each in value if isinstance(value, tuple | list) else (value,):
            words += [flag, str(each)]
    return shlex.join(words)


def pinned(side: OpenSide) -> str:
    """The side in a way that means one thing in any folder; a ref as its commit, but for a working tree with changes.

    Such a tree has no commit that would bring its files back.
    """
    if side.build is not None and side.build.commit.changes is None:
        return side.build.commit.sha[:12]
    text = str(Path(side.side.text).expanduser().resolve()) if side.side.kind == RUN else side.side.text
    return f"{side.side.kind}:{text}"


def _readable(side: OpenSide, options: Mapping[str, Any]) -> str:
    """As ``pinned``, as it was given where that means the same."""
    if side.build is not None and side.build.commit.changes is None:
        return pinned(side)
    try:
        alone = parse_side(side.side.text, Path(options.get("repo") or HOUSE)).kind == side.side.kind
    except UsageError:
        alone = False
    return side.side.text if alone else f"{side.side.kind}:{side.side.text}"


def _absolute(name: str, value: Any) -> Any:
    if name == "workloads":
        return [str(Path(each).resolve()) for each in value]
    return str(Path(value).resolve()) if name in PATHS and value else value


def go_on(manifest: dict[str, Any], lanes: Sequence[Lane], *, force: bool) -> list[str]:
    """Ready a manifest to be measured further; remarks for the user.

    Raises UsageError where code, environment, versions or machine are others than were measured so far, unless
    ``force``: it is put down then. Other cells than were begun with are always refused.
    """
    if cell_rows([match for lane in lanes for match in lane.matches]) != manifest["cells"]:
        raise UsageError("this kvbench makes other cells of the workload than it began with: start a new comparison")
    now = environment()
    found, remarks = environment_differences(manifest, now)
    for side in SIDES:
        then, here = manifest[side], lanes[0].sides[side].facts
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


def edited(manifest: dict[str, Any]) -> list[str]:
    """Puts down, and tells, which workload files hold something else now than when the comparison began."""
    options = manifest["options"]
    how = {name: options[name] for name in ("profile", "overrides", "seed")}
    found = []
    for path, given in zip(options["workloads"], manifest["given"], strict=False):  # stored runs have no files
        try:
            same = json.loads(json.dumps(load_workload(path, **how).resolved, default=str)) == given["workload"]
        except UsageError:
            same = False
        if not same:
            found.append(f"{path} is not what it was when the comparison began, which goes on as it was then")
    manifest["notes"] += [note for note in found if note not in manifest["notes"]]
    return found


def unusable_repeat(folder: CompareFolder, manifest: Mapping[str, Any]) -> str | None:
    """Of stored runs: why the first repeat that does not count does not, where it was measured."""
    repeat = whole_pairs(folder, manifest) + 1
    for cell in manifest["cells"]:
        for side in SIDES:
            run = folder.run(side, cell["workload"])
            if run.is_done(cell[side], repeat):
                done = read_json(run.load(cell[side], repeat) / DONE)
                if not done["valid"]:
                    why = "; ".join(done["invalid_reasons"])
                    return f"repeat {repeat} of {cell[side]} of {side} is invalid ({why}), and ends what can be paired"
    return None


def stored_differences(stored: Mapping[str, Path], lanes: Sequence[Lane]) -> list[str]:
    """What two runs differ in that must be equal: machine, versions, servers, requests; not their commits."""
    then, now = (RunFolder(stored[side]).manifest() for side in SIDES)
    found, _ = environment_differences({**then, "git": {}}, now)
    matches = [match for lane in lanes for match in lane.matches]
    for match in matches:
        told = [
            (manifest.get("servers") or {}).get(match.of(side).config_id) or {}
            for side, manifest in zip(SIDES, (then, now), strict=True)
        ]
        found += server_differences(*told, varied_settings(match))
    folder, rows = CompareFolder(Path(), stored), cell_rows(matches)
    for repeat in range(1, whole_pairs(folder, {"cells": rows}) + 1):
        found += request_differences(folder, rows, repeat)
    return list(dict.fromkeys(found))
