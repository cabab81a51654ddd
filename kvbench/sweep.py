"""A sweep from a resolved workload to a results folder: plan, run, resume, finish."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from kvbench import loadrun
from kvbench.block import BlockRunner, Failure
from kvbench.design import Block, Cell, Design, make_design, plan_blocks, select
from kvbench.errors import Interrupted, UsageError
from kvbench.manifest import build_manifest, git_state
from kvbench.progress import Estimator, SweepProgress, clock
from kvbench.results import RunFolder, create_run, utc_now, write_json
from kvbench.targets.base import Target
from kvbench.workload import Workload, differing_keys

EXIT_OK, EXIT_INVALID, EXIT_INTERRUPTED = 0, 4, 130
_GUESS_TOKENS_PER_S = {"cpu": 200.0, "gpu": 4000.0}  # until the first load is measured
_UNKNOWN = 2**20  # a limit that only the server knows is checked once it runs


@dataclass(frozen=True)
class SweepOptions:
    """What the command line adds to the workload."""

    only: tuple[str, ...] = ()
    output_dir: Path = Path("results")
    report: bool = True
    backend: str = "kvbench"
    check: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda settings: {}
    """Engine-side check of one configuration's settings; returns its capacity, raises ValueError."""


def plan_sweep(workload: Workload, only: Sequence[str] = ()) -> tuple[Design, tuple[Block, ...]]:
    """Cells and blocks in the order in which they run."""
    design = select(make_design(workload.engine, workload.sweep, workload.load_points, workload.design), only)
    return design, plan_blocks(design, workload.load.repeats, workload.seed)


def preflight(workload: Workload, design: Design, options: SweepOptions) -> tuple[dict[str, Any], dict[str, float]]:
    """Everything that can be refused before a launch: each configuration, and the prompts of each load.

    Returns capacity by configuration id and guessed seconds by load id. Raises UsageError.
    """
    capacity: dict[str, Any] = {}
    for configuration in design.configurations:
        try:
            capacity[configuration.config_id] = dict(options.check(configuration.settings))
        except ValueError as error:
            raise UsageError(f"configuration {configuration.config_id}: {error}") from None
    rate = _GUESS_TOKENS_PER_S.get(workload.profile, 200.0)
    guesses: dict[str, float] = {}
    for cell in design.cells:
        known = capacity[cell.configuration.config_id]
        limit = known.get("max_model_len") or cell.configuration.settings.get("max_model_len", _UNKNOWN)
        try:
            requests = loadrun.make_requests(
                workload.load,
                cell.load,
                vocab_size=int(known.get("vocab_size") or _UNKNOWN),
                max_model_len=int(limit),
                seed=workload.seed,
                repeat=1,
            )
        except (ValueError, OSError) as error:
            raise UsageError(f"{cell.cell_id}: {error}") from None
        work = sum(r.max_tokens for r in requests) / (rate * min(1.0, (cell.load.concurrency or 8) / 4))
        arrivals = max((r.arrival_s or 0.0 for r in requests), default=0.0)
        guesses[cell.load.load_id] = max(work, arrivals) + 3.0
    return capacity, guesses


def describe_plan(
    workload: Workload, design: Design, blocks: Sequence[Block], seconds: float, console: Console
) -> None:
    """The plan of --dry-run: cells, order, time."""
    loads = sum(len(b.cells) for b in blocks)
    console.print(
        f"{workload.name} ({workload.profile} profile, seed {workload.seed}): {len(design.configurations)} "
        f"configurations, {len(design.cells)} cells, {len(blocks)} server launches, {loads} loads, "
        f"about {clock(seconds)} (a guess until it is measured)",
        soft_wrap=True, highlight=False, markup=False,
    )  # fmt: skip
    console.print("cells:", highlight=False)
    for cell in design.cells:
        point = cell.load
        what = f"{point.concurrency} users" if point.mode == "closed" else f"{point.request_rate or 'trace'} requests/s"
        count = f", {point.num_requests} requests" if point.num_requests else ""
        mark = "  (baseline)" if cell.configuration.is_baseline else ""
        console.print(
            f"  {cell.cell_id}: {cell.configuration.label}; {what}{count}{mark}", highlight=False, markup=False
        )
    console.print("order:", highlight=False)
    for number, block in enumerate(blocks, 1):
        cells = ", ".join(c.load.load_id for c in block.cells)
        console.print(
            f"  {number}. repeat {block.repeat}: {block.configuration.config_id}: {cells}",
            highlight=False,
            markup=False,
        )
    for note in design.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


@dataclass
class Sweep:
    """One execution of a sweep in one folder. ``resumed`` is the folder of a run to go on with."""

    workload: Workload
    options: SweepOptions
    new_target: Callable[[], Target]
    console: Console
    resumed: RunFolder | None = None
    argv_extra: tuple[str, ...] = ()  # options that a resume command must repeat, such as --serve-cmd
    manifest_extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def execute(self) -> int:
        """Run what is not done; the exit code. Raises UsageError before anything is launched."""
        design, blocks = plan_sweep(self.workload, self.options.only)
        capacity, guesses = preflight(self.workload, design, self.options)
        for note in design.notes:
            self.console.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False)
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
        manifest = self._open_manifest(run, blocks, capacity)
        write_json(run.manifest_path, manifest)
        estimator = Estimator(guesses)
        left = _without_done(run, blocks)
        finished = sum(len(b.cells) for b in blocks) - sum(len(b.cells) for b in left)
        self.console.print(f"results: {run.path}", highlight=False, markup=False, soft_wrap=True)
        if self.resumed:
            self.console.print(f"{finished} loads are finished and are not run again", highlight=False)
        failures: list[Failure] = []
        try:
            with _signals(), SweepProgress(self.console, left, estimator) as listener:
                runner = BlockRunner(
                    self.workload, run, self.new_target, listener, _manifest_writer(run, manifest), failures
                )
                for block in left:
                    runner.run_block(block)
        except (Interrupted, KeyboardInterrupt) as interrupt:
            self._close(run, manifest, failures, "incomplete", capacity)
            name = getattr(interrupt, "signal_name", "SIGINT")
            self.console.print(
                f"stopped by {name}; what was measured is kept. Go on with:\n  {self.resume_command(run)}",
                highlight=False, markup=False, soft_wrap=True,
            )  # fmt: skip
            return EXIT_INTERRUPTED
        except BaseException:
            self._close(run, manifest, failures, "incomplete", capacity)
            raise
        complete = not _without_done(run, _planned_blocks(self.workload, manifest))
        self._close(run, manifest, failures, "complete" if complete else "incomplete", capacity)
        return self._conclude(run, design, failures, complete)

    def resume_command(self, run: RunFolder) -> str:
        return shlex.join(["kvbench", "sweep", "--resume", os.path.relpath(run.path), *self.argv_extra])

    def _open_manifest(self, run: RunFolder, blocks: Sequence[Block], capacity: Mapping[str, Any]) -> dict[str, Any]:
        if self.resumed:
            manifest = self.resumed.manifest()
            require_same_workload(manifest, self.workload, run)
            manifest["resumed"] = [*manifest.get("resumed", []), {"at": utc_now(), "git": git_state()}]
            return manifest | {"status": "running", "failures": []}
        source = self.workload.source
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
            workload_file=os.path.relpath(source) if source else None,
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
        capacity: Mapping[str, Any],
    ) -> None:
        """Aggregate what is there and write the manifest; also after an interruption."""
        manifest |= {"status": status, "ended": utc_now(), "failures": [dataclasses.asdict(f) for f in failures]}
        write_json(run.manifest_path, manifest)
        aggregate_run(run, self.workload, manifest)

    def _conclude(self, run: RunFolder, design: Design, failures: Sequence[Failure], complete: bool) -> int:
        problems = [f"{f.cell_id} repeat {f.repeat} failed: {f.reason}" for f in failures]
        problems += [
            f"{cell.cell_id} is invalid: {reason}" for cell in design.cells for reason in _invalid_reasons(run, cell)
        ]
        if self.options.report:
            _report(run, self.console)
        if not complete and not failures:
            self.console.print(f"cells are left; go on with:\n  {self.resume_command(run)}", highlight=False)
        if problems:
            self.console.print(
                "INVALID: not every load is a measurement (exit code 4); the results are kept:\n"
                + "\n".join(f"  - {p}" for p in problems),
                highlight=False, markup=False, soft_wrap=True,
            )  # fmt: skip
        if failures:
            self.console.print(f"run the failed loads again with:\n  {self.resume_command(run)}", highlight=False)
        return EXIT_INVALID if problems else EXIT_OK


def require_same_workload(manifest: Mapping[str, Any], workload: Workload, run: RunFolder) -> None:
    """Raises UsageError when ``workload`` is not the one the run was started with; names the keys."""
    # through JSON, as the manifest went
    import json

    now = json.loads(json.dumps(workload.resolved, default=str))
    keys = differing_keys(manifest["workload"], now)
    if keys:
        raise UsageError(
            f"{run.path} was started with another workload; it differs in {', '.join(keys)}: resume it with "
            "`kvbench sweep --resume FOLDER` alone (the stored workload), or start a new run without --resume"
        )


def aggregate_run(run: RunFolder, workload: Workload, manifest: Mapping[str, Any]) -> None:
    """cells/*/summary.json and summary.csv from the finished loads."""
    from kvbench.aggregate import aggregate_cell, write_summary_csv

    design = make_design(workload.engine, workload.sweep, workload.load_points, workload.design)
    facts = {
        "capacity": manifest.get("capacity") or {},
        "backend": manifest.get("backend", "kvbench"),
        "model": (manifest.get("model") or {}).get("name"),
    }
    summaries = [s for cell in design.cells if (s := aggregate_cell(run, cell, facts))]
    if summaries:
        write_summary_csv(run, summaries)


def _planned_blocks(workload: Workload, manifest: Mapping[str, Any]) -> tuple[Block, ...]:
    planned = {cell_id for block in manifest["plan"] for cell_id in block["cells"]}
    _, blocks = plan_sweep(workload)
    return tuple(dataclasses.replace(b, cells=tuple(c for c in b.cells if c.cell_id in planned)) for b in blocks)


def _without_done(run: RunFolder, blocks: Sequence[Block]) -> list[Block]:
    """The blocks with the loads that are not finished."""
    left = [
        dataclasses.replace(b, cells=tuple(c for c in b.cells if not run.is_done(c.cell_id, b.repeat))) for b in blocks
    ]
    return [b for b in left if b.cells]


def _invalid_reasons(run: RunFolder, cell: Cell) -> list[str]:
    from kvbench.results import DONE, read_json

    found = []
    for repeat in run.done_repeats(cell.cell_id):
        done = read_json(run.load(cell.cell_id, repeat) / DONE)
        found += [f"repeat {repeat}: {reason}" for reason in done["invalid_reasons"]]
    return found


def _manifest_writer(
    run: RunFolder, manifest: dict[str, Any]
) -> Callable[[Block, Mapping[str, Any] | None, Target], None]:
    """Stores what the first server of each configuration says of itself."""

    def write(block: Block, info: Mapping[str, Any] | None, target: Target) -> None:
        told = dict(info or {})
        model = dict(told.get("model_info") or told.get("model") or {})
        manifest["model"] = manifest.get("model") or {**dataclasses.asdict(target.model), **model}
        config_id = block.configuration.config_id
        if isinstance(told.get("capacity"), Mapping):
            manifest["capacity"][config_id] = {**manifest["capacity"].get(config_id, {}), **told["capacity"]}
        manifest.setdefault("servers", {}).setdefault(config_id, told)
        write_json(run.manifest_path, manifest)

    return write


def _report(run: RunFolder, console: Console) -> None:
    """Table, headline and report. A failure here must not cost the results: it is said, and the run stays."""
    from kvbench import report

    try:
        report.console_table(run.path)
        console.print(report.headline(run.path), highlight=False, markup=False, soft_wrap=True)
        paths = report.build_report(run.path)
    except (ValueError, OSError, KeyError) as error:
        console.print(
            f"the report could not be written ({error!r}); the results are kept, try `kvbench report {run.path}`",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
        return
    for path in paths.values() if isinstance(paths, Mapping) else paths:
        console.print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGINT and SIGTERM become one Interrupted; further ones are ignored, since the way out is bounded."""

    def handle(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signal.Signals(number).name)

    before = {each: signal.signal(each, handle) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
