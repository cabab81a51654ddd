"""One block: a fresh engine of one configuration, warmed up, and its loads one after another.

Blocks run here, one after another; ``RayMachines`` (kvbench/ray) run them elsewhere, several at a time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.measure.instrument import Instrument
from kvbench.metrics.model import LoadMetrics, failed_words
from kvbench.runs.manifest import StoredManifest
from kvbench.runs.results import Environment, FailedLoad
from kvbench.targets.builtin import ServerRefusedError
from kvbench.workload.design import Block, Cell


class Unanswered(NamedTuple):
    """The reason why no request of a load succeeded. ``rejected``: all answers were errors that blame the request."""

    reason: str
    rejected: bool = False


def why_unanswered(metrics: LoadMetrics) -> Unanswered | None:
    """Returns why no request of a load succeeded; None where one did."""
    if metrics.completed:
        return None
    reason = failed_words(metrics.failure_messages, metrics.failed, metrics.failed, True)
    return Unanswered(reason, 0 < metrics.failed == metrics.rejected_by_server)


@dataclass(frozen=True)
class BlockRunner:
    """Runs blocks with one instrument, into the run folder of its job.

    ``on_sent``: called with the cell of each load that was sent, and why none of its requests succeeded; may raise to
    end the sweep. Noted on the way: ``failures``; ``served``: blocks whose engine was up; ``keeps_cache``:
    configurations that need a new engine for each load, since nothing else empties their prefix cache.
    """

    instrument: Instrument
    failures: list[FailedLoad] = field(default_factory=list)
    served: list[str] = field(default_factory=list)
    keeps_cache: list[str] = field(default_factory=list)
    on_sent: Callable[[Cell, Unanswered | None], None] = lambda cell, unanswered: None

    def run_block(self, block: Block) -> bool:
        """Runs every load of ``block`` that is not done yet. A load that fails is recorded, and the next one tried.

        False when the engine could not be started. Raises ServerRefusedError when it does not take its settings.
        """
        config_id, repeat, folder = block.configuration.config_id, block.repeat, self.instrument.job.folder
        if not block.alone and config_id in self.keeps_cache:
            return self._run_apart(block)
        cells = [cell for cell in block.cells if not folder.is_done(cell.cell_id, repeat)]
        try:
            if not self._bring_up(block, cells):
                return False
            for position, cell in enumerate(cells):
                if position == 1 and self.instrument.needs_new_engine():
                    self.keeps_cache.append(config_id)
                    break
                self._measure(cell, repeat)
        finally:
            self.instrument.close()
        if not block.alone and config_id in self.keeps_cache:
            self._run_apart(dataclasses.replace(block, cells=tuple(cells[1:])))
        return True

    def _run_apart(self, block: Block) -> bool:
        started = [self.run_block(part) for part in block.split()]
        return any(started)

    def _bring_up(self, block: Block, cells: Sequence[Cell]) -> bool:
        """Starts and warms up the engine. Where that fails, so do all ``cells``; False then."""
        listener, label = self.instrument.job.listener, block.configuration.label
        try:
            listener.status(f"starting the server of {label} (repeat {block.repeat})")
            self._open(block)
            listener.status(f"warming up {label}")
            self.instrument.warm_up(block, max((c.load for c in cells), key=lambda load: load.concurrency or 0))
        except MeasurementError as error:
            reason = self.instrument.reason_of(error)
            for cell in cells:
                self.fail(cell, block.repeat, reason, of_server=True)
            return False
        return True

    def _open(self, block: Block) -> None:
        """Opens the engine. A UsageError fails this block only, where an engine has started before."""
        try:
            self.instrument.open(block)
        except ServerRefusedError:
            raise
        except UsageError as error:
            if not self.served:
                raise
            raise MeasurementError(str(error)) from None
        self.served.append(block.block_id)

    def _measure(self, cell: Cell, repeat: int) -> None:
        try:
            result = self.instrument.measure(cell, repeat)
        except MeasurementError as error:
            reason, gone = self.instrument.reason_of(error), self.instrument.is_gone()
            self.fail(cell, repeat, reason, of_server=gone, unanswered=error.answered == 0 and not gone)
        else:
            self.on_sent(cell, why_unanswered(result.metrics))

    def fail(self, cell: Cell, repeat: int, reason: str, *, of_server: bool, unanswered: bool = False) -> None:
        """Records a load without a result."""
        failed = FailedLoad(
            cell_id=cell.cell_id, repeat=repeat, reason=reason, of_server=of_server, unanswered=unanswered
        )
        self.failures.append(failed)
        self.instrument.job.listener.load_failed(cell, repeat, reason)
        if unanswered:
            self.on_sent(cell, Unanswered(reason))


@dataclass(frozen=True)
class Finished:
    """A block that has run. ``started``: whether its server was up; ``seconds``: what it took."""

    block: Block
    started: bool
    seconds: float


class ThisMachine:
    """Runs each block in this process. ``at_once``: blocks that may run at the same time.

    ``environment``: of other machines; None: it is this one's. ``is_like_here``: whether this one is and runs the same.
    ``resume_options``: of the command line, for --resume.
    """

    at_once: int = 1
    is_here: bool = True
    is_like_here: bool = True
    environment: Environment | None = None
    resume_options: Sequence[str] = ()
    notes: Sequence[str] = ()

    def begin(self, runner: BlockRunner, manifest: StoredManifest) -> None:
        """Sets the ``runner`` of the blocks; ``manifest`` may keep which machine ran which load."""
        self.runner = runner
        self._next: Block | None = None

    def next_block(self, left: Sequence[Block]) -> Block | None:
        """The first of the blocks that are ``left`` that can begin now; None: none."""
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
