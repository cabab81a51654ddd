"""The counter gate's judgement: what was replayed against what was accepted, exactly, and why it differs in words."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvbench.gate.counter_workload import CounterWorkload, Scenario
from kvbench.gate.divergence import Change, Parting, changed_counters, first_difference
from kvbench.gate.lock import CounterLock, LockedScenario
from kvbench.gate.replay import COUNTERS, Replayed
from kvbench.gate.verdict import EMPTY, FAIL, INVALID, PASS, Finding, Moved, Verdict, worst

SUITE = "counters"
WORKLOAD, LOCK = Path("workloads/ci_counters.yaml"), Path("ci/counters.lock.json")
_UNITS = ("bytes", "tokens", "pages", "slots", "steps")


@dataclass(frozen=True)
class Commands:
    """What to type: the gate again, the gate for one scenario, and the acceptance."""

    workload: Path
    lock: Path
    only: tuple[str, ...] = ()

    @property
    def gate(self) -> str:
        return self._command("gate", "counters", *(part for glob in self.only for part in ("--only", glob)))

    def one(self, name: str) -> str:
        return self._command("gate", "counters", "--only", name)

    @property
    def accept(self) -> str:
        return f'{self._command("accept", "counters")} --reason "..."'

    def _command(self, *words: str) -> str:
        files = [str(self.workload)] if self.workload != WORKLOAD else []
        files += ["--lock", str(self.lock)] if self.lock != LOCK else []
        return shlex.join(["kvbench", *words[:2], *files, *words[2:]])


@dataclass(frozen=True)
class Judged:
    """One scenario: its finding, and what of it the verdict's sentence is made from."""

    finding: Finding
    changes: tuple[Change, ...] = ()
    parting: Parting | None = None


def judge(
    workload: CounterWorkload,
    lock: CounterLock | None,
    first: Mapping[str, Replayed],
    second: Mapping[str, Replayed],
    commands: Commands,
    candidate: Mapping[str, object],
) -> Verdict:
    """The verdict over all scenarios of ``workload``, and those that only the lock has.

    ``first`` and ``second``: two runs of the same scenarios by the same code. A difference between them is the
    engine's nondeterminism: the whole verdict is then invalid, for no difference from the lock means anything.
    """
    common = {"reproduce": commands.gate, "accept": commands.accept, "candidate": dict(candidate)}
    if lock is None:
        sentence = f"nothing was compared: there is no {commands.lock}; accept what this code counts to make it"
        return Verdict(SUITE, EMPTY, sentence, **common)
    last = lock.accepted[-1]
    common["base"] = {"name": str(commands.lock), "sha": last.git, "accepted": last.date, "reason": last.reason}
    known = set(lock.counters)
    judged = [
        _judge_one(scenario, lock.scenarios.get(scenario.name), first, second, known, commands)
        for scenario in workload.scenarios
    ]
    present = {scenario.name for scenario in workload.scenarios}
    judged += [_removed(name, commands) for name in lock.scenarios if name not in present]
    findings = tuple(each.finding for each in judged)
    if not present & set(lock.scenarios):
        sentence = f"nothing was compared: no scenario of {commands.workload} is in {commands.lock}"
        return Verdict(SUITE, EMPTY, sentence, findings, **common)
    outcomes = [finding.outcome for finding in findings]
    outcome = INVALID if INVALID in outcomes else worst(outcomes)
    return Verdict(
        SUITE,
        outcome,
        _sentence(outcome, judged, commands, first),
        findings,
        moved=_moved(workload, lock, first, judged),
        facts={"scenarios": len(present), "steps": _steps(first), "counters": len(COUNTERS) + 1},
        **common,
    )


def _judge_one(
    scenario: Scenario,
    locked: LockedScenario | None,
    first: Mapping[str, Replayed],
    second: Mapping[str, Replayed],
    known: set[str],
    commands: Commands,
) -> Judged:
    run = first[scenario.name]
    if unsteady := nondeterminism(run, second[scenario.name]):
        return Judged(_finding(scenario.name, INVALID, unsteady, (f"reproduce: {commands.one(scenario.name)}",)))
    broken = f"{run.trouble}; " if run.trouble else ""
    if locked is None:
        return Judged(_failed(scenario.name, f"{broken}new scenario, with nothing accepted to compare", commands))
    if locked.definition != scenario.digest:
        words = f"{broken}the workload file defines another scenario than the accepted one, so nothing can be compared"
        return Judged(_failed(scenario.name, words, commands))
    return _compared(scenario.name, locked, run, known, commands)


def _compared(name: str, locked: LockedScenario, run: Replayed, known: set[str], commands: Commands) -> Judged:
    changes = changed_counters(locked.counters, run.counters)
    parting = first_difference(locked.columns, run.history)
    other_tokens = locked.outputs != run.outputs
    if not (changes or parting or other_tokens or run.trouble):
        return Judged(_finding(name, PASS, f"all {len(COUNTERS)} counters as accepted", ()))
    parts = [run.trouble] if run.trouble else []
    if changes:
        parts.append(f"{_up_and_down(changes)}: " + _listed([str(change) for change in changes], 3))
    elif parting:
        parts.append("the totals are the same and the steps are not")
    if other_tokens:
        parts.append("the output tokens differ")
    if parting:
        parts.append(f"first difference at {parting}")
    details = [str(change) + ("" if change.name in known else " (not counted when accepted)") for change in changes]
    if parting:
        details.append(f"first difference at {parting}")
        told = ", ".join(f"{key.replace('_', ' ')} {value:,}" for key, value in parting.before.items() if value)
        details += [f"until then the same; step {parting.step - 1}: {told}"] if told else []
    finding = _failed(name, "; ".join(parts), commands, details, changes[0] if changes else None, parting)
    return Judged(finding, tuple(changes), parting)


def nondeterminism(first: Replayed, second: Replayed) -> str | None:
    """What differs between two runs of the same code and scenario, in a sentence."""
    parting = first_difference(first.history, second.history)
    changes = changed_counters(first.counters, second.counters)
    if not (parting or changes or first.outputs != second.outputs or first.trouble != second.trouble):
        return None
    what = (
        f"first at {parting}" if parting
        else f"in {changes[0]}" if changes
        else f"{first.trouble or 'no trouble'} / {second.trouble or 'no trouble'}" if first.trouble != second.trouble
        else "in the output tokens"
    )  # fmt: skip
    return f"two runs of this very code differ, {what}: the engine is not deterministic, so this is no regression"


def _removed(name: str, commands: Commands) -> Judged:
    return Judged(_failed(name, "accepted, and no longer in the workload file: nobody guards it any more", commands))


def _failed(
    name: str,
    sentence: str,
    commands: Commands,
    details: list[str] | None = None,
    lead: Change | None = None,
    parting: Parting | None = None,
) -> Finding:
    lines = [*(details or []), f"reproduce: {commands.one(name)}", f"accept, if it is meant: {commands.accept}"]
    return _finding(name, FAIL, sentence, tuple(lines), lead, parting)


def _finding(
    name: str,
    outcome: str,
    sentence: str,
    details: tuple[str, ...],
    lead: Change | None = None,
    parting: Parting | None = None,
) -> Finding:
    return Finding(
        id=f"{SUITE}/{name}",
        suite=SUITE,
        title=name,
        outcome=outcome,
        sentence=f"{name}: {sentence}",
        metric=lead.name if lead else None,
        unit=unit_of(lead.name) if lead else None,
        base=lead.was if lead else None,
        candidate=lead.now if lead else None,
        change=lead.ratio if lead else None,
        figures={"first_different_step": parting.step} if parting else {},
        details=details,
    )


def unit_of(counter: str) -> str:
    """What a counter counts, by its name."""
    if counter.startswith(("slot_steps", "shared_slot")):
        return "slot steps"
    if counter in ("prefix_hits", "prefix_queries"):
        return "tokens"
    return next((unit for unit in _UNITS if unit in counter.split("_")), "count")


def _sentence(outcome: str, judged: list[Judged], commands: Commands, runs: Mapping[str, Replayed]) -> str:
    if outcome == PASS:
        return (
            f"all {len(runs)} scenarios count what was accepted: {len(COUNTERS)} counters and every one of "
            f"{_steps(runs):,} steps"
        )
    if outcome == INVALID:
        unsteady = [each.finding for each in judged if each.finding.outcome == INVALID]
        return f"{len(unsteady)} of {len(judged)} scenarios are not the same twice: {unsteady[0].sentence}"
    failed = [each for each in judged if each.finding.outcome == FAIL]
    parts = [f"{len(failed)} of {len(judged)} scenarios differ from {commands.lock}"]
    counted = Counter(change.name for each in failed for change in each.changes)
    if counted:
        parts.append("moved most: " + ", ".join(_most_moved(failed, counted)))
    parted = [each for each in failed if each.parting]
    if parted:
        earliest = min(parted, key=lambda each: each.parting.step)
        parts.append(f"earliest at {earliest.parting} ({earliest.finding.title})")
    elif not counted:
        parts.append(failed[0].finding.sentence)
    broken = next((each for each in failed if runs.get(each.finding.title) and runs[each.finding.title].trouble), None)
    if broken:
        parts.insert(1, f"{broken.finding.title}: {runs[broken.finding.title].trouble}")
    return "; ".join(parts)


def _most_moved(failed: list[Judged], counted: Counter[str]) -> list[str]:
    """The three counters that moved in most scenarios, sums over steps last, with their totals there."""
    order: dict[str, int] = {}
    for each in failed:
        for place, change in enumerate(each.changes):
            order[change.name] = min(order.get(change.name, place), place)
    names = sorted(counted, key=lambda name: (_is_sum(name), -counted[name], order[name]))[:3]
    words = []
    for name in names:
        both = [change for each in failed for change in each.changes if change.name == name]
        total = Change(name, sum(c.was for c in both), sum(c.now for c in both))
        words.append(f"{total} in {counted[name]} scenario{'s' if counted[name] > 1 else ''}")
    return words


def _is_sum(name: str) -> bool:
    return name.endswith("_steps") or name.startswith("slot_steps")


def _moved(
    workload: CounterWorkload, lock: CounterLock, runs: Mapping[str, Replayed], judged: list[Judged]
) -> tuple[Moved, ...]:
    """Counters that differ, added up over all scenarios that could be compared."""
    counted = Counter(change.name for each in judged for change in each.changes)
    both = [(lock.scenarios[s.name], runs[s.name]) for s in workload.scenarios if s.name in lock.scenarios]
    moved = []
    for name in sorted(counted, key=lambda each: (_is_sum(each), -counted[each], each)):
        was = sum(locked.counters.get(name, 0) for locked, _ in both)
        now = sum(run.counters[name] for _, run in both)
        change = now / was - 1 if was else None
        where = f"{counted[name]} of {len(both)} scenarios"
        moved.append(Moved(name, name.replace("_", " "), where, unit_of(name), was, now, change))
    return tuple(moved)


def _steps(runs: Mapping[str, Replayed]) -> int:
    return sum(max(map(len, run.history.values()), default=0) for run in runs.values())


def _up_and_down(changes: list[Change]) -> str:
    up = sum(change.now > change.was for change in changes)
    words = [
        f"{count} counter{'s' if count > 1 else ''} {way}"
        for count, way in ((up, "up"), (len(changes) - up, "down"))
        if count
    ]
    return ", ".join(words)


def _listed(words: list[str], most: int) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
