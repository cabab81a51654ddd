"""Progress of a sweep: which load runs, how far it is, how long is left.

A plain line for each finished load; in between on a terminal a live line of the load and one of its server, elsewhere
(CI, a pipe) both in one line after every half a minute without output.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from kvbench.common import text as words
from kvbench.common.console import QUIET_S, LiveText, Part, fit, print_plain
from kvbench.common.text import clock
from kvbench.effects.comparison import Call
from kvbench.measure.instrument import Listener
from kvbench.metrics.definitions import THROUGHPUT
from kvbench.runs.engine_time import EngineTime
from kvbench.runs.results import LoadResult
from kvbench.sweep.show_load import one_line
from kvbench.targets.choose import START_GUESS_S
from kvbench.targets.prometheus import MetricsSample
from kvbench.workload.design import Block, Cell, Design


class Estimator:
    """The seconds that loads and server starts take: the median of those that are finished, else a guess.

    A load is like those of the same cell, else like those of the same load point under other configurations.
    """

    def __init__(self, guesses: Mapping[str, float], start_guess_s: float = START_GUESS_S) -> None:
        self._guesses = dict(guesses)  # load_id -> seconds
        self._start_guess_s = start_guess_s
        self._seen: dict[str, list[float]] = {}
        self._starts: list[float] = []
        self._rest: list[float] = []

    def observe(self, cell: Cell, wall_s: float, server_start_s: float | None = None) -> None:
        """Notes that a load took ``wall_s``, checks included, and its server ``server_start_s`` to start."""
        for key in (cell.cell_id, cell.load.load_id):
            self._seen.setdefault(key, []).append(wall_s)
        if server_start_s is not None:
            self._starts.append(server_start_s)

    def observe_block(self, block: Block, wall_s: float) -> None:
        """Notes what a block took beyond start and loads (warm-up, the server's end)."""
        expected = statistics.median(self._starts or [0.0]) + sum(self.load_s(cell) for cell in block.cells)
        self._rest.append(max(0.0, wall_s - expected))

    def load_s(self, cell: Cell) -> float:
        for key in (cell.cell_id, cell.load.load_id):
            if key in self._seen:
                return statistics.median(self._seen[key])
        return self._guesses[cell.load.load_id]

    @property
    def guesses_starts(self) -> bool:
        """Tests whether no launch has been measured yet."""
        return not self._starts

    def start_s(self) -> float:
        """The seconds of everything but the loads of a block."""
        start = statistics.median(self._starts) if self._starts else self._start_guess_s
        return start + statistics.median(self._rest or [0.0])

    def total_s(self, blocks: Sequence[Block]) -> float:
        """The seconds for ``blocks`` from nothing."""
        return sum(self.start_s() + sum(self.load_s(c) for c in b.cells) for b in blocks if b.cells)


def so_far(measured: EngineTime, design: Design) -> str:
    """Says in one line what engine time has decided of output tokens/s, in the order of the workload."""
    base = next(configuration.label for configuration in design.configurations if configuration.is_baseline)
    loads = {cell.load.load_id: cell.load for cell in design.cells}.values()
    # Engine time measures every configuration at every load, also where --only leaves a cell out.
    cells = [Cell.of(configuration, load) for configuration in design.configurations for load in loads]
    names = {cell.cell_id: f"{cell.configuration.label} at {cell.load.load_id}" for cell in cells}
    changes, others = [], {Call.LEVEL: [], Call.UNDECIDED: []}
    for effect in measured.effects:
        if effect.metric != THROUGHPUT:
            continue
        name, comparison = names[effect.cell], effect.comparison
        if comparison.call in others:
            others[comparison.call].append(name)
            continue
        change, low, high = (f"{100 * (x - 1):+.1f}" for x in (comparison.ratio, comparison.low, comparison.high))
        changes.append(f"{name} {change} % ({low} to {high})")
    parts = [", ".join(changes), *(f"{call.value}: {', '.join(like)}" for call, like in others.items() if like)]
    launches = f"{measured.launches} launch{'' if measured.launches == 1 else 'es'}"
    took = clock(measured.seconds or 0)
    return f"engine time after {launches}, {took}; output tokens/s against {base}: {'; '.join(filter(None, parts))}"


WINDOW_S = 5.0
_TOKENS = "generation_tokens_total"


class LiveServer:
    """The last seconds of a server, from readings of its /metrics that the measurement takes anyway.

    ``take`` may be called by another thread than ``rows``.
    """

    def __init__(self) -> None:
        self._samples: tuple[MetricsSample, ...] = ()

    def take(self, sample: MetricsSample) -> None:
        """Adds the next reading of the same server."""
        self._samples = (*(earlier for earlier in self._samples if sample.at - earlier.at <= WINDOW_S), sample)

    def rows(self, width: int) -> Sequence[str]:
        """Writes ``412 tok/s, 18 running, 14 waiting, KV 93 %`` as far as the server tells that."""
        now, parts = time.perf_counter(), []
        recent = [sample for sample in self._samples if now - sample.at <= WINDOW_S]
        counted = [sample for sample in recent if _TOKENS in sample.counters]
        if len(counted) > 1 and (seconds := counted[-1].at - counted[0].at) > 0:
            made = counted[-1].counters[_TOKENS] - counted[0].counters[_TOKENS]
            parts.append((f"{words.tokens_per_s(made / seconds)} tok/s", 1))
        gauges = recent[-1].gauges if recent else {}
        for name, what, rank in (("num_requests_running", "running", 3), ("num_requests_waiting", "waiting", 4)):
            if name in gauges:
                parts.append((f"{gauges[name]:.0f} {what}", rank))
        if "kv_cache_usage_perc" in gauges:
            parts.append((f"KV {100 * gauges['kv_cache_usage_perc']:.0f} %", 2))
        line = fit(parts, width, ", ")
        return (line,) if line else ()


class SweepProgress(Listener):
    """The sweep's listener. ``blocks`` are those still to run, until ``expect`` tells others.

    ``grows``: loads may come in or drop out for the time that there is, so their number is only about right;
    ``at_once``: blocks that run at the same time.
    """

    def __init__(
        self,
        console: Console,
        blocks: Sequence[Block],
        estimator: Estimator,
        quiet_s: float = QUIET_S,
        *,
        grows: bool = False,
        at_once: int = 1,
    ) -> None:
        self._console = console
        self._estimator = estimator
        self._at_once = at_once
        self._about = "~" if grows else ""
        self._finished: set[tuple[str, int]] = set()
        self.expect(blocks)
        self._began = self._load_began = time.monotonic()
        self._current: tuple[str, int] | None = None
        self._started = ("", 0)
        self._loads_from = 0.0  # time.monotonic()
        self._doing: str | Callable[[], str] = "starting"
        self._requests: list[Part] = []
        self._server = LiveServer()
        self._live = LiveText(console, self._rows, quiet_s)

    def expect(self, blocks: Sequence[Block]) -> None:
        """Sets the blocks still to run. A load that is measured again counts once, as not finished."""
        self._left = {(c.cell_id, b.repeat): (b, c) for b in blocks for c in b.cells}
        self._finished -= self._left.keys()
        self._total = len(self._finished) + len(self._left)

    def loads_begin_in(self, seconds: float) -> None:
        """Tells when the loads begin: something else is measured first."""
        self._loads_from = time.monotonic() + seconds

    def __enter__(self) -> SweepProgress:
        self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.__exit__(*exc)

    def time_left_s(self) -> float:
        """The seconds of loads not finished, plus one server start for each block that still has some."""
        left = list(self._left.values())  # a copy: this runs in the thread of the live line, too
        blocks = {b.block_id for b, _ in left}
        seconds = max(0.0, self._loads_from - time.monotonic())
        seconds += sum(self._estimator.load_s(c) for _, c in left)
        seconds += self._estimator.start_s() * max(0, len(blocks) - 1 if self._current else len(blocks))
        if running := self._left.get(self._current):
            seconds -= min(time.monotonic() - self._load_began, 0.95 * self._estimator.load_s(running[1]))
        return max(0.0, seconds) / self._at_once

    def status(self, text: str | Callable[[], str]) -> None:
        """Tells what is being done; a function is asked whenever it is shown."""
        self._current, self._requests = None, []
        self._doing, self._load_began = text, time.monotonic()

    def load_started(self, cell: Cell, repeat: int, total: int) -> None:
        self.status(f"{cell.cell_id} repeat {repeat}")
        self._current = self._started = (cell.cell_id, repeat)
        self._server = LiveServer()

    def server_read(self, sample: MetricsSample) -> None:
        self._server.take(sample)

    def load_progress(self, done: int, total: int, failed: int, elapsed_s: float) -> None:
        if self._current is None:  # the client was calibrated since the load was announced
            self.status("{} repeat {}".format(*self._started))
            self._current = self._started
        self._requests = [(f": {done}/{total}", 1), (" requests", 5), (f", {failed} failed" if failed else "", 2)]

    def load_finished(self, cell: Cell, repeat: int, done: LoadResult) -> None:
        seconds = time.monotonic() - self._load_began
        if self._started != (cell.cell_id, repeat):  # it ran on another machine
            seconds = done.wall_s or seconds
        self._estimator.observe(cell, seconds, done.server_start_s)
        self._finish(cell, repeat, one_line(done))

    def load_failed(self, cell: Cell, repeat: int, reason: str) -> None:
        self._finish(cell, repeat, f"FAILED: {reason}")

    def _finish(self, cell: Cell, repeat: int, text: str) -> None:
        self._left.pop((cell.cell_id, repeat), None)
        self._finished.add((cell.cell_id, repeat))
        self.status("between loads")
        self._live.printed()
        elapsed = clock(time.monotonic() - self._began)
        head = f"[{len(self._finished)}/{self._about}{self._total}] {cell.cell_id} repeat {repeat}: "
        print_plain(self._console, f"{head}{text}  (elapsed {elapsed}, {self._time_left()}{self._guess()})")

    def _rows(self, width: int) -> list[str]:
        number, requests = min(len(self._finished) + 1, self._total), self._requests
        doing = self._doing() if callable(self._doing) else self._doing
        parts: list[Part] = [
            (f"[{number}/{self._about}{self._total}", 0),
            (f", {self._time_left()}", 3),
            (self._guess(), 6),
            (f"] {doing}", 0),
            *requests,
            (f"{', ' if requests else ': '}{clock(time.monotonic() - self._load_began)}", 4),
        ]
        return [fit(parts, width), *(self._server.rows(width) if self._current else ())]

    def _time_left(self) -> str:
        return f"about {clock(self.time_left_s())} left"

    def _guess(self) -> str:
        return ", a guess" if self._estimator.guesses_starts else ""
