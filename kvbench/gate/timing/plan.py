"""The loads that make a pair, and the order in which a pair is run: pure functions.

A pair is one newly launched server of each side, one right after the other, under the same requests. For every
configuration of every pair a random choice decides which side goes first. That makes the sign-flip test exact
(``signflip.py``): if the sides do not differ, swapping base and candidate in a pair flips the sign of its log ratio and
changes nothing else, whatever the machine did meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.common.errors import UsageError
from kvbench.workload.design import Block, Cell, Configuration, Design

BASE, CANDIDATE = "base", "candidate"
SIDES = (BASE, CANDIDATE)


@dataclass(frozen=True)
class PairedCell:
    """A cell of a comparison: its name, its workload, the ``key`` of its match, and its id on either side."""

    name: str
    workload: str
    turn: str
    base: str
    candidate: str

    def on(self, side: str) -> str:
        return self.base if side == BASE else self.candidate


@dataclass(frozen=True)
class Match:
    """A configuration of a workload on both sides, with its cells.

    ``names``: of the cells, ``<workload>/<cell id>``, with both ids where the sides differ in settings.
    """

    workload: str
    base: Configuration
    candidate: Configuration
    base_cells: tuple[Cell, ...]
    candidate_cells: tuple[Cell, ...]
    names: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.workload}/{self.base.config_id}"

    def of(self, side: str) -> Configuration:
        return self.base if side == BASE else self.candidate

    def cells(self, side: str) -> tuple[Cell, ...]:
        return self.base_cells if side == BASE else self.candidate_cells

    @property
    def paired_cells(self) -> list[PairedCell]:
        cells = zip(self.names, self.base_cells, self.candidate_cells, strict=True)
        return [PairedCell(name, self.workload, self.key, a.cell_id, b.cell_id) for name, a, b in cells]

    def block(self, side: str, pair: int, order: Sequence[int]) -> Block:
        """The launch of one side in pair ``pair``, its loads in ``order`` (indices)."""
        return Block(pair, self.of(side), tuple(self.cells(side)[i] for i in order))


@dataclass(frozen=True)
class Turn:
    """A configuration's part of a pair: the side that goes first, and the order of its loads."""

    pair: int
    match: Match
    first: str
    order: tuple[int, ...]

    @property
    def sides(self) -> tuple[str, str]:
        return SIDES if self.first == BASE else SIDES[::-1]


def match_designs(workload: str, base: Design, candidate: Design) -> tuple[Match, ...]:
    """The configurations of both sides, paired in their order.

    Raises UsageError when the sides do not have the same number of configurations, or not the same loads.
    """
    lefts, rights = base.configurations, candidate.configurations
    if len(lefts) != len(rights):
        ids = [", ".join(c.config_id for c in side) for side in (lefts, rights)]
        raise UsageError(
            f"{workload}: base has {len(lefts)} configurations ({ids[0]}) and candidate {len(rights)} ({ids[1]}), "
            "so they cannot be paired: leave out of the workload's sweep what one of them cannot have"
        )
    matches = []
    for left, right in zip(lefts, rights, strict=True):
        cells = [tuple(c for c in d.cells if c.configuration is side) for d, side in ((base, left), (candidate, right))]
        if [c.load for c in cells[0]] != [c.load for c in cells[1]]:
            raise UsageError(f"{workload}: {left.config_id} and {right.config_id} have different loads")
        names = tuple(f"{workload}/{_name(a, b)}" for a, b in zip(*cells, strict=True))
        matches.append(Match(workload, left, right, *cells, names))
    return tuple(matches)


def _name(base: Cell, candidate: Cell) -> str:
    if base.cell_id == candidate.cell_id:
        return base.cell_id
    return f"{base.configuration.config_id}~{candidate.configuration.config_id}-{base.load.load_id}"


def turns(matches: Sequence[Match], pair: int, seed: int) -> tuple[Turn, ...]:
    """The order of pair ``pair``, drawn from ``seed``: of the configurations, of the sides, and of the loads."""
    rng, drawn = random.Random(f"kvbench-pair/{seed}/{pair}"), []
    shuffled = list(matches)
    rng.shuffle(shuffled)
    for match in shuffled:
        first, order = rng.choice(SIDES), list(range(len(match.names)))
        rng.shuffle(order)
        drawn.append(Turn(pair, match, first, tuple(order)))
    return tuple(drawn)
