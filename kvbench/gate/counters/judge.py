"""The counter gate's verdict: what was replayed against what was accepted, exactly."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.common.text import and_more
from kvbench.gate.counters.commands import Commands
from kvbench.gate.counters.first_difference import (
    Change,
    FirstDifference,
    changed_counters,
    first_difference,
    is_sum,
)
from kvbench.gate.counters.lock import CounterLock
from kvbench.gate.counters.replay import COUNTERS, Replayed
from kvbench.gate.counters.workload import CounterWorkload, Scenario
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INVALID, PASS, Finding, Moved, Verdict, worst

SUITE = "counters"
_NOTES = 5
_UNITS = ("bytes", "tokens", "pages", "slots", "steps")


@dataclass(frozen=True)
class ScenarioResult:
    """One scenario. ``reasons``: why it did not pass, in clauses. ``error``: what is wrong without a comparison."""

    name: str
    outcome: str
    reasons: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    difference: FirstDifference | None = None
    error: str | None = None

    @property
    def sentence(self) -> str:
        return f"{self.name}: {'; '.join(self.reasons) or f'all {len(COUNTERS)} counters as accepted'}"

    @property
    def cause(self) -> str:
        """Scenarios with an equal cause are reported together."""
        if self.error:
            return re.sub(r"\d+|\(.*", "", self.error).strip()
        return self.difference.cause if self.difference else "; ".join(self.reasons)

    def finding(self, commands: Commands) -> Finding:
        """The counter that changed most stands for all where there is room for one."""
        most = self.changes[0] if self.changes else None
        again = [f"reproduce: {commands.one(self.name)}"] if self.outcome != PASS else []
        again += [f"accept, if it is meant: {commands.accept}"] if self.outcome == FAIL and not self.error else []
        return Finding(
            id=f"{SUITE}/{self.name}",
            suite=SUITE,
            title=f"{self.name}: {most.words}" if most else self.name,
            outcome=self.outcome,
            sentence=self.sentence,
            metric=most.name if most else None,
            unit=unit_of(most.name) if most else None,
            base=most.was if most else None,
            candidate=most.now if most else None,
            change=most.ratio if most else None,
            figures={"first_different_step": self.difference.step} if self.difference else {},
            details=(*self.details, *again),
        )


def judge(
    workload: CounterWorkload,
    lock: CounterLock | None,
    first: Mapping[str, Replayed],
    second: Mapping[str, Replayed],
    commands: Commands,
    candidate: Mapping[str, object],
) -> Verdict:
    """The verdict over all scenarios of ``workload``, and those that only the lock has.

    ``first`` and ``second``: two runs of the same code. If they differ, the engine is nondeterministic and the whole
    verdict is invalid, because no difference from the lock means anything then.
    """
    common = {"reproduce": commands.gate, "candidate": dict(candidate)}
    if lock is None:
        sentence = f"nothing was compared: there is no {commands.lock}; `kvbench accept counters` makes it"
        return Verdict(SUITE, EMPTY, sentence, accept=commands.accept, **common)
    last = lock.accepted[-1]
    common["base"] = {"name": str(commands.lock), "sha": last.git, "accepted": last.date, "reason": last.reason}
    present = {scenario.name for scenario in workload.scenarios}
    if not present & set(lock.scenarios) and not (commands.only and present | set(lock.scenarios)):
        return Verdict(SUITE, EMPTY, f"nothing was compared: {_no_scenario(workload, commands)}", **common)
    results = [_result(scenario, lock, first, second) for scenario in workload.scenarios]
    gone = "accepted, and no longer in the workload file: nothing guards it any more"
    results += [ScenarioResult(name, FAIL, (gone,)) for name in lock.scenarios if name not in present]
    outcomes = [each.outcome for each in results]
    outcome = INVALID if INVALID in outcomes else worst(outcomes)
    notes = _notes([each for each in results if each.outcome == outcome]) if outcome != PASS else []
    if outcome == PASS and lock.workload_digest != workload.digest:
        notes = [f"{commands.workload} is not the accepted one, though no scenario of it changed"]
    acceptable = notes and outcome != INVALID and not any(each.error for each in results)
    steps = sum(run.steps for run in first.values())
    return Verdict(
        SUITE,
        outcome,
        _sentence(outcome, results, notes, str(commands.lock), steps),
        tuple(each.finding(commands) for each in results),
        accept=commands.accept if acceptable else None,
        moved=moved(results),
        notes=tuple(notes if outcome == PASS else notes[1:]),  # the first is in the sentence
        facts={"scenarios": len(present), "steps": steps, "counters": len(COUNTERS)},
        **common,
    )


def _no_scenario(workload: CounterWorkload, commands: Commands) -> str:
    if not commands.only:
        return f"no scenario of {commands.workload} is in {commands.lock}"
    groups = Counter(name.partition("/")[0] for name in workload.names)
    there = and_more([f"'{group}/*' ({count})" for group, count in groups.items()], 20)
    return f"--only {' '.join(commands.only)} matches no scenario, there are {there}"


def _result(
    scenario: Scenario, lock: CounterLock, first: Mapping[str, Replayed], second: Mapping[str, Replayed]
) -> ScenarioResult:
    name, run, locked = scenario.name, first[scenario.name], lock.scenarios.get(scenario.name)
    if unsteady := nondeterminism(run, second[name]):
        return ScenarioResult(name, INVALID, (unsteady,))
    error = [run.error] if run.error else []
    if locked is None or locked.definition != scenario.digest:
        reason = "new in the workload file: nothing was accepted to compare it with"
        if locked is not None:
            reason = "the workload file defines another scenario than the accepted one: they cannot be compared"
        return ScenarioResult(name, FAIL, (*error, reason), error=run.error)
    changes = changed_counters(locked.counters, run.counters)
    difference = first_difference(locked.columns, run.history)
    if not (changes or difference or locked.outputs != run.outputs or error):
        return ScenarioResult(name, PASS)
    reasons = [*error, f"{len(changes)} of {len(COUNTERS)} counters differ: {and_more(changes)}".removesuffix(": ")]
    reasons += ["the output tokens differ"] if locked.outputs != run.outputs else []
    reasons += [f"first difference at {difference}"] if difference else []
    details = [f"{change}{_unknown(change.name, lock)}" for change in changes]
    if difference and (before := [f"{k.replace('_', ' ')} {v:,}" for k, v in difference.before.items() if v]):
        details.append(f"the same until then; step {difference.step - 1}: {', '.join(before)}")
    return ScenarioResult(name, FAIL, tuple(reasons), tuple(details), tuple(changes), difference, run.error)


def _unknown(name: str, lock: CounterLock) -> str:
    """A counter that only one side has is no change of the engine's behaviour, and looks like one."""
    if name not in lock.counters:
        return ", which was not counted when this was accepted"
    return "" if name in COUNTERS else ", which is not counted any more"


def nondeterminism(first: Replayed, second: Replayed) -> str | None:
    """What differs between two runs of the same code and scenario; None where nothing does."""
    changes = changed_counters(first.counters, second.counters)
    what = (
        first_difference(first.history, second.history)
        or next(iter(changes), None)
        or (first.outputs != second.outputs and "the output tokens")
        or (first.error != second.error and f"how they failed: {first.error} / {second.error}")
    )
    return f"two runs of the same code differ ({what}): the engine is not deterministic" if what else None


def _sentence(outcome: str, results: Sequence[ScenarioResult], notes: Sequence[str], lock: str, steps: int) -> str:
    if outcome == PASS:
        return f"all {len(results)} scenarios as accepted: {len(COUNTERS)} counters, and each of {steps:,} steps"
    concerned = sum(each.outcome == outcome for each in results)
    differ = f"differ from {lock}" if outcome == FAIL else "differ between two runs of the same code"
    most = sorted(_totals(results).values(), key=lambda each: (is_sum(each[0].name), -each[1]))
    named = and_more([f"{total} in {count}" for total, count in most[:3]])
    return f"{concerned} of {len(results)} scenarios {differ}; {notes[0]}" + f"; moved most: {named}" * bool(named)


def _notes(results: Sequence[ScenarioResult]) -> list[str]:
    """One sentence a cause, the most frequent first, with the scenario where it shows earliest."""
    groups: dict[str, list[ScenarioResult]] = {}
    for each in sorted(results, key=lambda each: each.difference.step if each.difference else 0):
        groups.setdefault(each.cause, []).append(each)
    notes = []
    for cause, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        steps = [each.difference.step for each in group if each.difference]
        alike = f"{len(group)} begin with {cause}" + (f", at steps {min(steps)} to {max(steps)}" if steps else "")
        notes.append(f"{alike}; the earliest: {group[0].sentence}" if len(group) > 1 else group[0].sentence)
    rest = [f"{len(notes) - _NOTES} more causes: see the findings"] if len(notes) > _NOTES else []
    return notes[:_NOTES] + rest


def moved(results: Sequence[ScenarioResult]) -> tuple[Moved, ...]:
    """Counters that differ, added up over the scenarios where they do: in most scenarios first, sums of steps last."""
    totals = sorted(_totals(results).values(), key=lambda each: (is_sum(each[0].name), -each[1], each[0].name))
    return tuple(
        Moved(
            total.name, total.words, f"{count} of {len(results)} scenarios", unit_of(total.name), total.was, total.now,
            total.ratio,
        )
        for total, count in totals
    )  # fmt: skip


def _totals(results: Sequence[ScenarioResult]) -> dict[str, tuple[Change, int]]:
    """Counter -> its total over the scenarios where it differs, and their number."""
    found: dict[str, tuple[Change, int]] = {}
    for change in (change for each in results for change in each.changes):
        total, count = found.get(change.name, (Change(change.name, 0, 0), 0))
        found[change.name] = (Change(change.name, total.was + change.was, total.now + change.now), count + 1)
    return found


def unit_of(counter: str) -> str:
    """What a counter counts, by its name."""
    if counter.startswith(("slot_steps", "shared_slot")):
        return "slot steps"
    if counter in ("prefix_hits", "prefix_queries"):
        return "tokens"
    return next((unit for unit in _UNITS if unit in counter.split("_")), "count")
