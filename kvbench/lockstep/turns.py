"""Decides whose step is next: engines take turns so that all meet the same speed of the machine.

A machine shared with others changes its speed by 10 % within a second. Engines that compute their steps in turns, a few
milliseconds each, are slowed down alike, so the ratio of their times is known far better than either time. The next
turn belongs to the engine whose own clock is furthest behind: all engines are about equally far in their own time, and
at any moment all have been measured about equally long. Ties are broken at random.

An engine that has just waited finds its weights and KV out of the processor's caches. ``cold_cost`` measures by how
much that lengthens the first decode steps of a turn, beside the late steps of a long turn, which are as short as those
of an engine alone. ``choose_turn`` takes the shortest turn whose steps are on average within ``MAX_COLD_COST`` of them.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvbench.common.errors import MeasurementError
from kvbench.lockstep.process import TURN_LIMIT_S, EngineFailedError, EngineProcess, wait_for_answers

STEP_COLUMNS = ("seconds", "prefill_tokens", "decode_tokens", "output_tokens")
TURNS = (1, 2, 4, 8)
MAX_COLD_COST = 0.02
_WARM_UP_PROMPT = 16  # tokens
CLOCKS_DIFFER_S = 0.002  # an engine's clock and ours, in one turn
LEAST_CLAIMED = 0.3  # of the wait for the answers to a load's turns, that its steps take
_TOO_SHORT_TO_TELL_S = 1.0
_WARM_UP_TURNS = 24  # of all engines together: enough for a median over them
_WARM_FROM = 4  # the late steps of a turn: from here on (from 0)


@dataclass
class TurnTaker:
    """An engine that takes part, and the steps of its present load.

    ``launch``: its number; engines of one launch compute one at a time, and launches at the same time.
    ``clock``: its engine time [s]; ``steps``: rows of ``STEP_COLUMNS``;
    ``turns``: how many of them each turn had; ``output_tokens``: of all steps.
    """

    process: EngineProcess
    name: str
    launch: int = 1
    clock: float = 0.0
    ended: bool = False
    steps: list[Sequence[float]] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    output_tokens: int = 0
    waited_s: float = 0.0  # for the answers to all turns of the load
    _closed: bool = False  # whether its load has no arrivals to wait for
    _began: float = 0.0  # its present turn [s, time.monotonic]

    def load(self, **load: Any) -> str:
        """Gives the engine its next requests; its metrics before them, as Prometheus text."""
        answer = self.process.ask(do="load", name=self.name, **load)
        self.clock, self.ended, self.steps, self.turns, self.output_tokens = 0.0, False, [], [], 0
        self.waited_s, self._closed = 0.0, load["concurrency"] is not None
        return answer["metrics"]

    def begin_turn(self, length: int) -> None:
        self._began = time.monotonic()
        self.process.send(do="turn", name=self.name, steps=length)

    def end_turn(self) -> None:
        """Waits for the steps of the turn that was begun. Raises EngineFailedError where their times cannot be true."""
        answer = self.process.receive(TURN_LIMIT_S)
        took = time.monotonic() - self._began
        try:
            steps, clock, ended = answer["steps"], float(answer["clock"]), bool(answer["ended"])
            seconds = [float(step[0]) for step in steps]
            self.output_tokens += sum(int(step[3]) for step in steps)
        except (LookupError, TypeError, ValueError) as error:
            text = f"its answer to a turn is not as the protocol has it ({type(error).__name__}: {error})"
            raise EngineFailedError(text, self.process) from None
        if why := self._why_untrue(seconds, clock, took):
            raise EngineFailedError(why, self.process)
        self.steps += steps
        self.turns.append(len(steps))
        self.waited_s += took
        self.clock, self.ended = clock, ended

    def _why_untrue(self, seconds: Sequence[float], clock: float, took: float) -> str:
        """Says why the times of a turn that took ``took`` seconds cannot be true; empty if they can."""
        claimed = sum(seconds)
        if not all(second > 0 for second in seconds):
            return f"a step took {min(seconds):g} s"
        if not claimed <= took + CLOCKS_DIFFER_S:
            return f"its steps claim {claimed:.4g} s of a turn that took {took:.4g} s"
        ahead = clock - self.clock - claimed
        if ahead < -CLOCKS_DIFFER_S or (self._closed and ahead > CLOCKS_DIFFER_S):
            return f"its clock went from {self.clock:.4g} to {clock:.4g} s in steps of {claimed:.4g} s"
        return ""

    def why_hidden(self) -> str:
        """Says that the steps of the load are much shorter than the wait for them; empty if they are not."""
        claimed = sum(step[0] for step in self.steps)
        if claimed >= LEAST_CLAIMED * self.waited_s or self.waited_s < _TOO_SHORT_TO_TELL_S:
            return ""
        return f"its steps claim {claimed:.3g} s of a load that took {self.waited_s:.3g} s: it hides time"

    def table(self) -> np.ndarray:
        """The steps as float64 [steps, 4], see ``STEP_COLUMNS``."""
        return np.asarray(self.steps, dtype=float).reshape(-1, len(STEP_COLUMNS))


def take_turns(engines: Sequence[TurnTaker], rng: random.Random, length: int, until: float) -> None:
    """Lets every engine compute its load to the end, in turns of up to ``length`` steps; launches side by side.

    until: when it is given up [s, time.monotonic]. Raises MeasurementError then, of the engine if it alone is left.
    """
    computing: dict[int, TurnTaker] = {}  # by launch
    while running := [engine for engine in engines if not engine.ended]:
        if time.monotonic() > until:
            names = ", ".join(dict.fromkeys(engine.name for engine in running))
            text = f"the load did not end in the time that it has (of {names})"
            raise EngineFailedError(text, running[0].process) if len(running) == 1 else MeasurementError(text)
        for launch in sorted({engine.launch for engine in running} - computing.keys()):
            waiting = [engine for engine in running if engine.launch == launch]
            computing[launch] = min(waiting, key=lambda engine: (engine.clock, rng.random()))
            computing[launch].begin_turn(length)
        answered = wait_for_answers([engine.process for engine in computing.values()], TURN_LIMIT_S)
        for launch, engine in list(computing.items()):
            if engine.process in answered:
                computing.pop(launch).end_turn()


def share_done(engines: Sequence[TurnTaker], output_tokens: int) -> float:
    """The share (0 to 1) of their load of ``output_tokens`` that engines have computed: the mean over them."""
    shares = [1.0 if engine.ended else min(1.0, engine.output_tokens / output_tokens) for engine in engines]
    return sum(shares) / len(shares)


def warm_up(
    engines: Sequence[TurnTaker], users: int, max_model_len: int, until: float, turns: int | None = None
) -> np.ndarray | None:
    """Decodes ``users`` short prompts in the longest turns on every engine, unmeasured; returns their ``cold_cost``.

    ``turns``: of each engine; None for as many as tell the cold cost. ``max_model_len``: the smallest of the engines.
    ``until``: as for ``take_turns``.
    """
    tokens = TURNS[-1] * (turns or 1 + math.ceil(_WARM_UP_TURNS / len(engines)))
    tokens = max(1, min(tokens, max_model_len - _WARM_UP_PROMPT))
    requests = [[[16 + i % 200] * _WARM_UP_PROMPT, tokens, None, 0] for i in range(users)]
    for engine in engines:
        engine.load(requests=requests, concurrency=users, temperature=0.0, ignore_eos=True, keep_cache=False)
    take_turns(engines, random.Random(0), TURNS[-1], until)
    return cold_cost(engines)


def cold_cost(engines: Sequence[TurnTaker]) -> np.ndarray | None:
    """The share by which the first steps of a turn are longer than its late ones: float64 [longest turn].

    Measured in whole turns of the longest length in which every step decodes the same number of tokens and nothing
    else: for each place the median over the turns of all engines. None where there are fewer than 8 such turns.
    """
    longest, relative = TURNS[-1], []
    for engine in engines:
        ends = np.cumsum(engine.turns)
        table = engine.table()
        for end, length in zip(ends, engine.turns, strict=True):
            steps = table[end - length : end]
            if length == longest and not steps[:, 1].any() and (steps[:, 2] == steps[0, 2]).all() and steps[0, 2]:
                relative.append(steps[:, 0] / np.median(steps[_WARM_FROM:, 0]))
    return np.median(relative, axis=0) - 1.0 if len(relative) >= 8 else None


def mean_step(engines: Sequence[TurnTaker], decodes_only: bool = False) -> float:
    """The mean step [s] of the engines' present loads; ``decodes_only``: of the steps without prompts."""
    steps = np.concatenate([engine.table() for engine in engines])
    return float(steps[(steps[:, 1] == 0) | (not decodes_only), 0].mean())


def choose_turn(cost: np.ndarray | None) -> int:
    """The shortest turn whose mean cold cost is at most ``MAX_COLD_COST``; the longest where that is not known."""
    if cost is None:
        return TURNS[-1]
    return next((length for length in TURNS if cost[:length].mean() <= MAX_COLD_COST), TURNS[-1])


def cold_facts(cost: np.ndarray | None, length: int) -> dict[str, Any]:
    """Facts for a result file: a turn's length, and the share by which its steps are slower than an engine's alone."""
    return {"turn_steps": length, "cold_cost": None if cost is None else float(cost[:length].mean())}
