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
from typing import Any

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
    CompareState,
    FailedAttempt,
    GivenUp,
    LockstepFacts,
)
from kvbench.gate.compare.lockstep_pairs import LockstepPairs, why_not_lockstep
from kvbench.gate.compare.manifest import new_comparison, resume, with_compared_requests, with_server
from kvbench.gate.compare.pair_runner import MeasurePair, PairRunner, measure_launched
from kvbench.gate.compare.request import TYPED, CompareRequest
from kvbench.gate.compare.runner_noise import noise_notes, store_noise
from kvbench.gate.compare.served_check import ServedCheck
from kvbench.gate.compare.sides import RUN, PairedWorkload, PairSide, left_to_servers, open_workloads, parse_side
from kvbench.gate.policy import Policy, load_policy
from kvbench.gate.sentences import say
from kvbench.gate.timing.noise import FEWEST_PAIRS
from kvbench.gate.timing.plan import BASE, SIDES, Match, Turn, turns
from kvbench.gate.verdict.outputs import publish, report_verdict, write_outputs
from kvbench.gate.verdict.terminal import print_verdict
from kvbench.gate.verdict.verdict import FAIL, INCONCLUSIVE, INVALID, Finding, Verdict
from kvbench.lockstep.process import OPEN_LIMIT_S
from kvbench.measure.http import HttpInstrument
from kvbench.measure.instrument import Job, Listener
from kvbench.runs.folder import RunFolder, create_run
from kvbench.runs.manifest import stored_workload
from kvbench.runs.server_info import ASYNCHRONOUS, ModelAnswer, ServerInfo
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
class ComparisonPlan:
    """A comparison that is to be measured. ``folder``, ``state``: of one that is resumed, None for a new one.

    ``method``: how pairs are measured, where the caller knows that the sides can be measured so.
    """

    subcommand: str
    request: CompareRequest
    policy: Policy
    sides: Mapping[str, PairSide]
    workloads: Sequence[Workload]
    folder: CompareFolder | None = None
    state: CompareState | None = None
    method: str | None = None


def compare_command(request: CompareRequest) -> int:
    """Runs ``kvbench compare``. Raises UsageError and MeasurementError."""
    with ExitStack() as held:
        plan = _make_plan(request, COMPARE, held)
        folder, state, verdict = run_plan(plan, Console(), held)
        if verdict is None:
            return EXIT_INTERRUPTED
        code = report_verdict(verdict, folder.path)
        write_pairs(folder, state, plan.policy.timing.metrics)
        return code


def calibrate_pairs_command(request: CompareRequest) -> int:
    """Runs ``kvbench dev calibrate``. Raises UsageError and MeasurementError."""
    console = Console()
    with ExitStack() as held:
        plan = _make_plan(request, CALIBRATE, held)
        folder, state, verdict = run_plan(plan, console, held)
        if verdict is None:
            return EXIT_INTERRUPTED
        if verdict.facts["pairs"] < FEWEST_PAIRS:
            print_verdict(verdict, console)
        return store_noise(folder, state, plan.policy.timing, plan.request, partial(print_plain, console))


def _make_plan(request: CompareRequest, subcommand: str, held: ExitStack) -> ComparisonPlan:
    """The plan, checked before anything is built. Raises UsageError.

    A folder that is resumed is locked in ``held`` and keeps the workloads and the policy that it began with, whatever
    their files hold now.
    """
    if request.resume is None:
        if not request.base or not request.candidate:
            raise UsageError(say("compare.two_sides"))
        policy, sides = load_policy(request.policy), parse_sides(request)
        if sides[BASE].kind == RUN:
            if request.workloads:
                raise UsageError(say("compare.stored_workload"))
            workloads = [stored_workload(RunFolder(Path(sides[BASE].text).expanduser()).manifest())]
        elif request.workloads:
            given = {"profile": request.profile, "overrides": request.overrides, "seed": request.seed}
            workloads = [load_workload(path, **given) for path in request.workloads]
        else:
            raise UsageError(say("compare.no_workload"))
        return ComparisonPlan(subcommand, request, policy, sides, workloads)
    folder = CompareFolder.open(request.resume)
    held.enter_context(folder.locked())
    state = folder.state()
    if state.subcommand != subcommand:
        raise UsageError(say("compare.begun_by", folder=folder.path, command=TYPED[state.subcommand]))
    begun = state.options.resumed_by(request)
    workloads = [stored_workload(given) for given in state.given]
    return ComparisonPlan(subcommand, begun, Policy.of(state.policy), parse_sides(begun), workloads, folder, state)


def parse_sides(request: CompareRequest) -> dict[str, PairSide]:
    return {side: parse_side(getattr(request, side), request.repository) for side in SIDES}


def run_plan(
    plan: ComparisonPlan, console: Console, held: ExitStack, make_run: Callable[..., ComparisonRun] | None = None
) -> tuple[CompareFolder, CompareState, Verdict | None]:
    """Opens both sides and measures; no verdict when it was interrupted. The folder stays locked in ``held``.

    make_run: measures in another way than ``ComparisonRun``
    """
    request, folder, state, tell = plan.request, plan.folder, plan.state, partial(print_plain, console)
    if folder is not None and state is not None:
        if finished := finished_verdict(folder, state, plan.policy):
            tell(say("compare.finished", folder=folder.path))
            return folder, state, finished
        if state.method == TWINS:
            raise UsageError(say("compare.twins", folder=folder.path))
    builds = held.enter_context(Builds(rebuild=request.rebuild, build_cmd=request.build_cmd, tell=tell))
    try:
        workloads = open_workloads(plan.sides, plan.workloads, request, builds, held)
    except MeasurementError as error:  # a build that fails
        if folder is None:
            path = create_run(request.output_dir, KIND, git_state()["short_sha"]).path
            _write_invalid(plan, path, None, error, tell)
        raise
    time = Clock.of(request.max_minutes)
    if folder is None or state is None:
        folder, state = _begin(plan, workloads)
        held.enter_context(folder.locked())
    elif not folder.stored:
        state, remarks = resume(state, workloads, force=request.force)
        for remark in remarks:
            tell(say("compare.note", text=remark))
    tell(say("compare.results", folder=folder.path))
    for note in filter(None, (*state.notes, state.doubt)):
        tell(say("compare.note", text=note))
    comparison = (make_run or ComparisonRun)(folder, state, workloads, plan.policy, request, console, time)
    try:
        verdict = comparison.judge_stored() if folder.stored else comparison.execute()
        return folder, comparison.state, verdict
    except MeasurementError as error:
        _write_invalid(plan, folder.path, comparison.state, error, tell)
        raise
    except UsageError:
        if plan.folder is None and folder.remove_unmeasured():
            tell(say("compare.removed", folder=folder.path))
        raise


def _begin(plan: ComparisonPlan, workloads: Sequence[PairedWorkload]) -> tuple[CompareFolder, CompareState]:
    """Makes the folder of a new comparison."""
    request, rules = plan.request, plan.policy.timing
    method, why = (plan.method, None) if plan.method else choose_method(request.method, workloads)
    notes = list(filter(None, [why]))
    if plan.subcommand == COMPARE:
        names = [workload.name for workload in workloads]
        notes = [*noise_notes(request, names, method, rules), *notes]
    cells = [name for workload in workloads for match in workload.matches for name in match.names]
    notes += filter(None, [left_to_servers(workloads[0].sides)])
    notes += [
        say("compare.empty_class", name=name, globs=", ".join(rules.classes[name]))
        for name in rules.empty_classes(cells)
    ]
    return new_comparison(request, plan.subcommand, method, plan.workloads, workloads, plan.policy, notes)


def choose_method(wanted: str, workloads: Sequence[PairedWorkload]) -> tuple[str, str | None]:
    """Chooses how pairs are measured, with a note on its clock, or on why it is not the sharpest way. UsageError."""
    if any(opened.stored for workload in workloads for opened in workload.sides.values()):
        if wanted != AUTO:
            raise UsageError(say("compare.stored_method", method=wanted))
        return STORED_RUNS, None
    if wanted == LAUNCHED:
        return LAUNCHED, None
    with tempfile.TemporaryDirectory() as scratch:
        reason = why_not_lockstep(workloads, Path(scratch) / "engine.log")
    if reason is None:
        return LOCKSTEP, say("pairs.clock", LOCKSTEP)
    if wanted == LOCKSTEP:
        raise UsageError(say("compare.no_lockstep", reason=reason))
    return LAUNCHED, say("compare.launched", reason=reason)


def _write_invalid(
    plan: ComparisonPlan, folder: Path, state: CompareState | None, error: Exception, tell: Callable[[str], None]
) -> None:
    """Writes the files of an invalid verdict for CI, if they fit on the disk."""
    if plan.subcommand != COMPARE:
        return
    sides = {side: (state.of(side) if state else plan.sides[side].facts()).to_json() for side in SIDES}
    reproduce = state.reproduce if state else shlex.join(["kvbench", *sys.argv[1:]])
    unmeasured = Finding("measured/comparison", "measured", "the comparison is measured", INVALID, str(error))
    verdict = Verdict("compare", INVALID, str(error), (unmeasured,), **sides, reproduce=reproduce)
    with suppress(OSError):
        for path in write_outputs(verdict, folder):
            tell(say("compare.written", path=path))
    publish(verdict, folder)


@dataclass
class LoadsShown(Listener):
    """Shows what is being measured. ``status`` replaces the text on the status line; its ``work`` is the same while a
    load goes on. ``load``: which load it is."""

    status: Callable[..., None]
    load: str = ""

    def load_started(self, cell: Cell, repeat: int, total: int) -> None:
        self.load = say("compare.load", pair=repeat, cell=cell.cell_id)
        self.status(self.load)

    def load_progress(self, done: int, total: int, failed: int, elapsed_s: float) -> None:
        failures = say("compare.load_failures", failed > 0, failed=failed)
        text = say("compare.load_progress", load=self.load, done=done, total=total, failed=failures)
        self.status(text, work=self.load)

    def load_failed(self, cell: Cell, repeat: int, reason: str) -> None:
        self.status(say("compare.load_failed", pair=repeat, cell=cell.cell_id, reason=reason))


@dataclass
class ElapsedLine:
    """A status line that says how long the work at hand has taken: a server's start may take minutes."""

    status: Callable[[Callable[[], str]], None]
    work: str = ""
    began: float = 0.0

    def __call__(self, text: str, work: str = "") -> None:
        if (work or text) != self.work:
            self.work, self.began = work or text, monotonic()
        began = self.began
        self.status(lambda: say("compare.elapsed", text=text, time=clock(monotonic() - began)))


@dataclass
class ComparisonRun:
    """Measures in a folder that has its manifest already and is locked by the caller.

    ``state``: of the comparison now; every step replaces it, and ``write`` stores it.
    ``check``: raises if a signal has come; ``show``: gets what is being done, on the status line.
    """

    folder: CompareFolder
    state: CompareState
    workloads: Sequence[PairedWorkload]
    policy: Policy
    request: CompareRequest
    console: Console
    clock: Clock
    check: Callable[[], None] = field(default=lambda: None)
    show: Callable[..., None] = field(default=lambda text, work="": None)
    pair_s = None  # engine time of a pair; None: the gate's

    @property
    def stop_early(self) -> bool:
        """Tests whether a look may end it. Pairs that calibrate a runner are all measured, whatever they show."""
        return self.state.subcommand == COMPARE

    @property
    def pairs(self) -> int:
        """The most that are measured."""
        return self.request.pairs or self.policy.timing.looks[-1].pairs

    @property
    def matches(self) -> list[Match]:
        return [match for workload in self.workloads for match in workload.matches]

    def execute(self) -> Verdict | None:
        """Measures what is missing and returns the verdict, None when it was interrupted."""
        self.write("incomplete", void=None)
        next_step = kept(self.folder.resume_command(self.state.subcommand))
        with orderly_end(self.folder.path, next_step, self._say) as work:
            with status_line(self.console, "starting") as status:
                self.check, self.show = work.check, ElapsedLine(status)
                if self.state.method == LOCKSTEP:
                    stopped = self._measure()
                    stopped = (self.stop_early and self._check_served()) or stopped
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
            pair = self.folder.whole_pairs(self.state.cells) + 1
            return say("compare.over_first_launches", over=self._over(pair))
        return None

    def _check_time(self) -> None:
        self.check()
        self.clock.require()

    def _over(self, pair: int) -> str:
        most = say("compare.up_to", self.stop_early) + plural(self.pairs, "pair")
        return say("compare.over", minutes=self.request.max_minutes or 0, pairs=pair - 1, most=most)

    def _check_served(self) -> str | None:
        """Checks the servers around engines that have not failed; why it could not, None where it did."""
        state, pairs = self.state, self.folder.whole_pairs(self.state.cells)
        if state.void or not pairs or conclude(self.folder, state, self.policy).outcome == FAIL:
            return None
        self._say(say("compare.served"))
        resumed = len(state.resumed)
        served = ServedCheck(self.folder, state.order_seed, self.check, self.show, self._on_failed, resumed)
        if given_up := served.run(self.workloads):
            self._give_up(given_up)
            return say("compare.not_measured", what=given_up.turn)
        return None

    def judge_stored(self) -> Verdict:
        """The verdict on stored runs. Raises MeasurementError where their first repeat is invalid."""
        cells = self.state.cells
        repeat = self.folder.whole_pairs(cells) + 1
        for cell, side in itertools.product(cells, SIDES):
            done = self.folder.done(cell, side, repeat)
            if done is not None and not done.valid:
                why = "; ".join(done.not_comparable)
                text = say("compare.invalid_repeat", repeat=repeat, cell=cell.on(side), side=side, why=why)
                if repeat == 1:
                    raise MeasurementError(say("compare.measure_again", text=text))
                self.state = self.state.with_notes([text])
                break
        return self.finish(None)

    def finish(self, stopped: str | None) -> Verdict:
        """Marks the comparison as complete and returns its verdict. ``stopped``: why it ended before a look decided."""
        looks, pairs = self.state.early_looks, self.folder.whole_pairs(self.state.cells)
        if stopped and pairs and pairs not in look_points(self.policy.timing, looks):
            looks = (*looks, pairs)
        # first: what is judged again later says the same, the time of its end too
        self.write("complete", stopped=stopped, pair_s=self._pair_s(), early_looks=looks)
        return conclude(self.folder, self.state, self.policy)

    def write(self, status: str, **changes: Any) -> None:
        """Replaces the state by one with ``changes``, and writes the manifest."""
        calibration = self._calibrator().facts()
        self.state = self.state.but(status=status, ended=utc_now(), calibration=calibration, **changes)
        self.folder.write(self.state)

    def _give_up(self, attempt: FailedAttempt) -> None:
        self.state = self.state.but(void=GivenUp(attempt.pair, attempt.turn))

    def _calibrator(self, *more: Callable[..., None]) -> Calibrator:
        return Calibrator(self.folder.path, not self.request.no_calibration, *more)

    def _say(self, text: str) -> None:
        with suppress(OSError):
            print_plain(self.console, text)

    def _measure(self) -> str | None:
        """Measures pair after pair; returns why it ended early, None if a look decided or the last one was taken."""
        measured, looks = 0, look_points(self.policy.timing, self.state.early_looks)
        runner = PairRunner(
            self.folder,
            self._way_to_measure(),
            self.policy.timing.metrics,
            self._on_measured,
            self._on_failed,
            len(self.state.resumed),
            self.clock,
        )
        for pair in range(1, self.pairs + 1):
            if not self.folder.is_whole(self.state.cells, pair):
                if stopped := self._measure_pair(runner, pair, measured):
                    return stopped
                measured += 1
                self._say_pair(pair, looks)
            self.state = with_compared_requests(self.folder, self.state, pair, force=self.request.force)
            if self.stop_early and pair in looks and self.is_decided(pair):
                return None
        return None

    def is_decided(self, pair: int) -> bool:
        """Tests whether the look after so many pairs ends the comparison."""
        return conclude(self.folder, self.state, self.policy, pairs=pair).outcome != INCONCLUSIVE

    def _measure_pair(self, runner: PairRunner, pair: int, measured: int) -> str | None:
        """Measures one pair, after ``measured`` others; why it could not, None where it did."""
        began = self.clock.elapsed_s
        if not measured and (known_s := self._pair_s()):
            self._require_time_for_a_verdict(pair - 1, known_s)
        try:
            self.clock.require(self._pair_s())
        except DeadlineError:
            return self._over(pair)
        try:
            given_up = runner.run(turns(self.matches, pair, self.state.order_seed), pair)
        except DeadlineError:
            return say("compare.over_cut", over=self._over(pair), pair=pair)
        if given_up:
            self._give_up(given_up)
            return say("compare.not_measured", what=say("compare.pair", pair=pair))
        took_s = self.clock.elapsed_s - began
        self.write("incomplete", seconds=(*self.state.seconds, took_s), pairs=pair)
        if measured < 2:  # the first one may have calibrated the client, or compiled kernels
            self._require_time_for_a_verdict(pair, took_s if measured else took_s / 2)
        return None

    def _pair_s(self) -> float:
        """Guesses what a pair takes: as attempts, else as pairs before --resume, else as its launches; 0: unknown."""
        keys = [match.key for match in self.matches]
        attempts = sum(map(self.clock.attempt_s, keys))
        return attempts if self.clock.took.keys() >= set(keys) else longest(self.state.seconds) or attempts

    def _say_pair(self, pair: int, looks: Sequence[int]) -> None:
        """Says what ``pair`` measured, and how long it is until something can be decided."""
        seconds, ahead = self.state.seconds, self.pairs
        if self.stop_early:
            ahead = next((look for look in looks if look >= pair), self.pairs)
        left, until = clock((ahead - pair) * sum(seconds) / len(seconds)), ""
        if ahead > pair:
            until = say("compare.until", self.stop_early, pairs=ahead, time=left)
        text = say(
            "compare.pair_done",
            pair=pair,
            up_to=say("compare.up_to", self.stop_early),
            most=self.pairs,
            line=pair_line(self.folder, self.state.cells, self.policy.timing, pair),
            time=clock(self.clock.elapsed_s),
            until=until,
        )
        self._say(text)

    def _require_time_for_a_verdict(self, pairs: int, pair_s: float) -> None:
        """Raises UsageError where --max-minutes end before any verdict, with ``pairs`` measured; --force: only says so.

        ``pair_s``: what a further pair takes at least.
        """
        rules, most = self.policy.timing, pairs + max(0.0, self.clock.left_s) // max(pair_s, 1e-3)
        if not (self.stop_early and most < min(rules.fewest_to_pass, rules.fewest_to_fail)):  # NaN without a limit
            return
        minutes = math.ceil((rules.looks[0].pairs - pairs + 1) * pair_s / 60)
        limits = {"fewest_to_pass": rules.fewest_to_pass, "fewest_to_fail": rules.fewest_to_fail}
        too_few = say("compare.too_few", minutes=self.request.max_minutes, most=plural(most, "pair"), **limits)
        if self.request.force:
            self._say(say("compare.too_few_forced", too_few=too_few, first=rules.looks[0].pairs, needed=minutes))
            return
        where = say("compare.to_resume", pairs > 0, command=self.folder.resume_command(self.state.subcommand))
        raise UsageError(say("compare.too_few_refused", too_few=too_few, needed=minutes, where=where))

    def _on_measured(self, turn: Turn, first: str) -> None:
        self.state = self.state.with_first_side(turn.pair, turn.match.key, first)
        self.write("incomplete")

    def _on_failed(self, attempt: FailedAttempt, most: int) -> None:
        self.write("incomplete", voids=(*self.state.voids, attempt))
        again, number = say("compare.again", attempt.attempt != most), attempt.attempt
        where = attempt.where
        self._say(say("compare.failed", where=where, again=again, attempt=number, most=most, reasons=attempt))

    def _way_to_measure(self) -> MeasurePair:
        if self.state.method != LOCKSTEP:
            return partial(measure_launched, self._runners(), self.clock)
        return LockstepPairs(
            self.folder,
            {workload.name: workload for workload in self.workloads},
            self.state.lockstep or LockstepFacts(),
            self.state.order_seed,
            self._on_facts,
            self._on_engine,
            self.request.start_timeout or OPEN_LIMIT_S,
            self.show,
            self._check_time,
            self.pair_s,
        ).measure

    def _on_facts(self, facts: LockstepFacts) -> None:
        self.state = self.state.but(lockstep=facts)

    def _runners(self) -> dict[tuple[str, str], BlockRunner]:
        calibrator, runners = self._calibrator(self.show, self._say, self.clock.require), {}
        for workload, side in itertools.product(self.workloads, SIDES):
            run, choice = self.folder.run(side, workload.name), workload.sides[side].choice
            run.path.mkdir(parents=True, exist_ok=True)
            job = Job(
                choice.workload,
                run,
                choice.new_target,
                LoadsShown(self.show),
                self._check_time,
                on_server=partial(self._on_server, workload, side),
                capacity=workload.capacity[side],
                calibrate=calibrator,
                poll_s=POLL_S,
            )
            runners[side, workload.name] = BlockRunner(HttpInstrument(job))
        return runners

    def _on_server(self, workload: PairedWorkload, side: str, block: Block, info: ServerInfo, target: Target) -> None:
        """Stores what the server says of itself, or compares it with what the first one of its configuration said."""
        match = next(m for m in workload.matches if m.of(side) == block.configuration)
        for note in dict.fromkeys(info.server.notes):
            if note not in self.state.notes:
                self._say(say("compare.note", text=note))
        self.state = self.state.with_notes(info.server.notes)
        served = ModelAnswer(**dataclasses.asdict(target.model))
        info, force = info.model_copy(update={"served_model": served}), self.request.force
        self.state = with_server(self.state, match, side, info, alone=block.alone, force=force)

    def _on_engine(self, side: str, match: Match, engine: ServerInfo) -> None:
        """Does what ``_on_server`` does, for an engine without a server."""
        served = ModelAnswer(**{name: engine.fact("model", name) for name in ("name", "vocab_size", "max_model_len")})
        engine = engine.model_copy(update={"served_model": served})
        self.state = with_server(self.state, match, side, engine, alone=False, force=self.request.force)
        if engine.fact("engine", ASYNCHRONOUS):
            self.state = self.state.with_notes([say("compare.synchronous", side=side)])
