"""The next experiments worth running: what this run leaves open, each with the reason and the command."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvbench.common import text as words
from kvbench.report.changes import ENGINE_TIME, decided_load
from kvbench.report.comparisons import baseline, differing
from kvbench.report.decision import PAYS, UNDECIDED, Choice, choices, open_ones, wins
from kvbench.report.limits import NOTHING, limit_of
from kvbench.report.provenance import validity
from kvbench.report.quality import is_quantised, quality_of
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Run
from kvbench.workload.settings import effective

_MOST = 3
_MOST_MINUTES = 30.0  # of engine time that are still proposed
_MOST_REPEATS = 20
_FINEST = 0.02  # a change below this is not worth deciding


@dataclass(frozen=True)
class NextStep:
    """``why``: what it would decide, for a sentence; ``command``: empty where none can be given."""

    why: str
    command: str


def next_steps(run: Run) -> list[NextStep]:
    """At most three, the most useful first."""
    load = decided_load(run)
    base = baseline(run, load) if load else None
    steps = list(again(run))
    if load is not None and base is not None:
        found = choices(run, load)
        steps += [*quality_step(run, found), *combine(run, base, found), *decide(run, found), *_larger_load(run, load)]
    return steps[:_MOST]


def again(run: Run) -> Iterator[NextStep]:
    if validity(run).status in ("invalid", "incomplete"):
        yield NextStep("measure what is missing or invalid", f"kvbench sweep --resume {shlex.quote(str(run.folder))}")


def quality_step(run: Run, found: Sequence[Choice]) -> Iterator[NextStep]:
    """What may be set needs its answers measured; a quantised KV too, since its price is always asked for."""
    if run.simulated:
        return
    ahead = wins(found)
    open_ = [each for each in open_ones(run, found) if each in ahead or is_quantised(each.cell)]
    if not open_:
        return
    names = words.and_more([each.name for each in open_])
    if run.is_built_in and not run.manifest.get("target"):
        yield NextStep(f"measure the quality of {names}", f"kvbench quality {shlex.quote(str(run.folder))}")
    elif any(not is_quantised(each.cell) for each in open_):
        command = sweep_command(run, ["-o", "load.canaries={share: 0.3}"])
        yield NextStep(f"see with canaries whether the answers of {names} are right", command)


def combine(run: Run, base: MeasuredCell, found: Sequence[Choice]) -> Iterator[NextStep]:
    """Settings that pay alone may not pay together; none whose answers lie outside the limits."""
    values: dict[str, MeasuredCell] = {}
    for each in found:
        changed, outside = differing(each.cell, base), quality_of(run, each.cell).outside
        if each.verdict == PAYS and not outside and len(changed) == 1 and changed != {"layout"}:
            values.setdefault(next(iter(changed)), each.cell)
    together = any(
        all(effective(each.cell.settings, name) == effective(cell.settings, name) for name, cell in values.items())
        for each in found
    )
    if len(values) < 2 or together:
        return
    sweep = {name: [effective(base.settings, name), effective(cell.settings, name)] for name, cell in values.items()}
    names = [each.name for each in found if each.cell in values.values()]
    yield NextStep(
        f"{words.listing(names)} pay alone: measure them together",
        sweep_command(run, ["-o", f"sweep={json.dumps(sweep)}", "-o", "design=full"]),
    )


def decide(run: Run, found: Sequence[Choice]) -> Iterator[NextStep]:
    """More engine time or more repeats, as many as the size of the open effects asks for."""
    open_ = [each for each in found if each.verdict == UNDECIDED and each.throughput]
    if not open_:
        return
    names = words.and_more([each.name for each in open_], 2)
    if all(each.throughput.clock == ENGINE_TIME for each in open_ if each.throughput):
        seconds = float((run.engine_time.facts if run.engine_time else {}).get("seconds") or 180.0)
        minutes = math.ceil(1.1 * seconds / 60 * max(_times_too_coarse(open_), default=1.4) ** 2)
        if minutes <= _MOST_MINUTES:
            yield NextStep(f"decide {names}", sweep_command(run, ["--lockstep-minutes", str(minutes)]))
        return
    repeats = min(len(each.cell.repeats) for each in open_)
    wanted = max(3, math.ceil(repeats * max(_times_too_coarse(open_), default=1.0) ** 2))
    if wanted <= _MOST_REPEATS:
        yield NextStep(f"decide {names}", sweep_command(run, ["--repeats", str(max(wanted, repeats + 1))]))


def _times_too_coarse(found: Sequence[Choice]) -> list[float]:
    """The smallest change that would have shown over the one to decide: as large as it looks, at least ``_FINEST``."""
    known = [each.throughput for each in found if each.throughput and each.throughput.would_show]
    return [(each.would_show or 0.0) / max(_FINEST, abs(each.ratio - 1)) for each in known]


def _larger_load(run: Run, load: MeasuredLoad) -> Iterator[NextStep]:
    """Nothing was full at the highest load: a higher one shows what breaks first."""
    if load != run.loads[-1] or load.mode != "closed" or load.sessions:
        return
    found = {limit_of(run, cell).limit for cell in run.at(load) if cell.valid}
    if found and found <= {NOTHING}:
        users = [f"{each.value:g}" for each in run.loads] + [f"{2 * load.value:g}"]
        what = f"nothing was full at {load.short}: see what breaks first"
        yield NextStep(what, sweep_command(run, ["-o", f"load.concurrency=[{', '.join(users)}]"]))


def sweep_command(run: Run, options: Sequence[str]) -> str:
    """The command of the run with further options; empty where it is not known."""
    command = [str(part) for part in run.manifest.get("command") or ()]
    while options[0] != "-o" and options[0] in command[:-1]:  # given before, with another value
        at = command.index(options[0])
        del command[at : at + 2]
    return shlex.join([*command, *options]) if "sweep" in command and "--resume" not in command else ""
