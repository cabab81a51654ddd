"""A planned step, and the handle of a launched one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvbench_engine.kv.manager import Move
from kvbench_engine.sequence import Drawn, Sequence


class Scheduled(NamedTuple):
    """The ``num_tokens`` of ``seq`` that a step computes, from ``seq.num_computed`` on."""

    seq: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Tests whether a token is drawn after these; valid until the step is launched."""
        return self.seq.num_computed + self.num_tokens == len(self.seq.token_ids)


@dataclass(slots=True)
class StepPlan:
    """One step's work: ``moves`` in order, then the tokens. A sequence is scheduled at most once.

    ``num_steady``: so many of ``scheduled``, from the first, are plain decodes: their first tokens are drawn, none
    reaches its last token, has forks to come or is a beam. ``repeats``: ``scheduled`` is the list of the plan before,
    one token further, and all of it is steady.
    """

    scheduled: list[Scheduled] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    num_steady: int = 0
    repeats: bool = False

    def add(self, seq: Sequence, num_tokens: int) -> None:
        """Schedule ``num_tokens`` of ``seq``, after all that is scheduled."""
        if len(self.scheduled) == self.num_steady:  # the scheduler's own list
            self.scheduled = self.scheduled.copy()
        self.scheduled.append(Scheduled(seq, num_tokens))


Draw = int | Drawn | None
"""What an item drew: one token and nothing else, tokens of another kind, or nothing, because its prompt is not done."""


class StepHandle(Protocol):
    """A step that was launched."""

    def tokens(self) -> list[Draw]:
        """Wait for the device; what each scheduled item drew, in the plan's order."""
        ...


class Computed(NamedTuple):
    """The handle of a step that is already computed."""

    drawn: list[Draw]

    def tokens(self) -> list[Draw]:
        return self.drawn
