"""By how much a turn's steps are slower than those of the same engine alone: every configuration of a workload.

    python -m tests.benchmarks.turn_cost OUT.md [--workload workloads/mixed.yaml] [--minutes 5]

The configurations share one process, as in a sitting of the sweep, and take turns of 24 steps in random order, all of
which decode as many tokens. The first steps of a turn find the caches that the others have left; from the 9th on the
engine is as it would be alone. Steps grow with their context, so the late ones are continued to the first by a line.
Writes by configuration how much longer the first 1, 2, 4 and 8 steps are than that line, and where the late part is
split in two, whether its first half is any slower (it would be if 8 steps were not enough).
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import numpy as np
from scipy import stats

from kvbench.common.machine import environment
from kvbench.lockstep.process import EngineProcess, open_all
from kvbench.lockstep.turns import TURNS, TurnTaker
from kvbench.targets.builtin import LOCKSTEP_COMMAND
from kvbench.workload.design import make_design
from kvbench.workload.file import load_workload

LONG, ALONE_FROM, LOADS_TURNS, PROMPT = 24, 8, 10, 16  # steps, steps, long turns of one load, tokens
_TRIMMED, _RESAMPLES = 0.1, 1000  # of the turns at each end: interruptions


def decode_turns(seat: TurnTaker) -> list[np.ndarray]:
    """The seconds [24] of each whole turn that decoded the same number of tokens at every step."""
    ends, table = np.cumsum(seat.turns), seat.table()
    turns = [table[end - length : end] for end, length in zip(ends, seat.turns, strict=True) if length == LONG]
    return [steps[:, 0] for steps in turns if not steps[:, 1].any() and len(set(steps[:, 2])) == 1]


def first_steps_cost(turns: np.ndarray) -> np.ndarray:
    """By how much the first 1, 2, 4 and 8 steps, and those up to the middle of the late ones, exceed an engine alone.

    ``turns``: seconds [turns, 24]. Returns float64 [5], 0.05 is 5 %.
    """
    profile = stats.trim_mean(turns / turns[:, ALONE_FROM:].mean(axis=1, keepdims=True), _TRIMMED, axis=0)
    places, middle = np.arange(LONG), (ALONE_FROM + LONG) // 2
    line = np.polyval(np.polyfit(places[ALONE_FROM:], profile[ALONE_FROM:], 1), places)
    settled = np.polyval(np.polyfit(places[middle:], profile[middle:], 1), places)
    over = profile / line - 1
    return np.array([*(over[:length].mean() for length in TURNS), (profile / settled - 1)[ALONE_FROM:middle].mean()])


def bounds(turns: np.ndarray) -> np.ndarray:
    """95 % bootstrap intervals over turns of ``first_steps_cost``. [2, 5]"""
    rng = np.random.default_rng(0)
    drawn = [first_steps_cost(turns[rng.integers(len(turns), size=len(turns))]) for _ in range(_RESAMPLES)]
    return np.quantile(drawn, (0.025, 0.975), axis=0)


def measure(path: Path, minutes: float, log: Path) -> tuple[dict[str, np.ndarray], int]:
    """By configuration the seconds [turns, 24], and how many sequences decode."""
    workload = load_workload(path)
    design = make_design(workload.engine, workload.sweep, workload.load_points, workload.design)
    users = max(point.concurrency or 1 for point in workload.load_points)
    at_once = dict.fromkeys((each.config_id for each in design.configurations), users)
    rng = random.Random(0)
    found: dict[str, list[np.ndarray]] = {each.config_id: [] for each in design.configurations}
    with EngineProcess(LOCKSTEP_COMMAND, log) as process:
        process.greet()
        open_all([(process, each.config_id, each.settings) for each in design.configurations])
        seats = [TurnTaker(process, each.config_id) for each in design.configurations]
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until:
            for seat in seats:
                n = at_once[seat.name]
                requests = [[[16 + i % 200] * PROMPT, LOADS_TURNS * LONG + 1, None, 0] for i in range(n)]
                seat.load(requests=requests, concurrency=n, temperature=0.0, ignore_eos=True, keep_cache=False)
                seat.take_turn(1)  # the prompts
            while running := [seat for seat in seats if not seat.ended]:
                for seat in rng.sample(running, len(running)):
                    seat.take_turn(LONG)
            for seat in seats:
                found[seat.name] += decode_turns(seat)
                at_once[seat.name] = int(seat.table()[:, 2].max())  # contiguous has room for fewer
    return {name: np.array(turns) for name, turns in found.items() if len(turns) >= 8}, users


def report(found: dict[str, np.ndarray], users: int, workload: Path) -> str:
    cpu = environment()["cpu"]
    heads = [f"first {length}" if length > 1 else "first" for length in TURNS]
    lines = [
        "# What a turn's cold caches cost",
        "",
        f"`python -m tests.benchmarks.turn_cost --workload {workload}`: {len(found)} engines of one process, up to "
        f"{users} sequences each. Machine: {cpu['model']}, {cpu['cores']} cores. By how much the first steps of a turn "
        "take longer than its 9th to 24th, which find the engine's own caches as if it were alone; 95 % bootstrap "
        "intervals over turns.",
        "",
        f"| configuration | turns | ms a step | {' | '.join(heads)} | steps 9 to 16 beside 17 to 24 |",
        "|---|--:|--:|" + "--:|" * (len(TURNS) + 1),
    ]
    for name, turns in found.items():
        cells = [
            f"{100 * cost:+.1f} % ({100 * low:.1f} to {100 * high:.1f})"
            for cost, low, high in zip(first_steps_cost(turns), *bounds(turns), strict=True)
        ]
        step_ms = 1e3 * np.median(turns[:, ALONE_FROM:])
        lines.append(f"| {name} | {len(turns)} | {step_ms:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workload", type=Path, default=Path("workloads/mixed.yaml"))
    parser.add_argument("--minutes", type=float, default=5.0)
    options = parser.parse_args()
    text = report(*measure(options.workload, options.minutes, options.out.with_suffix(".log")), options.workload)
    options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
