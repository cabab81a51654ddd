"""The commands ``compare`` and ``calibrate``: pair after pair, a look after some of them, an end in time."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic

from rich.console import Console

from kvbench.calibration.calibrate import Calibrator
from kvbench.common.console import print_plain, status_line
from kvbench.common.errors import EXIT_INTERRUPTED, MeasurementError, UsageError
from kvbench.common.files import utc_now
from kvbench.common.git import git_state
from kvbench.common.text import clock, plural
from kvbench.gate.compare.builds import Builds
from kvbench.gate.compare.clock import Clock, DeadlineError, longest
from kvbench.gate.compare.conclude import conclude, finished_verdict, look_points, pair_line, write_pairs
from kvbench.gate.compare.folder import (
    KIND,
    LAUNCHED,
    LOCKSTEP,
    STORED_RUNS,
    TWINS,
    CompareFolder,
    CompareManifest,
    FailedAttempt,
    GivenUp,
    LockstepFacts,
)
from kvbench.gate.compare.lockstep_pairs import LockstepPairs, why_not_lockstep
from kvbench.gate.compare.manifest import new_comparison, record_server, require_same_requests, resume
from kvbench.gate.compare.pair_runner import MeasurePair, PairRunner, measure_launched
from kvbench.gate.compare.request import TYPED, CompareRequest
from kvbench.gate.compare.runner_noise import noise_notes, store_noise
from kvbench.gate.compare.served_check import ServedCheck
from kvbench.gate.compare.sides import RUN, PairedWorkload, PairSide, open_workloads, parse_side
from kvbench.gate.policy import Policy, load_policy
from kvbench.gate.timing.noise import FEWEST_PAIRS
from kvbench.gate.timing.plan import BASE, SIDES, Match, Turn, turns
from kvbench.gate.verdict.outputs import publish, report_verdict, write_outputs
from kvbench.gate.verdict.pairs import CLOCKS
from kvbench.gate.verdict.terminal import print_verdict
from kvbench.gate.verdict.verdict import FAIL, INCONCLUSIVE, INVALID, Finding, Verdict
from kvbench.lockstep.process import OPEN_LIMIT_S
from kvbench.measure.http import HttpInstrument
from kvbench.measure.instrument import Job, Listener
from kvbench.runs.folder import RunFolder, create_run
from kvbench.runs.manifest import stored_workload
from kvbench.runs.server_info import ModelAnswer, ServerInfo
from kvbench.runs.work import kept, orderly_end
from kvbench.sweep.block import BlockRunner
from kvbench.targets.base import Target
from kvbench.workload.design import Block, Cell
from kvbench.workload.file import Workload, load_workload

COMPARE, CALIBRATE = "compare", "calibrate"
AUTO = "auto"
# A reading of /metrics takes the engine's thread from its steps. Four a second, as a sweep takes them, delay one gap in
# twenty on a small machine, which is where p95 lies; what changed over a load is exact however few there are.
POLL_S = 1.0


@dataclass(frozen=True)
class _Plan:
    """A comparison that is to be measured. ``folder``: of one that is resumed, None for a new one."""

    subcommand: str
    request: CompareRequest
    policy: Policy
    sides: Mapping[str, PairSide]
    workloads: Sequence[Workload]
    folder: CompareFolder | None = None


def compare_command(request: CompareRequest) -> int:
    """Runs ``kvbench compare``. Raises UsageError and MeasurementError."""
    with ExitStack() as held:
        plan = _make_plan(request, COMPARE, held)
        folder, verdict = _run(plan, Console(), held)
        if verdict is None:
            return EXIT_INTERRUPTED
        code = report_verdict(verdict, folder.path)
        write_pairs(folder, folder.manifest(), plan.policy.timing.metrics)
        return code


def calibrate_pairs_command(request: CompareRequest) -> int:
    """Runs ``kvbench dev calibrate``. Raises UsageError and MeasurementError."""
    console = Console()
    with ExitStack() as held:
        plan = _make_plan(request, CALIBRATE, held)
        folder, verdict = _run(plan, console, held)
        if verdict is None:
            return EXIT_INTERRUPTED
        if verdict.facts["pairs"] < FEWEST_PAIRS:
            print_verdict(verdict, console)
        return store_noise(folder, plan.policy.timing, plan.request, partial(print_plain, console))


def _make_plan(request: CompareRequest, subcommand: str, held: ExitStack) -> _Plan:
    """The plan, checked before anything is built. Raises UsageError.

    A folder that is resumed is locked in ``held`` and keeps the workloads and the policy that it began with, whatever
    their files hold now.
    """
    if request.resume is None:
        if not request.base or not request.candidate:
            raise UsageError("two sides are needed: write for example `kvbench compare main HEAD --workload FILE`")
        policy, sides = load_policy(request.policy), _sides(request)
        if sides[BASE].kind == RUN:
            if request.workloads:
                raise UsageError("--workload does not go with stored runs, which have their own: leave it out")
            workloads = [stored_workload(RunFolder(Path(sides[BASE].text).expanduser()).manifest())]
        elif request.workloads:
            given = {"profile": request.profile, "overrides": request.overrides, "seed": request.seed}
            workloads = [load_workload(path, **given) for path in request.workloads]
        else:
            raise UsageError("--workload is missing: write for example --workload workloads/mixed.yaml")
        return _Plan(subcommand, request, policy, sides, workloads)
    folder = CompareFolder.open(request.resume)
    held.enter_context(folder.locked())
    manifest = folder.manifest()
    if manifest.subcommand != subcommand:
        raise UsageError(f"{folder.path} was begun by `kvbench {TYPED[manifest.subcommand]}`: go on with that")
    begun = manifest.options.resumed_by(request)
    workloads = [stored_workload(given) for given in manifest.given]
    return _Plan(subcommand, begun, Policy.of(manifest.policy), _sides(begun), workloads, folder)


def _sides(request: CompareRequest) -> dict[str, PairSide]:
    return {side: parse_side(getattr(request, side), request.repository) for side in SIDES}


def _run(plan: _Plan, console: Console, held: ExitStack) -> tuple[CompareFolder, Verdict | None]:
    """Opens both sides and measures; no verdict when it was interrupted. The folder stays locked in ``held``."""
    request, folder, say = plan.request, plan.folder, partial(print_plain, console)
    if folder is not None:
        if finished := finished_verdict(folder, plan.policy):
            say(f"{folder.path} is finished: nothing is measured, and this is its verdict")
            return folder, finished
        if folder.manifest().method == TWINS:
            raise UsageError(
                f"{folder.path} was measured with --method twins, which this kvbench does not have: start a new "
                f"comparison (`kvbench gate {folder.path}` judges the pairs of one that is complete)"
            )
    builds = held.enter_context(Builds(rebuild=request.rebuild, build_cmd=request.build_cmd, say=say))
    try:
        workloads = open_workloads(plan.sides, plan.workloads, request, builds, held)
    except MeasurementError as error:  # a build that fails
        if folder is None:
            path = create_run(request.output_dir, KIND, git_state()["short_sha"]).path
            _write_invalid(plan, path, None, error, say)
        raise
    time = Clock.of(request.max_minutes)
    if folder is None:
        method, why = choose_method(request.method, workloads)
        notes = [why] if why else []
        if plan.subcommand == COMPARE:
            names = [workload.name for workload in workloads]
            notes = [*noise_notes(request, names, method, plan.policy.timing), *notes]
        folder = new_comparison(request, plan.subcommand, method, plan.workloads, workloads, plan.policy, notes)
        held.enter_context(folder.locked())
    manifest = folder.manifest()
    if plan.folder is not None and not folder.stored:
        for remark in resume(manifest, workloads, force=request.force):
            say(f"note: {remark}")
    say(f"results: {folder.path}")
    for note in filter(None, (*manifest.notes, manifest.doubt)):
        say(f"note: {note}")
    comparison = ComparisonRun(folder, manifest, workloads, plan.policy, request, console, time)
    try:
        return folder, comparison.judge_stored() if folder.stored else comparison.execute()
    except MeasurementError as error:
        _write_invalid(plan, folder.path, manifest, error, say)
        raise
    except UsageError:
        if plan.folder is None and folder.remove_unmeasured():
            say(f"removed: {folder.path}, since nothing was measured")
        raise


def choose_method(wanted: str, workloads: Sequence[PairedWorkload]) -> tuple[str, str | None]:
    """Chooses how pairs are measured, with a note on its clock, or on why it is not the sharpest way. UsageError."""
    if any(opened.stored for workload in workloads for opened in workload.sides.values()):
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


def _write_invalid(
    plan: _Plan, folder: Path, manifest: CompareManifest | None, error: Exception, say: Callable[[str], None]
) -> None:
    """Writes the files of an invalid verdict for CI, if they fit on the disk."""
    if plan.subcommand != COMPARE:
        return
    sides = {side: (manifest.of(side) if manifest else plan.sides[side].facts()).to_json() for side in SIDES}
    reproduce = manifest.reproduce if manifest else shlex.join(["kvbench", *sys.argv[1:]])
    unmeasured = Finding("measured/comparison", "measured", "the comparison is measured", INVALID, str(error))
    verdict = Verdict("compare", INVALID, str(error), (unmeasured,), **sides, reproduce=reproduce)
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
class ComparisonRun:
    """Measures in a folder that has its manifest already and is locked by the caller.

    ``check``: raises if a signal has come; ``show``: gets what is being done, on the status line.
    """

    folder: CompareFolder
    manifest: CompareManifest
    workloads: Sequence[PairedWorkload]
    policy: Policy
    request: CompareRequest
    console: Console
    clock: Clock
    check: Callable[[], None] = field(default=lambda: None)
    show: Callable[..., None] = field(default=lambda text, work="": None)

    @property
    def stop_early(self) -> bool:
        """Tests whether a look may end it. Pairs that calibrate a runner are all measured, whatever they show."""
        return self.manifest.subcommand == COMPARE

    @property
    def pairs(self) -> int:
        """The most that are measured."""
        return self.request.pairs or self.policy.timing.looks[-1].pairs

    @property
    def matches(self) -> list[Match]:
        return [match for workload in self.workloads for match in workload.matches]

    def execute(self) -> Verdict | None:
        """Measures what is missing and returns the verdict, None when it was interrupted."""
        self.manifest.void = None
        self.write("incomplete")
        next_step = kept(self.folder.resume_command(self.manifest.subcommand))
        with orderly_end(self.folder.path, next_step, self._say) as work:
            with status_line(self.console, "starting") as status:
                self.check, self.show = work.check, _Elapsed(status)
                if self.manifest.method == LOCKSTEP:
                    stopped = self._measure()
                    stopped = (self._check_served() if self.stop_early else None) or stopped
                else:
                    stopped = self._compile() or self._measure()
            return self.finish(stopped)
        return None

    def _compile(self) -> str | None:
        """The launches that may compile; why measuring cannot begin after them, None if it can."""
        try:
            for workload in self.workloads:
                workload.compile(self.folder.path, self._say, self.show, self._check_time, self.clock)
        except DeadlineError:
            pair = self.folder.whole_pairs(self.manifest.cells) + 1
            return f"{self._over(pair)}: servers were still being launched for the first time"
        return None

    def _check_time(self) -> None:
        self.check()
        self.clock.require()

    def _over(self, pair: int) -> str:
        most = f"{'up to ' if self.stop_early else ''}{plural(self.pairs, 'pair')}"
        return f"--max-minutes {self.request.max_minutes or 0:g} were over after {pair - 1} of {most}"

    def _check_served(self) -> str | None:
        """Checks the servers around engines that have not failed; why it could not, None where it did."""
        manifest, pairs = self.manifest, self.folder.whole_pairs(self.manifest.cells)
        if manifest.void or not pairs or conclude(self.folder, manifest, self.policy).outcome == FAIL:
            return None
        self._say("served check: single requests to both servers, for what engine time leaves out")
        resumed = len(manifest.resumed)
        served = ServedCheck(self.folder, manifest.order_seed, self.check, self.show, self._on_failed, resumed)
        if given_up := served.run(self.workloads):
            manifest.void = GivenUp(given_up.pair, given_up.turn)
            return f"{given_up.turn} could not be measured"
        return None

    def judge_stored(self) -> Verdict:
        """The verdict on stored runs. Raises MeasurementError where their first repeat is invalid."""
        cells, notes = self.manifest.cells, self.manifest.notes
        repeat = self.folder.whole_pairs(cells) + 1
        for cell, side in itertools.product(cells, SIDES):
            done = self.folder.done(cell, side, repeat)
            if done is not None and not done.valid:
                why = "; ".join(done.not_comparable)
                text = f"repeat {repeat} of {cell.on(side)} of {side} is invalid ({why}), and ends what can be paired"
                if repeat == 1:
                    raise MeasurementError(f"{text}: measure that run again")
                self.manifest.notes = (*notes, text) if text not in notes else notes
                break
        return self.finish(None)

    def finish(self, stopped: str | None) -> Verdict:
        """Marks the comparison as complete and returns its verdict. ``stopped``: why it ended before a look decided."""
        manifest, pairs = self.manifest, self.folder.whole_pairs(self.manifest.cells)
        manifest.stopped, manifest.pair_s = stopped, self._pair_s()
        if stopped and pairs and pairs not in look_points(self.policy.timing, manifest.early_looks):
            manifest.early_looks = (*manifest.early_looks, pairs)
        self.write("complete")  # first: what is judged again later says the same, the time of its end too
        return conclude(self.folder, manifest, self.policy)

    def write(self, status: str) -> None:
        self.manifest.status, self.manifest.ended = status, utc_now()
        self.manifest.calibration = self._calibrator().facts()
        self.folder.write(self.manifest)

    def _calibrator(self, *more: Callable[..., None]) -> Calibrator:
        return Calibrator(self.folder.path, not self.request.no_calibration, *more)

    def _say(self, text: str) -> None:
        with suppress(OSError):
            print_plain(self.console, text)

    def _measure(self) -> str | None:
        """Measures pair after pair; returns why it ended early, None if a look decided or the last one was taken."""
        manifest, measured = self.manifest, 0
        looks = look_points(self.policy.timing, manifest.early_looks)
        runner = PairRunner(
            self.folder,
            self._way_to_measure(),
            self.policy.timing.metrics,
            self._on_measured,
            self._on_failed,
            len(manifest.resumed),
            self.clock,
        )
        for pair in range(1, self.pairs + 1):
            if not self.folder.is_whole(manifest.cells, pair):
                if stopped := self._measure_pair(runner, pair, measured):
                    return stopped
                measured += 1
                self._say_pair(pair, looks)
            require_same_requests(self.folder, manifest, pair, force=self.request.force)
            is_look = self.stop_early and pair in looks
            if is_look and conclude(self.folder, manifest, self.policy, pairs=pair).outcome != INCONCLUSIVE:
                return None
        return None

    def _measure_pair(self, runner: PairRunner, pair: int, measured: int) -> str | None:
        """Measures one pair, after ``measured`` others; why it could not, None where it did."""
        manifest, began = self.manifest, self.clock.elapsed_s
        if not measured and (known_s := self._pair_s()):
            self._require_time_for_a_verdict(pair - 1, known_s)
        try:
            self.clock.require(self._pair_s())
        except DeadlineError:
            return self._over(pair)
        try:
            given_up = runner.run(turns(self.matches, pair, manifest.order_seed), pair)
        except DeadlineError:
            return f"{self._over(pair)}: pair {pair} was cut"
        if given_up:
            manifest.void = GivenUp(pair, given_up.turn)
            return f"pair {pair} could not be measured"
        took_s = self.clock.elapsed_s - began
        manifest.seconds, manifest.pairs = (*manifest.seconds, took_s), pair
        self.write("incomplete")
        if measured < 2:  # the first one may have calibrated the client, or compiled kernels
            self._require_time_for_a_verdict(pair, took_s if measured else took_s / 2)
        return None

    def _pair_s(self) -> float:
        """Guesses what a pair takes: as attempts, else as pairs before --resume, else as its launches; 0: unknown."""
        keys = [match.key for match in self.matches]
        attempts = sum(map(self.clock.attempt_s, keys))
        return attempts if self.clock.took.keys() >= set(keys) else longest(self.manifest.seconds) or attempts

    def _say_pair(self, pair: int, looks: Sequence[int]) -> None:
        """Says what ``pair`` measured, and how long it is until something can be decided."""
        seconds, up_to = self.manifest.seconds, "up to " if self.stop_early else ""
        ahead = next((look for look in looks if look >= pair), self.pairs) if self.stop_early else self.pairs
        left = clock((ahead - pair) * sum(seconds) / len(seconds))
        until = f", {f'the next look, after {ahead},' if self.stop_early else 'the end'} in about {left}"
        line = pair_line(self.folder, self.manifest.cells, self.policy.timing, pair)
        elapsed = f"elapsed {clock(self.clock.elapsed_s)}{until if ahead > pair else ''}"
        self._say(f"pair {pair} of {up_to}{self.pairs}: {line}  ({elapsed})")

    def _require_time_for_a_verdict(self, pairs: int, pair_s: float) -> None:
        """Raises UsageError where --max-minutes end before any verdict, with ``pairs`` measured; --force: only says so.

        ``pair_s``: what a further pair takes at least.
        """
        rules, most = self.policy.timing, pairs + max(0.0, self.clock.left_s) // max(pair_s, 1e-3)
        if not (self.stop_early and most < min(rules.fewest_to_pass, rules.fewest_to_fail)):  # NaN without a limit
            return
        minutes = math.ceil((rules.looks[0].pairs - pairs + 1) * pair_s / 60)
        too_few = (
            f"--max-minutes {self.request.max_minutes:g} are enough for about {plural(most, 'pair')}, and nothing "
            f"passes with fewer than {rules.fewest_to_pass} or fails with fewer than {rules.fewest_to_fail}"
        )
        if self.request.force:
            self._say(f"note: {too_few}: the first look, after {rules.looks[0].pairs}, needs about {minutes}")
            return
        where = f" to `{self.folder.resume_command(self.manifest.subcommand)}`" if pairs else ""
        raise UsageError(f"{too_few}: give about {minutes}{where}, or --force to measure what fits")

    def _on_measured(self, turn: Turn, first: str) -> None:
        order, pair = self.manifest.order, str(turn.pair)
        self.manifest.order = {**order, pair: {**order.get(pair, {}), turn.match.key: first}}
        self.write("incomplete")

    def _on_failed(self, attempt: FailedAttempt, most: int) -> None:
        self.manifest.voids = (*self.manifest.voids, attempt)
        self.write("incomplete")
        again = "" if attempt.attempt == most else ", and is measured again"
        counted = f"attempt {attempt.attempt} of up to {most}"
        self._say(f"{attempt.where} failed{again} ({counted}): {attempt}")

    def _way_to_measure(self) -> MeasurePair:
        if self.manifest.method != LOCKSTEP:
            return partial(measure_launched, self._runners(), self.clock)
        facts = self.manifest.lockstep = self.manifest.lockstep or LockstepFacts()
        workloads = {workload.name: workload for workload in self.workloads}
        limit, seed = self.request.start_timeout or OPEN_LIMIT_S, self.manifest.order_seed
        pairs = LockstepPairs(self.folder, workloads, facts, seed, self._on_engine, limit, self.show, self._check_time)
        return pairs.measure

    def _runners(self) -> dict[tuple[str, str], BlockRunner]:
        calibrator, runners = self._calibrator(self.show, self._say, self.clock.require), {}
        for each, side in itertools.product(self.workloads, SIDES):
            run, choice = self.folder.run(side, each.name), each.sides[side].choice
            run.path.mkdir(parents=True, exist_ok=True)
            job = Job(
                choice.workload,
                run,
                choice.new_target,
                LoadsShown(self.show),
                self._check_time,
                on_server=partial(self._on_server, each, side),
                capacity=each.capacity[side],
                calibrate=calibrator,
                poll_s=POLL_S,
            )
            runners[side, each.name] = BlockRunner(HttpInstrument(job))
        return runners

    def _on_server(self, workload: PairedWorkload, side: str, block: Block, info: ServerInfo, target: Target) -> None:
        """Stores what the server says of itself, or compares it with what the first one of its configuration said."""
        match = next(m for m in workload.matches if m.of(side) == block.configuration)
        new = [note for note in info.server.notes if note not in self.manifest.notes]
        self.manifest.notes = (*self.manifest.notes, *new)
        for note in new:
            self._say(f"note: {note}")
        served = ModelAnswer(**dataclasses.asdict(target.model))
        info, force = info.model_copy(update={"served_model": served}), self.request.force
        record_server(self.manifest, match, side, info, alone=block.alone, force=force)

    def _on_engine(self, side: str, match: Match, engine: ServerInfo) -> None:
        """Does what ``_on_server`` does, for an engine without a server."""
        served = ModelAnswer(**{name: engine.fact("model", name) for name in ("name", "vocab_size", "max_model_len")})
        engine = engine.model_copy(update={"served_model": served})
        record_server(self.manifest, match, side, engine, alone=False, force=self.request.force)
