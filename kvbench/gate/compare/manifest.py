"""The beginning of a comparison, its going on, and what must be equal on both sides.

Model, device, versions and requests must be equal: a difference in them would be taken for the candidate's. What a
server does not report is not compared.
"""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from kvbench.common.errors import UsageError
from kvbench.common.files import utc_now
from kvbench.common.git import git_state
from kvbench.common.machine import environment
from kvbench.gate.compare.folder import (
    KIND,
    LOCKSTEP,
    CompareFolder,
    CompareState,
    GivenWorkload,
    LockstepFacts,
)
from kvbench.gate.compare.request import CompareRequest
from kvbench.gate.compare.sides import REF, RUN, OpenSide, PairedWorkload
from kvbench.gate.policy import Policy
from kvbench.gate.sentences import say
from kvbench.gate.timing.plan import BASE, SIDES, Match, PairedCell
from kvbench.runs.folder import RunFolder, create_run
from kvbench.runs.manifest import environment_differences
from kvbench.runs.results import Environment, GitState, Resumed
from kvbench.runs.server_info import ServerInfo
from kvbench.workload.file import Workload

VERSIONS = "versions"  # in place of a setting: packages differ on purpose
_OF_A_BUILD = ("sha", "changes", "build", "environment")
# What must be equal: section and key of /server_info, and the engine setting that may make it differ on purpose.
_FACTS = (
    ("served_model", "vocab_size", "model"),
    ("served_model", "max_model_len", "max_model_len"),
    ("model", "weights_fingerprint", "model"),
    ("model", "num_parameters", "model"),
    ("resolved", "device", "device"),
    ("resolved", "device_name", "device"),
    *(("resolved", name, name) for name in ("dtype", "kernel_backend", "num_threads")),
)


def new_comparison(
    request: CompareRequest,
    subcommand: str,
    method: str,
    given: Sequence[Workload],
    workloads: Sequence[PairedWorkload],
    policy: Policy,
    notes: Sequence[str],
) -> tuple[CompareFolder, CompareState]:
    """A new folder, and the state that its manifest holds; ``given``: the workloads before the sides' own settings.

    Raises UsageError where it cannot be made, or stored runs are not comparable.
    """
    sides = workloads[0].sides
    stored = {side: path for side in SIDES if (path := sides[side].stored)}
    differences = stored_differences(stored, workloads)
    if differences and not request.force:
        raise UsageError(say("equal.stored", differences="; ".join(differences)))
    running = any(side.choice.runs_already for workload in workloads for side in workload.sides.values())
    doubt = None
    if stored:
        doubt = say("equal.not_random")
    elif running:
        doubt = say("equal.one_launch")
    folder = CompareFolder(create_run(request.output_dir, KIND, git_state()["short_sha"]).path, stored)
    resolved = {w.name: {side: dict(w.sides[side].choice.workload.resolved) for side in SIDES} for w in workloads}
    named = {side: sides[side].facts.model_copy(update={"name": sides[side].name}) for side in SIDES}
    state = CompareState(
        kind=KIND,
        status="incomplete",
        subcommand=subcommand,
        method=method,
        command=["kvbench", *sys.argv[1:]],
        reproduce=reproduce_command(request, sides, subcommand),
        **named,
        workloads=resolved,
        given=tuple(GivenWorkload(workload=dict(workload.resolved), profile=workload.profile) for workload in given),
        cells=_cells(workloads),
        order_seed=secrets.randbits(32) if request.order_seed is None else request.order_seed,
        options=request.for_any_folder(*(pinned(sides[side]) for side in SIDES)),
        policy=policy.stored(),
        stored={side: path.resolve() for side, path in stored.items()},
        servers={side: {} for side in SIDES},
        differences=tuple(differences),
        notes=(*notes, *(note for workload in workloads for note in workload.notes)),
        doubt=doubt,
        lockstep=LockstepFacts() if method == LOCKSTEP else None,
        started=utc_now(),
        **environment(),
    )
    folder.write(state)
    return folder, state


def reproduce_command(request: CompareRequest, sides: Mapping[str, OpenSide], subcommand: str) -> str:
    """The command that repeats it, with commits in place of branches and tags."""
    named = [sides[side] for side in (SIDES if subcommand == "compare" else (BASE,))]
    return shlex.join(request.words(subcommand, [pinned(s) if s.is_commit else s.side.given for s in named]))


def pinned(side: OpenSide) -> str:
    """Writes a side so that it means the same in any folder: a ref is its commit without changes."""
    if side.is_commit:
        return side.build.commit.sha[:12]
    text = str(Path(side.side.text).expanduser().resolve()) if side.side.kind == RUN else side.side.text
    return f"{side.side.kind}:{text}"


def _cells(workloads: Sequence[PairedWorkload]) -> tuple[PairedCell, ...]:
    return tuple(cell for workload in workloads for match in workload.matches for cell in match.paired_cells)


def resume(
    state: CompareState, workloads: Sequence[PairedWorkload], *, force: bool
) -> tuple[CompareState, Sequence[str]]:
    """Returns the state in which measuring goes on, and remarks for the user.

    Raises UsageError where code, environment, versions or machine differ from those so far, unless ``force``: the
    state then says so. Other cells than it began with are always refused.
    """
    if _cells(workloads) != state.cells:
        raise UsageError(say("equal.other_cells"))
    now = Environment(**environment())
    differences, remarks = environment_differences(state, now)
    for side in SIDES:
        then, here = state.of(side), workloads[0].sides[side].facts
        stored = [key for key in _OF_A_BUILD if key in then.model_fields_set]
        changed = [key for key in stored if getattr(then, key) != getattr(here, key)]
        if "changes" in changed:
            differences.append(say("equal.changed_tree", side=side))
        elif changed:
            differences.append(say("equal.changed_build", side=side, what=" and ".join(changed)))
    if differences and not force:
        raise UsageError(say("equal.resumed", differences="; ".join(differences)))
    entry = Resumed(at=utc_now(), **now.fields(), forced=force, differences=tuple(differences), remarks=tuple(remarks))
    mixed = [say("equal.mixed", difference=difference) for difference in differences]
    options = state.options.model_copy(update={"force": state.options.force or force})
    return state.but(options=options, resumed=(*state.resumed, entry)).with_notes(mixed), remarks


def stored_differences(stored: Mapping[str, Path], workloads: Sequence[PairedWorkload]) -> list[str]:
    """Lists what must be equal in two runs and is not: machine, versions, servers, requests; not their commits."""
    if not stored:
        return []
    then, now = (RunFolder(stored[side]).manifest() for side in SIDES)
    same_code = {"git": GitState(), "versions": {**then.versions, "kvbench": now.versions.get("kvbench")}}
    differences, _ = environment_differences(then.model_copy(update=same_code), now)
    for match in (match for workload in workloads for match in workload.matches):
        base = then.servers.get(match.base.config_id, ServerInfo())
        candidate = now.servers.get(match.candidate.config_id, ServerInfo())
        differences += server_differences(base, candidate, varied_settings(match))
    folder, cells = CompareFolder(Path(), stored), _cells(workloads)
    for repeat in range(1, folder.whole_pairs(cells) + 1):
        differences += request_differences(folder, cells, repeat)
    return list(dict.fromkeys(differences))


def server_differences(left: ServerInfo, right: ServerInfo, varied: frozenset[str] = frozenset()) -> list[str]:
    """Lists what two servers report differently, without what the settings in ``varied`` change on purpose.

    All package versions are compared, and the models' names unless both report a fingerprint of the weights.
    """
    facts = [(section, key) for section, key, setting in _FACTS if setting not in varied]
    compared = [(key, left.fact(section, key), right.fact(section, key)) for section, key in facts]
    fingerprints = [server.fact("model", "weights_fingerprint") for server in (left, right)]
    if not all(fingerprints) and "model" not in varied:
        paths = [server.fact("model", "name") or server.fact("served_model", "name") for server in (left, right)]
        compared.append(("model", *(path and PurePosixPath(str(path)).name for path in paths)))
    names = () if VERSIONS in varied else sorted(left.versions)
    compared += [
        (say("equal.version", name=n), *(server.fact("versions", n) for server in (left, right))) for n in names
    ]
    differing = [row for row in compared if None not in row and row[1] != row[2]]
    return [say("equal.two_values", name=name, base=a, candidate=b) for name, a, b in differing]


def varied_settings(match: Match) -> frozenset[str]:
    """The engine settings in which base and candidate differ on purpose."""
    a, b = match.base.settings, match.candidate.settings
    return frozenset(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


def with_server(
    state: CompareState, match: Match, side: str, facts: ServerInfo, *, alone: bool, force: bool
) -> CompareState:
    """Adds what the first server of a configuration reports, and compares every later one with it and the other side's.

    ``alone``: it was launched for one load, since its prefix cache could not be emptied. Raises UsageError for a
    difference, unless ``force``: the state then says so.
    """
    names = {s: f"{match.workload}/{match.of(s).config_id}" for s in SIDES}
    state = state.but(servers={**state.servers, side: {names[side]: facts, **state.servers[side]}})
    servers = {s: state.servers[s].get(names[s]) for s in SIDES}
    if alone and side not in (apart := state.apart.get(match.key, ())):
        state = state.but(apart={**state.apart, match.key: (*apart, side)})
    if changed := server_differences(servers[side], facts):
        what = say("equal.other_server", side=side, name=names[side], changed="; ".join(changed))
        state = _with_differences(state, [what], say("equal.serve_same"), force=force)
    if None in servers.values():
        return state
    varied = varied_settings(match)
    if state.options.candidate_python or (state.options.target and state.base.kind == REF):
        varied |= {VERSIONS}
        state = _with_versions(state, servers)
    differences = server_differences(*(servers[s] for s in SIDES), varied)
    return _with_differences(state, differences, say("equal.make_same"), force=force)


def _with_versions(state: CompareState, servers: Mapping[str, ServerInfo | None]) -> CompareState:
    """Notes which packages of the two sides have other versions, which is what is compared."""
    base, candidate = (servers[side].versions for side in SIDES)
    different = [name for name in sorted({*base, *candidate}) if base.get(name) != candidate.get(name)]
    texts = [f"{name} {base.get(name)} → {candidate.get(name)}" for name in different]
    note = say("equal.versions", versions=", ".join(texts) or say("equal.same_versions"))
    return state.with_notes([note])


def request_differences(folder: CompareFolder, cells: Sequence[PairedCell], pair: int) -> list[str]:
    """The cells whose two loads of a pair had different requests."""
    different = []
    for cell in cells:
        loads = [folder.done(cell, side, pair) for side in SIDES]
        if len({load.requests_sha256 for load in loads if load and load.requests_sha256}) > 1:
            different.append(say("equal.requests", cell=cell.name))
    return different


def with_compared_requests(folder: CompareFolder, state: CompareState, pair: int, *, force: bool) -> CompareState:
    """Raises UsageError where the loads of a pair had different requests; with ``force`` the state says so."""
    differences = request_differences(folder, state.cells, pair)
    return _with_differences(state, differences, say("equal.same_requests"), force=force)


def _with_differences(state: CompareState, differences: Sequence[str], way_out: str, *, force: bool) -> CompareState:
    if differences and not force:
        raise UsageError(say("equal.refused", differences="; ".join(differences), way_out=way_out))
    return state.but(differences=tuple(sorted({*state.differences, *differences})))
