"""Where the blocks of a sweep run: here, one after the other, or on other machines, several at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvbench.sweep.block import BlockRunner
from kvbench.workload.design import Block


@dataclass(frozen=True)
class Finished:
    """A block that has run. ``started``: whether its server was up; ``seconds``: what it took."""

    block: Block
    started: bool
    seconds: float


class BlockExecutor(Protocol):
    """Runs the blocks that a sweep decides on."""

    def has_room(self) -> bool:
        """Whether a further block can begin now."""
        ...

    def begin(self, left: Sequence[Block]) -> Block | None:
        """Which of the blocks that are left, in their order, begins next; None where all of them run."""
        ...

    def submit(self, block: Block) -> None:
        """Begins ``block``."""
        ...

    def next_finished(self) -> Finished | None:
        """Waits for the end of a block, None where none runs any more. Raises what ``run_block`` does."""
        ...

    def close(self) -> None:
        """Ends what still runs."""
        ...


class HereExecutor:
    """Runs each block in this process."""

    def __init__(self, runner: BlockRunner) -> None:
        self.runner = runner
        self._next: Block | None = None

    def has_room(self) -> bool:
        return self._next is None

    def begin(self, left: Sequence[Block]) -> Block | None:
        return left[0] if left else None

    def submit(self, block: Block) -> None:
        self._next = block

    def next_finished(self) -> Finished | None:
        if self._next is None:
            return None
        block, self._next, began = self._next, None, time.monotonic()
        return Finished(block, self.runner.run_block(block), time.monotonic() - began)

    def close(self) -> None:
        pass


class Elsewhere(Protocol):
    """Machines that run the blocks of a sweep in the place of this one."""

    at_once: int
    """blocks that may run at the same time"""
    environment: dict[str, Any]
    """as ``machine.environment()``: what all of these machines are and run"""
    is_like_here: bool
    """whether this machine is and runs the same"""
    resume_options: Sequence[str]
    """of the command line, for --resume"""
    notes: Sequence[str]

    def executor(self, runner: BlockRunner, manifest: dict[str, Any]) -> BlockExecutor:
        """Runs the blocks of ``runner``; keeps in ``manifest`` which machine ran which load."""
        ...
