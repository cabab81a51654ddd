"""KV that must be moved before a step's writes: copies on write, swaps."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class MoveKind(enum.Enum):
    COPY = "copy"  # within the device
    SWAP_OUT = "swap_out"  # device -> host
    SWAP_IN = "swap_in"  # host -> device


class Move(NamedTuple):
    """``num_slots`` slots from slot ``source`` to slot ``target``, host slots numbered on their own."""

    kind: MoveKind
    source: int
    target: int
    num_slots: int


def batches(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Runs of one kind that may be done all at once, in the order of ``moves``, each of which is of one page.

    The managers plan as if each move were done on the spot, so the order is part of the meaning: a page that one move
    wrote may be read or written by a later one, which therefore begins a new batch.
    """
    batch: list[Move] = []
    targets: set[int] = set()
    for move in moves:
        clash = move.target in targets or (move.kind is MoveKind.COPY and move.source in targets)
        if batch and (clash or move.kind is not batch[0].kind):
            yield batch
            batch, targets = [], set()
        batch.append(move)
        targets.add(move.target)
    if batch:
        yield batch
