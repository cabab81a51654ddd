"""The experiments worth running next, each with the command of the run that would decide it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvbench.common import text as words
from kvbench.effects.comparison import FEWEST, Comparison
from kvbench.metrics.definitions import ENGINE
from kvbench.report.decision import Candidate, Decision, Worth, open_ones, wins
from kvbench.report.limits import NOTHING
from kvbench.report.quality import is_quantised
from kvbench.report.wording import say
from kvbench.runs.model import Run
from kvbench.workload.settings import effective

_MOST_STEPS = 3
_MOST_MINUTES = 30.0  # of engine time that are still proposed
_USUAL_SECONDS = 180.0  # of engine time, where the run does not tell how long it took
_MOST_REPEATS = 20
_FINEST = 0.02  # a change below this is not worth deciding


@dataclass(frozen=True)
class NextStep:
    """An experiment. why: what it would decide, for a sentence; command: empty where none can be given."""

    why: str
    command: str


def next_steps(decision: Decision) -> list[NextStep]:
    """Lists at most three steps, the most useful first."""
    ways = (again, quality_step, combine, decide, _larger_load)
    return [step for way in ways for step in way(decision)][:_MOST_STEPS]


def again(decision: Decision) -> Iterator[NextStep]:
    """Measures what is missing or invalid."""
    if decision.validity.status in ("invalid", "incomplete"):
        yield NextStep(say("next_steps.again"), decision.run.resume_command)


def quality_step(decision: Decision) -> Iterator[NextStep]:
    """Measures answers of what may be set, and of a quantised KV, whose price is always asked for."""
    run, ahead = decision.run, wins(decision.candidates)
    unknown = [one for one in open_ones(decision.candidates) if one in ahead or is_quantised(one.cell)]
    if not unknown or run.simulated:
        return
    names = words.and_more([one.name for one in unknown])
    if run.is_built_in and not run.manifest.target:
        yield NextStep(say("next_steps.quality", names=names), shlex.join(["kvbench", "quality", str(run.folder)]))
    elif any(not is_quantised(one.cell) for one in unknown):
        command = sweep_command(run, ["-o", "load.canaries={share: 0.3}"])
        yield NextStep(say("next_steps.canaries", names=names), command)


def combine(decision: Decision) -> Iterator[NextStep]:
    """Settings that pay alone may not pay together; none whose answers lie outside the limits."""
    paying: dict[str, Candidate] = {}
    for one in decision.candidates:
        pays = one.verdict == Worth.PAYS and not one.quality.outside
        if pays and len(one.changed) == 1 and one.changed != {"layout"}:
            paying.setdefault(*one.changed, one)
    if len(paying) < 2 or decision.measured_together(*paying.values()):
        return
    sweep = {name: [effective(cell.settings, name) for cell in (one.base, one.cell)] for name, one in paying.items()}
    names = words.listing([one.name for one in paying.values()])
    options = ["-o", f"sweep={json.dumps(sweep)}", "-o", "design=full"]
    yield NextStep(say("next_steps.together", names=names), sweep_command(decision.run, options))


def decide(decision: Decision) -> Iterator[NextStep]:
    """Adds engine time or repeats, as many as the size of the undecided effects asks for."""
    run = decision.run
    undecided = [one for one in decision.candidates if one.verdict == Worth.UNDECIDED and one.throughput]
    comparisons = [one.throughput for one in undecided if one.throughput]
    if not comparisons:
        return
    why = say("next_steps.decide", names=words.and_more([one.name for one in undecided], 2))
    coarse = [_times_too_coarse(one) for one in comparisons if one.smallest]
    if all(one.clock == ENGINE for one in comparisons):
        seconds = run.engine_time and run.engine_time.seconds
        minutes = math.ceil(1.1 * (seconds or _USUAL_SECONDS) / 60 * max(coarse, default=1.4) ** 2)
        if minutes <= _MOST_MINUTES:
            yield NextStep(why, sweep_command(run, ["--lockstep-minutes", str(minutes)]))
        return
    repeats = min(len(one.cell.repeats) for one in undecided)
    wanted = max(FEWEST, math.ceil(repeats * max(coarse, default=1.0) ** 2))
    if wanted <= _MOST_REPEATS:
        yield NextStep(why, sweep_command(run, ["--repeats", str(max(wanted, repeats + 1))]))


def _times_too_coarse(one: Comparison) -> float:
    """The smallest change that would have shown over the one to decide: as large as it looks, at least _FINEST."""
    return (one.smallest or 0.0) / max(_FINEST, abs(one.ratio - 1))


def _larger_load(decision: Decision) -> Iterator[NextStep]:
    """Proposes a higher load where nothing was full at the highest one, to see what breaks first."""
    load, loads = decision.load, decision.comparisons.loads
    if decision.base is None or load is None or load != loads[-1] or load.mode != "closed" or load.sessions:
        return
    if {one.limit for one in decision.limits if one.cell.load == load} == {NOTHING}:
        users = ", ".join(f"{value:g}" for value in (*(one.value for one in loads), 2 * load.value))
        command = sweep_command(decision.run, ["-o", f"load.concurrency=[{users}]"])
        yield NextStep(say("next_steps.larger_load", load=load.short), command)


def sweep_command(run: Run, options: Sequence[str]) -> str:
    """The command of the run with further options; empty where it is not known."""
    command = list(run.manifest.command)
    while options[0] != "-o" and options[0] in command[:-1]:  # given before, with another value
        at = command.index(options[0])
        del command[at : at + 2]
    return shlex.join([*command, *options]) if "sweep" in command and "--resume" not in command else ""
