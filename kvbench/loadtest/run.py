"""What ``kvbench load`` does with its options: one load on a running server, or a search over rates."""

from __future__ import annotations

import dataclasses
import shlex
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench.calibration.cache import Calibrator
from kvbench.common.console import print_plain, status_line
from kvbench.common.errors import (
    EXIT_INTERRUPTED,
    EXIT_INVALID,
    EXIT_OK,
    EXIT_REGRESSION,
    MeasurementError,
    UsageError,
)
from kvbench.common.files import check_output_dir, read_json, write_json
from kvbench.loadtest.folder import METRICS, LoadFolder, describe, open_folder
from kvbench.loadtest.max_rate.plan import SearchPlan, at_rate, mean_rate, plan_search
from kvbench.loadtest.max_rate.run import RateSearch
from kvbench.loadtest.options import (
    LoadOptions,
    become_worker,
    check_combination,
    check_named_load,
    choose_load,
    client_processes,
    workload_source,
)
from kvbench.loadtest.result import lengths_of, show, stored
from kvbench.measure.http import DRAIN, PREPARE, HttpInstrument
from kvbench.measure.instrument import Clients, Job, Listener, UnstoredError
from kvbench.measure.live_server import LiveServer
from kvbench.measure.server import Server, requests_for
from kvbench.measure.server_state import with_server_defaults
from kvbench.measure.warm_up import WarmUp, warm_up
from kvbench.metrics.latency import too_many_failed
from kvbench.requests.request import store_requests
from kvbench.runs.folder import RunFolder
from kvbench.runs.work import FolderWork, begun, kept, work_in
from kvbench.targets.base import Target
from kvbench.targets.choose import preset_named, running_server
from kvbench.targets.prometheus import MetricsSample
from kvbench.workload.design import LoadPoint
from kvbench.workload.load_section import load_point
from kvbench.workload.request_form import RequestForm

_RUN = 1  # of a single load; 0 is the warm-up's


def load_command(
    *,
    given: Collection[str],
    workload: str | None,
    output_dir: Path | None,
    resume: bool,
    find_max_rate: str | None,
    **options: Any,
) -> int:
    """The exit code. ``given``: which of the options stand on the command line. Raises UsageError, MeasurementError."""
    check_combination(given, options["overrides"])
    if options["worker"]:
        become_worker(options)
    clients = client_processes(options)
    chosen = LoadOptions(**{field.name: options[field.name] for field in dataclasses.fields(LoadOptions)})
    workload, text = workload_source(workload, options, chosen, searching=find_max_rate is not None)
    how = {"text": text, **{key: options[key] for key in ("profile", "overrides", "seed")}}
    check_named_load(workload, chosen, how, searching=find_max_rate is not None)
    plan = None
    if find_max_rate is None:
        loaded, point = choose_load(workload, chosen, **how)
    else:
        loaded, point, plan = plan_search(workload, find_max_rate, chosen, how, options)
    target = _running_target(options, loaded.load.form)
    target.start({}, Path())
    console = Console()
    say = partial(print_plain, console)
    try:
        if (load := with_server_defaults(loaded.load, target)) is not loaded.load:
            changed = {"cache_state": load.cache_state, "ignore_eos": load.ignore_eos}
            resolved = {**loaded.resolved, "load": {**loaded.resolved["load"], **changed}}
            loaded = dataclasses.replace(loaded, load=load, resolved=resolved)
        for note in target.notes:
            say(f"note: {note}")
        try:
            requests = requests_for(loaded.load, point, target, loaded.seed, _RUN)
        except MeasurementError as error:  # nothing has been sent or written yet
            drawn = text and loaded.load.prompts.kind == "synthetic"
            raise UsageError(f"{error}{' (here --input-len and --output-len)' if drawn else ''}") from None
        search = dataclasses.asdict(plan) if plan else None
        manifest = describe(loaded, point, target_facts(target), search=search, sharing=clients.facts)
        with _work(output_dir, manifest["command"], resume, say) as (path, work):
            folder = open_folder(path, manifest, resume=resume)
            told = StatusText(console)
            calibrator = Calibrator(folder.path, not options["no_calibration"], told.say, console.print)

            def check() -> None:
                work.check()
                target.check_alive()

            job = Job(
                loaded, RunFolder(path), lambda: target, told, check,
                calibrate=calibrator if clients.workers is None else None,
                clients=Clients(clients.spec, clients.arguments, clients.workers),
            )  # fmt: skip
            instrument = HttpInstrument(job)
            settings = {"target": target.base_url}
            instrument.server = Server(loaded.load, loaded.seed, target, settings, target.server_info(), None, check)
            if clients.notice:
                say(clients.notice)
            runner = LoadRunner(instrument, point, folder, console, options["num_warmups"], calibrator, requests, told)
            if output_dir is not None:
                work.close = partial(runner.say_what_is_kept, work, resume_command(manifest["command"], resume))
            next_step = "give the same command and --resume" if output_dir is not None else ""
            return runner.search(plan, next_step) if plan else runner.run(next_step)
        return EXIT_INTERRUPTED
    finally:
        target.stop()


def _running_target(options: Mapping[str, Any], form: RequestForm) -> Target:
    """The running server that the options name. Raises UsageError."""
    if not options["url"]:
        raise UsageError("--url is missing: the server, e.g. --url http://127.0.0.1:8000")
    kind = preset_named(options["preset"])
    return running_server("--url", options["url"], options, kind, form)()


@contextmanager
def _work(
    output_dir: Path | None, command: Sequence[str], resume: bool, say: Callable[[str], None]
) -> Iterator[tuple[Path, FolderWork]]:
    """The work in ``output_dir``, or in a folder that is removed afterwards."""
    if output_dir is None:
        with tempfile.TemporaryDirectory() as scratch, work_in(Path(scratch), "nothing is kept", say) as work:
            yield Path(scratch), work
        return
    check_output_dir(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    with work_in(output_dir, kept(resume_command(command, resume)), say) as work:
        yield output_dir, work


def resume_command(command: Sequence[str], resume: bool) -> str:
    """How to go on with a load that was begun by ``command``. ``resume``: it was given --resume itself."""
    return shlex.join([*command, *([] if resume else ["--resume"])])


_PHASES = {
    PREPARE: "preparing the server's cache and the client",
    "begin": "sending",
    DRAIN: "all sent, waiting for the last answers",
    "measured": "reading the answers",
}


class StatusText(Listener):
    """Shows the current phase: in the status line on a terminal, as a printed line elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name = self._phase = ""
        self._server = LiveServer()
        self._update: Callable[[str], None] = lambda text: None

    def begin(self, name: str, update: Callable[[str], None]) -> None:
        """``update`` shows the text of a line about the load ``name`` from here on."""
        self._name, self._update, self._server = name, update, LiveServer()

    def rows(self, width: int) -> Sequence[str]:
        """What the server says of itself."""
        return self._server.rows(width)

    def server_read(self, sample: MetricsSample) -> None:
        self._server.take(sample)

    def say(self, text: str) -> None:
        """Something else that takes seconds is being done."""
        if self._console.is_terminal:
            self._update(f"{self._name}: {text}")
        else:
            print_plain(self._console, text)

    def load_phase(self, phase: str) -> None:
        """What the load does from here on."""
        self._phase = _PHASES[phase]
        self._update(f"{self._name}: {self._phase}")

    def load_progress(self, done: int, total: int, failed: int, elapsed_s: float) -> None:
        """How far it is."""
        self._update(f"{self._name}: {self._phase}, {done}/{total} requests, {failed} failed, {elapsed_s:.0f} s")


def target_facts(target: Target) -> dict[str, Any]:
    """Which server was measured, for a manifest: url, model and what tells versions apart; never a key."""
    model = dataclasses.asdict(target.model)
    facts = {"url": target.base_url, "preset": target.preset.name, "version": target.version()}
    facts |= {"endpoint": target.dialect.endpoint, "template_tokens": target.template_tokens}
    return facts | {"model": model.pop("name"), **model}


@dataclass
class LoadRunner:
    """The loads of one command on one server. ``warm_ups``: requests before the first, never measured.

    ``requests``: of a load at ``point``.
    """

    instrument: HttpInstrument
    point: LoadPoint
    folder: LoadFolder
    console: Console
    warm_ups: int
    calibrator: Calibrator
    requests: list[Any]
    told: StatusText
    measured: int = 0

    def run(self, next_step: str) -> int:
        """A single load; the exit code. ``next_step``: how to measure an invalid one again; empty: not at all."""
        metrics_file = self.folder.path / METRICS
        if self.folder.finished:
            print_plain(self.console, "this load is finished and is not run again")
            result = read_json(metrics_file)
        else:
            result = self.measure(self.point, _RUN, self.folder.path, self.requests)
            outcome = {name: result[name] for name in ("valid", "refused", "wrong_answers")}
            try:
                write_json(metrics_file, result)
                self.folder.finish(**outcome, calibration=self.calibrator.facts())
            except OSError:  # a full disk: what was measured is told at least
                show(self.console, self.point.load_id, result)
                raise
        show(self.console, self.point.load_id, result)
        if result.get("wrong_answers"):
            return EXIT_REGRESSION
        if not result["invalid_reasons"]:
            return EXIT_OK
        if too_many_failed(result["metrics"]):
            print_plain(self.console, "the server failed requests: see the failures and the server's log first")
        if next_step:
            print_plain(self.console, f"to measure again {next_step}: the new load replaces this one")
        return EXIT_INVALID

    def search(self, plan: SearchPlan, next_step: str) -> int:
        """A search over rates; the exit code. ``next_step``: how to go on with one that is not at its end."""
        server = self.instrument.server
        load = server.load
        native_rate, least = None, self.point.num_requests
        if load.arrivals == "trace":
            native_rate, least = mean_rate(self.requests), len(self.requests)

        def check() -> None:
            server.check()
            search.check_time()

        def measure(rate: float, count: int, number: int, out: Path) -> dict[str, Any]:
            point = self.point
            if native_rate is None:
                point = load_point("open", concurrency=None, rate=rate, num_requests=count, arrivals=load.arrivals)
            run_load = at_rate(load, rate, count, native_rate)
            self.instrument.server = dataclasses.replace(server, load=run_load, check=check)
            return self.measure(point, number, out, None)

        self.instrument.job.failures_invalidate = False

        bounds, length = plan.bounds(native_rate or self.point.request_rate), plan.run_length(load, least)
        search = RateSearch(
            plan.conditions, bounds, length, self.folder, measure, self.console, 60.0 * plan.max_minutes
        )
        code = search.run()
        facts = {"valid": code != EXIT_INVALID, "calibration": self.calibrator.facts()}
        if not search.can_continue:
            self.folder.finish(**facts)
            return code
        self.folder.update(**facts)
        if next_step:
            print_plain(self.console, f"to go on {next_step}: finished runs are not run again")
        return code

    def say_what_is_kept(self, work: FolderWork, command: str) -> None:
        """At an early end: where no load was measured to its end, ``command`` begins again."""
        if not (self.measured or any(self.folder.finished_runs())):
            work.next_step = begun(command)

    def measure(self, point: LoadPoint, number: int, out: Path, made: list[Any] | None) -> dict[str, Any]:
        """One load, after the warm-up if it is the first; what metrics.json holds.

        ``made``: its requests; None: those of run ``number`` are drawn.
        """
        server, target = self.instrument.server, self.instrument.server.target
        notes_before = len(target.notes)
        warm = None if self.measured else self._warm_up(server, point)
        if new := target.notes[notes_before:]:  # it takes no token ids
            print_plain(self.console, f"note: {new[0]}")
            made = None
        requests = made or server.requests(point, number)
        path, digest = store_requests(requests, out, "requests")
        name = point.load_id
        with status_line(self.console, f"{name}: {len(requests)} requests", more=self.told.rows) as update:
            self.told.begin(name, update)
            unstored = None
            try:
                result = self.instrument.send(point, requests, path, out)
            except UnstoredError as error:
                result, unstored = error.result, error
        self.measured += 1
        kept = {
            **stored(server.load, point, self.folder.manifest["target"], result),
            **({"warm_up": warm.to_json()} if warm else {}),
            "notes": [*target.notes],
            "lengths": lengths_of(server.load, requests, target.model.max_model_len),
            "prefix_caching": server.info.engine.enable_prefix_caching,
            "requests_file": path.name,
            "requests_sha256": digest,
        }
        if unstored:  # what was measured is told at least
            show(self.console, name, kept)
            raise unstored
        return kept

    def _warm_up(self, server: Server, point: LoadPoint) -> WarmUp:
        began, answers = time.monotonic(), ["no request answered"]

        def on_answer(answered: int, of: int) -> None:
            answers.append(f"{answered} of {of} requests answered")

        with status_line(self.console, "warming up") as update:
            update(lambda: f"warming up: {answers[-1]}, {time.monotonic() - began:.0f} s")
            warm = warm_up(server, point, self.warm_ups, on_answer)
        self.folder.update(warm_up=warm.to_json())
        return warm
