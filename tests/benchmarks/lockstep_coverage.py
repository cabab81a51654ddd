"""How often the intervals of engines in lockstep cover the truth, by simulation: writes lockstep_coverage.md beside it.

python -m tests.benchmarks.lockstep_coverage [--runs 400] [--seed 15]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kvbench.effects.comparison import Call, Comparison
from kvbench.lockstep.intervals import EARLY_CONFIDENCE, FEWEST_LAUNCHES, FEWEST_POOLED, TARGET, is_decided
from tests.support.lockstep_simulation import look, sittings, where_they_stop

MACHINES = ("ar1", "bimodal", "drifting", "bursty")
LAUNCH_SDS, EFFECTS = (0.0, 0.005, 0.01), (0.0, 0.02)
ENGINES, LOADS, MOST, STEPS, STEP_SD = 7, 2, 8, 200, 0.07
Cell = tuple[str, float, float]
Found = Sequence[Sequence[Comparison]]  # [sittings][questions]


def cells() -> Iterator[Cell]:
    return itertools.product(MACHINES, LAUNCH_SDS, EFFECTS)


def covers(found: Found, true: float) -> float:
    """The part of the intervals that hold the true effect."""
    return float(np.mean([each.low <= 1 + true <= each.high for sitting in found for each in sitting]))


def wrong(found: Found, true: float) -> float:
    """The part of sittings with a call that is wrong: a difference that is not there, or in the other direction."""
    calls = {Call.WORSE} if true else {Call.BETTER, Call.WORSE}
    return float(np.mean([any(each.call in calls for each in sitting) for sitting in found]))


def half(found: Found) -> str:
    return f"±{100 * np.median([each.half_width for sitting in found for each in sitting]):.2f} %"


def row(cell: Cell, runs: int, seed: int) -> str:
    """A cell of the table: machine, sd of launches, true effect."""
    kind, launch_sd, true = cell
    rng = np.random.default_rng([seed, list(cells()).index(cell)])
    tokens, seconds = sittings(kind, rng, runs, MOST, ENGINES, true, launch_sd, LOADS, steps=STEPS, step_sd=STEP_SD)
    looks = [look(tokens, seconds[:, :n]) for n in range(FEWEST_POOLED, MOST + 1)]
    two, first, ended = look(tokens, seconds[:, :2])[0], looks[0][0], where_they_stop([judged for judged, _ in looks])
    alone = [[[each] for sitting in found for each in sitting] for _, found in looks]
    shares = (
        covers(two, true),
        covers(first, true),
        covers(ended, true),
        covers(where_they_stop(alone), true),
        wrong(first, true),
        wrong(ended, true),
        np.mean([is_decided(each) for sitting in ended for each in sitting]),
    )
    columns = [
        kind,
        f"{100 * launch_sd:g} %",
        f"{100 * true:g} %",
        *(f"{100 * x:.1f} %" for x in shares),
        f"{np.mean([sitting[0].n for sitting in ended]):.1f}",
        half(two),
        half(first),
        half(ended),
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
            "engine against the first. All the others have the true effect. All launches compute the same steps, of",
            "which each counts as it recurs over launches. *Launch sd*: of the log ratio, from launch to launch.",
            "",
            f"*Covers, 2, n*: 95 % intervals, with the noise in common, after 2 and {FEWEST_POOLED} launches. *Covers,",
            f"stopped*: where the sitting stopped: all questions called and known to ±{TARGET * 100:g} %, from launch",
            f"{FEWEST_POOLED} on, or after {MOST} launches. *Alone*: where each question stops a sitting of its own,",
            f"by its own interval: from launch {FEWEST_POOLED} on at {100 * EARLY_CONFIDENCE:g} %, from launch "
            f"{FEWEST_LAUNCHES + 1} on at 95 %. *Wrong*: sittings with at least one false",
            f"ahead or behind (with a true effect: in the other direction), after {FEWEST_POOLED} launches and where",
            "stopped.",
            "*Decided*, *launches*, *half*: questions decided, mean number of launches, median half width.",
            "",
            "*ar1*: 8 % with a memory of 1 s. *bimodal*: a third slower half of the time. *drifting*: 20 % (sd) within",
            "half a minute, and waves of 10 %. *bursty*: ar1, and every 20 s another program interrupts a step for 10",
            "to 100 decode steps.",
            "",
            "| machine | launch sd | effect | covers, 2 | covers, n | covers, stopped | alone | wrong, n "
            "| wrong, stopped | decided | launches | half, 2 | half, n | half, stopped |",
            "|" + "---|" * 14,
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400, help="sittings of each row")
    parser.add_argument("--seed", type=int, default=15)
    given = parser.parse_args()
    rows = (row(cell, given.runs, given.seed) for cell in cells())
    Path(__file__).with_suffix(".md").write_text(page(rows, given.runs, given.seed), encoding="utf-8")
