"""A sweep from a resolved workload to a results folder: plan, run, resume, finish."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench.calibration.cache import Calibrator
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
from kvbench.common.files import check_output_dir, utc_now, write_json
from kvbench.common.git import git_state
from kvbench.common.secrets import without_value
from kvbench.common.text import and_more, clock, plural
from kvbench.lockstep.process import OPEN_LIMIT_S
from kvbench.lockstep.sitting import Show, Sitting, begin_anew
from kvbench.measure.http import HttpInstrument
from kvbench.measure.instrument import Instrument, Job
from kvbench.metrics.canaries import WRONG_ANSWERS
from kvbench.runs.aggregate import TargetFacts, aggregate_cell
from kvbench.runs.engine_time import EngineTime, read_engine_time
from kvbench.runs.folder import RunFolder, create_run
from kvbench.runs.manifest import add_notes, add_server, build_manifest
from kvbench.runs.quality import read_quality
from kvbench.runs.repeats import repeat_notes
from kvbench.runs.results import Capacity, CellSummary, LoadResult
from kvbench.runs.resume import accept_server, reopen, require_same_workload
from kvbench.runs.server_info import ServerInfo
from kvbench.runs.work import FolderWork, kept, work_in
from kvbench.sweep.block import BlockRunner, Failure, Unanswered, why_unanswered
from kvbench.sweep.capacity import memory_notes
from kvbench.sweep.machines import ThisMachine
from kvbench.sweep.order import LoadKey, Measured, blocks_in_time, blocks_left
from kvbench.sweep.plan import Preflight, describe_plan, planned_blocks, preflight
from kvbench.sweep.progress import Estimator, SweepProgress
from kvbench.targets.base import Target
from kvbench.targets.choose import ChosenTarget
from kvbench.workload.design import Block, Cell, Design, design_of
from kvbench.workload.file import Workload, portable
from kvbench.workload.load_section import LoadConfig

MAX_FAILED_STARTS = 2  # in a row from the beginning: the third would fail too
LOCKSTEP_MINUTES = 3.0
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
    was begun, or ``LOCKSTEP_MINUTES``; ``open_limit_s``: until an engine of it is there;
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
    machines: ThisMachine = dataclasses.field(default_factory=ThisMachine)
    ended_early: str = dataclasses.field(default="", init=False)  # why
    failures: list[Failure] = dataclasses.field(default_factory=list, init=False)
    summaries: list[CellSummary] = dataclasses.field(default_factory=list, init=False)

    @property
    def workload(self) -> Workload:
        """The workload as it runs on the target."""
        return self.target.workload

    def __post_init__(self) -> None:
        if self.lockstep_minutes is None:
            stored = self.resumed.manifest().lockstep_minutes if self.resumed else None
            self.lockstep_minutes = LOCKSTEP_MINUTES if stored is None else stored

    def _plan(self) -> tuple[Design, tuple[Block, ...], Preflight]:
        """Cells, blocks and what is known of them, after every check before a launch."""
        check_output_dir(self.resumed.path if self.resumed else self.output_dir)
        if self.resumed:  # before its cells are looked for in a workload that may not have them
            require_same_workload(self.resumed, self.workload)
        design, blocks = self.target.plan(self.only)
        return design, blocks, preflight(self.workload, design, self.target.check, self.instrument)

    def describe(self) -> int:
        """Prints what ``execute`` would run, after the same checks; writes and launches nothing. Raises UsageError."""
        design, blocks, known = self._plan()
        measured, estimator = self._known(blocks, known.seconds)
        first_s = 60 * self.lockstep_minutes if self._has_engine_time(design, self.resumed) else 0.0
        minutes = self._minutes
        left = self._left(design, blocks, measured, estimator, minutes, self._spent_s + first_s)
        if self.resumed:
            self._reopen(self.resumed, something_left=bool(left))
            self._say_what_is_finished(self.resumed, measured)
            if not left:
                what = "its quality, and nothing else," if self._lacks_quality(self.resumed) else "nothing"
                self._say(f"{what} is left to run")
                return EXIT_OK
        seconds = first_s + estimator.total_s(left) / self.machines.at_once
        describe_plan(self.workload, design, left, seconds, self.console, self.target.start_guess_s)
        for note in memory_notes(design, known.capacity, known.lengths):
            self._say(f"memory: {note}")
        for note in self.machines.notes:
            self._note(note)
        if first_s:
            self._note(f"{self.lockstep_minutes:g} minutes of it are engine time, before the loads "
                       "(--lockstep-minutes); on a slow machine up to three times that")  # fmt: skip
        if self._lacks_quality(self.resumed):
            self._note(f"then the answers of {plural(len(design.configurations), 'configuration')} are measured, in 10 "
                       "to 15 s each with kvbench-tiny on 2 cores (--no-quality)")  # fmt: skip
        if minutes is not None:
            self._note(f"within --max-minutes {minutes:g}, as far as it can be guessed; which repeats "
                       "follow the first depends on what they decide")  # fmt: skip
        return EXIT_OK

    def execute(self) -> int:
        """Run what is not done; the exit code. Raises UsageError before anything is launched."""
        design, blocks, known = self._plan()
        for note in design.notes:
            self._note(note)
        for note in memory_notes(design, known.capacity, known.lengths):
            self._say(f"memory: {note}")
        for note in self.machines.notes:
            self._note(note)
        if not self.resumed and self._times_this_machine() and (notice := foreign_cpu.busy_notice()):
            self._note(notice)
        run = self.resumed or create_run(self.output_dir, self.workload.name, git_state()["short_sha"])
        resume = shlex.join(["kvbench", "sweep", "--resume", os.path.relpath(run.path), *self.machines.resume_options])
        try:
            with work_in(run.path, kept(resume), self._say) as work:
                complete = self._measure(work, run, design, blocks, known)
                self._measure_quality(work, run, resume)
                return self._conclude(run, design, complete, resume)
        except UsageError:
            if not self.resumed and run.remove_unmeasured():
                self._say(f"removed: {run.path}, since nothing was measured")
            raise
        return EXIT_INTERRUPTED

    def _measure(
        self,
        work: FolderWork,
        run: RunFolder,
        design: Design,
        blocks: Sequence[Block],
        known: Preflight,
    ) -> bool:
        """Whether every planned load is measured."""
        capacity = known.capacity
        measured, estimator = self._known(blocks, known.seconds)
        left_out = self.resumed.manifest().left_out if self.resumed else ()
        minutes, began = self._minutes, time.monotonic() - self._spent_s

        def still_left() -> list[Block]:
            return self._left(design, blocks, measured, estimator, minutes, time.monotonic() - began)

        left = still_left()
        if self.resumed:
            manifest = self._reopen(run, something_left=bool(left))
        else:
            manifest = self._new_manifest(blocks, capacity, [*design.notes, *self.machines.notes])
        manifest |= {"max_minutes": minutes, "lockstep_minutes": self.lockstep_minutes}
        manifest |= {"set_aside": list(manifest.get("set_aside") or ())}
        write_json(run.manifest_path, manifest)

        def close(status: str) -> None:
            self._close(run, manifest | {"measured_s": time.monotonic() - began}, status)

        work.close = lambda: close("incomplete")
        self._say(f"results: {run.path}")
        if self.resumed:
            self._say_what_is_finished(run, measured)
        at_once = self.machines.at_once
        with SweepProgress(self.console, left, estimator, grows=minutes is not None, at_once=at_once) as listener:
            job = Job(
                self.workload,
                run,
                self.target.new_target,
                listener,
                work.check,
                on_server=_manifest_writer(run, manifest, self._note, force=self.force),
                capacity=capacity,
                calibrate=self._calibrator(run, listener.status, self._say),
            )
            on_sent = _ends_without_answers(self.workload.load, len(design.configurations), measured)
            runner = BlockRunner(self.instrument(job), self.failures, on_sent=on_sent)
            if left:
                listener.loads_begin_in(60 * self.lockstep_minutes if self._has_engine_time(design, run) else 0.0)
                self._measure_engine_time(run, design, capacity, work.check, listener.status)
                listener.loads_begin_in(0.0)
                left = still_left()  # it took time
            started = failed_starts = disturbed = 0
            self.machines.begin(runner, manifest)
            with self._ends_unanswered(), contextlib.closing(self.machines) as machines:
                while not self.ended_early and (started or failed_starts < MAX_FAILED_STARTS):
                    listener.expect(left)
                    manifest["measured_s"] = time.monotonic() - began
                    if block := machines.next_block(left):
                        if self._would_be_disturbed_again(block, measured, work.check, listener.status):
                            measured.again = False
                            left = still_left()
                            continue
                        self._set_aside(run, manifest, block, measured)
                        machines.submit(block)
                    elif finished := machines.next_finished():
                        block = finished.block
                        if finished.started:
                            started += 1
                            estimator.observe_block(block, finished.seconds)
                        else:
                            failed_starts += 1
                        measured.take(run, block)
                        disturbed = measured.disturbed_in_a_row(block, disturbed)
                        if still_left():  # the time that max_minutes allows is for loads
                            began += self._wait_or_end(disturbed, work.check, listener.status)
                        left = still_left()
                    else:
                        break
        every = [(c.cell_id, b.repeat) for b in planned_blocks(self.workload, manifest) for c in b.cells]
        missing = [load for load in every if not run.is_done(*load)]
        given_up = {*left_out} - measured.attempts.keys()
        if minutes is not None and not left:
            given_up |= {load for load in missing if measured.is_left(load)} & set(_loads(blocks))
        manifest["left_out"] = [load for load in missing if load in given_up]
        complete = len(manifest["left_out"]) == len(missing)
        close("complete" if complete else "incomplete")
        if complete:
            report = shlex.join(["kvbench", "report", os.path.relpath(run.path)])
            work.close, work.next_step = lambda: None, f"everything is measured. Write the report with:\n  {report}"
        return complete

    @contextlib.contextmanager
    def _ends_unanswered(self) -> Iterator[None]:
        try:
            yield
        except UnansweredError as error:
            self.ended_early = str(error)

    def _has_engine_time(self, design: Design, run: RunFolder | None) -> bool:
        """Whether the run still begins with a sitting in engine time."""
        facts = self.target.manifest
        if not self.machines.is_like_here:
            return False
        if facts.get("backend") != "kvbench" or facts.get("serve_cmd") or len(design.configurations) < 2:
            return False
        known = _engine_time(run) if run else None
        return self.lockstep_minutes > 0 and not (known and known.finished)

    def _measure_engine_time(
        self,
        run: RunFolder,
        design: Design,
        capacity: Mapping[str, Capacity],
        check: Callable[[], None],
        show: Show,
    ) -> None:
        """All configurations in engine time (``kvbench/lockstep``), where the engine is the built-in one."""
        if not self._has_engine_time(design, run):
            return
        if begin_anew(run):
            self._note("engine time begins anew: launches of an earlier hour cannot be joined with those of now")
        sitting = Sitting(
            run, self.workload, design, capacity, 60 * self.lockstep_minutes, self.open_limit_s, show, check
        )
        if reason := sitting.why_not():
            self._note(f"engine time is not measured: {reason}")
            return
        try:
            measured = sitting.execute()
        except MeasurementError as error:
            self._note(f"engine time is not measured: {error}")
            return
        for note in measured.notes:
            self._note(note)
        self._say(
            f"engine time: {plural(measured.configurations, 'configuration')} in turns, "
            f"{measured.launches} launch{'' if measured.launches == 1 else 'es'} in {clock(measured.seconds)}"
        )

    def _lacks_quality(self, run: RunFolder | None) -> bool:
        """Whether the built-in engine's answers are still to be measured, with the code of this run."""
        facts = self.target.manifest
        if not self.machines.is_like_here:
            return False
        if not self.quality or facts.get("backend") != "kvbench" or facts.get("serve_cmd"):
            return False
        if run is None:
            return True
        manifest = run.manifest()
        design = design_of(self.workload, manifest.only or ())
        try:
            known = read_quality(run.path)
        except UsageError:
            return True
        measured = known.configurations.keys() if known and not known.differs_from(manifest) else set()
        return not {each.config_id for each in design.configurations} <= measured

    def _measure_quality(self, work: FolderWork, run: RunFolder, resume: str) -> None:
        """A failure costs nothing that was measured."""
        if self.quality is None or self.ended_early or not self.summaries or not self._lacks_quality(run):
            return
        before = work.next_step
        report = shlex.join(["kvbench", "report", os.path.relpath(run.path)])
        work.next_step = f"the loads are kept. Measure the quality with:\n  {resume}\nor report without it:\n  {report}"
        try:
            self.quality(run.path, self.console)
        except Exception as error:
            where = "" if isinstance(error, UsageError) else f" ({log_traceback(error)})"
            self._note(
                f"the quality of the answers is not measured: {error}{where}; try `kvbench quality "
                f"{os.path.relpath(run.path)}`"
            )
        work.next_step = before

    def _calibrator(self, run: RunFolder, *say: Callable[[str], None]) -> Calibrator:
        return Calibrator(run.path, self.calibrate, *say)

    def _reopen(self, run: RunFolder, *, something_left: bool) -> dict[str, Any]:
        manifest, remarks = reopen(
            run, self.target.manifest, force=self.force, something_left=something_left,
            now=self.machines.environment,
        )  # fmt: skip
        for remark in remarks:
            self._note(remark)
        return manifest

    def _known(self, blocks: Sequence[Block], guesses: Mapping[str, float]) -> tuple[Measured, Estimator]:
        """What a run that goes on has of ``blocks``, and how long it took; nothing of a new run."""
        measured, estimator = Measured({}), Estimator(guesses, self.target.start_guess_s)
        for block in blocks if self.resumed else ():
            measured.read(self.resumed, block)
            for cell in block.cells:
                if done := measured.done.get((cell.cell_id, block.repeat)):
                    estimator.observe(cell, done.wall_s, done.server_start_s)
        return measured, estimator

    @property
    def _minutes(self) -> float | None:
        """The limit on the time of further repeats, that of a run to go on with unless another one is given."""
        if self.max_minutes is not None:
            return self.max_minutes
        return self.resumed.manifest().max_minutes if self.resumed else self.workload.max_minutes

    @property
    def _spent_s(self) -> float:
        """Seconds that a run to go on with was measured before."""
        return (self.resumed.manifest().measured_s or 0.0) if self.resumed else 0.0

    def _left(
        self,
        design: Design,
        blocks: Sequence[Block],
        measured: Measured,
        estimator: Estimator,
        minutes: float | None,
        spent_s: float,
    ) -> list[Block]:
        if minutes is None:
            return blocks_left(blocks, measured)
        time_left_s = (minutes * 60 - spent_s) * self.machines.at_once
        return blocks_in_time(design, blocks, measured, time_left_s, lambda block: estimator.total_s([block]))

    def _waits_for_quiet(self, check: Callable[[], None], show: Callable[[str], None]) -> str:
        """Which programs keep the machine busy for as long as the sweep may wait; empty once they leave it alone."""
        found = ""

        def on_busy(words: str) -> None:
            nonlocal found
            if not found:
                self._say(f"other programs use {words}; waiting for them, {self.wait_idle_minutes:g} minutes at most "
                          "(--wait-idle)")  # fmt: skip
            found = words

        show("waiting for other programs to leave the machine alone")
        return "" if foreign_cpu.waits_for_quiet(60 * self.wait_idle_minutes, check, on_busy) else found

    def _would_be_disturbed_again(
        self, block: Block, measured: Measured, check: Callable[[], None], show: Callable[[str], None]
    ) -> bool:
        """Whether ``block`` was disturbed before and other programs still keep the machine busy."""
        if not self._may_wait() or not measured.attempts[block.cells[0].cell_id, block.repeat]:
            return False
        if busy := self._waits_for_quiet(check, show):
            self._note(f"other programs keep the machine busy ({busy}): disturbed loads are not measured again")
        return bool(busy)

    def _wait_or_end(self, disturbed: int, check: Callable[[], None], show: Callable[[str], None]) -> float:
        """After too many ``disturbed`` loads in a row: waits for a quiet machine; the seconds that it took.

        Ends the sweep where that is hopeless.
        """
        if disturbed < DISTURBED_IN_A_ROW or not self._may_wait():
            return 0.0
        began = time.monotonic()
        self._say(f"{plural(disturbed, 'load')} in a row were disturbed by other programs, or by the host")
        if busy := self._waits_for_quiet(check, show):
            self.ended_early = f"other programs keep the machine busy ({busy}); go on once it is quiet"
        elif disturbed >= 2 * DISTURBED_IN_A_ROW:
            self.ended_early = f"{plural(disturbed, 'load')} in a row were disturbed; go on once it is quiet"
        return time.monotonic() - began

    def _may_wait(self) -> bool:
        """Not beside a server that runs already, which would be taken for another program."""
        return self.wait_idle_minutes > 0 and self._times_this_machine() and not self.target.runs_already

    def _times_this_machine(self) -> bool:
        """Whether other programs on this machine disturb the loads."""
        return self.instrument.disturbed_by_machine and self.machines.is_here

    def _set_aside(self, run: RunFolder, manifest: dict[str, Any], block: Block, measured: Measured) -> None:
        """Moves the invalid loads of ``block`` away, with the logs of their server, and lists them in the manifest."""
        invalid = [cell for cell in block.cells if run.is_done(cell.cell_id, block.repeat)]
        for cell in invalid:
            done = measured.done[cell.cell_id, block.repeat]
            entry = {"cell_id": cell.cell_id, "repeat": block.repeat, "reasons": list(done.invalid_reasons)}
            kept = run.set_aside(cell.cell_id, block.repeat)
            manifest["set_aside"].append(entry | {"folder": str(kept.relative_to(run.path))})
        if invalid:
            for block_id in {block.block_id, *(part.block_id for part in block.split())}:
                run.set_log_aside(block_id)
            write_json(run.manifest_path, manifest)
            loads = ", ".join(f"{cell.cell_id} repeat {block.repeat}" for cell in invalid)
            self._say(f"measuring again what was invalid: {loads}")

    def _say_what_is_finished(self, run: RunFolder, measured: Measured) -> None:
        again = [load for load in measured.done if measured.is_left(load)]
        self._say(f"{plural(len(measured.done) - len(again), 'finished load')}, which will not run again")
        if again:
            self._say(f"{plural(len(again), 'invalid load')}, which will be measured again")
        for path in run.damaged_loads():
            self._note(f"a file in {path} is damaged: the load is run again")

    def _new_manifest(
        self, blocks: Sequence[Block], capacity: Mapping[str, Capacity], notes: Sequence[str]
    ) -> dict[str, Any]:
        source = portable(self.workload.source.resolve()) if self.workload.source else None
        plan = [
            {
                "block_id": b.block_id,
                "repeat": b.repeat,
                "configuration": b.configuration.config_id,
                "cells": [c.cell_id for c in b.cells],
            }
            for b in blocks
        ]
        known = {config_id: held.to_json() for config_id, held in capacity.items()}
        manifest = build_manifest(
            workload=self.workload.resolved,
            # for a reader, nothing reads it again: outside kvbench's folder its name will do
            workload_file=Path(source).name if source and Path(source).is_absolute() else source,
            profile=self.workload.profile,
            seed=self.workload.seed,
            plan=plan,
            extra={"capacity": known, "only": list(self.only), "notes": list(notes), **self.target.manifest},
        )
        if self.machines.environment:
            manifest |= {**self.machines.environment} | {"command": without_value(manifest["command"], "--ray-address")}
        return manifest | {"started": utc_now()}

    def _close(self, run: RunFolder, manifest: dict[str, Any], status: str) -> None:
        """Aggregates the finished loads and writes the manifest; ``status`` complete is written last."""
        manifest |= {"status": status, "ended": utc_now(), "failures": [dataclasses.asdict(f) for f in self.failures]}
        manifest["calibration"] = self._calibrator(run).facts()
        write_json(run.manifest_path, manifest | {"status": "incomplete"})
        design = design_of(self.workload, manifest.get("only") or ())
        model, backend = (manifest.get("model") or {}).get("name"), manifest.get("backend", "kvbench")
        facts = TargetFacts(backend, model, manifest.get("capacity") or {}, manifest.get("simulated"))
        found = [aggregate_cell(run, cell, facts) for cell in design.cells]
        self.summaries = [summary for summary in found if summary is not None]
        if status != "incomplete":
            write_json(run.manifest_path, manifest)

    def _note(self, text: str) -> None:
        self._say(f"note: {text}")

    def _say(self, text: str) -> None:
        print_plain(self.console, text)

    def _conclude(self, run: RunFolder, design: Design, complete: bool, resume: str) -> int:
        """Report, what failed and what is invalid; the exit code."""
        problems = failed_loads(self.failures)
        if self.ended_early:
            problems.append(f"ended early: {self.ended_early}")
        if not complete and not any(run.done_repeats(cell.cell_id) for cell in design.cells):
            problems.append("nothing was measured")
        elif self.report:
            try:
                self.report(run.path, self.console)
            except Exception as error:  # it must not cost the results
                problems.append(
                    f"the report could not be written ({error!r}, {log_traceback(error)}); the results are kept, try "
                    f"`kvbench report {run.path}`"
                )
        chosen = {cell.cell_id for cell in design.cells}
        invalid = [each for each in self.summaries if each.cell_id in chosen and each.invalid_reasons]
        loads = [load for summary in invalid for load in _invalid(run, summary.cell_id)]
        only_disturbed = not problems and all(load.is_disturbed for load in loads)
        for summary in invalid:
            problems += [f"{summary.cell_id} is invalid: {why}" for why in summary.invalid_reasons]
        if not complete and not self.failures:
            self._say(f"cells are left; go on with:\n  {resume}")
        manifest = run.manifest()
        counted = [(each.cell_id, len(each.repeats), each.invalid_repeats) for each in self.summaries]
        for note in repeat_notes(manifest, counted):
            self._note(note)
        if complete and manifest.left_out:
            self._say(f"measure the repeats that are left out with:\n  {resume} --max-minutes <more>")
        judged = [summary for summary in self.summaries if summary.cell_id in chosen]
        wrong = [f"{summary.cell_id}: {why}" for summary in judged for why in summary.wrong_answers]
        refused = [f"{summary.cell_id}: {why}" for summary in judged for why in summary.refused]
        if wrong:
            head = (
                "WRONG ANSWERS: the server answered canaries wrongly (exit code 1); these cells are compared with "
                f"none, and what is needed to find out why is in their {WRONG_ANSWERS}:\n"
            )
            self._say(head + "  - " + and_more(wrong, 4, between="\n  - "))
        if refused:
            head = "REFUSED: the server answered requests with errors of its own; these cells are compared with none:\n"
            self._say(head + "  - " + and_more(refused, 4, between="\n  - "))
        if problems:
            head = "INVALID: not every cell is validly measured (exit code 4); the results are kept:\n"
            self._say(head + "  - " + and_more(problems, 4, between="\n  - "))
            if only_disturbed and _engine_time(run):
                self._say("The changes in engine time stay valid: other programs only widen their intervals.")
        if self.failures or (problems and complete):
            self._say(f"run the failed and invalid loads again with:\n  {resume}")
        return EXIT_REGRESSION if wrong else EXIT_INVALID if problems else EXIT_OK


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


def _loads(blocks: Sequence[Block]) -> list[LoadKey]:
    return [(cell.cell_id, block.repeat) for block in blocks for cell in block.cells]


def _engine_time(run: RunFolder) -> EngineTime | None:
    """What was measured in engine time; None where nothing was, or its file is damaged: it is measured anew."""
    try:
        return read_engine_time(run.path)
    except UsageError:
        return None


def _invalid(run: RunFolder, cell_id: str) -> list[LoadResult]:
    """The invalid loads of a cell."""
    results = [run.result(cell_id, repeat) for repeat in run.done_repeats(cell_id)]
    return [result for result in results if result.invalid_reasons]


def failed_loads(failures: Sequence[Failure]) -> list[str]:
    """One line a reason: a server that does not start fails several loads."""
    by_reason: dict[str, list[str]] = {}
    for failure in failures:
        by_reason.setdefault(failure.reason, []).append(f"{failure.cell_id} repeat {failure.repeat}")
    return [f"{', '.join(loads)} failed: {reason}" for reason, loads in by_reason.items()]


def _manifest_writer(
    run: RunFolder, manifest: dict[str, Any], tell: Callable[[str], None], *, force: bool
) -> Callable[[Block, ServerInfo, Target], None]:
    """Stores the report of each configuration's first server on itself, and refuses a server that differs.

    ``tell``: gets its notes, each once.
    """

    def write(block: Block, info: ServerInfo, target: Target) -> None:
        config_id = block.configuration.config_id
        accept_server(manifest, config_id, info, force=force)
        manifest["model"] = manifest.get("model") or dataclasses.asdict(target.model) | info.model.to_json()
        if capacity := info.capacity.to_json():  # what the server has made of the budget wins over the arithmetic
            known = manifest["capacity"].setdefault(config_id, {})
            known |= capacity | {"kv_budget_bytes": capacity.get("budget_bytes", known.get("kv_budget_bytes"))}
        for note in add_notes(manifest, info):
            tell(note)
        add_server(manifest, config_id, info)
        write_json(run.manifest_path, manifest)

    return write
