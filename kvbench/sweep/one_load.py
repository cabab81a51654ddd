"""``kvbench load``: a sweep of one cell on a server that runs already, or a search over rates there."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench.calibration.calibrate import Calibrator
from kvbench.common.console import print_plain, status_line
from kvbench.common.errors import (
    EXIT_INTERRUPTED,
    EXIT_INVALID,
    EXIT_OK,
    EXIT_REGRESSION,
    MeasurementError,
    UsageError,
)
from kvbench.common.files import check_output_dir, utc_now
from kvbench.common.records import write_record
from kvbench.load.launch import DRAIN
from kvbench.measure.http import PREPARE, HttpInstrument
from kvbench.measure.instrument import Job, Listener
from kvbench.measure.warm_up import warm_up
from kvbench.requests.request import RequestList
from kvbench.runs.aggregate import aggregate_cell
from kvbench.runs.folder import RunFolder, load_resume_command
from kvbench.runs.manifest import new_manifest
from kvbench.runs.results import CellLoad, LoadResult, WarmUpResult
from kvbench.runs.work import FolderWork, kept, work_in
from kvbench.sweep.load_folder import METRICS, LoadFolder, LoadManifest, SearchRuns, open_folder
from kvbench.sweep.load_options import (
    become_worker,
    check_combination,
    check_named_load,
    choose_load,
    client_processes,
    workload_source,
)
from kvbench.sweep.progress import LiveServer
from kvbench.sweep.rate_run import RateSearch, SearchPlan, at_rate, mean_rate, plan_search
from kvbench.sweep.requests import LoadOptions, LoadRequest
from kvbench.sweep.show_load import StoredLoad, show, stored_load
from kvbench.targets.base import Target
from kvbench.targets.choose import preset_named, running_server
from kvbench.targets.prometheus import MetricsSample
from kvbench.workload.design import Block, Cell, LoadPoint, plan_sweep
from kvbench.workload.file import Workload
from kvbench.workload.load_section import load_point
from kvbench.workload.options import PromptOptions
from kvbench.workload.request_form import RequestForm

_REPEAT = 1  # of a single load; 0 is the warm-up's


def load_command(request: LoadRequest) -> int:
    """Runs the command; its exit code. Raises UsageError, MeasurementError."""
    overrides = request.changes
    check_combination(request.given, overrides)
    if request.worker:
        become_worker(request)
    clients, notice = client_processes(request)
    chosen, slo, output_dir = request.part(LoadOptions), request.find_max_rate, request.output_dir
    workload, text = workload_source(
        request.workload, request.part(PromptOptions), chosen, profile=request.profile, searching=slo is not None
    )
    how = {"text": text, "profile": request.profile, "overrides": overrides, "seed": request.seed}
    check_named_load(workload, chosen, how, searching=slo is not None)
    plan = None
    if slo is None:
        loaded, point = choose_load(workload, chosen, **how)
    else:
        loaded, point, plan = plan_search(workload, slo, chosen, how, request)
    console = Console()
    say = partial(print_plain, console)
    display = LoadDisplay(console)
    job = Job(loaded, RunFolder(Path()), _new_target(request, loaded.load.form), display, clients=clients)
    instrument = HttpInstrument(job)
    block = block_of(loaded, point, request.url)
    try:
        instrument.open(block)
        loaded = job.workload = _with_load_of(loaded, instrument)
        for note in instrument.server.target.notes:
            say(f"note: {note}")
        try:
            requests = instrument.server.requests(point, _REPEAT)
        except MeasurementError as error:  # nothing has been sent or written yet
            drawn = text and loaded.load.prompts.kind == "synthetic"
            raise UsageError(f"{error}{' (here --input-len and --output-len)' if drawn else ''}") from None
        manifest = describe(loaded, block, instrument.server.target, plan, clients.facts)
        with _work(output_dir, manifest.command, say) as (path, work):
            folder = open_folder(path, manifest, resume=request.resume)
            calibrator = Calibrator(path, not request.no_calibration, display.say, console.print)
            job.folder, job.check = SearchRuns(path) if plan else RunFolder(path), work.check
            job.calibrate = calibrator if clients.workers is None else None
            if notice:
                say(notice)
            loads = OneLoad(instrument, block, folder, console, request.num_warmups, calibrator, requests, display)
            if output_dir is not None:
                work.close = partial(loads.say_what_is_kept, work, load_resume_command(manifest.command))
            next_step = "give the same command and --resume" if output_dir is not None else ""
            return loads.search(plan, next_step) if plan else loads.run(next_step)
        return EXIT_INTERRUPTED
    finally:
        instrument.close()


def block_of(workload: Workload, point: LoadPoint, url: str | None) -> Block:
    """The block of the one cell: a running server has no settings that are known."""
    design, _ = plan_sweep(dataclasses.replace(workload, engine={"target": url}, sweep={}))
    cell = next(cell for cell in design.cells if cell.load == point)
    return Block(_REPEAT, cell.configuration, (cell,))


def _new_target(request: LoadRequest, form: RequestForm) -> Callable[[], Target]:
    """Makes the target of the running server that the options name. Raises UsageError."""
    if not request.url:
        raise UsageError("--url is missing: the server, e.g. --url http://127.0.0.1:8000")
    return running_server("--url", request.url, request, preset_named(request.preset), form)


def _with_load_of(workload: Workload, instrument: HttpInstrument) -> Workload:
    """The workload as this server runs it, which may be unable to empty its cache or to ignore end tokens."""
    load = instrument.server.load
    if load is workload.load:
        return workload
    changed = {"cache_state": load.cache_state, "ignore_eos": load.ignore_eos}
    resolved = {**workload.resolved, "load": {**workload.resolved["load"], **changed}}
    return dataclasses.replace(workload, load=load, resolved=resolved)


def describe(
    workload: Workload, block: Block, target: Target, plan: SearchPlan | None, sharing: Mapping[str, Any]
) -> LoadManifest:
    """The manifest of a load, before anything is sent; never with a key."""
    facts = dataclasses.asdict(target.model)
    served = {"url": target.base_url, "preset": target.preset.name, "version": target.version()}
    served |= {"endpoint": target.dialect.endpoint, "template_tokens": target.template_tokens}
    return new_manifest(
        LoadManifest,
        workload,
        [] if plan else [block],
        kind="load",
        seed=workload.seed,
        load=CellLoad.of(block.cells[0].load),
        target=served | {"model": facts.pop("name"), **facts},
        search=dataclasses.asdict(plan) if plan else None,
        sharing=dict(sharing),
        backend=target.preset.name,
        started=utc_now(),
    )


@contextmanager
def _work(
    output_dir: Path | None, command: Sequence[str], say: Callable[[str], None]
) -> Iterator[tuple[Path, FolderWork]]:
    """The work in ``output_dir``, or in a folder that is removed afterwards."""
    if output_dir is None:
        with tempfile.TemporaryDirectory() as scratch, work_in(Path(scratch), "nothing is kept", say) as work:
            yield Path(scratch), work
        return
    check_output_dir(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    with work_in(output_dir, kept(load_resume_command(command)), say) as work:
        yield output_dir, work


_PHASES = {
    PREPARE: "preparing the server's cache and the client",
    "begin": "sending",
    DRAIN: "all sent, waiting for the last answers",
    "measured": "reading the answers",
}


class LoadDisplay(Listener):
    """Shows what a load does, on a terminal in the status line. ``done``: the result of the last load."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name = self._phase = ""
        self._update: Callable[[str], None] = lambda text: None
        self._server = LiveServer()
        self.done: LoadResult | None = None

    @contextmanager
    def of_load(self, name: str, total: int) -> Iterator[None]:
        """The status line of the load ``name`` of ``total`` requests."""
        self._name, self._server, self.done = name, LiveServer(), None
        with status_line(self._console, f"{name}: {total} requests", more=self._server.rows) as update:
            self._update = update
            yield
        self._update = lambda text: None

    def say(self, text: str) -> None:
        """Tells that something else that takes seconds is being done."""
        if self._console.is_terminal:
            self._update(f"{self._name}: {text}")
        else:
            print_plain(self._console, text)

    def load_phase(self, phase: str) -> None:
        self._phase = _PHASES[phase]
        self._update(f"{self._name}: {self._phase}")

    def load_progress(self, done: int, total: int, failed: int, elapsed_s: float) -> None:
        self._update(f"{self._name}: {self._phase}, {done}/{total} requests, {failed} failed, {elapsed_s:.0f} s")

    def server_read(self, sample: MetricsSample) -> None:
        self._server.take(sample)

    def load_finished(self, cell: Cell, repeat: int, done: LoadResult) -> None:
        self.done = done


@dataclass
class OneLoad:
    """The loads of one command on one server. ``warm_ups``: requests before the first, never measured.

    ``block``: of the one cell; ``requests``: of its load, as drawn to see whether the server can take them.
    """

    instrument: HttpInstrument
    block: Block
    folder: LoadFolder
    console: Console
    warm_ups: int
    calibrator: Calibrator
    requests: RequestList
    display: LoadDisplay

    @property
    def cell(self) -> Cell:
        return self.block.cells[0]

    def run(self, next_step: str) -> int:
        """Runs a single load; the exit code. ``next_step``: how to measure an invalid one again; empty: not at all."""
        metrics_file = self.folder.path / METRICS
        if self.folder.finished:
            print_plain(self.console, "this load is finished and is not run again")
            result = self.folder.metrics(self.folder.path)
        else:
            result = self.measure(self.cell, _REPEAT)
            outcome = {"valid": result.valid, "refused": result.refused, "wrong_answers": result.wrong_answers}
            try:
                write_record(metrics_file, result)
                run = RunFolder(self.folder.path)
                model = {"name": self.instrument.server.target.model.name}
                aggregate_cell(run, self.cell, self.folder.manifest.model_copy(update={"model": model}))
                self.folder.show_at_top(run.load(self.cell.cell_id, _REPEAT))
                self.folder.finish(**outcome, calibration=self.calibrator.facts())
            except OSError:  # a full disk: what was measured is told at least
                show(self.console, self.cell.load.load_id, result)
                raise
        show(self.console, self.cell.load.load_id, result)
        if result.wrong_answers:
            return EXIT_REGRESSION
        if not result.invalid_reasons:
            return EXIT_OK
        if result.metrics.too_many_failed:
            print_plain(self.console, "the server failed requests: see the failures and the server's log first")
        if next_step:
            print_plain(self.console, f"to measure again {next_step}: the new load replaces this one")
        return EXIT_INVALID

    def search(self, plan: SearchPlan, next_step: str) -> int:
        """Runs a search over rates; the exit code. ``next_step``: how to go on with one that is not at its end."""
        server, job, native_rate, least = self.instrument.server, self.instrument.job, None, self.cell.load.num_requests
        load, check = server.load, job.check
        if load.arrivals == "trace":
            native_rate, least = mean_rate(self.requests), len(self.requests)

        def check_both() -> None:
            check()
            search.check_time()

        def measure(rate: float, count: int, number: int) -> StoredLoad:
            point = self.cell.load
            if native_rate is None:
                point = load_point("open", concurrency=None, rate=rate, num_requests=count, arrivals=load.arrivals)
            self.instrument.server = dataclasses.replace(server, load=at_rate(load, rate, count, native_rate))
            return self.measure(Cell(f"r{rate:g}", self.block.configuration, point), number)

        job.check, job.failures_invalidate = check_both, False
        bounds, length = plan.bounds(native_rate or self.cell.load.request_rate), plan.run_length(load, least)
        search = RateSearch(
            plan.conditions, bounds, length, self.folder, measure, self.console, 60.0 * plan.max_minutes
        )
        code = search.run()
        facts = {"valid": code != EXIT_INVALID, "calibration": self.calibrator.facts()}
        if not search.can_continue:
            self.folder.finish(**facts)
            return code
        self.folder.replace(**facts)
        if next_step:
            print_plain(self.console, f"to go on {next_step}: finished runs are not run again")
        return code

    def say_what_is_kept(self, work: FolderWork, command: str) -> None:
        """Settles the next step at an early end: where no load was measured to its end, ``command`` begins again."""
        if not (self.display.done or any(self.folder.finished_runs())):
            work.next_step = f"no load was measured to its end. Begin again with:\n  {command}"

    def measure(self, cell: Cell, number: int) -> StoredLoad:
        """Measures one load, after the warm-up if it is the first; returns what metrics.json holds."""
        target = self.instrument.server.target
        if not self.instrument.loads:
            notes_before = len(target.notes)
            self.instrument.facts["warm_up"] = self._warm_up(cell.load)
            if new := target.notes[notes_before:]:  # it takes no token ids
                print_plain(self.console, f"note: {new[0]}")
        else:
            self.instrument.facts.pop("warm_up", None)
        try:
            with self.display.of_load(cell.load.load_id, len(self.requests)):
                result = self.instrument.measure(cell, number)
        except OSError:
            if self.display.done:  # a full disk: what was measured is told at least
                show(self.console, cell.load.load_id, stored_load(self.instrument, cell.load, self.display.done))
            raise
        return stored_load(self.instrument, cell.load, result)

    def _warm_up(self, point: LoadPoint) -> WarmUpResult:
        began, answers = time.monotonic(), ["no request answered"]

        def on_answer(answered: int, total: int) -> None:
            answers.append(f"{answered} of {total} requests answered")

        with status_line(self.console, "warming up") as update:
            update(lambda: f"warming up: {answers[-1]}, {time.monotonic() - began:.0f} s")
            warm = warm_up(self.instrument.server, point, self.warm_ups, on_answer)
        self.folder.replace(warm_up=warm)
        return warm
