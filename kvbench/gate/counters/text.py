"""What a counter verdict says of all scenarios together: its sentence, how the differences begin, what moved."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.gate.counters.first_difference import Change, Parting, is_sum
from kvbench.gate.counters.replay import COUNTERS, Replayed
from kvbench.gate.verdict.verdict import INVALID, PASS, Finding, Moved

_BEGINNINGS = 5
_UNITS = ("bytes", "tokens", "pages", "slots", "steps")


@dataclass(frozen=True)
class Judged:
    """One scenario: its finding, and what the sentences over all of them are made from.

    ``trouble``: what is wrong with it by itself, without a comparison.
    """

    finding: Finding
    changes: tuple[Change, ...] = ()
    parting: Parting | None = None
    trouble: str | None = None

    @property
    def name(self) -> str:
        return self.finding.id.partition("/")[2]

    @property
    def first_step(self) -> int:
        return self.parting.step if self.parting else 0

    @property
    def first_counter(self) -> str:
        """``preempted up``, of what differs at its first different step the nearest to a cause; else empty."""
        if self.parting is None or not self.parting.changes:
            return ""
        first = self.parting.changes[0]
        return f"{first.words} {'up' if first.now > first.was else 'down'}"

    @property
    def beginning(self) -> str:
        """How its difference begins, without numbers: what is alike in this is likely to have one cause."""
        if self.finding.outcome == INVALID:
            return ""
        begins = self.first_counter
        if not begins and not self.trouble and not self.changes:
            begins = self.finding.sentence.removeprefix(self.name)
        return begins + re.sub(r"\d+", "", self.trouble or "").split("(")[0]


def verdict_sentence(outcome: str, judged: Sequence[Judged], lock: str, runs: Mapping[str, Replayed]) -> str:
    """The verdict in one sentence, with its numbers."""
    if outcome == PASS:
        return (
            f"all {len(runs)} scenarios count what was accepted: {len(COUNTERS)} counters and every one of "
            f"{total_steps(runs):,} steps"
        )
    concerned = [each for each in judged if each.finding.outcome == outcome]
    if outcome == INVALID:
        return f"{len(concerned)} of {len(judged)} scenarios are not the same twice: {concerned[0].finding.sentence}"
    parts = [f"{len(concerned)} of {len(judged)} scenarios differ from {lock}"]
    broken = [each for each in concerned if each.trouble]
    if broken:
        parts.append(f"{broken[0].trouble} ({_name_and_more([each.name for each in broken])})")
    group = _alike(concerned)[0]
    if group[0].parting:
        alike = f"{len(group)} of them begin {_alike_in(group)}; the earliest is" if len(group) > 1 else "it begins in"
        parts.append(f"{alike} {group[0].name} at {group[0].parting}")
    elif not broken:
        parts.append(group[0].finding.sentence)
    counted = _scenarios_of(concerned)
    if counted:
        parts.append("moved most: " + ", ".join(_most_moved(concerned, counted)))
    return "; ".join(parts)


def beginnings(judged: Sequence[Judged]) -> tuple[str, ...]:
    """The ways in which the differences begin, the most frequent first, each by its earliest scenario."""
    ordered = _alike([each for each in judged if each.finding.outcome != PASS])
    notes = []
    for group in ordered[:_BEGINNINGS]:
        also = f" ({len(group) - 1} more {_also(group)})" if len(group) > 1 else ""
        notes.append(group[0].finding.sentence + also)
    if len(ordered) > _BEGINNINGS:
        rest = sum(len(group) for group in ordered[_BEGINNINGS:])
        notes.append(f"{rest} more scenarios begin to differ in {len(ordered) - _BEGINNINGS} other ways")
    return tuple(notes)


def _also(group: Sequence[Judged]) -> str:
    """What the rest of a group has in common with the first, which is said in full."""
    if group[0].finding.outcome == INVALID:
        return "differ between the two runs"
    return f"begin {_alike_in(group)}" if group[0].parting else "likewise"


def _alike_in(group: Sequence[Judged]) -> str:
    """``with the same counter, preempted up, at steps 35 to 48``: they need not be alike in anything else."""
    steps = [each.first_step for each in group if each.parting]
    low, high = min(steps), max(steps)
    where = f"at step {low}" if low == high else f"at steps {low} to {high}"
    begins = group[0].first_counter
    return f"with the same counter, {begins}, {where}" if begins else f"to differ {where}"


def _alike(judged: Sequence[Judged]) -> list[list[Judged]]:
    """By how they begin: the largest group first, and of each the earliest scenario."""
    groups: dict[str, list[Judged]] = {}
    for each in sorted(judged, key=lambda each: each.first_step):
        groups.setdefault(each.beginning, []).append(each)
    return sorted(groups.values(), key=len, reverse=True)


def moved(judged: Sequence[Judged]) -> tuple[Moved, ...]:
    """Counters that differ, added up over the scenarios where they do: in most scenarios first, sums of steps last."""
    counted = _scenarios_of(judged)
    rows = []
    for name in sorted(counted, key=lambda each: (is_sum(each), -counted[each], each)):
        total = _total(judged, name)
        where = f"{counted[name]} of {len(judged)} scenarios"
        rows.append(Moved(name, total.words, where, unit_of(name), total.was, total.now, total.ratio))
    return tuple(rows)


def unit_of(counter: str) -> str:
    """What a counter counts, by its name."""
    if counter.startswith(("slot_steps", "shared_slot")):
        return "slot steps"
    if counter in ("prefix_hits", "prefix_queries"):
        return "tokens"
    return next((unit for unit in _UNITS if unit in counter.split("_")), "count")


def total_steps(runs: Mapping[str, Replayed]) -> int:
    return sum(run.steps for run in runs.values())


def _most_moved(judged: Sequence[Judged], counted: Counter[str]) -> list[str]:
    """The three counters that moved in most scenarios, sums over steps last, with their totals there."""
    names = sorted(counted, key=lambda name: (is_sum(name), -counted[name], -_total(judged, name).size))
    return [
        f"{_total(judged, name)} in {counted[name]} scenario{'s' if counted[name] > 1 else ''}" for name in names[:3]
    ]


def _scenarios_of(judged: Sequence[Judged]) -> Counter[str]:
    """Counter -> in how many scenarios it differs."""
    return Counter(change.name for each in judged for change in each.changes)


def _total(judged: Sequence[Judged], name: str) -> Change:
    both = [change for each in judged for change in each.changes if change.name == name]
    return Change(name, sum(change.was for change in both), sum(change.now for change in both))


def _name_and_more(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
