"""How often the intervals of engines in lockstep cover the truth, by simulation: writes lockstep_coverage.md beside it.

python -m tests.benchmarks.lockstep_coverage [--runs 2000] [--seed 15]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from kvbench.lockstep.intervals import FEWEST_LAUNCHES, TARGET
from tests.support.lockstep_simulation import Ends, look, sittings, stopped

MACHINES = {"ar1": False, "bimodal": False, "drifting": False, "bursty": False, "bursty, marked": True}
LAUNCH_SDS, EFFECTS = (0.0, 0.005, 0.01), (0.0, 0.02)
ENGINES, LOADS, MOST, STEPS, STEP_SD = 7, 2, 8, 200, 0.07
AT_ONCE = 400  # sittings
Cell = tuple[str, float, float]


def simulated(cell: Cell, runs: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Log ratios and errors [launches, runs, questions] of a cell: machine, sd of launches, true effect."""
    kind, launch_sd, true = cell
    rng = np.random.default_rng([seed, list(cells()).index(cell)])
    machine, settings = kind.split(",")[0], {"steps": STEPS, "step_sd": STEP_SD, "marked": MACHINES[kind]}
    many = [
        sittings(machine, rng, min(AT_ONCE, runs - begin), MOST, ENGINES, true, launch_sd, LOADS, **settings)
        for begin in range(0, runs, AT_ONCE)
    ]
    return tuple(np.concatenate(part, axis=1) for part in zip(*many, strict=True))


def cells() -> Iterator[Cell]:
    return itertools.product(MACHINES, LAUNCH_SDS, EFFECTS)


def alone(y: np.ndarray, within: np.ndarray) -> Ends:
    """Each question as a sitting of its own."""
    return stopped(*(x.reshape(len(x), -1, 1) for x in (y, within)), fewest=FEWEST_LAUNCHES + 1)


def wrong(found: Ends, true: float) -> float:
    """The part of sittings with a call that is wrong: a difference that is not there, or in the other direction."""
    called = found.apart & (found.log_ratio < 0) if true else found.apart
    return float(called.any(axis=1).mean())


def row(cell: Cell, runs: int, seed: int) -> str:
    kind, launch_sd, true = cell
    y, within = simulated(cell, runs, seed)
    first = look(y[:FEWEST_LAUNCHES], within[:FEWEST_LAUNCHES])
    ended, single = stopped(y, within), alone(y, within)
    shares = (
        first.covers(true).mean(),
        ended.covers(true).mean(),
        single.covers(true).mean(),
        wrong(first, true),
        wrong(ended, true),
        ended.decided.mean(),
    )
    columns = [
        kind,
        f"{100 * launch_sd:g} %",
        f"{100 * true:g} %",
        f"{100 * np.median(within):.2f} %",
        *(f"{100 * x:.1f} %" for x in shares),
        f"{ended.launches.mean():.1f}",
        *(f"±{100 * np.expm1(np.median(each.half)):.2f} %" for each in (first, ended)),
    ]
    return f"| {' | '.join(columns)} |"


def page(rows: Iterable[str], runs: int, seed: int) -> str:
    return "\n".join(
        [
            "# How often the intervals of engines in lockstep cover the truth",
            "",
            f"Simulated by `python -m tests.benchmarks.lockstep_coverage --runs {runs} --seed {seed}`:",
            f"{runs:,} sittings a row, {ENGINES} engines in turns, {LOADS} loads of {STEPS} steps each (decode 9 ms,",
            f"prefill 54 ms, {100 * STEP_SD:g} % scatter of their own), {LOADS * (ENGINES - 1)} questions of one",
            "engine against the first. All the others have the true effect. *Launch sd*: of the log ratio, from launch",
            "to launch. *Error*: median standard error within a launch.",
            "",
            f"*Covers, n*: 95 % intervals after {FEWEST_LAUNCHES} launches. *Covers, stopped*: where the sitting",
            f"stopped: all questions called and known to ±{TARGET * 100:g} %, from launch {FEWEST_LAUNCHES} on, or",
            f"after {MOST} launches. *Alone*: where each question stops a sitting of its own, from launch",
            f"{FEWEST_LAUNCHES + 1} on. *Wrong*: sittings of all questions with at least one false ahead or behind",
            f"(with a true effect: in the other direction), after {FEWEST_LAUNCHES} launches and where stopped.",
            "*Decided*, *launches*, *half*: questions decided, mean number of launches, median half width.",
            "",
            "*ar1*: 8 % with a memory of 1 s. *bimodal*: a third slower half of the time. *drifting*: 20 % (sd) within",
            "half a minute, and waves of 10 %. *bursty*: ar1, and every 20 s another program interrupts a step for 10",
            "to 100 decode steps; *marked*: such steps are known as such, and the shares that they reach into are left",
            "out.",
            "",
            "| machine | launch sd | effect | error | covers, n | covers, stopped | alone | wrong, n | wrong, stopped "
            "| decided | launches | half, n | half, stopped |",
            "|" + "---|" * 13,
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000, help="sittings of each row")
    parser.add_argument("--seed", type=int, default=15)
    given = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        rows = pool.map(row, cells(), itertools.repeat(given.runs), itertools.repeat(given.seed))
        Path(__file__).with_suffix(".md").write_text(page(rows, given.runs, given.seed), encoding="utf-8")
