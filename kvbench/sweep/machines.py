"""Where the blocks of a sweep run: here, one after another; ``RayMachines`` run them elsewhere, several at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.runs.manifest import StoredManifest
from kvbench.runs.results import Environment
from kvbench.sweep.block import BlockRunner
from kvbench.workload.design import Block


@dataclass(frozen=True)
class Finished:
    """A block that has run. ``started``: whether its server was up; ``seconds``: what it took."""

    block: Block
    started: bool
    seconds: float


class ThisMachine:
    """Runs each block in this process.

    ``at_once``: blocks that may run at the same time. ``environment``: of other machines; None: it is this one's.
    ``is_like_here``: whether this machine is and runs the same. ``resume_options``: of the
    command line, for --resume.
    """

    at_once: int = 1
    is_here: bool = True
    is_like_here: bool = True
    environment: Environment | None = None
    resume_options: Sequence[str] = ()
    notes: Sequence[str] = ()

    def begin(self, runner: BlockRunner, manifest: StoredManifest) -> None:
        """The blocks of ``runner`` follow; ``manifest`` may keep which machine ran which load."""
        self.runner = runner
        self._next: Block | None = None

    def next_block(self, left: Sequence[Block]) -> Block | None:
        """Which of the blocks that are ``left``, in their order, can begin now; None: none."""
        return left[0] if left and self._next is None else None

    def submit(self, block: Block) -> None:
        """Begins ``block``."""
        self._next = block

    def next_finished(self) -> Finished | None:
        """Waits for the end of a block, None where none runs any more. Raises what ``run_block`` does."""
        if self._next is None:
            return None
        block, self._next, began = self._next, None, time.monotonic()
        return Finished(block, self.runner.run_block(block), time.monotonic() - began)

    def close(self) -> None:
        """Ends what still runs."""
