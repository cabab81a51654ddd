"""An intended change becomes the new baseline: the lock file is written anew, and says why, by which code, and when."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvbench.errors import UsageError
from kvbench.gate.counter_commands import Commands
from kvbench.gate.counter_workload import CounterWorkload
from kvbench.gate.counters import judge
from kvbench.gate.lock import Accepted, CounterLock, read_lock, write_lock
from kvbench.gate.replay import COUNTERS, Replayed
from kvbench.gate.verdict import PASS, Verdict
from kvbench.manifest import git_state
from kvbench.results import utc_now


def accept(workload: CounterWorkload, runs: Mapping[str, Replayed], path: Path, reason: str) -> list[str]:
    """Write the lock file, unless it says the same already; what changed, in lines. Raises UsageError.

    A lock file that is there and cannot be read is not written over: its log of reasons would be lost.
    """
    known = read_lock(path)
    verdict = judge(workload, known, runs, runs, Commands(workload.path, path), {})
    if known is not None and _same(workload, known, verdict):
        return [f"nothing to accept: {path} says what this code counts"]
    changed = _changed(known, verdict, len(workload.scenarios))
    entry = Accepted(reason=reason, git=_commit(), date=utc_now(), changed=changed)
    try:
        write_lock(path, workload, runs, [*(known.accepted if known else ()), entry])
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None
    moved = [f"  {m.title} {m.base:,} -> {m.candidate:,} ({m.where})" for m in verdict.moved[:10]]
    more = len(verdict.moved) - len(moved)
    return [
        f"accepted: {changed}",
        *moved,
        *([f"  and {more} more counters"] if more > 0 else []),
        f"reason: {reason}",
        f"{path} is written; commit it with the change",
    ]


def _same(workload: CounterWorkload, known: CounterLock, verdict: Verdict) -> bool:
    return (
        verdict.outcome == PASS
        and known.workload_digest == workload.digest
        and known.workload == workload.name
        and known.counters == list(COUNTERS)
    )


def _changed(known: CounterLock | None, verdict: Verdict, scenarios: int) -> str:
    if known is None:
        return f"the first lock file, {scenarios} scenarios"
    differ = sum(finding.outcome != PASS for finding in verdict.findings)
    if not differ:
        return "the workload file, and no counter"
    names = ", ".join(moved.title for moved in verdict.moved[:5])
    return f"{differ} of {len(verdict.findings)} scenarios" + (f": {names}" if names else "")


def _commit() -> str:
    state = git_state()
    return f"{state['sha'] or state['short_sha']}{'-dirty' if state['dirty'] else ''}"
