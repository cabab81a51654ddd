"""The counter gate's verdict: every replayed counter compared with the accepted one, exactly; and what accepts them."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvbench.common.errors import UsageError
from kvbench.common.files import utc_now
from kvbench.common.git import git_state
from kvbench.common.text import and_more
from kvbench.gate.counters import LOCK, WORKLOAD
from kvbench.gate.counters.lock import Accepted, CounterLock, read_lock, write_lock
from kvbench.gate.counters.replay import COUNTERS, Replayed
from kvbench.gate.counters.workload import CounterWorkload, Scenario
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INVALID, PASS, Finding, Moved, Verdict, worst
from kvbench.gate.verdict.wording import percent

SUITE = "counters"
# Causes before effects: the first that differs at the first different step is the likeliest cause.
_CAUSES = (
    "preempted", "copied_pages", "copied_slots", "swapped_out_slots", "swapped_in_slots", "swap_lost_slots",
    "prefix_evictions", "prefix_hits", "prefix_queries", "refused_fragmented", "forks", "finished", "allocated_pages",
    "freed_pages", "prefill_tokens", "decode_tokens", "recomputed_tokens", "running", "waiting",
)  # fmt: skip
SUMS = ("slot_steps_", "shared_slot_steps", "running_steps", "waiting_steps")  # which almost any change moves
_UNITS = ("bytes", "tokens", "pages", "slots", "steps")
_NOTES = 5


@dataclass(frozen=True)
class GateCommands:
    """The commands that a verdict names, without files that are the default."""

    workload: Path = WORKLOAD
    lock: Path = LOCK
    only: tuple[str, ...] = ()

    def gate(self, *only: str) -> str:
        return self._command("gate", *(word for glob in only or self.only for word in ("--only", glob)))

    def accept(self) -> str:
        return f'{self._command("accept")} --reason "..."'

    def _command(self, verb: str, *options: str) -> str:
        files = [str(self.workload)] if self.workload != WORKLOAD else []
        files += ["--lock", str(self.lock)] if self.lock != LOCK else []
        return shlex.join(["kvbench", verb, "counters", *files, *options])


@dataclass(frozen=True)
class Change:
    """One counter, or one column of the history at one step: its accepted and its present value."""

    name: str
    was: int
    now: int

    @property
    def words(self) -> str:
        return self.name.replace("_", " ")

    @property
    def ratio(self) -> float | None:
        """now / was - 1; None when it was 0."""
        return self.now / self.was - 1 if self.was else None

    @property
    def unit(self) -> str:
        if self.name.startswith(("slot_steps", "shared_slot")):
            return "slot steps"
        if self.name in ("prefix_hits", "prefix_queries"):
            return "tokens"
        return next((unit for unit in _UNITS if unit in self.name.split("_")), "count")

    def __str__(self) -> str:
        difference = f"{self.now - self.was:+,}" if self.ratio is None else percent(self.ratio)
        return f"{self.words} {self.was:,} -> {self.now:,} ({difference})"


@dataclass(frozen=True)
class FirstDifference:
    """The first step at which the accepted and the present history differ.

    ``changes``: the columns that differ there, causes first; empty where one history has ended. ``before``: the columns
    at the step before, equal in both. ``longer``: whether the present history is the longer one.
    """

    step: int
    changes: tuple[Change, ...]
    before: Mapping[str, int]
    longer: bool = False

    @property
    def cause(self) -> str:
        """The cause in words: ``preempted up``; ``the end`` where one history is longer."""
        if not self.changes:
            return "the end"
        return f"{self.changes[0].words} {'up' if self.changes[0].now > self.changes[0].was else 'down'}"

    def __str__(self) -> str:
        changes = and_more([f"{c.words} {c.now:,} (was {c.was:,})" for c in self.changes], 4)
        return f"step {self.step}: {changes or ('goes on, had ended' if self.longer else 'has ended, went on')}"


def changed_counters(was: Mapping[str, int], now: Mapping[str, int]) -> list[Change]:
    """The counters that differ: the largest relative change first, sums over steps last. A missing one counts as 0."""
    changes = [Change(name, was.get(name, 0), now.get(name, 0)) for name in dict.fromkeys([*was, *now])]
    return sorted((change for change in changes if change.was != change.now), key=_by_size)


def _by_size(change: Change) -> tuple[bool, float]:
    """Sorts the largest relative change first, sums over steps last; what was 0 has changed most."""
    return change.name.startswith(SUMS), -math.inf if change.ratio is None else -abs(change.ratio)


def first_difference(was: Mapping[str, Sequence[int]], now: Mapping[str, Sequence[int]]) -> FirstDifference | None:
    """Finds the first step that differs, None where none does. A missing column counts as 0 at every step."""
    old, new = (max(map(len, history.values()), default=0) for history in (was, now))
    names = sorted({*was, *now}, key=lambda name: (_CAUSES.index(name) if name in _CAUSES else len(_CAUSES), name))

    def at(history: Mapping[str, Sequence[int]], index: int) -> dict[str, int]:
        return {name: history[name][index] if name in history else 0 for name in names} if index >= 0 else {}

    both = min(old, new)
    for index in range(both):
        left, right = at(was, index), at(now, index)
        if left != right:
            changes = tuple(Change(name, left[name], right[name]) for name in names if left[name] != right[name])
            return FirstDifference(index + 1, changes, at(now, index - 1))
    return None if old == new else FirstDifference(both + 1, (), at(now, both - 1), longer=new > old)


@dataclass(frozen=True)
class ScenarioResult:
    """One scenario. ``step``: the first at which its history differs, or 0. ``error``: whether the replay failed.

    ``cause``: scenarios with the same cause are reported together.
    """

    finding: Finding
    cause: str = ""
    step: int = 0
    changes: tuple[Change, ...] = ()
    error: bool = False


def judge(
    workload: CounterWorkload,
    lock: CounterLock | None,
    first: Mapping[str, Replayed],
    second: Mapping[str, Replayed],
    commands: GateCommands,
    candidate: Mapping[str, object],
) -> Verdict:
    """The verdict on all scenarios of ``workload`` and those that only the lock has.

    ``first`` and ``second``: two runs of the same code. If they differ the verdict is invalid, because a difference
    from the lock then means nothing.
    """
    common = {"reproduce": commands.gate(), "candidate": dict(candidate)}
    if lock is None:
        sentence = f"nothing was compared: there is no {commands.lock}; `kvbench accept counters` makes it"
        return Verdict(SUITE, EMPTY, sentence, accept=commands.accept(), **common)
    last = lock.accepted[-1]
    common["base"] = {"name": str(commands.lock), "sha": last.git, "accepted": last.date, "reason": last.reason}
    present = {scenario.name for scenario in workload.scenarios}
    if not present & set(lock.scenarios) and not (commands.only and present | set(lock.scenarios)):
        why = f"no scenario of {commands.workload} is in {commands.lock}"
        if commands.only:
            groups = Counter(name.partition("/")[0] for name in workload.names)
            choices = and_more([f"'{group}/*' ({count})" for group, count in groups.items()], 20)
            why = f"--only {' '.join(commands.only)} matches no scenario, there are {choices}"
        return Verdict(SUITE, EMPTY, f"nothing was compared: {why}", **common)
    results = [_result(scenario, lock, first[scenario.name], second[scenario.name]) for scenario in workload.scenarios]
    gone = "accepted, and no longer in the workload file: nothing guards it any more"
    results += [ScenarioResult(_finding(name, FAIL, gone), gone) for name in lock.scenarios if name not in present]
    outcomes = [result.finding.outcome for result in results]
    outcome = INVALID if INVALID in outcomes else worst(outcomes)
    steps = sum(run.steps for run in first.values())
    moved = _moved(results)
    if outcome == PASS:
        sentence = f"all {len(results)} scenarios as accepted: {len(COUNTERS)} counters, and each of {steps:,} steps"
        same = lock.workload_digest == workload.digest
        notes = [] if same else [f"{commands.workload} is not the accepted one, though no scenario of it changed"]
    else:
        concerned = [each for each in results if each.finding.outcome == outcome]
        differ = f"differ from {commands.lock}" if outcome == FAIL else "differ between two runs of the same code"
        cause, *notes = _causes(concerned)
        sentence = f"{len(concerned)} of {len(results)} scenarios {differ}; {cause}"
        if moved:
            most = [f"{m.title} {m.base:,} -> {m.candidate:,} in {m.where}" for m in moved]
            sentence += f"; moved most: {and_more(most)}"
    if outcome == FAIL and not any(each.error for each in results):
        common["accept"] = commands.accept()
    facts = {"scenarios": len(present), "steps": steps, "counters": len(COUNTERS)}
    findings = tuple(_with_commands(each, commands) for each in results)
    return Verdict(SUITE, outcome, sentence, findings, moved=moved, notes=tuple(notes), facts=facts, **common)


def _result(scenario: Scenario, lock: CounterLock, run: Replayed, second: Replayed) -> ScenarioResult:
    name, locked = scenario.name, lock.scenarios.get(scenario.name)
    if unsteady := nondeterminism(run, second):
        return ScenarioResult(_finding(name, INVALID, unsteady), unsteady)
    reasons, cause = [run.error] if run.error else [], re.sub(r"\d+|\(.*", "", run.error or "").strip()
    if locked is None or locked.definition != scenario.digest:
        reason = "new in the workload file: nothing was accepted to compare it with"
        if locked is not None:
            reason = "the workload file defines another scenario than the accepted one: they cannot be compared"
        return ScenarioResult(_finding(name, FAIL, *reasons, reason), cause or reason, error=bool(run.error))
    changes = changed_counters(locked.counters, run.counters)
    difference = first_difference(locked.columns, run.history)
    other_tokens = locked.outputs != run.outputs
    if not (changes or difference or other_tokens or run.error):
        return ScenarioResult(_finding(name, PASS, f"all {len(COUNTERS)} counters as accepted"))
    reasons.append(f"{len(changes)} of {len(COUNTERS)} counters differ: {and_more(changes)}".removesuffix(": "))
    reasons += ["the output tokens differ"] if other_tokens else []
    finding = _finding(name, FAIL, *reasons, *([f"first difference at {difference}"] if difference else []))
    details = []
    for change in changes:
        gone = "" if change.name in COUNTERS else ", which is not counted any more"
        new = "" if change.name in lock.counters else ", which was not counted when this was accepted"
        details.append(f"{change}{new or gone}")
    step, before = 0, []
    if difference:
        step, cause = difference.step, cause or difference.cause
        before = [f"{k.replace('_', ' ')} {v:,}" for k, v in difference.before.items() if v]
    details += [f"the same until then; step {step - 1}: {', '.join(before)}"] if before else []
    finding = replace(finding, details=tuple(details), figures={"first_different_step": step} if step else {})
    if changes:  # the counter that changed most stands for all where there is room for one
        most, title = changes[0], f"{name}: {changes[0].words}"
        numbers = {"base": most.was, "candidate": most.now, "change": most.ratio}
        finding = replace(finding, title=title, metric=most.name, unit=most.unit, **numbers)
    return ScenarioResult(finding, cause or "; ".join(reasons), step, tuple(changes), bool(run.error))


def _finding(name: str, outcome: str, *reasons: str) -> Finding:
    return Finding(f"{SUITE}/{name}", SUITE, name, outcome, f"{name}: {'; '.join(reasons)}")


def _with_commands(result: ScenarioResult, commands: GateCommands) -> Finding:
    finding = result.finding
    if finding.outcome == PASS:
        return finding
    again = [f"reproduce: {commands.gate(finding.id.partition('/')[2])}"]
    again += [f"accept, if it is meant: {commands.accept()}"] if finding.outcome == FAIL and not result.error else []
    return replace(finding, details=(*finding.details, *again))


def nondeterminism(first: Replayed, second: Replayed) -> str | None:
    """Says what differs between two runs of the same code and scenario, None where nothing does."""
    changes = changed_counters(first.counters, second.counters)
    what = (
        first_difference(first.history, second.history)
        or next(iter(changes), None)
        or (first.outputs != second.outputs and "the output tokens")
        or (first.error != second.error and f"how they failed: {first.error} / {second.error}")
    )
    return f"two runs of the same code differ ({what}): the engine is not deterministic" if what else None


def _causes(results: Sequence[ScenarioResult]) -> list[str]:
    """One sentence for each cause, the most frequent first, with the scenario where it appears earliest."""
    groups: dict[str, list[ScenarioResult]] = {}
    for each in sorted(results, key=lambda each: each.step):
        groups.setdefault(each.cause, []).append(each)
    sentences = []
    for cause, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        steps = f", at steps {group[0].step} to {group[-1].step}" if group[0].step else ""
        alike = f"{len(group)} begin with {cause}{steps}; the earliest: " if len(group) > 1 else ""
        sentences.append(f"{alike}{group[0].finding.sentence}")
    rest = [f"{len(sentences) - _NOTES} more causes: see the findings"] if len(sentences) > _NOTES else []
    return sentences[:_NOTES] + rest


def _moved(results: Sequence[ScenarioResult]) -> tuple[Moved, ...]:
    """Counters that differ, summed over the scenarios in which they do: the largest relative change first."""
    changed = [change for result in results for change in result.changes]
    scenarios = Counter(change.name for change in changed)
    was, now = Counter(), Counter()
    for change in changed:
        was[change.name] += change.was
        now[change.name] += change.now
    totals = sorted((Change(name, was[name], now[name]) for name in scenarios), key=_by_size)
    where = {name: f"{count} of {len(results)} scenarios" for name, count in scenarios.items()}
    return tuple(Moved(t.name, t.words, where[t.name], t.unit, t.was, t.now, t.ratio) for t in totals)


def accept(workload: CounterWorkload, runs: Mapping[str, Replayed], path: Path, reason: str) -> list[str]:
    """Writes the lock file, unless nothing changed, and returns what changed, in lines.

    Raises UsageError for a lock file that cannot be read: overwriting it would lose its log of reasons.
    """
    lock = read_lock(path)
    verdict = judge(workload, lock, runs, runs, GateCommands(workload.path, path), {})
    same = (workload.name, workload.digest, list(COUNTERS))
    if lock and verdict.outcome == PASS and (lock.workload, lock.workload_digest, lock.counters) == same:
        return [f"nothing to accept: {path} says what this code counts"]
    changed = _changed(lock, workload, verdict)
    state = git_state()
    commit = f"{state['sha'] or state['short_sha']}{'-dirty' if state['dirty'] else ''}"
    entry = Accepted(reason=reason, git=commit, date=utc_now(), changed=changed)
    try:
        write_lock(path, workload, runs, [*(lock.accepted if lock else ()), entry])
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None
    moved = and_more([f"{m.title} {m.base:,} -> {m.candidate:,} ({m.where})" for m in verdict.moved], 10)
    lines = [f"accepted: {changed}", *([f"moved: {moved}"] if moved else []), f"reason: {reason}"]
    return [*lines, f"{path} is written; commit it with the change"]


def _changed(known: CounterLock | None, workload: CounterWorkload, verdict: Verdict) -> str:
    if known is None:
        return f"the first lock file, {len(workload.scenarios)} scenarios"
    if not (failed := [finding.id.partition("/")[2] for finding in verdict.of(FAIL)]):
        return "the workload file, and no counter"
    counters = and_more([moved.title for moved in verdict.moved], 5) or "none"
    return f"{len(failed)} of {len(verdict.findings)} scenarios ({and_more(failed, 12)}); counters: {counters}"
