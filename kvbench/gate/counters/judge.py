"""The counter gate's verdict: every replayed counter compared with the accepted one, exactly; and what accepts them."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.files import utc_now
from kvbench.common.git import git_state
from kvbench.common.text import and_more
from kvbench.gate.counters import LOCK, WORKLOAD
from kvbench.gate.counters.lock import Accepted, CounterLock, read_lock, write_lock
from kvbench.gate.counters.replay import COUNTERS, Replayed
from kvbench.gate.counters.workload import CounterWorkload, Scenario
from kvbench.gate.sentences import say
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
        words = ["kvbench", verb, "counters"]
        if self.workload != WORKLOAD:
            words.append(str(self.workload))
        if self.lock != LOCK:
            words += ["--lock", str(self.lock)]
        return shlex.join([*words, *options])


@dataclass(frozen=True)
class Change:
    """A counter, or a column of the history at one step: its accepted and its present value."""

    name: str
    was: int
    now: int

    @property
    def words(self) -> str:
        return self.name.replace("_", " ")

    @property
    def ratio(self) -> float | None:
        """The relative change, now / was - 1; None where it was 0."""
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
        return say("counters.change", words=self.words, was=self.was, now=self.now, difference=difference)


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
            return say("counters.the_end")
        first = self.changes[0]
        return say("counters.cause", first.now > first.was, words=first.words)

    def __str__(self) -> str:
        changes = [say("counters.step_change", words=c.words, now=c.now, was=c.was) for c in self.changes]
        return say("counters.step", step=self.step, changes=and_more(changes, 4) or say("counters.longer", self.longer))


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
        if index < 0:
            return {}
        return {name: history[name][index] if name in history else 0 for name in names}

    both = min(old, new)
    for index in range(both):
        left, right = at(was, index), at(now, index)
        if left != right:
            changes = tuple(Change(name, left[name], right[name]) for name in names if left[name] != right[name])
            return FirstDifference(index + 1, changes, at(now, index - 1))
    if old == new:
        return None
    return FirstDifference(both + 1, (), at(now, both - 1), longer=new > old)


@dataclass(frozen=True)
class ScenarioResult:
    """A scenario's result. ``step``: the first that differs, or 0. ``error``: whether the replay failed.

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
        sentence = say("counters.no_lock", lock=commands.lock)
        return Verdict(SUITE, EMPTY, sentence, accept=commands.accept(), **common)
    last = lock.accepted[-1]
    common["base"] = {"name": str(commands.lock), "sha": last.git, "accepted": last.date, "reason": last.reason}
    present = {scenario.name for scenario in workload.scenarios}
    if not present & set(lock.scenarios) and not (commands.only and present | set(lock.scenarios)):
        why = say("counters.not_in_lock", workload=commands.workload, lock=commands.lock)
        if commands.only:
            groups = Counter(name.partition("/")[0] for name in workload.names)
            choices = and_more([say("counters.group", group=g, count=count) for g, count in groups.items()], 20)
            why = say("counters.no_match", globs=" ".join(commands.only), choices=choices)
        return Verdict(SUITE, EMPTY, say("counters.nothing", why=why), **common)
    results = [_result(scenario, lock, first[scenario.name], second[scenario.name]) for scenario in workload.scenarios]
    gone = say("counters.gone")
    results += [ScenarioResult(_finding(name, FAIL, gone), gone) for name in lock.scenarios if name not in present]
    outcomes = [result.finding.outcome for result in results]
    outcome = INVALID if INVALID in outcomes else worst(outcomes)
    steps = sum(run.steps for run in first.values())
    moved = _moved(results)
    if outcome == PASS:
        sentence = say("counters.all_pass", scenarios=len(results), counters=len(COUNTERS), steps=steps)
        notes = []
        if lock.workload_digest != workload.digest:
            notes.append(say("counters.other_file", workload=commands.workload))
    else:
        concerned = [result for result in results if result.finding.outcome == outcome]
        cause, *notes = _causes(concerned)
        most = [say("counters.moved_counter", **_numbers(row)) for row in moved]
        sentence = say(
            "counters.differ",
            outcome == FAIL,
            count=len(concerned),
            scenarios=len(results),
            lock=commands.lock,
            cause=cause,
            moved=say("counters.moved", bool(most), counters=and_more(most)),
        )
    if outcome == FAIL and not any(result.error for result in results):
        common["accept"] = commands.accept()
    facts = {"scenarios": len(present), "steps": steps, "counters": len(COUNTERS)}
    findings = tuple(_with_commands(result, commands) for result in results)
    return Verdict(SUITE, outcome, sentence, findings, moved=moved, notes=tuple(notes), facts=facts, **common)


def _result(scenario: Scenario, lock: CounterLock, run: Replayed, second: Replayed) -> ScenarioResult:
    name, locked = scenario.name, lock.scenarios.get(scenario.name)
    if unsteady := nondeterminism(run, second):
        return ScenarioResult(_finding(name, INVALID, unsteady), unsteady)
    reasons = [run.error] if run.error else []
    cause = re.sub(r"\d+|\(.*", "", run.error or "").strip()
    if locked is None or locked.definition != scenario.digest:
        reason = say("counters.not_comparable", locked is None)
        return ScenarioResult(_finding(name, FAIL, *reasons, reason), cause or reason, error=bool(run.error))
    changes = changed_counters(locked.counters, run.counters)
    difference = first_difference(locked.columns, run.history)
    other_tokens = locked.outputs != run.outputs
    if not (changes or difference or other_tokens or run.error):
        return ScenarioResult(_finding(name, PASS, say("counters.as_accepted", n=len(COUNTERS))))
    which = say("counters.which", bool(changes), changes=and_more(changes))
    reasons.append(say("counters.changed", count=len(changes), counters=len(COUNTERS), which=which))
    if other_tokens:
        reasons.append(say("counters.tokens"))
    if difference:
        reasons.append(say("counters.first", difference=difference))
    finding = _finding(name, FAIL, *reasons)
    details = []
    for change in changes:
        text = str(change)
        if change.name not in lock.counters:
            text = say("counters.not_counted_then", change=change)
        elif change.name not in COUNTERS:
            text = say("counters.not_counted_now", change=change)
        details.append(text)
    step, before = 0, []
    if difference:
        step, cause = difference.step, cause or difference.cause
        names = {name.replace("_", " "): value for name, value in difference.before.items() if value}
        before = [say("counters.column", name=name, value=value) for name, value in names.items()]
    if before:
        details.append(say("counters.until_then", step=step - 1, columns=", ".join(before)))
    finding = replace(finding, details=tuple(details))
    if step:
        finding = replace(finding, figures={"first_different_step": step})
    if changes:  # the counter that changed most stands for all where there is room for one
        most, title = changes[0], say("counters.title", name=name, words=changes[0].words)
        numbers = {"base": most.was, "candidate": most.now, "change": most.ratio}
        finding = replace(finding, title=title, metric=most.name, unit=most.unit, **numbers)
    return ScenarioResult(finding, cause or "; ".join(reasons), step, tuple(changes), bool(run.error))


def _finding(name: str, outcome: str, *reasons: str) -> Finding:
    sentence = say("counters.title", name=name, words="; ".join(reasons))
    return Finding(say("counters.id", name=name), SUITE, name, outcome, sentence)


def _numbers(moved: Moved) -> dict[str, Any]:
    return {name: getattr(moved, name) for name in ("title", "base", "candidate", "where")}


def _with_commands(result: ScenarioResult, commands: GateCommands) -> Finding:
    finding = result.finding
    if finding.outcome == PASS:
        return finding
    again = [say("counters.reproduce", command=commands.gate(finding.id.partition("/")[2]))]
    if finding.outcome == FAIL and not result.error:
        again.append(say("counters.accept", command=commands.accept()))
    return replace(finding, details=(*finding.details, *again))


def nondeterminism(first: Replayed, second: Replayed) -> str | None:
    """Says what differs between two runs of the same code and scenario, None where nothing does."""
    changes = changed_counters(first.counters, second.counters)
    what = (
        first_difference(first.history, second.history)
        or next(iter(changes), None)
        or (first.outputs != second.outputs and "the output tokens")
        or (first.error != second.error and say("counters.how_failed", first=first.error, second=second.error))
    )
    return say("counters.not_deterministic", bool(what), what=what) or None


def _causes(results: Sequence[ScenarioResult]) -> list[str]:
    """Writes a sentence for each cause, the most frequent first, with the scenario where it appears earliest."""
    groups: dict[str, list[ScenarioResult]] = {}
    for result in sorted(results, key=lambda result: result.step):
        groups.setdefault(result.cause, []).append(result)
    sentences = []
    for cause, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        first, last, text = group[0].step, group[-1].step, group[0].finding.sentence
        if len(group) > 1:
            steps = say("counters.steps", first > 0, first=first, last=last)
            text = say("counters.alike", count=len(group), cause=cause, steps=steps, first=text)
        sentences.append(text)
    if len(sentences) > _NOTES:
        sentences[_NOTES:] = [say("counters.more_causes", n=len(sentences) - _NOTES)]
    return sentences


def _moved(results: Sequence[ScenarioResult]) -> tuple[Moved, ...]:
    """Counters that differ, summed over the scenarios in which they do: the largest relative change first."""
    changed = [change for result in results for change in result.changes]
    scenarios = Counter(change.name for change in changed)
    was, now = Counter(), Counter()
    for change in changed:
        was[change.name] += change.was
        now[change.name] += change.now
    totals = sorted((Change(name, was[name], now[name]) for name in scenarios), key=_by_size)
    many = len(results)
    where = {name: say("counters.of_scenarios", count=n, scenarios=many) for name, n in scenarios.items()}
    return tuple(Moved(t.name, t.words, where[t.name], t.unit, t.was, t.now, t.ratio) for t in totals)


def accept(workload: CounterWorkload, runs: Mapping[str, Replayed], path: Path, reason: str) -> list[str]:
    """Writes the lock file, unless nothing changed, and returns what changed, in lines.

    Raises UsageError for a lock file that cannot be read: overwriting it would lose its log of reasons.
    """
    lock = read_lock(path)
    verdict = judge(workload, lock, runs, runs, GateCommands(workload.path, path), {})
    same = (workload.name, workload.digest, list(COUNTERS))
    if lock and verdict.outcome == PASS and (lock.workload, lock.workload_digest, lock.counters) == same:
        return [say("counters.nothing_to_accept", lock=path)]
    changed = _changed(lock, workload, verdict)
    state = git_state()
    commit = f"{state['sha'] or state['short_sha']}{'-dirty' if state['dirty'] else ''}"
    entry = Accepted(reason=reason, git=commit, date=utc_now(), changed=changed)
    try:
        write_lock(path, workload, runs, [*(lock.accepted if lock else ()), entry])
    except OSError as error:
        raise UsageError(say("counters.not_written", lock=path, error=error.strerror or error)) from None
    moved = and_more([say("counters.accepted_counter", **_numbers(row)) for row in verdict.moved], 10)
    lines = [
        say("counters.accepted", changed=changed),
        say("counters.accepted_moved", bool(moved), counters=moved),
        say("counters.reason", reason=reason),
        say("counters.written", lock=path),
    ]
    return [line for line in lines if line]


def _changed(lock: CounterLock | None, workload: CounterWorkload, verdict: Verdict) -> str:
    if lock is None:
        return say("counters.first_lock", n=len(workload.scenarios))
    if not (failed := [finding.id.partition("/")[2] for finding in verdict.of(FAIL)]):
        return say("counters.no_counter")
    counters = and_more([moved.title for moved in verdict.moved], 5) or "none"
    values = {"count": len(failed), "scenarios": len(verdict.findings), "names": and_more(failed, 12)}
    return say("counters.accepted_scenarios", counters=counters, **values)
