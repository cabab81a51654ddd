"""The way a load is run. Every load begins in ``Instrument.measure``, which stores its result in the run's folder.

A new clock or backend is one subclass with ``run``. Those that ship: ``HttpInstrument`` (kvbench/measure/http.py),
``SteppedInstrument`` (kvbench/lockstep/instrument.py), ``SimulatedInstrument`` (kvbench/simulation/instrument.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from kvbench.calibration.calibrate import ClientCalibration, ClientLoad
from kvbench.common.errors import MeasurementError
from kvbench.common.records import write_record
from kvbench.metrics.definitions import SERVED
from kvbench.requests.request import RequestSpec
from kvbench.runs.folder import DONE, RunFolder
from kvbench.runs.results import Capacity, LoadResult
from kvbench.runs.server_info import ServerInfo
from kvbench.targets.base import Target
from kvbench.targets.prometheus import POLL_INTERVAL_S, MetricsSample
from kvbench.workload.design import Block, Cell, LoadPoint
from kvbench.workload.file import Workload
from kvbench.workload.load_section import LoadConfig

Calibrate = Callable[[ClientLoad, ClientCalibration | None], ClientCalibration | None]


class Listener:
    """A display, which is told what is being measured. Each method may be left out."""

    def status(self, text: str) -> None:
        """Notes that something else than a load is being done."""

    def load_started(self, cell: Cell, repeat: int, total: int) -> None: ...

    def load_phase(self, phase: str) -> None:
        """A ``phase`` begins: PREPARE, "begin", DRAIN (all is sent) or "measured" (all is answered)."""

    def load_progress(self, done: int, total: int, failed: int, elapsed_s: float) -> None: ...

    def server_read(self, sample: MetricsSample) -> None:
        """A reading of the server's /metrics, which the measurement takes anyway."""

    def load_finished(self, cell: Cell, repeat: int, done: LoadResult) -> None: ...

    def load_failed(self, cell: Cell, repeat: int, reason: str) -> None: ...


@dataclass(frozen=True)
class Clients:
    """The processes that send a load. ``spec``: fields of LoadSpec; ``arguments``: arguments of the load process.

    ``workers``: how many other machines send it; None: this machine sends it.
    """

    spec: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    workers: int | None = None

    @property
    def facts(self) -> dict[str, int | None]:
        """The field ``sharing`` of a manifest: processes here (None: as the workload says), or workers elsewhere."""
        return {"processes": self.spec.get("processes"), "workers": self.workers}


@dataclass
class Job:
    """The measurement that a command wants, and the listeners to it.

    ``folder``: where results go. ``new_target``: makes the target of a server. ``check``: called often; raises when the
    measurement must end. ``on_server``: called with the block, /server_info and target of each server that is up; may
    refuse it with a UsageError. ``capacity``: known before a launch, by configuration. ``calibrate``: gives the
    calibration of the load client for a load, given the one from before the load; None: nobody calibrates.
    ``poll_s``: between two readings of /metrics. ``failures_invalidate`` False: failed requests, and /metrics that do
    not answer, are a result (an overloaded server) and no fault of the measurement.
    """

    workload: Workload
    folder: RunFolder
    new_target: Callable[[], Target] = Target
    listener: Listener = field(default_factory=Listener)
    check: Callable[[], None] = lambda: None
    on_server: Callable[[Block, ServerInfo, Target], None] = lambda block, info, target: None
    capacity: Mapping[str, Capacity] = field(default_factory=dict)
    calibrate: Calibrate | None = None
    poll_s: float = POLL_INTERVAL_S
    clients: Clients = Clients()
    failures_invalidate: bool = True


class UnstoredError(OSError):
    """A failure to write the ``result`` of a load."""

    def __init__(self, error: OSError, result: LoadResult) -> None:
        super().__init__(error.errno, error.strerror, error.filename)
        self.result = result


class Instrument:
    """Measures loads, one after another, on an engine that it opens for each block.

    ``clock``: of its times (SERVED, ENGINE or SIMULATED). ``disturbed_by_machine``: whether other programs on this
    machine disturb its loads.
    """

    clock: ClassVar[str] = SERVED
    disturbed_by_machine: ClassVar[bool] = True

    def __init__(self, job: Job) -> None:
        self.job = job

    @classmethod
    def why_not(cls, load: LoadConfig, requests: Sequence[RequestSpec]) -> str | None:
        """Returns why it cannot measure this load, None if it can."""
        return None

    @classmethod
    def guess_s(cls, point: LoadPoint, requests: Sequence[RequestSpec], profile: str) -> float:
        """Seconds that a load of ``requests`` takes, until one is measured."""
        return 1.0

    def open(self, block: Block) -> None:
        """Brings up the engine of the block's configuration. Raises UsageError or MeasurementError."""

    def warm_up(self, block: Block, point: LoadPoint) -> None:
        """Warms the engine up before its first load. Raises MeasurementError."""

    def close(self) -> None:
        """Ends what ``open`` brought up."""

    def needs_new_engine(self) -> bool:
        """Tests whether the next load needs an engine that was opened anew."""
        return False

    def is_gone(self) -> bool:
        """Tests whether the engine has ended by itself."""
        return False

    def reason_of(self, error: MeasurementError) -> str:
        """Tells why a load failed."""
        return str(error)

    def measure(self, cell: Cell, repeat: int) -> LoadResult:
        """One load: its files and done.json in the run's folder.

        Raises MeasurementError where it could not be driven to its end, OSError where its result cannot be stored;
        the listener is told that result all the same.
        """
        self.job.check()
        result = None
        identity = {"cell_id": cell.cell_id, "repeat": repeat}
        try:
            with self.job.folder.scratch_load(cell.cell_id, repeat) as out:
                result = self.run(cell, repeat, out).model_copy(update=identity)
                if result.clock != self.clock:
                    raise MeasurementError(f"its times are of the clock {result.clock!r}, and not {self.clock!r}")
                write_record(out / DONE, result)
        except OSError as error:
            result = error.result.model_copy(update=identity) if isinstance(error, UnstoredError) else result
            if result is not None:
                self.job.listener.load_finished(cell, repeat, result)
            raise
        self.job.listener.load_finished(cell, repeat, result)
        return result

    def run(self, cell: Cell, repeat: int, out: Path) -> LoadResult:
        """Runs the load and writes its files into ``out``: requests.parquet, load.json, counters.json."""
        raise NotImplementedError
