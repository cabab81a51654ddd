"""Accepting an intended change: the lock file is written anew, with reason, commit and date."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvbench.common.errors import UsageError
from kvbench.common.files import utc_now
from kvbench.common.git import git_state
from kvbench.common.text import and_more
from kvbench.gate.counters.judge import Commands, judge
from kvbench.gate.counters.lock import Accepted, CounterLock, read_lock, write_lock
from kvbench.gate.counters.replay import COUNTERS, Replayed
from kvbench.gate.counters.workload import CounterWorkload
from kvbench.gate.verdict.verdict import FAIL, PASS, Verdict


def accept(workload: CounterWorkload, runs: Mapping[str, Replayed], path: Path, reason: str) -> list[str]:
    """Write the lock file, unless it would say the same; returns what changed, in lines. Raises UsageError.

    A lock file that cannot be read is not overwritten: its log of reasons would be lost.
    """
    known = read_lock(path)
    verdict = judge(workload, known, runs, runs, Commands(workload.path, path), {})
    same = (workload.name, workload.digest, list(COUNTERS))
    if known and verdict.outcome == PASS and (known.workload, known.workload_digest, known.counters) == same:
        return [f"nothing to accept: {path} says what this code counts"]
    changed = _changed(known, workload, verdict)
    state = git_state()
    commit = f"{state['sha'] or state['short_sha']}{'-dirty' if state['dirty'] else ''}"
    entry = Accepted(reason=reason, git=commit, date=utc_now(), changed=changed)
    try:
        write_lock(path, workload, runs, [*(known.accepted if known else ()), entry])
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None
    moved = and_more([f"{m.title} {m.base:,} -> {m.candidate:,} ({m.where})" for m in verdict.moved], 10)
    lines = [f"accepted: {changed}", *([f"moved: {moved}"] if moved else []), f"reason: {reason}"]
    return [*lines, f"{path} is written; commit it with the change"]


def _changed(known: CounterLock | None, workload: CounterWorkload, verdict: Verdict) -> str:
    """Which scenarios were removed, are new, have another definition, or count something else."""
    if known is None:
        return f"the first lock file, {len(workload.scenarios)} scenarios"
    now = {scenario.name: scenario.digest for scenario in workload.scenarios}
    was = {name: scenario.definition for name, scenario in known.scenarios.items()}
    kinds: dict[str, list[str]] = {}
    for finding in verdict.of(FAIL):
        name = finding.id.partition("/")[2]
        changed = "counted otherwise" if now.get(name) == was.get(name) else "defined anew"
        kinds.setdefault("removed" if name not in now else "new" if name not in was else changed, []).append(name)
    if not kinds:
        return "the workload file, and no counter"
    parts = [f"{len(names)} {kind} ({and_more(names, 12)})" for kind, names in kinds.items()]
    counters = and_more([moved.title for moved in verdict.moved], 5) or "none"
    differ = f"{len(verdict.of(FAIL))} of {len(verdict.findings)} scenarios"
    return f"{differ}: {'; '.join(parts)}; counters: {counters}"
