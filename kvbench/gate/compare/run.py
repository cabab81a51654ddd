"""``kvbench compare`` and ``kvbench calibrate``: pair after pair, a look after some of them, an end in time."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import click
from rich.console import Console

from kvbench.calibration.cache import Calibrator
from kvbench.common.console import print_plain, status_line
from kvbench.common.errors import EXIT_INTERRUPTED, MeasurementError, UsageError
from kvbench.common.files import read_json, utc_now, write_json
from kvbench.common.git import git_state
from kvbench.common.packages import REPOSITORY
from kvbench.common.text import clock, plural
from kvbench.gate.compare.builds import Builds
from kvbench.gate.compare.clock import Clock, OutOfTimeError, longest
from kvbench.gate.compare.conclude import conclude, finished_verdict, look_points, pair_line, write_pairs
from kvbench.gate.compare.folder import KIND, CompareFolder
from kvbench.gate.compare.lockstep_pairs import LockstepPairs, why_not_lockstep
from kvbench.gate.compare.manifest import PATHS, new_comparison, record_server, require_same_requests, resume
from kvbench.gate.compare.pair_runner import FailedAttempt, LaunchedPairs, Method, PairRunner
from kvbench.gate.compare.runner_noise import noise_notes, store_noise
from kvbench.gate.compare.served_check import ServedCheck
from kvbench.gate.compare.sides import RUN, PairedWorkload, Side, open_workloads, parse_side
from kvbench.gate.policy import Policy, load_policy
from kvbench.gate.timing.noise import FEWEST_PAIRS
from kvbench.gate.timing.plan import BASE, SIDES, Match, Turn, turns
from kvbench.gate.verdict.github import publish
from kvbench.gate.verdict.outputs import report_verdict, write_outputs
from kvbench.gate.verdict.pairs import CLOCKS
from kvbench.gate.verdict.terminal import print_verdict
from kvbench.gate.verdict.verdict import FAIL, INCONCLUSIVE, INVALID, Finding, Verdict
from kvbench.lockstep.process import OPEN_LIMIT_S
from kvbench.runs.folder import MANIFEST, RunFolder, create_run
from kvbench.runs.manifest import add_notes
from kvbench.runs.repeats import not_comparable
from kvbench.runs.resume import stored_workload
from kvbench.runs.work import kept, orderly_end
from kvbench.sweep.block import BlockRunner, Listener
from kvbench.targets.base import Target
from kvbench.workload.design import Block, Cell
from kvbench.workload.file import Workload, load_workload

COMPARE, CALIBRATE = "compare", "calibrate"
AUTO, LOCKSTEP, LAUNCHED, STORED_RUNS = "auto", "lockstep", "launched", "stored runs"
TWINS = "twins"  # of older comparisons: they are judged, and not gone on with
_WITH_RESUME = ("resume", "max_minutes", "output_dir", "force")  # options of an execution, not of its comparison
# A reading of /metrics takes the engine's thread from its steps. Four a second, as a sweep takes them, delay one gap in
# twenty on a small machine, which is where p95 lies; what changed over a load is exact however few there are.
POLL_S = 1.0


@dataclass(frozen=True)
class _Request:
    """What the user wants compared. ``folder``: of the comparison that is resumed, None for a new one."""

    subcommand: str
    options: Mapping[str, Any]
    policy: Policy
    sides: Mapping[str, Side]
    workloads: Sequence[Workload]
    folder: CompareFolder | None = None


def compare_command(**options: Any) -> int:
    """``kvbench compare``. Raises UsageError and MeasurementError."""
    with ExitStack() as held:
        request = _read_request(options, COMPARE, held)
        folder, verdict = _run(request, Console(), held)
        if verdict is None:
            return EXIT_INTERRUPTED
        code = report_verdict(verdict, folder.path)
        write_pairs(folder, folder.manifest(), request.policy.timing.metrics)
        return code


def calibrate_pairs_command(*, side: str | None, **options: Any) -> int:
    """``kvbench calibrate``. Raises UsageError and MeasurementError."""
    console, side = Console(), side or "HEAD"
    with ExitStack() as held:
        request = _read_request({"base": side, "candidate": side, **options}, CALIBRATE, held)
        folder, verdict = _run(request, console, held)
        if verdict is None:
            return EXIT_INTERRUPTED
        if verdict.facts["pairs"] < FEWEST_PAIRS:
            print_verdict(verdict, console)
        return store_noise(folder, request.policy.timing, request.options, partial(print_plain, console))


def _read_request(options: dict[str, Any], subcommand: str, held: ExitStack) -> _Request:
    """The request, checked before anything is built. Raises UsageError.

    A folder that is resumed is locked in ``held`` and keeps the workloads and the policy that it began with, whatever
    their files hold now.
    """
    if options["resume"] is None:
        if not options["base"] or not options["candidate"]:
            raise UsageError("two sides are needed: write for example `kvbench compare main HEAD --workload FILE`")
        sides = _sides(options)
        return _Request(subcommand, options, load_policy(options["policy"]), sides, _workloads(options, sides[BASE]))
    folder = CompareFolder.open(options["resume"])
    held.enter_context(folder.locked())
    manifest = folder.manifest()
    if manifest["subcommand"] != subcommand:
        raise UsageError(f"{folder.path} was begun by `kvbench {manifest['subcommand']}`: go on with that")
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
        if given and parameter.name not in _WITH_RESUME:
            name = parameter.human_readable_name if isinstance(parameter, click.Argument) else parameter.opts[0]
            raise UsageError(
                f"{name} cannot change a comparison that has begun ({folder.path}): leave it out, or start a new one "
                "without --resume"
            )
    stored = manifest["options"]
    options = stored | {name: options[name] for name in _WITH_RESUME}
    options |= {name: Path(stored[name]) for name in PATHS if stored.get(name)}
    options["force"] = options["force"] or stored["force"]
    workloads = [stored_workload(each) for each in manifest["given"]]
    policy = Policy.from_json(manifest["policy"])
    return _Request(subcommand, options, policy, _sides(options), workloads, folder)


def _sides(options: Mapping[str, Any]) -> dict[str, Side]:
    return {side: parse_side(options[side], Path(options["repo"] or REPOSITORY)) for side in SIDES}


def _workloads(options: Mapping[str, Any], base: Side) -> list[Workload]:
    """The files of --workload, or the workload of a stored run. Raises UsageError."""
    if base.kind == RUN:
        if options["workloads"]:
            raise UsageError("--workload does not go with stored runs, which have their own: leave it out")
        return [stored_workload(RunFolder(Path(base.text).expanduser()).manifest())]
    if not options["workloads"]:
        raise UsageError("--workload is missing: write for example --workload workloads/mixed.yaml")
    given = {name: options[name] for name in ("profile", "overrides", "seed")}
    return [load_workload(path, **given) for path in options["workloads"]]


def _run(request: _Request, console: Console, held: ExitStack) -> tuple[CompareFolder, Verdict | None]:
    """Opens both sides and measures; no verdict when it was interrupted. The folder stays locked in ``held``."""
    options, folder, say = request.options, request.folder, partial(print_plain, console)
    if folder is not None and (finished := finished_verdict(folder, request.policy)):
        say(f"{folder.path} is finished: nothing is measured, and this is its verdict")
        return folder, finished
    if folder is not None and folder.manifest().get("method") == TWINS:
        raise UsageError(
            f"{folder.path} was measured with --method twins, which this kvbench does not have: start a new comparison "
            f"(`kvbench gate {folder.path}` judges the pairs of one that is complete)"
        )
    builds = held.enter_context(Builds(rebuild=options["rebuild"], build_cmd=options["build_cmd"], say=say))
    try:
        workloads = open_workloads(request.sides, request.workloads, {**options, "port": 0}, builds, held)
    except MeasurementError as error:  # a build that fails
        if folder is None:
            _write_invalid(request, create_run(options["output_dir"], KIND, git_state()["short_sha"]).path, error, say)
        raise
    within = Clock.of(options["max_minutes"])
    if folder is None:
        names = [each.name for each in workloads]
        method, why = choose_method(options["method"], workloads)
        compared = request.subcommand == COMPARE
        notes = noise_notes(options, names, method, request.policy.timing) if compared else []
        notes += [why] if why else []
        folder = new_comparison(
            options, request.workloads, workloads, request.policy, request.subcommand, notes, method
        )
        held.enter_context(folder.locked())
    manifest = {"method": LAUNCHED} | folder.manifest()  # older ones do not name it
    if request.folder is not None and not folder.stored:
        for remark in resume(manifest, workloads, force=options["force"]):
            say(f"note: {remark}")
    say(f"results: {folder.path}")
    for note in (*manifest["notes"], *filter(None, [manifest.get("doubt")])):
        say(f"note: {note}")
    comparison = Comparison(folder, manifest, workloads, request.policy, options, console, within)
    try:
        return folder, comparison.judge_stored() if folder.stored else comparison.execute()
    except MeasurementError as error:
        _write_invalid(request, folder.path, error, say)
        raise
    except UsageError:
        if request.folder is None and folder.remove_unmeasured():
            say(f"removed: {folder.path}, since nothing was measured")
        raise


def choose_method(wanted: str, workloads: Sequence[PairedWorkload]) -> tuple[str, str | None]:
    """How pairs are measured, and a note on it: on its clock, or why it is not the sharpest way. Raises UsageError."""
    if any(opened.stored for each in workloads for opened in each.sides.values()):
        if wanted != AUTO:
            raise UsageError(f"--method {wanted} goes with what is measured, and stored runs are already: leave it out")
        return STORED_RUNS, None
    if wanted == LAUNCHED:
        return LAUNCHED, None
    with tempfile.TemporaryDirectory() as scratch:
        reason = why_not_lockstep(workloads, Path(scratch) / "engine.log")
    if reason is None:
        return LOCKSTEP, CLOCKS[LOCKSTEP]
    if wanted == LOCKSTEP:
        raise UsageError(f"--method lockstep cannot be used: {reason}; leave it out")
    return LAUNCHED, f"measured by launched pairs, and not in engine time in lockstep, which is sharper: {reason}"


def _write_invalid(request: _Request, folder: Path, error: Exception, say: Callable[[str], None]) -> None:
    """Writes the files of an invalid verdict for CI, if they fit on the disk."""
    if request.subcommand != COMPARE:
        return
    manifest = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    sides = {side: manifest.get(side) or request.sides[side].to_json() for side in SIDES}
    reproduce = manifest.get("reproduce") or shlex.join(["kvbench", *sys.argv[1:]])
    found = Finding("measured/comparison", "measured", "the comparison is measured", INVALID, str(error))
    verdict = Verdict("compare", INVALID, str(error), (found,), **sides, reproduce=reproduce)
    with suppress(OSError):
        for path in write_outputs(verdict, folder):
            say(f"written: {path}")
    publish(verdict, folder)


@dataclass
class LoadsShown(Listener):
    """Shows what is being measured. ``status`` replaces the text on the status line; its ``work`` is the same while a
    load goes on. ``load``: which load it is."""

    status: Callable[..., None]
    load: str = ""

    def load_started(self, cell: Cell, repeat: int, total: int) -> None:
        self.load = f"pair {repeat}: {cell.cell_id}"
        self.status(self.load)

    def load_progress(self, done: int, total: int, failed: int, elapsed_s: float) -> None:
        text = f"{self.load}, {done}/{total} requests{f', {failed} failed' if failed else ''}"
        self.status(text, work=self.load)

    def load_failed(self, cell: Cell, repeat: int, reason: str) -> None:
        self.status(f"pair {repeat}: {cell.cell_id} failed: {reason}")


@dataclass
class _Elapsed:
    """A status line that says how long the work at hand has taken: a server's start may take minutes."""

    status: Callable[[Callable[[], str]], None]
    work: str = ""
    began: float = 0.0

    def __call__(self, text: str, work: str = "") -> None:
        if (work or text) != self.work:
            self.work, self.began = work or text, monotonic()
        began = self.began
        self.status(lambda: f"{text}: {clock(monotonic() - began)}")


@dataclass
class Comparison:
    """Measures in a folder that has its manifest already and is locked by the caller."""

    folder: CompareFolder
    manifest: dict[str, Any]
    workloads: Sequence[PairedWorkload]
    policy: Policy
    options: Mapping[str, Any]
    console: Console
    clock: Clock

    @property
    def stop_early(self) -> bool:
        """Whether a look may end it. Pairs that calibrate a runner are all measured, whatever they show."""
        return self.manifest["subcommand"] == COMPARE

    @property
    def pairs(self) -> int:
        """The most that are measured."""
        return self.options.get("pairs") or self.policy.timing.looks[-1].pairs

    def execute(self) -> Verdict | None:
        """Measures what is missing and returns the verdict, None when it was interrupted."""
        self.manifest["void"] = None
        self.write("incomplete")
        next_step = kept(self.folder.resume_command(self.manifest["subcommand"]))
        with orderly_end(self.folder.path, next_step, self._say) as work:
            with status_line(self.console, "starting") as status:
                show = _Elapsed(status)
                stopped = self._compile(work.check, show) or self._measure(work.check, show)
                if self.manifest["method"] == LOCKSTEP and self.stop_early:
                    stopped = self._check_served(work.check, show) or stopped
            return self.finish(stopped)
        return None

    def _compile(self, check: Callable[[], None], show: Callable[[str], None]) -> str | None:
        """The launches that may compile; why measuring cannot begin after them, None if it can."""
        if self.manifest["method"] == LOCKSTEP:
            return None
        try:
            for each in self.workloads:
                each.compile(self.folder.path, self._say, show, partial(self._check_time, check), self.clock)
        except OutOfTimeError:
            pair = self.folder.whole_pairs(self.manifest["cells"]) + 1
            return f"{self._over(pair)}: servers were still being launched for the first time"
        return None

    def _check_time(self, check: Callable[[], None]) -> None:
        check()
        self.clock.check()

    def _over(self, pair: int) -> str:
        most = f"{'up to ' if self.stop_early else ''}{plural(self.pairs, 'pair')}"
        return f"--max-minutes {self.options['max_minutes'] or 0:g} were over after {pair - 1} of {most}"

    def _check_served(self, check: Callable[[], None], show: Callable[[str], None]) -> str | None:
        """Checks the servers around engines that have not failed; why it could not, None where it did."""
        manifest, pairs = self.manifest, self.folder.whole_pairs(self.manifest["cells"])
        if manifest["void"] or not pairs or conclude(self.folder, manifest, self.policy).outcome == FAIL:
            return None
        self._say("served check: single requests to both servers, for what engine time leaves out")
        served = ServedCheck(
            self.folder, manifest["order_seed"], check, show, self._on_failed, len(manifest["resumed"])
        )
        if given_up := served.run(self.workloads):
            manifest["void"] = {"pair": given_up.pair, "turn": given_up.turn}
            return f"{given_up.turn} could not be measured"
        return None

    def judge_stored(self) -> Verdict:
        """The verdict on stored runs. Raises MeasurementError where their first repeat is invalid."""
        folder, cells, notes = self.folder, self.manifest["cells"], self.manifest["notes"]
        repeat = folder.whole_pairs(cells) + 1
        for cell, side in itertools.product(cells, SIDES):
            done = folder.done(cell, side, repeat)
            if done is not None and not done["valid"]:
                why = "; ".join(not_comparable(done))
                text = f"repeat {repeat} of {cell[side]} of {side} is invalid ({why}), and ends what can be paired"
                if repeat == 1:
                    raise MeasurementError(f"{text}: measure that run again")
                notes += [text] if text not in notes else []
                break
        return self.finish(None)

    def finish(self, stopped: str | None) -> Verdict:
        """Marks the comparison as complete and returns its verdict. ``stopped``: why it ended before a look decided."""
        early, pairs = self.manifest["early_looks"], self.folder.whole_pairs(self.manifest["cells"])
        self.manifest |= {"stopped": stopped, "pair_s": self._pair_s()}
        if stopped and pairs and pairs not in look_points(self.policy.timing, early):
            early.append(pairs)
        self.write("complete")  # first: what is judged again later says the same, the time of its end too
        return conclude(self.folder, self.manifest, self.policy)

    def write(self, status: str) -> None:
        self.manifest |= {"status": status, "ended": utc_now(), "calibration": self._calibrator().facts()}
        write_json(self.folder.manifest_path, self.manifest)

    def _calibrator(self, *more: Callable[..., None]) -> Calibrator:
        return Calibrator(self.folder.path, not self.options["no_calibration"], *more)

    def _say(self, text: str) -> None:
        with suppress(OSError):
            print_plain(self.console, text)

    def _measure(self, check: Callable[[], None], show: Callable[[str], None]) -> str | None:
        """Measures pair after pair; returns why it ended early, None if a look decided or the last one was taken."""
        manifest, cells, seconds = self.manifest, self.manifest["cells"], self.manifest["seconds"]
        looks = look_points(self.policy.timing, manifest["early_looks"])
        matches = [match for each in self.workloads for match in each.matches]
        runner = PairRunner(
            self.folder,
            self._method(partial(self._check_time, check), show),
            self.policy.timing.metrics,
            self._on_measured,
            self._on_failed,
            len(manifest["resumed"]),
            self.clock,
        )
        measured = 0
        for pair in range(1, self.pairs + 1):
            if not self.folder.is_whole(cells, pair):
                began = self.clock.elapsed_s
                if not measured and (known_s := self._pair_s()):
                    self._require_time_for_a_verdict(pair - 1, known_s)
                try:
                    self.clock.require(self._pair_s())
                except OutOfTimeError:
                    return self._over(pair)
                try:
                    given_up = runner.run(turns(matches, pair, manifest["order_seed"]), pair)
                except OutOfTimeError:
                    return f"{self._over(pair)}: pair {pair} was cut"
                if given_up:
                    manifest["void"] = {"pair": pair, "turn": given_up.turn}
                    return f"pair {pair} could not be measured"
                seconds.append(self.clock.elapsed_s - began)
                manifest["pairs"] = pair
                self.write("incomplete")
                if measured < 2:  # the first one may have calibrated the client, or compiled kernels
                    self._require_time_for_a_verdict(pair, seconds[-1] if measured else seconds[-1] / 2)
                measured += 1
                self._say_pair(pair, looks)
            require_same_requests(self.folder, manifest, pair, force=self.options["force"])
            is_look = self.stop_early and pair in looks
            if is_look and conclude(self.folder, manifest, self.policy, pairs=pair).outcome != INCONCLUSIVE:
                return None
        return None

    def _pair_s(self) -> float:
        """How long a pair takes: as attempts did, else as pairs before --resume, else as its launches; 0: unknown."""
        keys = [match.key for each in self.workloads for match in each.matches]
        attempts = sum(map(self.clock.attempt_s, keys))
        return attempts if self.clock.took.keys() >= set(keys) else longest(self.manifest["seconds"]) or attempts

    def _say_pair(self, pair: int, looks: Sequence[int]) -> None:
        """What ``pair`` measured, and how long it is until something can be decided."""
        seconds, up_to = self.manifest["seconds"], "up to " if self.stop_early else ""
        ahead = next((look for look in looks if look >= pair), self.pairs) if self.stop_early else self.pairs
        left = clock((ahead - pair) * sum(seconds) / len(seconds))
        until = f", {f'the next look, after {ahead},' if self.stop_early else 'the end'} in about {left}"
        self._say(
            f"pair {pair} of {up_to}{self.pairs}: {pair_line(self.folder, self.manifest, self.policy, pair)}  "
            f"(elapsed {clock(self.clock.elapsed_s)}{until if ahead > pair else ''})"
        )

    def _require_time_for_a_verdict(self, pairs: int, pair_s: float) -> None:
        """Raises UsageError where --max-minutes end before any verdict, with ``pairs`` measured; --force: only says so.

        ``pair_s``: what a further pair takes at least.
        """
        rules, most = self.policy.timing, pairs + max(0.0, self.clock.left_s) // max(pair_s, 1e-3)
        if not (self.stop_early and most < min(rules.fewest_to_pass, rules.fewest_to_fail)):  # NaN without a limit
            return
        minutes = math.ceil((rules.looks[0].pairs - pairs + 1) * pair_s / 60)
        too_few = (
            f"--max-minutes {self.options['max_minutes']:g} are enough for about {plural(most, 'pair')}, and nothing "
            f"passes with fewer than {rules.fewest_to_pass} or fails with fewer than {rules.fewest_to_fail}"
        )
        if self.options["force"]:
            self._say(f"note: {too_few}: the first look, after {rules.looks[0].pairs}, needs about {minutes}")
            return
        where = f" to `{self.folder.resume_command(self.manifest['subcommand'])}`" if pairs else ""
        raise UsageError(f"{too_few}: give about {minutes}{where}, or --force to measure what fits")

    def _on_measured(self, turn: Turn, first: str) -> None:
        self.manifest["order"].setdefault(str(turn.pair), {})[turn.match.key] = first
        self.write("incomplete")

    def _on_failed(self, attempt: FailedAttempt, most: int) -> None:
        self.manifest["voids"].append(dataclasses.asdict(attempt))
        self.write("incomplete")
        again = "" if attempt.attempt == most else ", and is measured again"
        counted = f"attempt {attempt.attempt} of up to {most}"
        self._say(f"{attempt.where} failed{again} ({counted}): {attempt}")

    def _method(self, check: Callable[[], None], show: Callable[[str], None]) -> Method:
        if self.manifest["method"] != LOCKSTEP:
            return LaunchedPairs(self._runners(check, show), self.clock)
        workloads = {each.name: each for each in self.workloads}
        facts = self.manifest.setdefault("lockstep", {})
        limit = self.options["start_timeout"] or OPEN_LIMIT_S
        seed = self.manifest["order_seed"]
        return LockstepPairs(self.folder, workloads, facts, seed, self._on_engine, limit, show, check)

    def _runners(self, check: Callable[[], None], show: Callable[[str], None]) -> dict[tuple[str, str], BlockRunner]:
        calibrator, runners = self._calibrator(show, self._say, self.clock.require), {}
        for each, side in itertools.product(self.workloads, SIDES):
            run, choice = self.folder.run(side, each.name), each.sides[side].choice
            run.path.mkdir(parents=True, exist_ok=True)
            runners[side, each.name] = BlockRunner(
                choice.workload,
                run,
                choice.new_target,
                LoadsShown(show),
                partial(self._on_server, each, side),
                check,
                calibrate=calibrator,
                capacity=each.capacity[side],
                poll_s=POLL_S,
            )
        return runners

    def _on_server(
        self, workload: PairedWorkload, side: str, block: Block, info: Mapping[str, Any] | None, target: Target
    ) -> None:
        """Stores what the server says of itself, or compares it with what the first one of its configuration said."""
        facts = {**(info or {}), "served_model": dataclasses.asdict(target.model)}
        match = next(m for m in workload.matches if m.of(side) == block.configuration)
        for note in add_notes(self.manifest, facts):
            self._say(f"note: {note}")
        record_server(self.manifest, match, side, facts, alone=block.alone, force=self.options["force"])

    def _on_engine(self, workload: PairedWorkload, side: str, match: Match, info: Mapping[str, Any]) -> None:
        """As ``_on_server``, for an engine without a server."""
        model = info.get("model") or {}
        served = {name: model.get(name) for name in ("name", "vocab_size", "max_model_len")}
        facts = {**info, "served_model": served}
        record_server(self.manifest, match, side, facts, alone=False, force=self.options["force"])
