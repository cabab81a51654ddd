"""Which counters of two replays of one scenario differ, and the first step at which their histories differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.common.text import and_more
from kvbench.gate.verdict.wording import percent

# Causes before effects: the first of these that differs at the first different step is the likeliest cause.
_CAUSES = (
    "preempted", "copied_pages", "copied_slots", "swapped_out_slots", "swapped_in_slots", "swap_lost_slots",
    "prefix_evictions", "prefix_hits", "prefix_queries", "refused_fragmented", "forks", "finished", "allocated_pages",
    "freed_pages", "prefill_tokens", "decode_tokens", "recomputed_tokens", "running", "waiting",
)  # fmt: skip
_SUMS = ("slot_steps_", "shared_slot_steps", "running_steps", "waiting_steps")


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

    def __str__(self) -> str:
        difference = f"{self.now - self.was:+,}" if self.ratio is None else percent(self.ratio)
        return f"{self.words} {self.was:,} -> {self.now:,} ({difference})"


@dataclass(frozen=True)
class FirstDifference:
    """The first step at which two histories differ. ``changes``: the columns that differ there, causes first.

    ``before``: the columns at the step before, where both are the same. ``ended``: "was" or "now" when the only
    difference is that one of the two had ended.
    """

    step: int
    changes: tuple[Change, ...]
    before: Mapping[str, int]
    ended: str | None = None

    @property
    def cause(self) -> str:
        """``preempted up``; ``the end`` where one history is longer."""
        if not self.changes:
            return "the end"
        first = self.changes[0]
        return f"{first.words} {'up' if first.now > first.was else 'down'}"

    def __str__(self) -> str:
        if self.ended:
            return f"step {self.step}: {'goes on, had ended' if self.ended == 'was' else 'has ended, went on'}"
        return f"step {self.step}: {and_more([f'{c.words} {c.now:,} (was {c.was:,})' for c in self.changes], 4)}"


def changed_counters(was: Mapping[str, int], now: Mapping[str, int]) -> list[Change]:
    """The counters that differ, a missing one being 0: the largest relative change first, sums over steps last."""
    changes = [Change(name, was.get(name, 0), now.get(name, 0)) for name in dict.fromkeys([*was, *now])]
    return sorted(
        (change for change in changes if change.was != change.now),
        key=lambda change: (is_sum(change.name), -math.inf if change.ratio is None else -abs(change.ratio)),
    )


def is_sum(counter: str) -> bool:
    """Whether it is a sum over steps, which moves with almost anything."""
    return counter.startswith(_SUMS)


def first_difference(was: Mapping[str, Sequence[int]], now: Mapping[str, Sequence[int]]) -> FirstDifference | None:
    """None when the histories are the same; a column that is missing is 0 at every step."""
    old, new = (max(map(len, each.values()), default=0) for each in (was, now))
    names = sorted(dict.fromkeys([*was, *now]), key=lambda name: (*_CAUSES, name).index(name))

    def at(history: Mapping[str, Sequence[int]], index: int) -> dict[str, int]:
        return {name: history[name][index] if name in history else 0 for name in names} if index >= 0 else {}

    for index in range(min(old, new)):
        left, right = at(was, index), at(now, index)
        if left != right:
            changes = tuple(Change(name, left[name], right[name]) for name in names if left[name] != right[name])
            return FirstDifference(index + 1, changes, at(now, index - 1))
    if old == new:
        return None
    shorter = min(old, new)
    return FirstDifference(shorter + 1, (), at(now, shorter - 1), "was" if old < new else "now")
