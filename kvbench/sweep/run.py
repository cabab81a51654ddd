"""A sweep from a resolved workload to a results folder: plan, run, resume, finish."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench.calibration.cache import Calibrator
from kvbench.common.errors import (
    EXIT_INTERRUPTED,
    EXIT_INVALID,
    EXIT_OK,
    Interrupted,
    MeasurementError,
    say,
    storage_sentence,
)
from kvbench.common.files import utc_now, write_json
from kvbench.common.git import git_state
from kvbench.common.signals import Interruption
from kvbench.runs.folder import RunFolder, create_run
from kvbench.runs.manifest import add_server, build_manifest
from kvbench.runs.resume import accept_server, reopen
from kvbench.sweep.block import BlockRunner, Failure
from kvbench.sweep.end import by_reason, invalid_reasons, write_report
from kvbench.sweep.plan import SweepOptions, capacity_note, planned_blocks, preflight, without_done
from kvbench.sweep.progress import Estimator, SweepProgress
from kvbench.targets.base import Target
from kvbench.workload.design import Block, Design, make_design
from kvbench.workload.file import Workload, portable

MAX_FAILED_STARTS = 2  # in a row from the beginning: the third would fail too


@dataclass
class Sweep:
    """One execution of a sweep in one folder. ``resumed`` is the folder of a run to go on with."""

    workload: Workload
    options: SweepOptions
    new_target: Callable[[], Target]
    console: Console
    resumed: RunFolder | None = None
    manifest_extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def execute(self) -> int:
        """Run what is not done; the exit code. Raises UsageError before anything is launched."""
        design, blocks = self.options.plan(self.workload)
        capacity, guesses = preflight(self.workload, design, self.options)
        for note in design.notes:
            self._note(note)
        if not self.resumed and (notice := _busy_notice()):
            self._note(notice)
        run = self.resumed or create_run(self.options.output_dir, self.workload.name, git_state()["short_sha"])
        with run.locked():
            return self._execute_locked(run, design, blocks, capacity, guesses)

    def _execute_locked(
        self,
        run: RunFolder,
        design: Design,
        blocks: Sequence[Block],
        capacity: Mapping[str, Any],
        guesses: Mapping[str, float],
    ) -> int:
        left = without_done(run, blocks)
        manifest = self._open_manifest(run, blocks, capacity, something_left=bool(left))
        manifest["notes"] = list(design.notes)
        write_json(run.manifest_path, manifest)
        estimator = Estimator(guesses, self.options.start_guess_s)
        finished = sum(len(b.cells) for b in blocks) - sum(len(b.cells) for b in left)
        self._say(f"results: {run.path}")
        if self.resumed:
            self.console.print(f"{finished} loads are finished and are not run again", highlight=False)
            for path in run.damaged_loads():
                self._note(f"a file in {path} is damaged: the load is run again")
        failures: list[Failure] = []
        complete = False
        try:
            with Interruption() as interruption:
                with SweepProgress(self.console, left, estimator) as listener:
                    runner = BlockRunner(
                        self.workload,
                        run,
                        self.new_target,
                        listener,
                        _manifest_writer(run, manifest, force=self.options.force),
                        interruption.check,
                        failures,
                        calibrate=self._calibrator(run, listener.status, self._say),
                        capacity=capacity,
                    )
                    _run_blocks(runner, left)
                whole = not without_done(run, planned_blocks(self.workload, manifest))
                self._close(run, manifest, failures, "complete" if whole else "incomplete")
                complete = whole
                if note := capacity_note(design.configurations, manifest["capacity"]):
                    self._say(note)
                return self._conclude(run, design, failures, complete)
        except (Interrupted, KeyboardInterrupt, SystemExit) as interrupt:
            with suppress(OSError):
                self._close_unless(complete, run, manifest, failures)
            self._say_stopped(run, interrupt, complete)
            return EXIT_INTERRUPTED
        except OSError as error:
            with suppress(OSError):  # there may be no room to; "incomplete" stands there since the start
                self._close_unless(complete, run, manifest, failures)
            raise self._not_stored(run, error) from error
        except BaseException:
            self._close_unless(complete, run, manifest, failures)
            raise

    def _calibrator(self, run: RunFolder, *tell: Callable[[str], None]) -> Calibrator:
        return Calibrator(run.path, self.options.calibrate, *tell)

    def resume_command(self, run: RunFolder) -> str:
        return shlex.join(["kvbench", "sweep", "--resume", os.path.relpath(run.path)])

    def _open_manifest(
        self, run: RunFolder, blocks: Sequence[Block], capacity: Mapping[str, Any], *, something_left: bool
    ) -> dict[str, Any]:
        if self.resumed:
            manifest, remarks = reopen(
                run, self.workload, self.manifest_extra, force=self.options.force, something_left=something_left
            )
            for remark in remarks:
                self._note(remark)
            return manifest
        source = self.workload.source.resolve() if self.workload.source else None
        plan = [
            {
                "block_id": b.block_id,
                "repeat": b.repeat,
                "configuration": b.configuration.config_id,
                "cells": [c.cell_id for c in b.cells],
            }
            for b in blocks
        ]
        manifest = build_manifest(
            workload=self.workload.resolved,
            workload_file=_shown(source) if source else None,
            profile=self.workload.profile,
            seed=self.workload.seed,
            plan=plan,
            extra={"capacity": dict(capacity), "only": list(self.options.only), **self.manifest_extra},
        )
        return manifest | {"started": utc_now()}

    def _close(
        self,
        run: RunFolder,
        manifest: dict[str, Any],
        failures: Sequence[Failure],
        status: str,
    ) -> None:
        """Aggregate what is there and write the manifest; also after an interruption. Nothing is complete before."""
        manifest |= {"status": status, "ended": utc_now(), "failures": [dataclasses.asdict(f) for f in failures]}
        manifest["calibration"] = self._calibrator(run).facts()
        write_json(run.manifest_path, manifest | {"status": "incomplete"})
        aggregate_run(run, self.workload, manifest)
        if status != "incomplete":
            write_json(run.manifest_path, manifest)

    def _close_unless(
        self, complete: bool, run: RunFolder, manifest: dict[str, Any], failures: Sequence[Failure]
    ) -> None:
        if not complete:
            self._close(run, manifest, failures, "incomplete")

    def _note(self, text: str) -> None:
        self._say(f"note: {text}")

    def _say(self, text: str) -> None:
        """As it is, unwrapped: commands are copied from it."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _say_stopped(self, run: RunFolder, interrupt: BaseException, complete: bool) -> None:
        """Where it can still be read: rich leaves with SystemExit when nobody reads stdout any more."""
        unread = isinstance(interrupt, SystemExit)
        name = "SIGPIPE (nobody reads the output)" if unread else getattr(interrupt, "signal_name", "SIGINT")
        text = f"stopped by {name}; "
        if complete:
            report = shlex.join(["kvbench", "report", os.path.relpath(run.path)])
            text += f"everything is measured. Write the report with:\n  {report}"
        else:
            text += f"what was measured is kept. Go on with:\n  {self.resume_command(run)}"
        with suppress(OSError):  # a terminal that is gone
            if unread:
                say(text)
            else:
                self._say(text)

    def _not_stored(self, run: RunFolder, error: OSError) -> Exception:
        """The sentence for a disk that is full or lost; ``error`` itself when it is about something else."""
        sentence = storage_sentence(error, run.path)
        if sentence is None:
            return error
        return MeasurementError(
            f"{sentence}; what was measured is kept. Go on then with:\n  {self.resume_command(run)}"
        )

    def _conclude(self, run: RunFolder, design: Design, failures: Sequence[Failure], complete: bool) -> int:
        problems = by_reason(failures)
        if not complete and not any(run.done_repeats(cell.cell_id) for cell in design.cells):
            problems.append("nothing was measured")
        elif self.options.report and (problem := write_report(self.options.report, run, self.console)):
            problems.append(problem)
        problems += [
            f"{cell.cell_id} is invalid: {reason}" for cell in design.cells for reason in invalid_reasons(run, cell)
        ]
        if not complete and not failures:
            self._say(f"cells are left; go on with:\n  {self.resume_command(run)}")
        if problems:
            head = "INVALID: not every load is a measurement (exit code 4); the results are kept:\n"
            self._say(head + "\n".join(f"  - {p}" for p in problems))
        if failures:
            self._say(f"run the failed loads again with:\n  {self.resume_command(run)}")
        return EXIT_INVALID if problems else EXIT_OK


def _busy_notice() -> str | None:
    """One line when other programs use this machine already."""
    from kvbench.common.foreign_cpu import busy_notice

    return busy_notice()


def _shown(source: Path) -> str:
    """The workload file for a reader; nothing reads it again. Elsewhere than in kvbench's folder its name will do."""
    path = portable(source)
    return source.name if Path(path).is_absolute() else path


def aggregate_run(run: RunFolder, workload: Workload, manifest: Mapping[str, Any]) -> None:
    """cells/*/summary.json from the finished loads."""
    from kvbench.runs.aggregate import aggregate_cell

    design = make_design(workload.engine, workload.sweep, workload.load_points, workload.design)
    facts = {
        "capacity": manifest.get("capacity") or {},
        "backend": manifest.get("backend", "kvbench"),
        "model": (manifest.get("model") or {}).get("name"),
    }
    for cell in design.cells:
        aggregate_cell(run, cell, facts)


def _run_blocks(runner: BlockRunner, blocks: Sequence[Block]) -> None:
    """All blocks, unless no server can be started at all: then hours of waiting would measure nothing."""
    failed_starts, started = 0, False
    for block in blocks:
        if runner.run_block(block):
            started = True
        else:
            failed_starts += 1
        if not started and failed_starts >= MAX_FAILED_STARTS:
            return


def _manifest_writer(
    run: RunFolder, manifest: dict[str, Any], *, force: bool
) -> Callable[[Block, Mapping[str, Any] | None, Target], None]:
    """Stores what the first server of each configuration says of itself, and refuses one that is another."""

    def write(block: Block, info: Mapping[str, Any] | None, target: Target) -> None:
        told = dict(info or {})
        config_id = block.configuration.config_id
        accept_server(manifest, config_id, told, force=force)
        manifest["model"] = manifest.get("model") or {
            **dataclasses.asdict(target.model),
            **(told.get("model") or {}),
        }
        if capacity := told.get("capacity"):  # what the server has made of the budget wins over the arithmetic
            known = manifest["capacity"].setdefault(config_id, {})
            known |= capacity | {"kv_budget_bytes": capacity.get("budget_bytes", known.get("kv_budget_bytes"))}
        add_server(manifest, config_id, told)
        write_json(run.manifest_path, manifest)

    return write
