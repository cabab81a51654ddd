"""The counter gate's judgement: what was replayed against what was accepted, exactly, and why it differs in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvbench.gate.counters.commands import Commands
from kvbench.gate.counters.first_difference import Change, Parting, changed_counters, first_difference
from kvbench.gate.counters.lock_file import CounterLock, LockedScenario
from kvbench.gate.counters.replay import COUNTERS, Replayed
from kvbench.gate.counters.text import Judged, beginnings, moved, total_steps, unit_of, verdict_sentence
from kvbench.gate.counters.workload import CounterWorkload, Scenario
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INVALID, PASS, Finding, Verdict, worst

SUITE = "counters"


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
    common = {"reproduce": commands.gate, "candidate": dict(candidate)}
    if lock is None:
        sentence = f"nothing was compared: there is no {commands.lock}; accept what this code counts to make it"
        return Verdict(SUITE, EMPTY, sentence, accept=commands.accept, **common)
    last = lock.accepted[-1]
    common["base"] = {"name": str(commands.lock), "sha": last.git, "accepted": last.date, "reason": last.reason}
    present = {scenario.name for scenario in workload.scenarios}
    locked = set(lock.scenarios)
    if not present & locked and not (commands.only and present | locked):  # a new or a removed one may be asked for
        return Verdict(SUITE, EMPTY, f"nothing was compared: {_nothing(workload, commands)}", **common)
    judged = [_judged(scenario, lock, first, second, commands) for scenario in workload.scenarios]
    judged += [_removed(name, commands) for name in lock.scenarios if name not in present]
    outcomes = [each.finding.outcome for each in judged]
    outcome = INVALID if INVALID in outcomes else worst(outcomes)
    notes = beginnings([each for each in judged if each.finding.outcome == outcome])
    if outcome == PASS and lock.workload_digest != workload.digest:
        notes = (f"{commands.workload} is not the accepted one, though no scenario of it changed",)
    acceptable = outcome != INVALID and not any(each.trouble for each in judged)
    return Verdict(
        SUITE,
        outcome,
        verdict_sentence(outcome, judged, str(commands.lock), first),
        tuple(each.finding for each in judged),
        accept=commands.accept if notes and acceptable else None,
        moved=moved(judged),
        notes=notes,
        facts={"scenarios": len(present), "steps": total_steps(first), "counters": len(COUNTERS)},
        **common,
    )


def _nothing(workload: CounterWorkload, commands: Commands) -> str:
    if not commands.only:
        return f"no scenario of {commands.workload} is in {commands.lock}"
    groups = Counter(name.partition("/")[0] for name in workload.names)
    told = ", ".join(f"'{group}/*' ({count})" for group, count in groups.items())
    globs = " and ".join(repr(glob) for glob in commands.only)
    return f"--only {globs} fits no scenario; {commands.workload} has {told}, such as {workload.names[0]}"


def _judged(
    scenario: Scenario,
    lock: CounterLock,
    first: Mapping[str, Replayed],
    second: Mapping[str, Replayed],
    commands: Commands,
) -> Judged:
    name, run, locked = scenario.name, first[scenario.name], lock.scenarios.get(scenario.name)
    if unsteady := nondeterminism(run, second[name]):
        return Judged(_finding(name, INVALID, unsteady, (f"reproduce: {commands.one(name)}",)))
    if locked is None:
        return _failed(name, ["new in the workload file: nothing was accepted to compare it with"], commands, run)
    if locked.definition != scenario.digest:
        words = "the workload file defines another scenario than the accepted one, so the two cannot be compared"
        return _failed(name, [words], commands, run)
    return _compared(name, locked, run, set(lock.counters), commands)


def _compared(name: str, locked: LockedScenario, run: Replayed, known: set[str], commands: Commands) -> Judged:
    changes = changed_counters(locked.counters, run.counters)
    parting = first_difference(locked.columns, run.history)
    other_tokens = locked.outputs != run.outputs
    if not (changes or parting or other_tokens or run.trouble):
        return Judged(_finding(name, PASS, f"all {len(COUNTERS)} counters as accepted"))
    parts = []
    if changes:
        parts.append(f"{_up_and_down(changes)}: {_listed([str(change) for change in changes], 3)}")
    elif parting:
        parts.append("the totals are the same and the steps are not")
    if other_tokens:
        parts.append("the output tokens differ")
    if parting:
        parts.append(f"first difference at {parting}")
    details = [f"{change}{_unknown(change.name, known)}" for change in changes]
    if parting:
        details += [f"first difference at {parting}", *_before(parting)]
    return _failed(name, parts, commands, run, details, changes, parting)


def _unknown(name: str, known: set[str]) -> str:
    """A counter that one side alone has is no change of the engine's behaviour, and looks like one."""
    if name not in known:
        return ", which was not counted when this was accepted"
    return "" if name in COUNTERS else ", which is not counted any more"


def _before(parting: Parting) -> list[str]:
    told = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in parting.before.items() if value)
    return [f"the same until then; step {parting.step - 1}: {told}"] if told else []


def nondeterminism(first: Replayed, second: Replayed) -> str | None:
    """What differs between two runs of the same code and scenario, in a sentence."""
    parting = first_difference(first.history, second.history)
    changes = changed_counters(first.counters, second.counters)
    if parting:
        what = f"first at {parting}"
    elif changes:
        what = f"in {changes[0]}"
    elif first.outputs != second.outputs:
        what = "in the output tokens"
    elif first.trouble != second.trouble:
        what = f"in how they went wrong: {first.trouble or 'not at all'} / {second.trouble or 'not at all'}"
    else:
        return None
    return f"two runs of this very code differ, {what}; the engine is not deterministic, and this is no regression"


def _removed(name: str, commands: Commands) -> Judged:
    return _failed(name, ["accepted, and no longer in the workload file: nothing guards it any more"], commands)


def _failed(
    name: str,
    parts: Sequence[str],
    commands: Commands,
    run: Replayed | None = None,
    details: Sequence[str] = (),
    changes: Sequence[Change] = (),
    parting: Parting | None = None,
) -> Judged:
    trouble = run.trouble if run is not None else None
    lines = [*details, f"reproduce: {commands.one(name)}"]
    lines += [] if trouble else [f"accept, if it is meant: {commands.accept}"]
    sentence = "; ".join([*([trouble] if trouble else []), *parts])
    lead = changes[0] if changes else None
    return Judged(_finding(name, FAIL, sentence, tuple(lines), lead, parting), tuple(changes), parting, trouble)


def _finding(
    name: str,
    outcome: str,
    sentence: str,
    details: tuple[str, ...] = (),
    lead: Change | None = None,
    parting: Parting | None = None,
) -> Finding:
    """``lead``: the counter that stands for all that moved where there is room for one."""
    return Finding(
        id=f"{SUITE}/{name}",
        suite=SUITE,
        title=f"{name}: {lead.words}" if lead else name,
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


def _up_and_down(changes: Sequence[Change]) -> str:
    up = sum(change.now > change.was for change in changes)
    ways = ((up, "up"), (len(changes) - up, "down"))
    return ", ".join(f"{count} counter{'s' if count > 1 else ''} {way}" for count, way in ways if count)


def _listed(words: Sequence[str], most: int) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
