"""A sweep from a resolved workload to a results folder: plan, run, resume, finish."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench.calibration.cache import Calibrator
from kvbench.common.errors import EXIT_INTERRUPTED, EXIT_INVALID, EXIT_OK
from kvbench.common.files import utc_now, write_json
from kvbench.common.git import git_state
from kvbench.runs.folder import RunFolder, create_run
from kvbench.runs.manifest import add_server, build_manifest
from kvbench.runs.resume import accept_server, reopen
from kvbench.runs.work import Work, kept, work_in
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
        with work_in(run.path, kept(self.resume_command(run)), self._say) as work:
            return self._measure(work, run, design, blocks, capacity, guesses)
        return EXIT_INTERRUPTED

    def _measure(
        self,
        work: Work,
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
        failures: list[Failure] = []
        work.close = lambda: self._close(run, manifest, failures, "incomplete")
        finished = sum(len(b.cells) for b in blocks) - sum(len(b.cells) for b in left)
        self._say(f"results: {run.path}")
        if self.resumed:
            self._say(f"{finished} loads are finished and are not run again")
            for path in run.damaged_loads():
                self._note(f"a file in {path} is damaged: the load is run again")
        with SweepProgress(self.console, left, Estimator(guesses, self.options.start_guess_s)) as listener:
            runner = BlockRunner(
                self.workload,
                run,
                self.new_target,
                listener,
                _manifest_writer(run, manifest, force=self.options.force),
                work.check,
                failures,
                calibrate=self._calibrator(run, listener.status, self._say),
                capacity=capacity,
            )
            _run_blocks(runner, left)
        complete = not without_done(run, planned_blocks(self.workload, manifest))
        self._close(run, manifest, failures, "complete" if complete else "incomplete")
        if complete:
            report = shlex.join(["kvbench", "report", os.path.relpath(run.path)])
            work.close, work.next_step = None, f"everything is measured. Write the report with:\n  {report}"
        if note := capacity_note(design.configurations, manifest["capacity"]):
            self._say(note)
        return self._conclude(run, design, failures, complete)

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

    def _note(self, text: str) -> None:
        self._say(f"note: {text}")

    def _say(self, text: str) -> None:
        """As it is, unwrapped: commands are copied from it."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

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
