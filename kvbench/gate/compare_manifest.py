"""The manifest of a comparison: everything that is known before its first launch, and how it is done again."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.errors import UsageError
from kvbench.gate.folder import FORMAT, KIND, CompareFolder
from kvbench.gate.lanes import Lane
from kvbench.gate.plan import BASE, SIDES, cell_rows
from kvbench.gate.policy import Policy
from kvbench.gate.sides import OpenSide
from kvbench.manifest import environment, git_state
from kvbench.results import RunFolder, create_run, utc_now, write_json
from kvbench.resume import environment_differences

# Options that say what is compared, as words of the command that does it again.
_REPEATED = (
    "profile", "overrides", "seed", "only", "policy", "repo", "build_cmd", "target", "exact", "target_python",
    "target_args", "serve_cmd", "preset", "model", "vocab_size", "max_model_len", "tokenizer", "api_key_env",
    "tls_ca_file", "no_tls_verify", "start_timeout", "max_minutes", "no_calibration", "force",
)  # fmt: skip
_FLAG = {"overrides": "-o", "workloads": "--workload"}
_STORED_RUNS = (
    "stored runs were not measured side by side in random order: whatever the machine did between them counts as the "
    "candidate's"
)


def new_comparison(
    options: Mapping[str, Any], lanes: Sequence[Lane], policy: Policy, subcommand: str, notes: Sequence[str]
) -> CompareFolder:
    """A new folder with its manifest. Raises UsageError where it cannot be made, or stored runs are not comparable."""
    sides = lanes[0].sides
    stored = {side: sides[side].stored for side in SIDES if sides[side].stored}
    differences = _stored_differences(stored) if stored else []
    if differences and not options["force"]:
        raise UsageError(f"base and candidate differ: {'; '.join(differences)}; --force compares them all the same")
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
        "cells": cell_rows([match for lane in lanes for match in lane.matches]),
        "order_seed": secrets.randbits(32) if seed is None else seed,
        "order": {},
        "options": {key: value for key, value in options.items() if key != "resume"}
        | {side: pinned(sides[side]) for side in SIDES},
        "policy": str(policy.source) if policy.source else None,
        "stored": {side: str(folder) for side, folder in stored.items()},
        "servers": {side: {} for side in SIDES},
        "differences": differences,
        "notes": [*notes, *(note for lane in lanes for note in lane.notes), *([_STORED_RUNS] if stored else [])],
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
    words += [pinned(sides[side]) for side in (SIDES if subcommand == "compare" else (BASE,))]
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
    """The side as it was given; a ref as its commit, but for a working tree with changes, which has none."""
    if side.build is not None and side.build.commit.changes is None:
        return side.build.commit.sha[:12]
    return side.side.text


def require_unchanged(manifest: Mapping[str, Any], lanes: Sequence[Lane]) -> None:
    """UsageError where a comparison that is gone on with would measure other code than it has measured."""
    for side in SIDES:
        then, now = manifest[side].get("changes"), lanes[0].sides[side].facts.get("changes")
        if then != now:
            raise UsageError(
                f"{side} is a working tree that has changed since: bring its files back, or start a new comparison "
                "without --resume"
            )


def _stored_differences(stored: Mapping[str, Path]) -> list[str]:
    """What two runs differ in that must be equal; their commits are what is compared."""
    then, now = (RunFolder(stored[side]).manifest() for side in SIDES)
    found, _ = environment_differences({**then, "git": {}}, now)
    return found
