"""Engines that take turns step by step on a machine that changes its speed, simulated for many launches at once.

The next step belongs to the engine whose clock is furthest behind. A step takes what it takes (prefill or decode), by
its engine's factor (launch effect and true effect), by the machine's speed at that moment, by a scatter of its own, and
longer if another program interrupts it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvbench.effects.comparison import Comparison
from kvbench.lockstep.intervals import (
    MOST_SHARES,
    LaunchRatio,
    Steps,
    as_it_recurs,
    effect,
    goes_on,
    pooled_effects,
    ratio_of_totals,
    share_ends,
)

DECODE, PREFILL = 0.009, 0.054  # s, as the built-in engine's on two cores
STEP_SD = 0.10  # of a step's own log time
MACHINES = ("steady", "ar1", "bimodal", "drifting", "bursty")
BURSTS = 0.05  # a second of the machine's time
BURST_STEPS = (10.0, 100.0)  # a burst lasts as many decode steps, log-uniform


@dataclass(frozen=True)
class Job:
    """The same steps for every engine. ``seconds`` [steps] or [engines, steps] at speed 1, ``tokens`` [steps]."""

    seconds: np.ndarray
    tokens: np.ndarray


def job(rng: np.random.Generator, steps: int, concurrency: int = 3, output_tokens: int = 48) -> Job:
    """Closed loop: a prefill step, of one token, for each request that has ended, among decode steps."""
    prefills = rng.random(steps) < concurrency / output_tokens
    return Job(np.where(prefills, PREFILL, DECODE), np.where(prefills, 1, concurrency))


def machine(kind: str, rng: np.random.Generator, launches: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """(wall time [launches], seconds since the last call [launches]) -> how much longer a step takes now [launches]."""
    if kind == "steady":
        return lambda at, since: np.ones(launches)
    if kind in ("ar1", "bursty"):  # 8 % within a second
        state = rng.normal(size=launches)

        def ar1(at: np.ndarray, since: np.ndarray) -> np.ndarray:
            kept = np.exp(-since)
            state[:] = kept * state + np.sqrt(1 - kept**2) * rng.normal(size=launches)
            return np.exp(0.08 * state)

        return ar1
    if kind == "bimodal":  # a third slower half of the time, for 0.7 s on average
        slow = rng.random(launches) < 0.5

        def bimodal(at: np.ndarray, since: np.ndarray) -> np.ndarray:
            slow[:] ^= rng.random(launches) < (1 - np.exp(-2 * since / 0.7)) / 2
            return np.where(slow, 1.35, 1.0)

        return bimodal
    if kind == "drifting":  # up or down by 20 % (sd) in the first half minute, and 10 % in waves of 10 s
        way, phase = 0.2 * rng.normal(size=launches), rng.random(launches)
        return lambda at, since: np.exp(way * np.minimum(at / 30, 1) + 0.1 * np.sin(2 * np.pi * (at / 10 + phase)))
    raise ValueError(kind)


def take_turns(
    kind: str, rng: np.random.Generator, jobs: Job, factors: np.ndarray, step_sd: float = STEP_SD
) -> np.ndarray:
    """Seconds [launches, engines, steps]; ``factors`` [launches, engines]: of the times."""
    launches, engines = factors.shape
    steps = len(jobs.tokens)
    needed = np.broadcast_to(jobs.seconds, (engines, steps))
    slowness = machine(kind, rng, launches)
    seconds = np.zeros((launches, engines, steps))
    each = np.arange(launches)
    clocks = rng.random((launches, engines)) * 1e-9  # ties by chance
    done = np.zeros((launches, engines), dtype=int)
    wall, last = np.zeros(launches), np.zeros(launches)
    spread = np.log(BURST_STEPS[1] / BURST_STEPS[0])
    for _ in range(engines * steps):
        turn = np.where(done < steps, clocks, np.inf).argmin(axis=1)
        step = done[each, turn]
        took = needed[turn, step] * factors[each, turn] * slowness(wall, last)
        took *= np.exp(step_sd * rng.normal(size=launches))
        if kind == "bursty":
            hit = rng.random(launches) < BURSTS * took
            took += hit * DECODE * BURST_STEPS[0] * np.exp(spread * rng.random(launches))
        seconds[each, turn, step] = took
        clocks[each, turn] += took
        done[each, turn] += 1
        wall += took
        last = took
    return seconds


def sittings(
    kind: str,
    rng: np.random.Generator,
    runs: int,
    launches: int,
    engines: int,
    true: float,
    launch_sd: float,
    loads: int = 2,
    steps: int = 400,
    step_sd: float = STEP_SD,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [loads, steps] and seconds [loads, launches, runs, engines, steps] of runs of a sitting.

    All launches compute the same job. All engines but the first are faster by ``true``. ``launch_sd``: of the log
    ratio.
    """
    own = rng.normal(size=(launches * runs, engines)) * launch_sd / np.sqrt(2)  # of all loads: it is one process
    own[:, 1:] -= np.log1p(true)
    jobs = [job(rng, steps) for _ in range(loads)]
    seconds = np.array([take_turns(kind, rng, each, np.exp(own), step_sd) for each in jobs])
    return np.array([each.tokens for each in jobs]), seconds.reshape(loads, launches, runs, engines, steps)


def look(tokens: np.ndarray, seconds: np.ndarray) -> tuple[list[list[Comparison]], list[list[Comparison]]]:
    """What ``sittings`` say of each engine at each load: [runs][questions] as a sitting has it, and each alone."""
    judged, alone = ([[] for _ in range(seconds.shape[2])] for _ in range(2))
    for made, took in zip(tokens, seconds, strict=True):
        parts = np.diff([share_ends(Steps(step, made), MOST_SHARES) for step in np.eye(len(made))])  # [steps, shares]
        shares = as_it_recurs(took) @ parts  # share_ends is linear in the seconds
        found = ratio_of_totals(shares[:, :, :1], shares[:, :, 1:], same_work=True)  # [launches, runs, engines - 1]
        for run in range(len(alone)):
            y, errors = found.log_ratio[:, run].T, found.error[:, run].T
            names = [f"engine {i}" for i in range(1, len(y) + 1)]
            launches = [
                list(map(LaunchRatio, *of, itertools.repeat(MOST_SHARES))) for of in zip(y, errors, strict=True)
            ]
            each = dict(zip(names, map(effect, launches), strict=True))
            alone[run] += each.values()
            judged[run] += pooled_effects(each, dict(zip(names, y, strict=True))).values()
    return judged, alone


def where_they_stop(looks: Iterable[Sequence[Sequence[Comparison]]]) -> list[Sequence[Comparison]]:
    """The effects of each sitting at the first of its ``looks`` at which it does not go on, or the last."""
    return [
        next((found for found in sitting if not goes_on(found)), sitting[-1]) for sitting in zip(*looks, strict=True)
    ]


def gate_pairs(
    kind: str,
    rng: np.random.Generator,
    runs: int,
    pairs: int,
    decode_slower: float = 0.0,
    launch_sd: float = 0.005,
    place: float = 0.01,
    steps: int = 300,
    step_sd: float = STEP_SD,
) -> np.ndarray:
    """[runs, pairs, 1, 3] log(candidate / base) of throughput, p95 TTFT and p95 ITL: a pair is one launch of both.

    The engine in the first place is faster by ``place``; a coin says whose place that is. ``launch_sd``: of the log
    ratio. ``decode_slower``: the candidate's decode steps.
    """
    jobs = job(rng, steps, output_tokens=96)
    prefills = jobs.tokens == 1
    both = np.stack([jobs.seconds, np.where(prefills, 1, 1 + decode_slower) * jobs.seconds])
    own = rng.normal(size=(runs * pairs, 2)) * launch_sd / np.sqrt(2)
    own[np.arange(len(own)), rng.integers(2, size=len(own))] -= place
    seconds = take_turns(kind, rng, Job(both, jobs.tokens), np.exp(own), step_sd)
    values = np.stack(
        [
            jobs.tokens.sum() / seconds.sum(axis=2),
            np.quantile(seconds[:, :, prefills], 0.95, axis=2),
            np.quantile(np.repeat(seconds, jobs.tokens, axis=2), 0.95, axis=2),  # a step is the gap before its tokens
        ],
        axis=-1,
    )
    return np.log(values[:, 1] / values[:, 0]).reshape(runs, pairs, 1, 3)
