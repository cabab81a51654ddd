"""Checks that an engine's process speaks protocol 3 (docs/engines.md): its clock, its tokens, its ends, its refusals.

What can be known of an engine from outside is checked, each point by itself, in the order of ``CHECKS``. The engine is
opened once. What it does not offer, such as several answers to a prompt, is not checked, and the result says so.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.common.errors import MeasurementError
from kvbench.lockstep.process import PROTOCOLS, EngineProcess, EngineRefusedError
from kvbench.lockstep.turns import STEP_COLUMNS
from kvbench.runs.server_info import ServerInfo, is_size

PASSED, FAILED, NOT_OFFERED = "passed", "FAILED", "not offered"
NAME = "checked"
_LONGEST_TURN = 4
_LATE_S = 1000.0  # an arrival that no idle engine would reach by waiting
_CLOCK_TOLERANCE_S = 1e-6
_LEAST_OF_WALL = 0.5  # of a turn's time on the wall, that its steps claim
_WALL_MARGIN_S = 0.002
_OPEN_LIMIT_S = 900.0


class CheckFailedError(Exception):
    """A sentence about what the engine did and the protocol does not allow."""


class NotOfferedError(Exception):
    """A sentence about what the engine does not have, so that it cannot be checked."""


@dataclass(frozen=True)
class CheckResult:
    """One point: its ``title``, PASSED, FAILED or NOT_OFFERED, and what was seen."""

    title: str
    outcome: str
    detail: str = ""


@dataclass
class CheckedLoad:
    """A load as the engine computed it.

    steps: float64 [steps, 4], see ``STEP_COLUMNS``; wall_s: [turns] until each answer; clocks: [turns] as it said
    rows: of each request, as ``result`` has them
    """

    requests: Sequence[Sequence[Any]]
    steps: np.ndarray
    turns: list[int]
    wall_s: list[float]
    clocks: list[float]
    rows: list[list[Any]] = field(default_factory=list)


@dataclass
class EngineUnderCheck:
    """One engine process with its opened engine, and the loads that several checks look at."""

    process: EngineProcess
    settings: Mapping[str, Any]
    described: Mapping[str, Any] = field(default_factory=dict)
    _closed: CheckedLoad | None = None

    @property
    def vocab_size(self) -> int:
        return int(self.described["model"]["vocab_size"])

    @property
    def closed(self) -> CheckedLoad:
        """Two users who send six requests of 4 to 24 tokens."""
        if self._closed is None:
            self._closed = self.compute([[self.prompt(i, 4 + 3 * i), 4 + 4 * i, None, 0] for i in range(6)], users=2)
        return self._closed

    def prompt(self, number: int, tokens: int) -> list[int]:
        return [16 + (7 * number + i) % min(200, self.vocab_size - 16) for i in range(tokens)]

    def begin(
        self,
        requests: Sequence[Sequence[Any]],
        users: int | None,
        keep_cache: bool = False,
        temperature: float = 0.0,
    ) -> None:
        self.process.ask(
            do="load", name=NAME, requests=requests, concurrency=users, temperature=temperature, ignore_eos=True,
            keep_cache=keep_cache,
        )  # fmt: skip

    def turn(self, steps: int) -> tuple[Mapping[str, Any], float]:
        """An answer to ``turn``, and how long it took on the wall [s]."""
        began = time.perf_counter()
        return self.process.ask(do="turn", name=NAME, steps=steps), time.perf_counter() - began

    def end(self, most_turns: int = 500) -> None:
        """Lets the present load end."""
        for _ in range(most_turns):
            if self.turn(_LONGEST_TURN)[0]["ended"]:
                return
        raise MeasurementError(f"a load did not end within {most_turns} turns")

    def compute(
        self, requests: Sequence[Sequence[Any]], users: int | None, most_turns: int = 500, **how: Any
    ) -> CheckedLoad:
        """Computes a load in turns of 1 to ``_LONGEST_TURN`` steps. Raises MeasurementError if it does not end."""
        self.begin(requests, users, **how)
        steps: list[Sequence[float]] = []
        load = CheckedLoad(requests, np.empty((0, len(STEP_COLUMNS))), [], [], [])
        for length in itertools.islice(itertools.cycle(range(1, _LONGEST_TURN + 1)), most_turns):
            answer, wall = self.turn(length)
            if len(answer["steps"]) > length:
                raise CheckFailedError(f"a turn of {length} steps had {len(answer['steps'])}")
            steps += answer["steps"]
            load.turns.append(len(answer["steps"]))
            load.wall_s.append(wall)
            load.clocks.append(float(answer["clock"]))
            if answer["ended"]:
                break
        else:
            raise MeasurementError(f"{len(requests)} requests did not end within {most_turns} turns")
        load.steps = np.array(steps, dtype=float).reshape(-1, len(STEP_COLUMNS))
        load.rows = self.process.ask(do="result", name=NAME)["requests"]
        if len(load.rows) != len(requests):
            raise CheckFailedError(f"the result has {len(load.rows)} rows for {len(requests)} requests")
        return load


def _opens(engine: EngineUnderCheck) -> str:
    engine.process.send(do="open", name=NAME, settings=dict(engine.settings))
    engine.described = engine.process.receive(_OPEN_LIMIT_S)
    ServerInfo.read(engine.described)  # ValueError for what cannot be true
    model = engine.described.get("model") or {}
    for fact in ("vocab_size", "max_model_len"):
        if not is_size(model.get(fact)):
            raise CheckFailedError(f'its answer to "open" has no model.{fact}: {model.get(fact)!r}')
    versions = ", ".join(f"{name} {version}" for name, version in (engine.described.get("versions") or {}).items())
    return f"{model['vocab_size']:,} tokens of vocabulary, {model['max_model_len']:,} of length; {versions or '?'}"


def _clock_is_the_sum(engine: EngineUnderCheck) -> str:
    load = engine.closed
    seconds = load.steps[:, 0]
    if not (seconds > 0).all():
        raise CheckFailedError(f"a step took {seconds.min():g} s")
    sums = np.cumsum(seconds)[np.cumsum(load.turns) - 1]
    off = np.abs(sums - load.clocks)
    if off.max() > _CLOCK_TOLERANCE_S * max(1.0, sums[-1]):
        turn = int(off.argmax())
        seen = f"its clock is {load.clocks[turn]:g} s, its steps {sums[turn]:g} s"
        raise CheckFailedError(f"after turn {turn + 1} {seen}")
    return f"{len(seconds)} steps in {sums[-1]:.3f} s"


def _clock_is_the_wall(engine: EngineUnderCheck) -> str:
    load = engine.closed
    ends = np.cumsum(load.turns)
    claimed = np.array([load.steps[end - n : end, 0].sum() for end, n in zip(ends, load.turns, strict=True)])
    wall = np.array(load.wall_s)
    if (claimed > wall + _WALL_MARGIN_S).any():
        turn = int((claimed - wall).argmax())
        raise CheckFailedError(f"turn {turn + 1} claims {claimed[turn]:.4g} s and took {wall[turn]:.4g} s")
    share = float(np.median(claimed / wall))  # other programs lengthen a few turns
    if share < _LEAST_OF_WALL and wall.sum() - claimed.sum() > _WALL_MARGIN_S * len(wall):
        raise CheckFailedError(f"its steps claim {share:.0%} of the time of a turn (the median of {len(wall)})")
    return f"{share:.0%} of the turns' time is in steps"


def _tokens_are_counted(engine: EngineUnderCheck) -> str:
    load = engine.closed
    in_steps, in_rows = load.steps[:, 3].sum(), sum(sum(row[3]) for row in load.rows)
    if in_steps != in_rows:
        raise CheckFailedError(f"its steps made {in_steps:g} tokens, its requests have {in_rows}")
    for row, (_, max_tokens, *_) in zip(load.rows, load.requests, strict=True):
        if sum(row[3]) != max_tokens or row[5] != "length":
            ended = f"ended with {sum(row[3])}, finish reason {row[5]!r}"
            raise CheckFailedError(f"a request of {max_tokens} tokens {ended}")
        if len(row[6]) != max_tokens or not all(0 <= token < engine.vocab_size for token in row[6]):
            raise CheckFailedError(f"a request of {max_tokens} tokens has {len(row[6])} ids, or ids that are no tokens")
    return f"{in_rows} tokens"


def _times_are_step_ends(engine: EngineUnderCheck) -> str:
    load = engine.closed
    ends = np.append(0.0, np.cumsum(load.steps[:, 0]))
    moments = [(at, "a request was sent") for row in load.rows for at in row[:2]]
    moments += [(at, "a token came") for row in load.rows for at in row[2]]
    for at, what in moments:
        if np.abs(ends - at).min() > _CLOCK_TOLERANCE_S * max(1.0, ends[-1]):
            raise CheckFailedError(f"{what} at {at:g} s, where no step ends")
    for row in load.rows:
        if list(row[2]) != sorted(row[2]) or len(row[2]) != len(row[3]) or row[1] < row[0] or row[2][0] <= row[1]:
            raise CheckFailedError("a request has tokens that are not in order, or before it was sent")
    events = sorted([(row[1], 1) for row in load.rows] + [(row[2][-1], -1) for row in load.rows])
    if (most := max(itertools.accumulate(change for _, change in events))) != 2:
        raise CheckFailedError(f"2 users had {most} requests at once")
    return "two requests at once"


def _equal_requests(engine: EngineUnderCheck) -> str:
    first, again = engine.closed, engine.compute(engine.closed.requests, users=2)
    if not np.array_equal(first.steps[:, 3], again.steps[:, 3]):
        raise CheckFailedError(f"{len(first.steps)} steps the first time, {len(again.steps)} or others the second")
    if other := sum(a[6] != b[6] for a, b in zip(first.rows, again.rows, strict=True)):
        raise CheckFailedError(f"{other} of {len(first.rows)} requests had other tokens the second time")
    return f"{len(again.steps)} steps twice"


def _arrivals(engine: EngineUnderCheck) -> str:
    arrivals = (0.0, 0.0, _LATE_S)
    load = engine.compute([[engine.prompt(i, 8), 4, at, 0] for i, at in enumerate(arrivals)], users=None)
    for row, at in zip(load.rows, arrivals, strict=True):
        if row[0] != at or row[1] < at or row[2][0] <= at:
            raise CheckFailedError(f"a request that arrives at {at:g} s is due at {row[0]:g} and sent at {row[1]:g} s")
    if load.clocks[-1] < _LATE_S or load.steps[:, 0].sum() > _LATE_S / 2:
        raise CheckFailedError(f"with an arrival at {_LATE_S:g} s its clock ends at {load.clocks[-1]:g} s")
    return f"the clock went on to {load.clocks[-1]:.1f} s"


def _refusals(engine: EngineUnderCheck) -> str:
    longest = int(engine.described["model"]["max_model_len"])
    engine.begin([[engine.prompt(0, 4), 8, None, 0]], users=1)
    engine.turn(1)
    wrong: Mapping[str, Mapping[str, Any]] = {
        "a load while one runs": {"do": "load", "requests": [], "concurrency": 1},
        "an unknown command": {"do": "no-such-command"},
    }
    for what, command in wrong.items():
        full = {"name": NAME, **command}
        if command["do"] == "load":
            full |= {"temperature": 0.0, "ignore_eos": True, "keep_cache": False}
        _must_refuse(engine, what, full)
    engine.end()
    engine.begin([[engine.prompt(0, longest + 1), 8, None, 0]], users=1)
    _must_refuse(engine, f"a prompt of {longest + 1:,} tokens", {"do": "turn", "name": NAME, "steps": 1})
    return f"{len(wrong) + 1} refusals"


def _must_refuse(engine: EngineUnderCheck, what: str, command: Mapping[str, Any]) -> None:
    try:
        engine.process.ask(**command)
    except EngineRefusedError:
        return
    raise CheckFailedError(f"{what} was not refused")


def _several_answers(engine: EngineUnderCheck) -> str:
    if "n" not in engine.process.options:
        raise NotOfferedError("a request has one answer")
    request = [engine.prompt(1, 8), 5, None, 0, {"n": 2}]
    (row,) = engine.compute([request], users=1, temperature=1.0).rows  # some engines fork no greedy request
    if len(row) < 8 or sorted(set(row[7])) != [0, 1] or len(row[6]) != 10:
        raise CheckFailedError("a request with n=2 has not two sequences of 5 tokens in its row")
    return "n"


def _prefix_cache(engine: EngineUnderCheck) -> str:
    if "cached_tokens" not in engine.process.tells:
        raise NotOfferedError("it does not tell how many tokens of a prompt were cached")
    if not (engine.described.get("engine") or {}).get("enable_prefix_caching"):
        raise NotOfferedError("it says of itself that it has no prefix cache, or that it is off")
    size = int((engine.described.get("engine") or {}).get("page_size") or 16)
    long = [[engine.prompt(3, min(4 * size, int(engine.described["model"]["max_model_len"]) - 8)), 2, None, 0]]
    cached = [engine.compute(long, users=1, keep_cache=keep).rows[0][4] for keep in (False, True, False)]
    if not cached[0] == cached[2] == 0 < cached[1]:
        raise CheckFailedError(f"cached tokens of one prompt, cache empty, kept, empty: {cached}")
    return f"{cached[1]} tokens were cached"


CHECKS: Mapping[str, Callable[[EngineUnderCheck], str]] = {
    "It opens and says what it is": _opens,
    "Its clock is the sum of its steps": _clock_is_the_sum,
    "Its seconds are those of the wall": _clock_is_the_wall,
    "Its steps have as many tokens as its requests": _tokens_are_counted,
    "Its tokens come at the ends of steps, and a user sends when the last request has ended": _times_are_step_ends,
    "Equal requests make equal steps and tokens": _equal_requests,
    "Arrivals are by its clock, and it jumps to the next where it is idle": _arrivals,
    "A request of two answers has two sequences": _several_answers,
    "Its prefix cache is kept and emptied as it is told": _prefix_cache,
    "What it cannot do is answered with an error, and it goes on": _refusals,  # last: it leaves a load
}
"""Each point: its title, and what returns what was seen, or raises."""


def check_engine(
    command: Sequence[str],
    settings: Mapping[str, Any],
    log: Path,
    env: Mapping[str, str | None] | None = None,
    check: Callable[[], None] = lambda: None,
    show: Callable[[str], None] = lambda text: None,
) -> Iterator[CheckResult]:
    """Yields each point's result as soon as it is known. Those after a refusal or a failed process are left out.

    show: gets the title of each point when it begins
    """
    with EngineProcess(command, log, env=env, check=check) as process:
        title = f"It speaks protocol {PROTOCOLS[-1]}"
        try:
            process.greet()
        except MeasurementError as error:
            yield CheckResult(title, FAILED, str(error))
            return
        yield CheckResult(title, PASSED, f"options of a request: {', '.join(sorted(process.options)) or 'none'}")
        engine = EngineUnderCheck(process, settings)
        for title, point in CHECKS.items():
            show(title)
            try:
                yield CheckResult(title, PASSED, point(engine))
            except NotOfferedError as reason:
                yield CheckResult(title, NOT_OFFERED, str(reason))
            except (CheckFailedError, MeasurementError, LookupError, TypeError, ValueError) as error:
                yield CheckResult(title, FAILED, _in_words(error))
                if isinstance(error, MeasurementError) or point is _opens:  # a load or an answer is in the way
                    return


def _in_words(error: Exception) -> str:
    if isinstance(error, MeasurementError | CheckFailedError):
        return str(error)
    return f"its answer is not as the protocol has it ({type(error).__name__}: {error})"
