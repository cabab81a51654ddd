"""Where and how two replays of one scenario part: which counters, by how much, and the first step that differs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.gate.verdict.text import percent

# What is done comes before what follows from it: the first of these that differs at the first step that differs is the
# nearest thing to a cause that counters can show.
_CAUSES = (
    "preempted", "copied_pages", "copied_slots", "swapped_out_slots", "swapped_in_slots", "swap_lost_slots",
    "prefix_evictions", "prefix_hits", "prefix_queries", "refused_fragmented", "forks", "finished", "allocated_pages",
    "freed_pages", "prefill_tokens", "decode_tokens", "recomputed_tokens", "running", "waiting",
)  # fmt: skip
_SUMS = ("slot_steps_", "shared_slot_steps", "running_steps", "waiting_steps")


@dataclass(frozen=True)
class Change:
    """One counter, or one column at one step: what it was and what it is."""

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
    def size(self) -> float:
        """How much it changed for what it was; anything is infinitely more than 0."""
        return math.inf if self.ratio is None else abs(self.ratio)

    @property
    def difference(self) -> str:
        """``+25.0 %``; of what was 0, the number."""
        return f"{self.now - self.was:+,}" if self.ratio is None else percent(self.ratio)

    def __str__(self) -> str:
        return f"{self.words} {self.was:,} -> {self.now:,} ({self.difference})"


@dataclass(frozen=True)
class Parting:
    """The first step at which two histories differ, and what differs there, causes first.

    ``before``: what both said at the step before it, by column. ``ended``: "was" or "now" when there is nothing more
    to differ than that one of the two had ended by then.
    """

    step: int
    changes: tuple[Change, ...]
    before: Mapping[str, int]
    ended: str | None = None

    def __str__(self) -> str:
        if self.ended == "was":
            return f"step {self.step}: goes on, had ended"
        if self.ended == "now":
            return f"step {self.step}: has ended, went on"
        shown = [f"{c.words} {c.now:,}, was {c.was:,}" for c in self.changes[:4]]
        more = len(self.changes) - len(shown)
        return f"step {self.step}: " + "; ".join(shown) + (f"; and {more} more" if more else "")


def changed_counters(was: Mapping[str, int], now: Mapping[str, int]) -> list[Change]:
    """The counters that differ, a missing one being 0: most changed first, sums over steps after all others."""
    names = list(dict.fromkeys([*was, *now]))
    changes = [Change(name, was.get(name, 0), now.get(name, 0)) for name in names]
    return sorted((c for c in changes if c.was != c.now), key=_weight)


def _weight(change: Change) -> tuple[bool, float]:
    return is_sum(change.name), -change.size


def is_sum(counter: str) -> bool:
    """Whether it adds something up over the steps, so that it moves with almost anything."""
    return counter.startswith(_SUMS)


def first_difference(was: Mapping[str, Sequence[int]], now: Mapping[str, Sequence[int]]) -> Parting | None:
    """None when the histories are the same; a column that one of them lacks is 0 throughout it."""
    old, new = (max(map(len, each.values()), default=0) for each in (was, now))
    names = sorted(dict.fromkeys([*was, *now]), key=_place)

    def at(history: Mapping[str, Sequence[int]], name: str, index: int) -> int:
        return history[name][index] if name in history else 0

    for index in range(min(old, new)):
        changes = [Change(name, at(was, name, index), at(now, name, index)) for name in names]
        changes = [change for change in changes if change.was != change.now]
        if changes:
            before = {name: at(now, name, index - 1) for name in names} if index else {}
            return Parting(index + 1, tuple(changes), before)
    if old == new:
        return None
    shorter = min(old, new)
    before = {name: at(now, name, shorter - 1) for name in names} if shorter else {}
    return Parting(shorter + 1, (), before, "was" if old < new else "now")


def _place(name: str) -> int:
    return _CAUSES.index(name) if name in _CAUSES else len(_CAUSES)
