"""Accepting an intended change: writes the lock file with reason, commit and date."""

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
    """Writes the lock file, unless nothing changed, and returns what changed, in lines.

    Raises UsageError for a lock file that cannot be read: overwriting it would lose its log of reasons.
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
    """The scenarios that are new, removed or different, and the counters that moved."""
    if known is None:
        return f"the first lock file, {len(workload.scenarios)} scenarios"
    if not (failed := [finding.id.partition("/")[2] for finding in verdict.of(FAIL)]):
        return "the workload file, and no counter"
    counters = and_more([moved.title for moved in verdict.moved], 5) or "none"
    return f"{len(failed)} of {len(verdict.findings)} scenarios ({and_more(failed, 12)}); counters: {counters}"
