"""What ``kvbench load`` does, apart from parsing. Imported when the command runs."""

from __future__ import annotations

import dataclasses
import shlex
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench.calibration.cache import Calibrator
from kvbench.common.console import status_line
from kvbench.common.errors import (
    EXIT_INTERRUPTED,
    EXIT_INVALID,
    EXIT_OK,
    MeasurementError,
    RefusedError,
    UsageError,
)
from kvbench.common.files import read_json, write_json
from kvbench.load import launch as loadrun
from kvbench.loadtest.conflicts import check_named_load, check_words
from kvbench.loadtest.folder import COMPLETE, METRICS, LoadFolder, describe, open_folder
from kvbench.loadtest.max_rate.plan import SearchPlan, at_rate, mean_rate, plan_search
from kvbench.loadtest.options import Asked, parse_rate, shaped
from kvbench.loadtest.result import lengths_of, show, stored
from kvbench.loadtest.shared import Sharing, be_worker, require_free, sharing
from kvbench.measure.load import Subject, measure_load, requests_for
from kvbench.measure.warm_up import WarmUp, warm_up
from kvbench.metrics.latency import too_many_failed
from kvbench.runs.work import Work, kept, work_in
from kvbench.targets.base import Target
from kvbench.workload.design import LoadPoint, load_point
from kvbench.workload.file import Workload

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
    """``kvbench load``; the exit code. ``given``: which of the parameters the user gave.

    Raises UsageError or MeasurementError.
    """
    check_words(given, options)
    if options["worker"]:
        be_worker(options)
    if workload is None:
        raise UsageError("the workload is missing: write for example `kvbench load workloads/mixed.yaml --url URL`")
    if options["master"]:
        require_free(options["bind_host"], options["bind_port"])
    shared = sharing(options)
    how = {key: options[key] for key in ("profile", "overrides", "seed")}
    asked = Asked(
        at=options["at"],
        request_rate=parse_rate(options["request_rate"]),
        burstiness=options["burstiness"],
        max_concurrency=options["max_concurrency"],
        num_prompts=options["num_prompts"],
        goodput=tuple(options["goodput"]),
    )
    check_named_load(workload, asked, how, searching=find_max_rate is not None)
    search = None
    if find_max_rate is None:
        loaded, point = shaped(workload, asked, **how)
    else:
        loaded, point, search = plan_search(workload, find_max_rate, asked, how, options)
    target = new_target(options)
    target.start({}, Path())
    console = Console()
    tell = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    try:
        made = _requests(loaded, point, target)
        manifest = _manifest(loaded, point, target, search, shared)
        with _work(output_dir, manifest["command"], resume, tell) as (path, work):
            folder = open_folder(path, manifest, resume=resume)
            calibrator = Calibrator(folder.path, not options["no_calibration"], console.print, console.print)
            subject = _subject(loaded, target, work, calibrator, shared)
            if shared.notice:
                tell(shared.notice)
            session = Session(
                subject, point, folder, console, options["num_warmups"], calibrator, made, keeps=output_dir is not None
            )
            return session.search(search) if search else session.one()
        return EXIT_INTERRUPTED
    finally:
        target.stop()


def new_target(options: Mapping[str, Any]) -> Target:
    """The running server that the options name, not yet asked anything. Raises UsageError."""
    from kvbench.targets.choose import preset_named, running_server

    if not options["url"]:
        raise UsageError("--url is missing: the server, e.g. --url http://127.0.0.1:8000")
    kind = preset_named(options["preset"])
    if options["tokenizer"] and kind.dialect.token_id_prompts:
        raise UsageError(
            f"--tokenizer is for a server that takes texts only, and {kind.title} is sent token ids: omit it"
        )
    return running_server("--url", options["url"], options, kind)()


def _requests(workload: Workload, point: LoadPoint, target: Target) -> list[Any]:
    """What the load sends. Raises UsageError when this server cannot take it: nothing has been sent or written yet."""
    try:
        return requests_for(workload.load, point, target, workload.seed, _RUN)
    except MeasurementError as error:
        raise UsageError(str(error)) from None


def _manifest(
    workload: Workload, point: LoadPoint, target: Target, search: SearchPlan | None, shared: Sharing
) -> dict[str, Any]:
    asked = dataclasses.asdict(search) if search else None
    return describe(workload, point, target_facts(target), search=asked, sharing=shared.facts)


@contextmanager
def _work(
    output_dir: Path | None, command: Sequence[str], resume: bool, tell: Callable[[str], None]
) -> Iterator[tuple[Path, Work]]:
    """The work in the folder asked for, or in one that is gone afterwards."""
    if output_dir is None:
        with tempfile.TemporaryDirectory() as scratch, work_in(Path(scratch), "nothing is kept", tell) as work:
            yield Path(scratch), work
        return
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output-dir {output_dir} cannot be made: {error.strerror}; give another folder") from None
    go_on = shlex.join([*command, *([] if resume else ["--resume"])])
    with work_in(output_dir, kept(go_on), tell) as work:
        yield output_dir, work


def target_facts(target: Target) -> dict[str, Any]:
    """Who was measured, for a manifest: url, model and what tells versions apart; never a key."""
    model = dataclasses.asdict(target.model)
    version = target.version()
    return {
        "url": target.base_url,
        "preset": target.preset.name,
        "version": version,
        "model": model.pop("name"),
        **model,
    }


def _subject(workload: Workload, target: Target, work: Work, calibrator: Calibrator, shared: Sharing) -> Subject:
    def check() -> None:
        work.check()
        target.check_alive()

    settings = {"target": target.base_url}
    return Subject(
        workload.load, workload.seed, target, settings, target.server_info(), None, check,
        client=shared.client, arguments=shared.arguments, streams_here=shared.streams_here,
        calibrate=lambda demand, before: shared.calibrate(demand, before, calibrator),
    )  # fmt: skip


@dataclass
class Session:
    """The loads of one command on one server. ``warmups``: requests before the first, never measured.

    ``made``: the requests of a load at ``point``; ``keeps``: whether the folder stays.
    """

    subject: Subject
    point: LoadPoint
    folder: LoadFolder
    console: Console
    warmups: int
    calibrator: Calibrator
    made: list[Any]
    keeps: bool = False
    measured: int = 0

    def one(self) -> int:
        """A single load; the exit code."""
        kept_at = self.folder.path / METRICS
        if self.folder.resumed and self.folder.manifest.get("status") == COMPLETE:
            self.console.print("this load is finished and is not run again", highlight=False)
            kept = read_json(kept_at)
        else:
            if aside := self.folder.aside:
                self._print(f"the load there was invalid: it is kept as {aside}, and measured again")
            kept = self.measure(self.subject, self.point, _RUN, self.folder.path, self.made)
            write_json(kept_at, kept)
            self.folder.finish(valid=kept["valid"], calibration=self.calibrator.facts())
        show(self.console, self.point.load_id, kept)
        if kept["valid"]:
            return EXIT_OK
        if failing := too_many_failed(kept["metrics"]):
            self._print("the server failed requests: see what the first failure says, and its log, and mend it first")
        if self.keeps:
            self._print(
                f"to measure again{' then' if failing else ''} give the same command and --resume: this load is then "
                f"kept as {self.folder.next_aside}"
            )
        return EXIT_INVALID

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def search(self, plan: SearchPlan) -> int:
        """A search over rates; the exit code."""
        from kvbench.loadtest.max_rate.run import RateSearch

        load = self.subject.load
        native, least = None, self.point.num_requests
        if load.arrivals == "trace":
            native, least = mean_rate(self.made), len(self.made)

        def check() -> None:
            self.subject.check()
            search.check_time()

        def measure(rate: float, count: int, number: int, out: Path) -> dict[str, Any]:
            point = self.point
            if native is None:
                point = load_point("open", concurrency=None, rate=rate, num_requests=count, arrivals=load.arrivals)
            subject = dataclasses.replace(self.subject, load=at_rate(load, rate, count, native), check=check)
            return self.measure(subject, point, number, out, None, failures_invalidate=False)

        bounds, sizes = plan.bounds(native or self.point.request_rate), plan.sizes(load, least)
        search = RateSearch(plan.parsed, bounds, sizes, self.folder, measure, self.console, plan.limit_s)
        code = search.run()
        facts = {"valid": code != EXIT_INVALID, "calibration": self.calibrator.facts()}
        if search.goes_on:  # the server may have died, the machine been busy, or the time been over: --resume
            self.folder.update(**facts)
            if self.keeps:
                self._print("to go on give the same command and --resume: runs that told something are not run again")
        else:
            self.folder.finish(**facts)
        return code

    def measure(
        self, subject: Subject, point: LoadPoint, number: int, out: Path, made: list[Any] | None, **how: Any
    ) -> dict[str, Any]:
        """One load, after the warm-up if it is the first; what metrics.json holds.

        ``number``: of its requests, where they are not ``made`` yet.
        """
        warm = None if self.measured else self._warm_up(subject, point)
        requests = made or subject.requests(point, number)
        path, digest = loadrun.store_requests(requests, out, "requests")
        name = point.load_id
        with status_line(self.console, f"{name}: {len(requests)} requests") as update:
            result = measure_load(
                subject,
                point,
                requests,
                path.resolve(),
                out.resolve(),
                first=not self.measured,
                on_progress=lambda done, total, failed, s: update(
                    f"{name}: {done}/{total} requests, {failed} failed, {s:.0f} s"
                ),
                **how,
            )
        self.measured += 1
        kept = stored(subject.load, point, self.folder.manifest["target"], result)
        told = {"warm_up": warm.to_json()} if warm else {}
        facts = {
            "lengths": lengths_of(subject.load, requests, subject.target.model.max_model_len),
            "prefix_caching": ((subject.info or {}).get("engine") or {}).get("enable_prefix_caching"),
        }
        return kept | told | facts | {"requests_file": path.name, "requests_sha256": digest}

    def _warm_up(self, subject: Subject, point: LoadPoint) -> WarmUp:
        with status_line(self.console, "warming up"):
            try:
                warm = warm_up(subject, point, self.warmups)
            except RefusedError:
                raise
            except MeasurementError as error:
                raise MeasurementError(f"{error}, or leave warm-ups out with --num-warmups 0") from error
        self.folder.update(warm_up=warm.to_json())
        return warm
