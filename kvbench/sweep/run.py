"""A sweep from a resolved workload to a results folder: plan, run, resume, finish."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from kvbench.calibration.calibrate import Calibrator
from kvbench.common import foreign_cpu
from kvbench.common.console import print_plain
from kvbench.common.errors import (
    EXIT_INTERRUPTED,
    EXIT_INVALID,
    EXIT_OK,
    EXIT_REGRESSION,
    MeasurementError,
    UsageError,
    log_traceback,
)
from kvbench.common.files import check_output_dir, utc_now
from kvbench.common.git import git_state
from kvbench.common.secrets import without_value
from kvbench.common.text import and_more, clock, plural
from kvbench.lockstep.process import OPEN_LIMIT_S
from kvbench.lockstep.sitting import Sitting, begin_anew
from kvbench.measure.http import HttpInstrument
from kvbench.measure.instrument import Instrument, Job
from kvbench.measure.words import repeat_notes
from kvbench.metrics.canaries import WRONG_ANSWERS
from kvbench.runs.aggregate import aggregate_cell
from kvbench.runs.engine_time import EFFECTS, FOLDER, EngineTime, read_engine_time
from kvbench.runs.folder import RunFolder, create_run
from kvbench.runs.manifest import (
    StoredManifest,
    accept_server,
    new_manifest,
    reopen,
    require_same_workload,
    with_server,
)
from kvbench.runs.quality import read_quality
from kvbench.runs.results import COMPLETE, INCOMPLETE, Capacity, CellSummary, FailedLoad, LoadResult, Manifest, SetAside
from kvbench.runs.server_info import ServerInfo
from kvbench.runs.work import FolderWork, kept, work_in
from kvbench.sweep.block import BlockRunner, ThisMachine, Unanswered, why_unanswered
from kvbench.sweep.order import Measured, blocks_in_time, blocks_left
from kvbench.sweep.plan import describe_plan, memory_notes, preflight
from kvbench.sweep.progress import Estimator, SweepProgress, so_far
from kvbench.targets.base import Target
from kvbench.targets.choose import ChosenTarget
from kvbench.workload.design import Block, Cell, design_of
from kvbench.workload.file import Workload, portable
from kvbench.workload.load_section import LoadConfig

MAX_FAILED_STARTS = 2  # in a row from the beginning: the third would fail too
LOCKSTEP_MINUTES = 3.0
FOREIGN_LOCKSTEP_MINUTES = 6.0  # engines of other projects, which start one process each
WAIT_IDLE_MINUTES = 2.0
DISTURBED_IN_A_ROW = 2  # loads: then a sweep waits for a quiet machine; as many again, and it ends


@dataclass
class Sweep:
    """One execution of a sweep in one folder.

    ``only``: patterns of cell ids; ``report``: writes and shows the report of a finished run; ``quality``: measures
    what its configurations change in answers, before the report, None: it is not measured; ``calibrate``: the load
    client, before its first load; ``resumed``: the folder of a run to go on with; ``force``: although something
    differs; ``max_minutes``: for repeats beyond the first, None: as the run was begun, or as the workload says;
    ``lockstep_minutes``: at most for engine time, which is measured before the loads (0: it is not), None: as the run
    was begun, or a few minutes; ``open_limit_s``: until an engine of it is there;
    ``wait_idle_minutes``: at most for other programs to leave the machine alone, once they disturb loads (0: never);
    ``instrument``: measures the loads; ``machines``: run the blocks.
    """

    target: ChosenTarget
    console: Console
    only: tuple[str, ...] = ()
    output_dir: Path = Path("results")
    report: Callable[[Path, Console], None] | None = None
    quality: Callable[[Path, Console], None] | None = None
    calibrate: bool = True
    resumed: RunFolder | None = None
    force: bool = False
    max_minutes: float | None = None
    lockstep_minutes: float | None = None
    open_limit_s: float = OPEN_LIMIT_S
    wait_idle_minutes: float = WAIT_IDLE_MINUTES
    instrument: type[Instrument] = HttpInstrument
    machines: ThisMachine = field(default_factory=ThisMachine)
    ended_early: str = field(default="", init=False)  # why
    failures: list[FailedLoad] = field(default_factory=list, init=False)
    summaries: list[CellSummary] = field(default_factory=list, init=False)

    @property
    def workload(self) -> Workload:
        """The workload as it runs on the target."""
        return self.target.workload

    def __post_init__(self) -> None:
        begun = self.begun = self.resumed.manifest() if self.resumed else None
        if self.lockstep_minutes is None:
            stored = begun.lockstep_minutes if begun else None
            usual = LOCKSTEP_MINUTES if self.target.manifest.is_built_in else FOREIGN_LOCKSTEP_MINUTES
            self.lockstep_minutes = usual if stored is None else stored
        if self.max_minutes is None:
            self.max_minutes = begun.max_minutes if begun else self.workload.max_minutes
        self._spent_s = (begun.measured_s or 0.0) if begun else 0.0

    def _plan(self) -> None:
        """Settles cells, blocks and what is known of them, after every check before a launch. Raises UsageError."""
        check_output_dir(self.resumed.path if self.resumed else self.output_dir)
        if self.resumed:  # before its cells are looked for in a workload that may not have them
            require_same_workload(self.resumed.path, self.begun, self.workload)
        self.engine_time: EngineTime | None = None
        if self.resumed:
            with contextlib.suppress(UsageError):  # a damaged file: it is measured anew
                self.engine_time = read_engine_time(self.resumed.path)
        self.design, self.blocks = self.target.plan(self.only)
        self.known = preflight(self.workload, self.design, self.target.check, self.instrument)
        self.measured, self.estimator = Measured({}), Estimator(self.known.seconds, self.target.start_guess_s)
        for block in self.blocks if self.resumed else ():
            self.measured.read(self.resumed, block)
            for cell in block.cells:
                if done := self.measured.done.get((cell.cell_id, block.repeat)):
                    self.estimator.observe(cell, done.wall_s, done.server_start_s)

    def _left(self, spent_s: float) -> list[Block]:
        """The blocks that are still to be measured, as far as --max-minutes allows after ``spent_s``."""
        if self.max_minutes is None:
            return blocks_left(self.blocks, self.measured)
        time_left_s = (self.max_minutes * 60 - spent_s) * self.machines.at_once
        seconds = lambda block: self.estimator.total_s([block])  # noqa: E731
        return blocks_in_time(self.design, self.blocks, self.measured, time_left_s, seconds)

    def describe(self) -> int:
        """Prints what ``execute`` would run, after the same checks; writes and launches nothing. Raises UsageError."""
        self._plan()
        first_s = 60 * self.lockstep_minutes if self._has_engine_time() else 0.0
        left = self._left(self._spent_s + first_s)
        if self.resumed:
            self._reopen(something_left=bool(left))
            self._say_what_is_finished()
            if not left:
                what = "its quality, and nothing else," if self._lacks_quality(self.resumed, self.begun) else "nothing"
                self._say(f"{what} is left to run")
                return EXIT_OK
        seconds = first_s + self.estimator.total_s(left) / self.machines.at_once
        describe_plan(self.workload, self.design, left, seconds, self.console, self.target.start_guess_s)
        self._say_what_is_known()
        if first_s:
            self._note(f"{self.lockstep_minutes:g} minutes of it are engine time, before the loads "
                       "(--lockstep-minutes); on a slow machine up to three times that")  # fmt: skip
        if self._lacks_quality(self.resumed, self.begun):
            configurations = plural(len(self.design.configurations), "configuration")
            self._note(f"then the answers of {configurations} are measured, nine in a "
                       "minute with kvbench-tiny on 2 cores (--no-quality)")  # fmt: skip
        if self.max_minutes is not None:
            self._note(f"within --max-minutes {self.max_minutes:g}, by the estimate; the first repeats decide "
                       "which others follow")  # fmt: skip
        return EXIT_OK

    def execute(self) -> int:
        """Runs what is not done; the exit code. Raises UsageError before anything is launched."""
        self._plan()
        for note in self.design.notes:
            self._note(note)
        self._say_what_is_known()
        if not self.resumed and self._times_this_machine() and (notice := foreign_cpu.busy_notice()):
            self._note(notice)
        run = self.run = self.resumed or create_run(self.output_dir, self.workload.name, git_state()["short_sha"])
        command = ["kvbench", "sweep", "--resume", os.path.relpath(run.path), *self.machines.resume_options]
        self.resume = shlex.join(command)
        try:
            with work_in(run.path, kept(self.resume), self._say) as work:
                complete = self._measure(work)
                self._measure_quality(work)
                return self._conclude(complete)
        except UsageError:
            if not self.resumed and run.remove_unmeasured():
                self._say(f"removed: {run.path}, since nothing was measured")
            raise
        self._report_so_far()
        return EXIT_INTERRUPTED

    def _report_so_far(self) -> None:
        """Reports what an interrupted run has decided, if that is anything. A failure costs nothing."""
        has_effects = (self.run.path / FOLDER / EFFECTS).is_file()
        has_loads = any(self.run.done_repeats(cell.cell_id) for cell in self.design.cells)
        if not self.report or not (has_effects or has_loads):
            return
        try:
            self.report(self.run.path, self.console)
        except Exception as error:
            self._note(f"there is no report yet ({error}); see `{self._report}`")

    def _measure(self, work: FolderWork) -> bool:
        """Measures what is left; returns whether every planned load is measured."""
        self._began = time.monotonic() - self._spent_s
        left = self._left(self._spent_s)
        manifest = self._reopen(something_left=bool(left)) if self.resumed else self._new_manifest()
        self.stored = StoredManifest(self.run.path, manifest)
        self.stored.replace(
            max_minutes=self.max_minutes, lockstep_minutes=self.lockstep_minutes, set_aside=manifest.set_aside
        )
        work.close = lambda: self._close(INCOMPLETE)
        self._say(f"results: {self.run.path}")
        if self.resumed:
            self._say_what_is_finished()
        grows, at_once = self.max_minutes is not None, self.machines.at_once
        with SweepProgress(self.console, left, self.estimator, grows=grows, at_once=at_once) as listener:
            job = Job(
                self.workload,
                self.run,
                self.target.new_target,
                listener,
                work.check,
                on_server=self._on_server,
                capacity=self.known.capacity,
                calibrate=Calibrator(self.run.path, self.calibrate, listener.status, self._say),
            )
            if left and self._has_engine_time():
                listener.loads_begin_in(60 * self.lockstep_minutes)
                self._measure_engine_time(job)
                listener.loads_begin_in(0.0)
            on_sent = _ends_without_answers(self.workload.load, len(self.design.configurations), self.measured)
            runner = BlockRunner(self.instrument(job), self.failures, on_sent=on_sent)
            self.machines.begin(runner, self.stored)
            try:
                with contextlib.closing(self.machines):
                    left = self._measure_blocks(job)
            except UnansweredError as error:
                self.ended_early = str(error)
        planned = [(cell, block.repeat) for block in self.stored.manifest.plan for cell in block.cells]
        missing = [load for load in planned if not self.run.is_done(*load)]
        given_up = {*manifest.left_out} - self.measured.attempts.keys()
        if self.max_minutes is not None and not left:
            chosen = {(cell.cell_id, block.repeat) for block in self.blocks for cell in block.cells}
            given_up |= {load for load in missing if self.measured.is_left(load)} & chosen
        left_out = tuple(load for load in missing if load in given_up)
        complete = len(left_out) == len(missing)
        self.stored.replace(left_out=left_out)
        self._close(COMPLETE if complete else INCOMPLETE)
        if complete:
            work.close = lambda: None
            work.next_step = f"everything is measured. Write the report with:\n  {self._report}"
        return complete

    def _measure_blocks(self, job: Job) -> list[Block]:
        """Measures block after block; returns those that are left at the end."""
        started = failed_starts = disturbed = 0
        left = self._left(time.monotonic() - self._began)  # engine time took some
        while not self.ended_early and (started or failed_starts < MAX_FAILED_STARTS):
            job.listener.expect(left)
            self.stored.replace(measured_s=time.monotonic() - self._began)
            if block := self.machines.next_block(left):
                if self._would_be_disturbed_again(block, job):
                    self.measured.again = False
                else:
                    self._set_aside(block)
                    self.machines.submit(block)
                    continue
            elif finished := self.machines.next_finished():
                block = finished.block
                if finished.started:
                    started += 1
                    self.estimator.observe_block(block, finished.seconds)
                else:
                    failed_starts += 1
                self.measured.take(self.run, block)
                disturbed = self.measured.disturbed_in_a_row(block, disturbed)
                if self._left(time.monotonic() - self._began):  # the time that max_minutes allows is for loads
                    self._began += self._wait_or_end(disturbed, job)
            else:
                break
            left = self._left(time.monotonic() - self._began)
        return left

    def _has_engine_time(self) -> bool:
        """Tests whether the run still begins with a sitting in engine time."""
        if not (self.machines.is_like_here and self.target.stepped and self.lockstep_minutes > 0):
            return False
        finished = self.engine_time is not None and self.engine_time.finished
        return len(self.design.configurations) > 1 and not finished

    def _measure_engine_time(self, job: Job) -> None:
        """Measures all configurations in engine time (``kvbench/lockstep``)."""
        assert self.target.stepped is not None
        self.engine_time = None
        if begin_anew(self.run):
            self._note("engine time starts again: its earlier launches cannot be combined with new ones")
        sitting = Sitting(
            self.run, self.workload, self.design, job.capacity, 60 * self.lockstep_minutes, self.open_limit_s,
            job.listener.status, job.check, stepped=self.target.stepped,
            on_effects=lambda measured: self._say(so_far(measured, self.design)),
        )  # fmt: skip
        if reason := sitting.why_not():
            self._note(f"engine time is not measured: {reason}")
            return
        try:
            measured = self.engine_time = sitting.execute()
        except MeasurementError as error:
            self._note(f"engine time is not measured: {error}")
            return
        for note in measured.notes:
            self._note(note)
        self._say(
            f"engine time: {plural(measured.configurations, 'configuration')} in turns, "
            f"{measured.launches} launch{'' if measured.launches == 1 else 'es'} in {clock(measured.seconds)}"
        )

    def _lacks_quality(self, run: RunFolder | None, manifest: Manifest | None) -> bool:
        """Tests whether the built-in engine's answers are still to be measured, with the code of this run."""
        if not (self.quality and self.machines.is_like_here and self.target.manifest.is_built_in):
            return False
        if run is None or manifest is None:
            return True
        try:
            quality = read_quality(run.path)
        except UsageError:
            return True
        measured = quality.configurations.keys() if quality and not quality.differs_from(manifest) else set()
        design = design_of(self.workload, manifest.only or ())  # this execution may measure a part of it
        return not {configuration.config_id for configuration in design.configurations} <= measured

    def _measure_quality(self, work: FolderWork) -> None:
        """Measures the quality of the answers, where it is missing. A failure costs nothing that was measured."""
        if self.ended_early or not self.summaries or not self._lacks_quality(self.run, self.stored.manifest):
            return
        before, work.next_step = work.next_step, (
            f"the loads are kept. Measure the quality with:\n  {self.resume}\nor report without it:\n  {self._report}"
        )  # fmt: skip
        try:
            self.quality(self.run.path, self.console)
        except Exception as error:
            where = "" if isinstance(error, UsageError) else f" ({log_traceback(error)})"
            self._note(
                f"the quality of the answers is not measured: {error}{where}; try `kvbench quality "
                f"{os.path.relpath(self.run.path)}`"
            )
        work.next_step = before

    @property
    def _report(self) -> str:
        """The command that writes the report."""
        return shlex.join(["kvbench", "report", os.path.relpath(self.run.path)])

    def _reopen(self, *, something_left: bool) -> Manifest:
        """The manifest of the run to go on with, whatever has changed where nothing will be measured."""
        begun = self.begun.model_copy(update={"status": INCOMPLETE, "failures": ()})
        if not something_left:
            return begun
        manifest, remarks = reopen(
            self.resumed.path, begun, self.target.manifest, force=self.force, now=self.machines.environment
        )
        for remark in remarks:
            self._note(remark)
        return manifest

    def _waits_for_quiet(self, job: Job) -> str:
        """Waits for other programs to leave the machine alone; returns those that do not, else an empty text."""
        busy = ""

        def on_busy(words: str) -> None:
            nonlocal busy
            if not busy:
                self._say(f"other programs use {words}; waiting for them, {self.wait_idle_minutes:g} minutes at most "
                          "(--wait-idle)")  # fmt: skip
            busy = words

        job.listener.status("waiting for other programs to leave the machine alone")
        return "" if foreign_cpu.waits_for_quiet(60 * self.wait_idle_minutes, job.check, on_busy) else busy

    def _would_be_disturbed_again(self, block: Block, job: Job) -> bool:
        """Tests whether ``block`` was disturbed before and other programs still keep the machine busy."""
        if not self._may_wait() or not self.measured.attempts[block.cells[0].cell_id, block.repeat]:
            return False
        if busy := self._waits_for_quiet(job):
            self._note(f"other programs keep the machine busy ({busy}): disturbed loads are not measured again")
        return bool(busy)

    def _wait_or_end(self, disturbed: int, job: Job) -> float:
        """Waits after too many ``disturbed`` loads in a row, or ends the sweep; returns the seconds that it took."""
        if disturbed < DISTURBED_IN_A_ROW or not self._may_wait():
            return 0.0
        began = time.monotonic()
        self._say(f"{plural(disturbed, 'load')} in a row were disturbed by other programs, or by the host")
        if busy := self._waits_for_quiet(job):
            self.ended_early = f"other programs keep the machine busy ({busy}); go on once it is quiet"
        elif disturbed >= 2 * DISTURBED_IN_A_ROW:
            self.ended_early = f"{plural(disturbed, 'load')} in a row were disturbed; go on once it is quiet"
        return time.monotonic() - began

    def _may_wait(self) -> bool:
        """Tests whether it may wait: beside no server that runs already, which would be taken for another program."""
        return self.wait_idle_minutes > 0 and self._times_this_machine() and not self.target.runs_already

    def _times_this_machine(self) -> bool:
        """Tests whether other programs on this machine disturb the loads."""
        return self.instrument.disturbed_by_machine and self.machines.is_here

    def _set_aside(self, block: Block) -> None:
        """Moves the invalid loads of ``block`` away, with the logs of their server, and lists them in the manifest."""
        invalid = [cell for cell in block.cells if self.run.is_done(cell.cell_id, block.repeat)]
        if not invalid:
            return
        entries = []
        for cell in invalid:
            reasons = self.measured.done[cell.cell_id, block.repeat].invalid_reasons
            folder = str(self.run.set_aside(cell.cell_id, block.repeat).relative_to(self.run.path))
            entries.append(SetAside(cell_id=cell.cell_id, repeat=block.repeat, reasons=reasons, folder=folder))
        for block_id in {block.block_id, *(part.block_id for part in block.split())}:
            self.run.set_log_aside(block_id)
        self.stored.replace(set_aside=(*self.stored.manifest.set_aside, *entries))
        loads = ", ".join(f"{cell.cell_id} repeat {block.repeat}" for cell in invalid)
        self._say(f"measuring again what was invalid: {loads}")

    def _say_what_is_known(self) -> None:
        for note in memory_notes(self.design, self.known.capacity, self.known.lengths):
            self._say(f"memory: {note}")
        for note in self.machines.notes:
            self._note(note)

    def _say_what_is_finished(self) -> None:
        again = [load for load in self.measured.done if self.measured.is_left(load)]
        self._say(f"{plural(len(self.measured.done) - len(again), 'finished load')}, which will not run again")
        if again:
            self._say(f"{plural(len(again), 'invalid load')}, which will be measured again")
        for path in self.resumed.damaged_loads():
            self._note(f"a file in {path} is damaged: the load is run again")

    def _new_manifest(self) -> Manifest:
        source = portable(self.workload.source.resolve()) if self.workload.source else None
        facts = {
            # for a reader, nothing reads it again: outside kvbench's folder its name will do
            "workload_file": Path(source).name if source and Path(source).is_absolute() else source,
            "capacity": self.known.capacity,
            "only": self.only,
            "notes": (*self.design.notes, *self.machines.notes),
            **self.target.manifest.fields(),
            "started": utc_now(),
        }
        manifest = new_manifest(Manifest, self.workload, self.blocks, **facts)
        if self.machines.environment is None:
            return manifest
        command = tuple(without_value(manifest.command, "--ray-address"))
        return manifest.model_copy(update=self.machines.environment.fields() | {"command": command})

    def _on_server(self, block: Block, info: ServerInfo, target: Target) -> None:
        """Stores the report of each configuration's first server on itself, and refuses a server that differs."""
        config_id = block.configuration.config_id
        accepted = accept_server(self.stored.manifest, config_id, info, force=self.force)
        manifest = self.stored.manifest = with_server(accepted, config_id, info)
        capacity, reported = dict(manifest.capacity), info.capacity.to_json()
        if reported:  # what the server has made of the budget wins over the arithmetic
            before = capacity.get(config_id, Capacity())
            reported["kv_budget_bytes"] = reported.get("budget_bytes", before.kv_budget_bytes)
            capacity[config_id] = before.model_copy(update=reported)
            self.known.capacity[config_id] = capacity[config_id]  # which the next server of it is held against
        new = [note for note in dict.fromkeys(info.server.notes) if note not in manifest.notes]
        for note in new:
            self._note(note)
        self.stored.replace(
            model=manifest.model or dataclasses.asdict(target.model) | info.model.to_json(),
            capacity=capacity,
            notes=(*manifest.notes, *new),
        )

    def _close(self, status: str) -> None:
        """Aggregates the finished loads and writes the manifest; ``status`` complete is written last."""
        self.stored.replace(
            measured_s=time.monotonic() - self._began,
            status=INCOMPLETE,
            ended=utc_now(),
            failures=tuple(self.failures),
            calibration=Calibrator(self.run.path, self.calibrate).facts(),
        )
        manifest = self.stored.manifest
        cells = design_of(self.workload, manifest.only or ()).cells
        self.summaries = [summary for cell in cells if (summary := aggregate_cell(self.run, cell, manifest))]
        if status == COMPLETE:
            self.stored.replace(status=COMPLETE)

    def _note(self, text: str) -> None:
        self._say(f"note: {text}")

    def _say(self, text: str) -> None:
        print_plain(self.console, text)

    def _conclude(self, complete: bool) -> int:
        """Reports, tells what failed and what is invalid; the exit code."""
        run, problems = self.run, failed_loads(self.failures)
        if self.ended_early:
            problems.append(f"ended early: {self.ended_early}")
        if not complete and not any(run.done_repeats(cell.cell_id) for cell in self.design.cells):
            problems.append("nothing was measured")
        elif self.report:
            try:
                self.report(run.path, self.console)
            except Exception as error:  # it must not cost the results
                problems.append(
                    f"the report could not be written ({error!r}, {log_traceback(error)}); the results are kept, try "
                    f"`kvbench report {run.path}`"
                )
        chosen = {cell.cell_id for cell in self.design.cells}
        judged = [summary for summary in self.summaries if summary.cell_id in chosen]
        invalid = [summary for summary in judged if summary.invalid_reasons]
        loads = [load for summary in invalid for load in _invalid(run, summary.cell_id)]
        only_disturbed = not problems and all(load.is_disturbed for load in loads)
        problems += [f"{summary.cell_id} is invalid: {why}" for summary in invalid for why in summary.invalid_reasons]
        if not complete and not self.failures:
            self._say(f"cells are left; go on with:\n  {self.resume}")
        manifest = self.stored.manifest
        for note in repeat_notes(manifest, self.summaries):
            self._note(note)
        if complete and manifest.left_out:
            self._say(f"measure the repeats that are left out with:\n  {self.resume} --max-minutes <more>")
        wrong = [f"{summary.cell_id}: {why}" for summary in judged for why in summary.wrong_answers]
        refused = [f"{summary.cell_id}: {why}" for summary in judged for why in summary.refused]
        if wrong:
            self._list(
                "WRONG ANSWERS: the server answered canaries wrongly (exit code 1); these cells are compared with "
                f"none, and what is needed to find out why is in their {WRONG_ANSWERS}",
                wrong,
            )
        if refused:
            self._list("REFUSED: the server answered requests with errors of its own; these cells are compared with "
                       "none", refused)  # fmt: skip
        if problems:
            self._list("INVALID: not every cell is validly measured (exit code 4); the results are kept", problems)
            if only_disturbed and self.engine_time and self.engine_time.effects:
                self._say("The changes in engine time stay valid: other programs only widen their intervals.")
        if self.failures or (problems and complete):
            self._say(f"run the failed and invalid loads again with:\n  {self.resume}")
        return EXIT_REGRESSION if wrong else EXIT_INVALID if problems else EXIT_OK

    def _list(self, head: str, lines: Sequence[str]) -> None:
        self._say(f"{head}:\n  - " + and_more(lines, 4, between="\n  - "))


class UnansweredError(Exception):
    """No request of a load succeeded, and none of an earlier load had."""


def _ends_without_answers(
    load: LoadConfig, configurations: int, measured: Measured
) -> Callable[[Cell, Unanswered | None], None]:
    """Returns what is called after each load and raises UnansweredError until one was answered.

    One configuration that rejects every request is a finding, two are not. ``measured``: before.
    """
    answered = any(not why_unanswered(done.metrics) for done in measured.done.values())
    failing: set[str] = set()

    def on_sent(cell: Cell, unanswered: Unanswered | None) -> None:
        nonlocal answered
        answered = answered or unanswered is None
        if answered:
            return
        failing.add(cell.configuration.config_id)
        if unanswered.rejected and len(failing) < min(2, configurations):
            return
        users, rate, limit_s = cell.load.concurrency or 1, cell.load.request_rate or math.inf, load.timeout_s
        smaller = "shorter prompts and outputs"
        if users > 1:
            smaller = f"a smaller load with -o load.concurrency={users // 2}"
        elif rate < math.inf:
            smaller = f"a smaller load with -o load.request_rate={rate / 2:g}"
        raise UnansweredError(
            f"no request has succeeded, of {cell.cell_id} neither ({unanswered.reason}), and the next loads would "
            f"hardly fare better: mend what the server says, give requests more time with -o load.timeout_s="
            f"{3 * limit_s:g} (it is {limit_s:g}), send {smaller}, or leave cells out with --only GLOB"
        )

    return on_sent


def _invalid(run: RunFolder, cell_id: str) -> list[LoadResult]:
    """Reads the invalid loads of a cell."""
    results = [run.result(cell_id, repeat) for repeat in run.done_repeats(cell_id)]
    return [result for result in results if result.invalid_reasons]


def failed_loads(failures: Sequence[FailedLoad]) -> list[str]:
    """Writes one line a reason: a server that does not start fails several loads."""
    by_reason: dict[str, list[str]] = {}
    for failure in failures:
        by_reason.setdefault(failure.reason, []).append(f"{failure.cell_id} repeat {failure.repeat}")
    return [f"{', '.join(loads)} failed: {reason}" for reason, loads in by_reason.items()]
