"""One block: a fresh server of one configuration, warmed up, and its loads one after another."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvbench.calibration.cache import ClientLoad
from kvbench.calibration.calibrate import Calibration
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.files import write_json
from kvbench.common.text import failed_words
from kvbench.load import launch
from kvbench.measure.load import LoadSetup, UnstoredError, measure_load
from kvbench.measure.server_state import with_server_defaults
from kvbench.measure.warm_up import warm_up
from kvbench.requests.request import RequestSpec, store_requests
from kvbench.runs.folder import DONE, RunFolder
from kvbench.targets.base import Target, contradiction, reason_of
from kvbench.targets.builtin import ServerRefusedError
from kvbench.targets.prometheus import POLL_INTERVAL_S, MetricsSample, OnReading
from kvbench.workload.design import Block, Cell, LoadPoint
from kvbench.workload.file import Workload

_GUESS_TOKENS_PER_S = {"cpu": 400.0, "gpu": 4000.0}  # until the first load is measured


class Listener(Protocol):
    """A progress display, called as the sweep goes on."""

    def load_started(self, cell: Cell, repeat: int, total: int) -> None: ...

    def load_progress(self, done: int, total: int, failed: int, elapsed_s: float) -> None: ...

    def server_read(self, sample: MetricsSample) -> None: ...

    def load_finished(self, cell: Cell, repeat: int, done: Mapping[str, Any]) -> None: ...

    def load_failed(self, cell: Cell, repeat: int, reason: str) -> None: ...

    def status(self, text: str) -> None: ...


class Driver(Protocol):
    """What drives the loads of a block: over HTTP, or on a simulated engine."""

    times_this_machine: bool
    """whether a load's times depend on what else this machine does"""

    def guess_s(self, point: LoadPoint, requests: Sequence[RequestSpec], profile: str) -> float:
        """Seconds that a load of ``requests`` takes, until one is measured."""
        ...

    def warm_up(self, setup: LoadSetup, point: LoadPoint) -> Mapping[str, Any]:
        """Before the first load on a server; what done.json says of it. Raises MeasurementError."""
        ...

    def measure(
        self,
        setup: LoadSetup,
        point: LoadPoint,
        requests: list[Any],
        requests_file: Path,
        out: Path,
        *,
        first: bool,
        on_progress: launch.Progress,
        on_reading: OnReading,
    ) -> dict[str, Any]:
        """As ``measure_load``: writes the load's files into ``out``; what done.json says of it."""
        ...


class HttpDriver:
    """Sends the loads of a server in a client process, over HTTP."""

    times_this_machine = True

    def guess_s(self, point: LoadPoint, requests: Sequence[RequestSpec], profile: str) -> float:
        rate = _GUESS_TOKENS_PER_S.get(profile, _GUESS_TOKENS_PER_S["cpu"])
        work = sum(r.width * r.max_tokens for r in requests) / (rate * min(1.0, (point.concurrency or 8) / 4))
        return max(work, max((r.arrival_s or 0.0 for r in requests), default=0.0)) + 3.0

    def warm_up(self, setup: LoadSetup, point: LoadPoint) -> Mapping[str, Any]:
        return warm_up(setup, point).to_json()

    def measure(self, *args: Any, **options: Any) -> dict[str, Any]:
        return measure_load(*args, **options)


HTTP = HttpDriver()


@dataclass(frozen=True)
class Failure:
    """A load without a result; --resume runs it again.

    ``of_server``: its server did not start, or died; ``unanswered``: it was sent to one that lives, in vain.
    """

    cell_id: str
    repeat: int
    reason: str
    of_server: bool = False
    unanswered: bool = False


class Unanswered(NamedTuple):
    """The reason why no request of a load succeeded. ``rejected``: all were answered with errors that blame them."""

    reason: str
    rejected: bool = False


def why_unanswered(metrics: Mapping[str, Any]) -> Unanswered | None:
    """Returns why no request of a load succeeded; None where one did."""
    if metrics.get("completed"):
        return None
    failed = metrics.get("failed") or 0
    reason = failed_words(metrics.get("failure_messages") or {}, failed, failed, True)
    return Unanswered(reason, failed > 0 and metrics.get("rejected_by_server") == failed)


@dataclass(frozen=True)
class BlockRunner:
    """Runs blocks of one workload into one run folder.

    ``on_server``: called with the block, /server_info and target of each server that is up; may refuse it with a
    UsageError. ``capacity``: known before a launch, by configuration; ``driver``: drives the loads; ``poll_s``: between
    two readings of /metrics; ``on_sent``: called with the cell of each load that was sent, and why none of its requests
    succeeded; may raise to end the sweep.
    Noted on the way: ``failures``; ``served``: blocks whose server was up; ``keeps_cache``: configurations whose prefix
    cache only a new server empties.
    """

    workload: Workload
    run: RunFolder
    new_target: Callable[[], Target]
    listener: Listener
    on_server: Callable[[Block, Mapping[str, Any] | None, Target], None]
    check_interrupt: Callable[[], None]
    failures: list[Failure] = field(default_factory=list)
    served: list[str] = field(default_factory=list)
    calibrate: Callable[[ClientLoad, Calibration | None], Calibration | None] | None = None
    capacity: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    driver: Driver = HTTP
    poll_s: float = POLL_INTERVAL_S
    keeps_cache: list[str] = field(default_factory=list)
    on_sent: Callable[[Cell, Unanswered | None], None] = lambda cell, unanswered: None

    def run_block(self, block: Block) -> bool:
        """Every load of ``block`` that is not done yet. A load that fails is recorded, and the next one tried.

        A server that turns out to have no way to empty its prefix cache is launched anew for each load that needs it
        so. False when the server could not be started. Raises ServerRefusedError when it does not take its settings.
        """
        config_id, repeat = block.configuration.config_id, block.repeat
        if not block.alone and config_id in self.keeps_cache:
            return self._run_apart(block)
        todo = [cell for cell in block.cells if not self.run.is_done(cell.cell_id, repeat)]
        target = self.new_target()
        try:
            if (up := self.bring_up(target, block, todo)) is None:
                return False
            setup, facts = up
            for position, cell in enumerate(todo):
                if position == 1 and self.cache_stays(target):
                    self.keeps_cache.append(config_id)
                    break
                try:
                    self._run_load(setup, cell, repeat, facts, first=position == 0)
                except MeasurementError as error:
                    reason, gone = reason_of(target, error), is_gone(target)
                    self.fail(cell, repeat, reason, of_server=gone, unanswered=error.answered == 0 and not gone)
        finally:
            target.stop()
        if not block.alone and config_id in self.keeps_cache:
            self._run_apart(dataclasses.replace(block, cells=tuple(todo[1:])))
        return True

    def _run_apart(self, block: Block) -> bool:
        started = [self.run_block(part) for part in block.split()]
        return any(started)

    def bring_up(self, target: Target, block: Block, cells: Sequence[Cell]) -> tuple[LoadSetup, dict[str, Any]] | None:
        """Starts the server and warms it up; what done.json says of both. None where it failed, and so all ``cells``.

        Raises ServerRefusedError.
        """
        started = time.monotonic()
        try:
            setup = self._start(target, block)
            start_s = time.monotonic() - started
            self.listener.status(f"warming up {block.configuration.label}")
            point = max((cell.load for cell in cells), key=lambda load: load.concurrency or 0)
            notes_before = len(target.notes)
            warm = self.driver.warm_up(setup, point)
            if len(target.notes) > notes_before:  # it takes no token ids
                self.on_server(block, target.server_info(), target)
        except MeasurementError as error:
            reason = reason_of(target, error) if block.block_id in self.served else str(error)
            for cell in cells:
                self.fail(cell, block.repeat, reason, of_server=True)
            return None
        return setup, {"server_start_s": start_s, "warm_up": dict(warm)}

    def _start(self, target: Target, block: Block) -> LoadSetup:
        """Starts the server. Where an earlier one has started, a UsageError fails this block only."""
        configuration, log = block.configuration, self.run.server_log(block.block_id)
        self.listener.status(f"starting the server of {configuration.label} (repeat {block.repeat})")
        target.check = self.check_interrupt
        try:
            target.start(configuration.settings, log)
        except ServerRefusedError:
            raise
        except UsageError as error:
            if not self.served:
                raise
            raise MeasurementError(str(error)) from None
        self.served.append(block.block_id)
        load, seed = with_server_defaults(self.workload.load, target), self.workload.seed
        info = target.server_info()
        if wrong := contradiction(configuration.settings, self.capacity.get(configuration.config_id, {}), info):
            raise MeasurementError(f"the server of {configuration.label} has other settings: {wrong}")
        self.on_server(block, info, target)
        self.check_interrupt()

        def check() -> None:
            self.check_interrupt()
            target.check_alive()

        more = {"calibrate": self.calibrate, "poll_s": self.poll_s}
        return LoadSetup(load, seed, target, configuration.settings, info, log, check, **more)

    def cache_stays(self, target: Target) -> bool:
        """Whether the next load needs an empty prefix cache, and only another server of ours has one."""
        if not target.starts_cold or self.workload.load.cache_state == "steady":
            return False
        try:
            return target.reset_prefix_cache() is None
        except MeasurementError:
            return False  # the load itself will say why

    def fail(self, cell: Cell, repeat: int, reason: str, *, of_server: bool, unanswered: bool = False) -> None:
        """Records a load without a result."""
        self.failures.append(Failure(cell.cell_id, repeat, reason, of_server, unanswered))
        self.listener.load_failed(cell, repeat, reason)
        if unanswered:
            self.on_sent(cell, Unanswered(reason))

    def _run_load(self, setup: LoadSetup, cell: Cell, repeat: int, facts: Mapping[str, Any], *, first: bool) -> None:
        """From the idle server to done.json. Raises MeasurementError when it could not be driven to its end."""
        setup.check()
        requests, path, drawn = self.draw(setup, cell, repeat)
        self.listener.load_started(cell, repeat, len(requests))
        done: dict[str, Any] = {}
        try:
            with self.run.scratch_load(cell.cell_id, repeat) as out:
                measured = self.driver.measure(
                    setup, cell.load, requests, path, out, first=first,
                    on_progress=self.listener.load_progress, on_reading=self.listener.server_read,
                )  # fmt: skip
                done = {**drawn, **facts, **measured}
                write_json(out / DONE, done)
        except OSError as error:  # a full disk: what was measured is told at least
            if done := done or (dict(error.result) if isinstance(error, UnstoredError) else {}):
                self.listener.load_finished(cell, repeat, done)
            raise
        self.listener.load_finished(cell, repeat, done)
        self.on_sent(cell, why_unanswered(done["metrics"]))

    def draw(self, setup: LoadSetup, cell: Cell, repeat: int) -> tuple[list[Any], Path, dict[str, Any]]:
        """The requests of a load, the file that they are stored in, and what done.json says of both."""
        requests = setup.requests(cell.load, repeat)
        path, digest = store_requests(requests, self.run.path / "requests", f"{cell.load.load_id}-{repeat}")
        facts = {"cell_id": cell.cell_id, "repeat": repeat, "requests_file": str(path.relative_to(self.run.path))}
        return requests, path, facts | {"requests_sha256": digest}


def is_gone(target: Target) -> bool:
    """Whether a launched server has ended."""
    try:
        target.check_alive()
    except MeasurementError:
        return True
    return False
