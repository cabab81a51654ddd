"""A comparison from its plan to its verdict: pair after pair, a look after some of them, an end in time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from kvbench.calibration.cache import Calibrator
from kvbench.common.console import Speaker
from kvbench.common.errors import Interrupted, MeasurementError, storage_sentence
from kvbench.common.files import utc_now, write_json
from kvbench.common.signals import Interruption
from kvbench.common.text import clock, plural
from kvbench.gate.compare.conclude import conclude, look_points, pair_line
from kvbench.gate.compare.folder import CompareFolder
from kvbench.gate.compare.lanes import Lane
from kvbench.gate.compare.pair_runner import PairRunner, PairVoid, Void
from kvbench.gate.compare.same_server import hear_server, require_same_requests
from kvbench.gate.compare.values import whole_pairs
from kvbench.gate.policy import Policy
from kvbench.gate.timing.plan import SIDES, Match, Turn, turns
from kvbench.gate.verdict.verdict import INCONCLUSIVE, Verdict
from kvbench.sweep.block import BlockRunner
from kvbench.targets.base import Target
from kvbench.workload.design import Block, Cell

# A reading of /metrics takes the engine's thread from its steps. Four a second, as a sweep takes them, delay one gap in
# twenty on a small machine, which is where p95 lies; what changed over a load is exact however few there are.
POLL_S = 1.0


@dataclass
class _Quiet:
    """What a BlockRunner tells of its loads: kept for the line that says where a comparison is."""

    text: str = "starting"

    def load_started(self, cell: Cell, repeat: int, total: int) -> None:
        self.text = f"pair {repeat}: {cell.cell_id}"

    def load_progress(self, done: int, total: int, failed: int, elapsed_s: float) -> None: ...

    def load_finished(self, cell: Cell, repeat: int, done: Mapping[str, Any]) -> None: ...

    def load_failed(self, cell: Cell, repeat: int, reason: str) -> None:
        self.text = f"pair {repeat}: {cell.cell_id} failed: {reason}"

    def status(self, text: str) -> None:
        self.text = text


@dataclass
class Comparison:
    """One execution in one folder, which holds its manifest already and is locked by the caller (``run_lock``).

    ``stop_early`` False: all pairs are measured whatever they say, as A/A pairs that calibrate a gate are.
    ``max_minutes``: of measuring, counted from here; None: no limit.
    """

    folder: CompareFolder
    manifest: dict[str, Any]
    lanes: Sequence[Lane]
    policy: Policy
    console: Console
    pairs: int
    max_minutes: float | None = None
    stop_early: bool = True
    calibrate: bool = True
    force: bool = False
    _listener: _Quiet = field(default_factory=_Quiet, init=False)

    def execute(self) -> Verdict | None:
        """Measure what is not there yet; the verdict, None when it was interrupted (``resume_command`` goes on)."""
        self._write("incomplete")
        try:
            with Interruption() as interruption, Speaker(self.console, lambda: self._listener.text):
                stopped = self._measure(interruption.check)
            return self._conclude(stopped)
        except (Interrupted, KeyboardInterrupt) as interrupt:
            name = getattr(interrupt, "signal_name", "SIGINT")
            self.say(f"stopped by {name}; what was measured is kept. Go on with:\n  {self.resume_command()}")
            return None
        except OSError as error:
            sentence = storage_sentence(error, self.folder.path)
            if sentence is None:
                raise
            way = f"what was measured is kept. Go on then with:\n  {self.resume_command()}"
            raise MeasurementError(f"{sentence}; {way}") from error

    def judge_stored(self) -> Verdict:
        """The verdict on runs that were measured before."""
        return self._conclude(None)

    def resume_command(self) -> str:
        return self.folder.resume_command(self.manifest["subcommand"])

    def say(self, text: str) -> None:
        """As it is, unwrapped: commands are copied from it."""
        with suppress(OSError):
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @property
    def matches(self) -> tuple[Match, ...]:
        return tuple(match for lane in self.lanes for match in lane.matches)

    def _measure(self, check: Callable[[], None]) -> str | None:
        """Pair after pair. Why it ended before a look decided; None: a look did, or the last was taken."""
        self.manifest["void"] = None
        looks = look_points(self.policy.timing, self.manifest["early_looks"])
        runner = PairRunner(
            self.folder,
            self._runners(check),
            self.policy.timing.metrics,
            self._on_kept,
            self._on_void,
            len(self.manifest["resumed"]),
        )
        began, seconds = time.monotonic(), self.manifest["seconds"]
        known = sum(1 for pair in range(1, self.pairs + 1) if self._is_whole(pair))
        for pair in range(1, self.pairs + 1):
            if not self._is_whole(pair):
                elapsed = time.monotonic() - began
                # The first pair takes longer than all others: it calibrates the client.
                expected = max(seconds[1:] or seconds, default=0.0)
                if self.max_minutes is not None and elapsed + expected > self.max_minutes * 60:
                    most = f"{'up to ' if self.stop_early else ''}{plural(self.pairs, 'pair')}"
                    return f"--max-minutes {self.max_minutes:g} were over after {pair - 1} of {most}"
                try:
                    runner.run(turns(self.matches, pair, self.manifest["order_seed"]), pair)
                except PairVoid as void:
                    self.manifest["void"] = {"pair": void.pair, "turn": void.turn}
                    return f"pair {pair} could not be measured"
                seconds.append(time.monotonic() - began - elapsed)
                self.manifest["pairs"] = pair
                self._write("incomplete")
                self._tell(pair, looks, time.monotonic() - began)
            require_same_requests(self.folder, self.manifest, pair, force=self.force)
            if self.stop_early and pair in looks and pair >= known:
                found = conclude(self.folder, self.manifest, self.policy, pairs=pair)
                if found.outcome != INCONCLUSIVE:
                    return None
        return None

    def _tell(self, pair: int, looks: Sequence[int], elapsed_s: float) -> None:
        """One line on a pair: what it says, and how long it may still take."""
        seconds = self.manifest["seconds"]
        ahead = next((look for look in looks if look >= pair), self.pairs) if self.stop_early else self.pairs
        left = clock((ahead - pair) * sum(seconds) / len(seconds))
        until = f", {f'the next look, after {ahead},' if self.stop_early else 'the end'} in about {left}"
        self.say(
            f"pair {pair} of {'up to ' if self.stop_early else ''}{self.pairs}: "
            f"{pair_line(self.folder, self.manifest, self.policy, pair)}  "
            f"(elapsed {clock(elapsed_s)}{until if ahead > pair else ''})"
        )

    def _on_kept(self, turn: Turn, first: str) -> None:
        self.manifest["order"].setdefault(str(turn.pair), {})[turn.match.key] = first
        self._write("incomplete")

    def _on_void(self, void: Void, most: int) -> None:
        self.manifest["voids"].append(void.to_json())
        self._write("incomplete")
        again = "" if void.attempt == most else ", and is measured again"
        counted = f"attempt {void.attempt} of up to {most}"
        self.say(f"pair {void.pair} of {void.turn} is no measurement{again} ({counted}): {void.words()}")

    def _is_whole(self, pair: int) -> bool:
        return all(self.folder.is_whole(match, pair) for match in self.matches)

    def _conclude(self, stopped: str | None) -> Verdict:
        early, pairs = self.manifest["early_looks"], whole_pairs(self.folder, self.manifest)
        self.manifest["stopped"] = stopped
        if stopped and pairs and pairs not in look_points(self.policy.timing, early):
            early.append(pairs)
        self._write("complete")  # first: what is judged again later says the same, the time of its end too
        return conclude(self.folder, self.manifest, self.policy)

    def _write(self, status: str) -> None:
        calibrator = Calibrator(self.folder.path, self.calibrate)
        self.manifest |= {"status": status, "ended": utc_now(), "calibration": calibrator.facts()}
        write_json(self.folder.manifest_path, self.manifest)

    def _runners(self, check: Callable[[], None]) -> dict[tuple[str, str], BlockRunner]:
        calibrator = Calibrator(self.folder.path, self.calibrate, self._listener.status, self.say)
        runners = {}
        for lane in self.lanes:
            for side in SIDES:
                run = self.folder.run(side, lane.name)
                run.path.mkdir(parents=True, exist_ok=True)
                opened = lane.sides[side]
                runners[side, lane.name] = BlockRunner(
                    opened.workload,
                    run,
                    opened.new_target,
                    self._listener,
                    self._on_server(side, lane),
                    check,
                    calibrate=calibrator,
                    capacity=lane.capacity[side],
                    poll_s=POLL_S,
                )
        return runners

    def _on_server(self, side: str, lane: Lane) -> Callable[[Block, Mapping[str, Any] | None, Target], None]:
        """Keeps what the first server of each configuration says; refuses another one, and one unlike its partner."""

        def hear(block: Block, info: Mapping[str, Any] | None, target: Target) -> None:
            told = {**(info or {}), "served_model": dataclasses.asdict(target.model)}
            match = next(m for m in lane.matches if m.of(side) == block.configuration)
            hear_server(self.manifest, match, side, told, alone=block.alone, force=self.force)

        return hear
