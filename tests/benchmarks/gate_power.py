"""How often the timing gate errs, by simulation: writes tests/benchmarks/gate_power.md beside this file.

    python -m tests.benchmarks.gate_power [--runs 1000] [--seed 6]

False alarms of a candidate that is the base, what the gate catches of a true slowdown, and what it passes.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy import stats

from kvbench.gate.timing.rules import DEFAULT_RULES
from tests.support.gate_simulation import (
    CONFIGURATIONS,
    NOISES,
    PAIR_SD,
    VOID,
    Decisions,
    decide,
    interrupted,
    log_ratios,
    passes_at_margin,
    worsened,
)
from tests.support.lockstep_simulation import gate_pairs

A_A_RUNS = 2000
INDEPENDENT, ONE_LAUNCH = (0.0, CONFIGURATIONS), (0.5, 1)  # part of the noise that a launch shares, configurations
LAUNCHES = {
    INDEPENDENT: "12 launches of 2 cells, 0 %",
    (0.5, CONFIGURATIONS): "12 launches of 2 cells, 50 %",
    ONE_LAUNCH: "1 launch of 24 cells, 50 %",
}
SHARES = (0.03, 0.05, 0.10)
WHERE = {"all 24 cells": slice(None), "one class of 6": slice(0, 6), "one cell": 0}
TITLES = [metric.title for metric in DEFAULT_RULES.metrics]
LAST = DEFAULT_RULES.looks[-1].pairs

LOCKSTEP_SDS = ((0.5, 1, 0.75), (0.8, 1.6, 1.2), (1, 2, 1.5), (1.2, 2.4, 1.8), (1.4, 2.8, 2.1), (1.6, 3.2, 2.4))  # %
SLOWED = np.log([1 / 1.016, 1.0, 1.02])  # decode steps, four fifths of the time, take 2 % longer


def bounds(count: int, runs: int) -> tuple[float, float]:
    """95 % Clopper-Pearson interval of a share."""
    low, high = stats.binomtest(int(count), runs).proportion_ci(0.95, "exact")
    return low, high


def looks(found: np.ndarray) -> str:
    """Share of runs by look: 55 + 35 + 7 %."""
    shares = (f"{(found == look + 1).mean() * 100:.3g}" for look in range(len(DEFAULT_RULES.looks)))
    return " + ".join(shares) + " %"


def _rng(seed: int, *of: int) -> np.random.Generator:
    return np.random.default_rng([seed, *of])


def _alarms(found: Decisions) -> str:
    counts = [int((x > 0).sum()) for x in (found.rejected, found.failed)]
    return " | ".join(f"{n / A_A_RUNS * 100:.2f} % | {bounds(n, A_A_RUNS)[1] * 100:.2f} %" for n in counts)


def false_alarms(seed: int) -> Iterator[str]:
    yield "| noise | launches of a side, share | smallest p alone | 95 % bound | FAIL | 95 % bound |"
    yield "|---|---|---|---|---|---|"
    for i, noise in enumerate(NOISES):
        for j, (launch, title) in enumerate(LAUNCHES.items()):
            found = decide(log_ratios(noise, _rng(seed, 1, i, j), A_A_RUNS, LAST, *launch), passes=False)
            yield f"| {noise} | {title} | {_alarms(found)} |"


def false_alarms_interrupted(seed: int) -> Iterator[str]:
    yield "| noise | as planned | smallest p alone | 95 % bound | FAIL | 95 % bound |"
    yield "|---|---|---|---|---|---|"
    planned = [look.pairs for look in DEFAULT_RULES.looks]
    for i, noise in enumerate(NOISES):
        y, points = interrupted(noise, _rng(seed, 5, i), A_A_RUNS, 0.5)
        usual = (points == planned).all(axis=1).mean()
        yield f"| {noise} | {usual * 100:.0f} % | {_alarms(decide(y, passes=False, points=points))} |"


def caught(
    rng: np.random.Generator, runs: int, metric: int, share: float, place: str, launch: tuple[float, int]
) -> np.ndarray:
    """[runs] the look at which each failed, 0: none, with a metric worse by ``share`` at a place of ``WHERE``."""
    y = log_ratios("normal", rng, runs, LAST, *launch)
    return decide(worsened(y, metric, share, WHERE[place]), passes=False).failed


def power(seed: int, runs: int) -> Iterator[str]:
    yield (
        "| metric | worse by | where | FAIL, independent | at look 1 + 2 + 3 | FAIL, one launch, 50 % "
        "| at look 1 + 2 + 3 |"
    )
    yield "|---|---|---|---|---|---|---|"
    for m, share, (w, place) in itertools.product(range(len(TITLES)), SHARES, enumerate(WHERE)):
        row = []
        for j, launch in enumerate((INDEPENDENT, ONE_LAUNCH)):
            failed = caught(_rng(seed, 2, m, round(share * 100), w, j), runs, m, share, place, launch)
            row += [f"{(failed > 0).mean() * 100:.3g} %", looks(failed)]
        yield f"| {TITLES[m]} | {share * 100:.0f} % | {place} | {' | '.join(row)} |"


def passes(seed: int, runs: int) -> Iterator[str]:
    yield "| launches of a side, share | PASS | at look 1 + 2 + 3 | FAIL | inconclusive after look 3 |"
    yield "|---|---|---|---|---|"
    for j, (launch, title) in enumerate(LAUNCHES.items()):
        found = decide(log_ratios("normal", _rng(seed, 3, j), runs, LAST, *launch))
        fine, bad = (x > 0 for x in (found.passed, found.failed))
        rest = (~fine & ~bad).mean()
        yield (
            f"| {title} | {fine.mean() * 100:.3g} % | {looks(found.passed)} | {bad.mean() * 100:.3g} % "
            f"| {rest * 100:.3g} % |"
        )


def at_margin(seed: int) -> Iterator[str]:
    yield "| noise | PASS | 95 % bound |"
    yield "|---|---|---|"
    for i, noise in enumerate(NOISES):
        count = passes_at_margin(noise, _rng(seed, 4, i), A_A_RUNS)
        yield f"| {noise} | {count / A_A_RUNS * 100:.2f} % | {bounds(count, A_A_RUNS)[1] * 100:.2f} % |"


def false_alarms_in_lockstep(seed: int) -> Iterator[str]:
    yield "| machine | pairs' sd: throughput, p95 TTFT, p95 ITL | smallest p alone | 95 % bound | FAIL | 95 % bound |"
    yield "|---|---|---|---|---|---|"
    for i, machine in enumerate(("ar1", "bimodal", "drifting", "bursty")):
        y = gate_pairs(machine, _rng(seed, 6, i), A_A_RUNS, LAST)
        sds = ", ".join(f"{100 * sd:.1f} %" for sd in y.std(axis=(0, 1, 2)))
        yield f"| {machine} | {sds} | {_alarms(decide(y, passes=False))} |"


def sds_in_lockstep(seed: int, runs: int) -> Iterator[str]:
    yield "| pairs' sd: throughput, p95 TTFT, p95 ITL | unchanged: PASS | at look 1 + 2 + 3 | FAIL | slower: FAIL |"
    yield "|---|---|---|---|---|"
    for i, sds in enumerate(LOCKSTEP_SDS):
        rng = _rng(seed, 7, i)
        y, common = rng.normal(size=(runs, LAST, 1, 3)), rng.normal(size=(runs, LAST, 1, 1)) * [-1, 1, 1]
        y = (y + common) / np.sqrt(2) * np.array(sds) / 100
        unchanged, slower = (decide(each) for each in (y, y + SLOWED))
        parts = (unchanged.passed, unchanged.failed, slower.failed)
        passed, failed, caught_ = (f"{(part > 0).mean() * 100:.3g} %" for part in parts)
        sds_named = ", ".join(f"{sd:g} %" for sd in sds)
        yield f"| {sds_named} | {passed} | {looks(unchanged.passed)} | {failed} | {caught_} |"


def lockstep_sections(seed: int, runs: int) -> list[str]:
    return [
        f"## Pairs in lockstep: a candidate that is the base, {A_A_RUNS:,} runs a row",
        "",
        "One cell; a pair is one launch of both sides, which take turns step by step for 300 steps each on a machine",
        "that changes its speed (tests/support/lockstep_simulation.py). Launches differ by 0.5 %, the side in the",
        "first place is 1 % faster, and a coin says which that is.",
        "",
        *false_alarms_in_lockstep(seed),
        "",
        f"## Pairs in lockstep: by how much they may scatter, {runs:,} runs a row, normal noise",
        "",
        "Half of each metric's variance is common to the three. *Slower*: decode steps take 2 % longer, which is p95",
        "ITL +2 % and throughput -1.6 %.",
        "",
        *sds_in_lockstep(seed, runs),
        "",
    ]


def page(seed: int, runs: int) -> str:
    rules = DEFAULT_RULES
    spread = ", ".join(f"{title} {sd * 100:g} %" for title, sd in zip(TITLES, PAIR_SD, strict=True))
    alphas = ", ".join(f"{look.alpha:g} after {look.pairs}" for look in rules.looks)
    return "\n".join(
        [
            "# How often the timing gate errs",
            "",
            f"Simulated by `python -m tests.benchmarks.gate_power --runs {runs} --seed {seed}`: 24 cells in 4 classes,",
            "3 metrics (87 hypotheses), launches in time order with a coin for each configuration of each pair, the",
            f"default rules (alpha {alphas} pairs).",
            f"Pairs scatter by {spread} (sd of the log ratio).",
            "*Launches of a side, share*: how many a pair has, one a configuration, and the part of the noise's",
            "variance that the cells of a launch have in common; *independent*: 12 launches, 0 %.",
            "*At look 1 + 2 + 3*: which look said so.",
            "",
            f"## False alarms: a candidate that is the base, {A_A_RUNS:,} runs a row",
            "",
            "*Smallest p alone*: without the floors, which is what the looks' alphas (1 % in all) are the limit of.",
            "Bounds: upper ends of 95 % Clopper-Pearson intervals.",
            "",
            *false_alarms(seed),
            "",
            f"## False alarms where runs are stopped and launches repeated, {A_A_RUNS:,} runs a row",
            "",
            f"12 launches of 2 cells, 50 % in common. The attempts with the slowest launches ({VOID * 100:.0f} %) are",
            "measured again in the other order, up to three times; a run stops after the third, and when its time is",
            "over, which slow launches use up faster; it then takes its next look early, and goes on. *As planned*:",
            "runs without an early look.",
            "",
            *false_alarms_interrupted(seed),
            "",
            f"## Power: a candidate that is slower, {runs:,} runs a row, normal noise",
            "",
            *power(seed, runs),
            "",
            f"## What passes: a candidate that is the base, {runs:,} runs a row, normal noise",
            "",
            *passes(seed, runs),
            "",
            f"## What passes wrongly: one hypothesis with a harm of exactly its margin, {A_A_RUNS:,} runs a row",
            "",
            "The others aside; they can only make a PASS rarer. The limit is "
            f"{sum(look.alpha_pass for look in rules.looks) * 100:g} %.",
            "",
            *at_margin(seed),
            "",
            *lockstep_sections(seed, runs),
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="of each row of power")
    parser.add_argument("--seed", type=int, default=6)
    given = parser.parse_args()
    Path(__file__).with_suffix(".md").write_text(page(given.seed, given.runs), encoding="utf-8")
