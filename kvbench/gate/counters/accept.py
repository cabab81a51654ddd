"""An intended change becomes the new baseline: the lock file is written anew, and says why, by which code, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvbench.common.errors import UsageError
from kvbench.common.files import utc_now
from kvbench.common.git import git_state
from kvbench.gate.counters.commands import Commands
from kvbench.gate.counters.judge import judge
from kvbench.gate.counters.lock_file import Accepted, CounterLock, read_lock, write_lock
from kvbench.gate.counters.replay import COUNTERS, Replayed
from kvbench.gate.counters.workload import CounterWorkload
from kvbench.gate.verdict.verdict import PASS, Verdict

_NAMED = 12  # scenarios of one kind; the diff of the lock file has all


def accept(workload: CounterWorkload, runs: Mapping[str, Replayed], path: Path, reason: str) -> list[str]:
    """Write the lock file, unless it says the same already; what changed, in lines. Raises UsageError.

    A lock file that is there and cannot be read is not written over: its log of reasons would be lost.
    """
    known = read_lock(path)
    verdict = judge(workload, known, runs, runs, Commands(workload.path, path), {})
    if known is not None and _same(workload, known, verdict):
        return [f"nothing to accept: {path} says what this code counts"]
    changed = _changed(known, workload, verdict)
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


def _changed(known: CounterLock | None, workload: CounterWorkload, verdict: Verdict) -> str:
    """What the acceptance does to which scenarios: a removed one is guarded by nothing from then on."""
    if known is None:
        return f"the first lock file, {len(workload.scenarios)} scenarios"
    differ = [finding.id.partition("/")[2] for finding in verdict.findings if finding.outcome != PASS]
    if not differ:
        return "the workload file, and no counter"
    now = {scenario.name: scenario.digest for scenario in workload.scenarios}
    was = {name: scenario.definition for name, scenario in known.scenarios.items()}
    kinds: dict[str, list[str]] = {}
    for name in differ:
        kind = (
            "removed and guarded no more" if name not in now
            else "new" if name not in was
            else "defined anew" if now[name] != was[name]
            else "counted otherwise"
        )  # fmt: skip
        kinds.setdefault(kind, []).append(name)
    parts = [f"{len(names)} {kind} ({_some(names)})" for kind, names in kinds.items()]
    counters = ", ".join(moved.title for moved in verdict.moved[:5])
    return f"{len(differ)} of {len(verdict.findings)} scenarios: {'; '.join(parts)}" + (
        f": {counters}" * bool(counters)
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _commit() -> str:
    state = git_state()
    return f"{state['sha'] or state['short_sha']}{'-dirty' if state['dirty'] else ''}"
