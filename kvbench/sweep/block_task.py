"""One block of a sweep on another machine: its server and loads run there, its results come back as they are made."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.calibration import calibrate
from kvbench.calibration.calibrate import Calibrator
from kvbench.common.errors import Interrupted, MeasurementError, UsageError, storage_sentence
from kvbench.common.files import pack, read_json, write_json
from kvbench.measure.http import HttpInstrument
from kvbench.measure.instrument import Job, Listener
from kvbench.requests.request import notes_path
from kvbench.runs.folder import RunFolder
from kvbench.runs.results import Capacity, FailedLoad, LoadResult, Manifest
from kvbench.runs.server_info import ServerInfo
from kvbench.sweep.block import BlockRunner
from kvbench.targets.base import ModelFacts, Target
from kvbench.targets.choose import choose
from kvbench.targets.options import TargetOptions
from kvbench.workload.design import Block, Cell
from kvbench.workload.file import Workload

_PREFIX = "kvbench-block-"
_NEW_S = 60.0  # a folder that is younger may not be locked yet
_LOOK_S = 0.2
_END_S = 10.0  # a load that is told to stop has ended and stopped its server


@dataclass(frozen=True)
class BlockTask:
    """The facts that a machine needs to run ``block``.

    ``workload``, ``options``, ``stored``: what ``choose`` makes the target of; ``served``: whether a server of this
    sweep has started before; ``keeps_cache``: as in BlockRunner; ``calibrations``: rows of calibration.json of the
    machine, None where the load client is not calibrated.
    """

    block: Block
    workload: Workload
    options: TargetOptions
    stored: Manifest
    capacity: Mapping[str, Capacity]
    served: bool
    keeps_cache: tuple[str, ...]
    calibrations: Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class StatusText:
    text: str


@dataclass(frozen=True)
class ServerUp:
    """A server with its /server_info and its facts of the model."""

    info: ServerInfo
    model: ModelFacts


@dataclass(frozen=True)
class LoadDone:
    """A finished load with its done.json. ``files``: a tar of its folder, with the requests that it sent."""

    cell: Cell
    done: LoadResult
    files: bytes


@dataclass(frozen=True)
class LoadFailed:
    cell: Cell
    failure: FailedLoad


@dataclass(frozen=True)
class BlockEnded:
    """The end of a block. ``started``: as ``run_block`` returns it; ``files``: a tar of logs and of failed loads.

    ``refused``: the sentence of a UsageError; ``problem``: of a MeasurementError, or of a full disk.
    """

    started: bool
    keeps_cache: tuple[str, ...]
    calibrations: Sequence[Mapping[str, Any]]
    files: bytes
    refused: str | None = None
    problem: str | None = None


Event = StatusText | ServerUp | LoadDone | LoadFailed | BlockEnded


def run_block_task(task: BlockTask) -> Iterator[Event]:
    """Runs the block in a temporary folder. When it is closed or interrupted, it ends the load and stops the server."""
    _remove_left_behind()
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder, RunFolder(Path(folder)).locked():
        work = _Work(task, RunFolder(Path(folder)))
        thread = threading.Thread(target=work.run, name="kvbench-block")
        yield StatusText("starting")  # the task runs
        thread.start()
        try:
            while thread.is_alive() or not work.events.empty():
                try:
                    yield work.events.get(timeout=_LOOK_S)
                except queue.Empty:
                    continue
            if work.error is not None:
                raise work.error
        finally:
            work.stop.set()
            thread.join(_END_S)
            if thread.is_alive():  # it waits for a server that starts
                work.kill_server()
                thread.join(_END_S)


def _remove_left_behind() -> None:
    """Removes the folders of blocks whose process was killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another task removes it
            if time.time() - path.stat().st_mtime > _NEW_S and not RunFolder(path).is_locked():
                shutil.rmtree(path, ignore_errors=True)


@dataclass
class _Work:
    """The block's run in a thread; what it tells of itself goes into ``events``."""

    task: BlockTask
    run_folder: RunFolder
    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    stop: threading.Event = field(default_factory=threading.Event)
    target: Target | None = None
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:  # raised again where the events are read
            self.error = error

    def kill_server(self) -> None:
        """Ends the wait for the server; the thread then stops what it has started."""
        pid = self.target.server().pid if self.target else None
        if pid is not None:
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)

    def _run(self) -> None:
        task, keeps_cache, failures = self.task, list(self.task.keeps_cache), []
        if task.calibrations:
            write_json(self.run_folder.path / calibrate.FILE, list(task.calibrations))
        started, refused, problem = False, None, None
        try:
            choice = choose(task.workload, task.options, task.stored)
            try:
                listener = _Listener(self.events.put, self.run_folder, failures)
                job = Job(
                    choice.workload,
                    self.run_folder,
                    lambda: self._new_target(choice.new_target),
                    listener,
                    self._check,
                    on_server=lambda block, info, target: self.events.put(ServerUp(info, target.model)),
                    capacity=task.capacity,
                    calibrate=Calibrator(
                        self.run_folder.path, task.calibrations is not None, listener.status, listener.status
                    ),
                )
                served = ["an earlier block"] if task.served else []
                runner = BlockRunner(HttpInstrument(job), failures, served, keeps_cache)
                started = runner.run_block(task.block)
            finally:
                choice.close()
        except UsageError as error:
            refused = str(error)
        except MeasurementError as error:
            problem = str(error)
        except OSError as error:
            if (problem := storage_sentence(error)) is None:
                raise
        calibration = self.run_folder.path / calibrate.FILE
        rows = read_json(calibration) if calibration.is_file() else []
        kept = [path for pattern in ("logs/*", "cells/*/loads/failed-*") for path in self.run_folder.path.glob(pattern)]
        files = pack(self.run_folder.path, kept)
        self.events.put(BlockEnded(started, tuple(keeps_cache), rows, files, refused, problem))

    def _check(self) -> None:
        if self.stop.is_set():
            raise Interrupted("SIGTERM")

    def _new_target(self, make: Callable[[], Target]) -> Target:
        self._check()
        self.target = make()
        return self.target


@dataclass
class _Listener(Listener):
    """Passes on what the sweep's display and folder need."""

    put: Callable[[Event], None]
    run: RunFolder
    failures: Sequence[FailedLoad]

    def load_started(self, cell: Cell, repeat: int, total: int) -> None:
        self.status(f"{cell.cell_id} repeat {repeat}")

    def load_finished(self, cell: Cell, repeat: int, done: LoadResult) -> None:
        folder = self.run.load(cell.cell_id, repeat)
        requests = self.run.path / str(done.requests_file)
        paths = [folder, requests, notes_path(requests)] if folder.is_dir() else []  # none on a full disk
        self.put(LoadDone(cell, done, pack(self.run.path, paths)))

    def load_failed(self, cell: Cell, repeat: int, reason: str) -> None:
        self.put(LoadFailed(cell, self.failures[-1]))

    def status(self, text: str) -> None:
        self.put(StatusText(text))
