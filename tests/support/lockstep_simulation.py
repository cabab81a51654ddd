"""Engines that take turns step by step on a machine that changes its speed, simulated for many launches at once.

The next step belongs to the engine whose clock is furthest behind. A step takes what it takes (prefill or decode), by
its engine's factor (launch effect and true effect), by the machine's speed at that moment, by a scatter of its own, and
longer if another program interrupts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from kvbench.lockstep.intervals import (
    FEWEST_LAUNCHES,
    LEVEL_WITHIN,
    MOST_SHARES,
    TARGET,
    Steps,
    error_over_launches,
    launch_ratio,
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
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds, and whether interrupted, [launches, engines, steps]; ``factors`` [launches, engines]: of the times."""
    launches, engines = factors.shape
    steps = len(jobs.tokens)
    needed = np.broadcast_to(jobs.seconds, (engines, steps))
    slowness = machine(kind, rng, launches)
    seconds = np.zeros((launches, engines, steps))
    burst = np.zeros(seconds.shape, dtype=bool)
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
            burst[each, turn, step] = hit
        seconds[each, turn, step] = took
        clocks[each, turn] += took
        done[each, turn] += 1
        wall += took
        last = took
    return seconds, burst


def _ratios(jobs: Job, seconds: np.ndarray, burst: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[1, engines - 1] log ratios to the first engine and their errors, of one launch whose bursts are known."""
    of_engines = [Steps(s, jobs.tokens, b) for s, b in zip(seconds, burst, strict=True)]
    found = [launch_ratio(of_engines[0], other) for other in of_engines[1:]]
    return np.array([[each.log_ratio for each in found]]), np.array([[each.error for each in found]])


def _ratios_at_once(jobs: Job, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``launch_ratio`` of jobs long enough for ``MOST_SHARES``, [launches, engines - 1], faster."""
    shape = (*seconds.shape[:2], MOST_SHARES + 1)
    rows = seconds.reshape(-1, seconds.shape[2])
    times = np.diff(np.array([share_ends(Steps(row, jobs.tokens), MOST_SHARES) for row in rows]).reshape(shape))
    found = ratio_of_totals(times[:, :1], times[:, 1:])
    return found.log_ratio, found.error


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
    marked: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Log ratios and their errors within launches, both [launches, runs, questions], of runs of a sitting.

    Each engine is compared with the first one at each load; all but the first are faster by ``true``. ``launch_sd``: of
    the log ratio. ``marked``: whether bursts are known as such.
    """
    many = runs * launches
    own = rng.normal(size=(many, engines)) * launch_sd / np.sqrt(2)  # of both loads: the process is the same
    own[:, 1:] -= np.log1p(true)
    y, errors = [], []
    for _ in range(loads):
        jobs = job(rng, steps)
        seconds, burst = take_turns(kind, rng, jobs, np.exp(own), step_sd)
        if marked:
            found = [_ratios(jobs, *launch) for launch in zip(seconds, burst, strict=True)]
        else:
            found = [_ratios_at_once(jobs, seconds)]
        y.append(np.concatenate([ratios for ratios, _ in found]))
        errors.append(np.concatenate([each for _, each in found]))
    shape = (loads, runs, launches, engines - 1)
    return tuple(np.array(x).reshape(shape).transpose(2, 1, 0, 3).reshape(launches, runs, -1) for x in (y, errors))


@dataclass(frozen=True)
class Ends:
    """Where each sitting stopped: ``launches`` [runs], and [runs, questions] log ratios and half widths there.

    ``level``, ``apart``: what was called so; ``decided``: by the rule that stops a sitting.
    """

    launches: np.ndarray
    log_ratio: np.ndarray
    half: np.ndarray

    @property
    def level(self) -> np.ndarray:
        low, high = np.exp(self.log_ratio - self.half), np.exp(self.log_ratio + self.half)
        return (low >= 1 - LEVEL_WITHIN) & (high <= 1 + LEVEL_WITHIN)

    @property
    def apart(self) -> np.ndarray:
        return (np.abs(self.log_ratio) > self.half) & ~self.level

    @property
    def decided(self) -> np.ndarray:
        return (self.level | self.apart) & (np.expm1(self.half) <= TARGET)

    def covers(self, true: float) -> np.ndarray:
        return np.abs(self.log_ratio - np.log1p(true)) <= self.half


def look(y: np.ndarray, within: np.ndarray) -> Ends:
    """What all the launches of ``sittings`` say."""
    half = stats.t.ppf(0.975, len(y) - 1) * error_over_launches(y, within)
    return Ends(np.full(y.shape[1], len(y)), y.mean(axis=0), half)


def stopped(y: np.ndarray, within: np.ndarray, fewest: int = FEWEST_LAUNCHES) -> Ends:
    """Sittings that stop as soon as every question is decided, from ``fewest`` launches on, or after the last."""
    found = look(y, within)
    for n in range(len(y) - 1, fewest - 1, -1):  # backwards: the first look that decides stays
        now = look(y[:n], within[:n])
        ends = now.decided.all(axis=1)
        found = Ends(
            np.where(ends, n, found.launches),
            np.where(ends[:, None], now.log_ratio, found.log_ratio),
            np.where(ends[:, None], now.half, found.half),
        )
    return found


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
    seconds, _ = take_turns(kind, rng, Job(both, jobs.tokens), np.exp(own), step_sd)
    values = np.stack(
        [
            jobs.tokens.sum() / seconds.sum(axis=2),
            np.quantile(seconds[:, :, prefills], 0.95, axis=2),
            np.quantile(np.repeat(seconds, jobs.tokens, axis=2), 0.95, axis=2),  # a step is the gap before its tokens
        ],
        axis=-1,
    )
    return np.log(values[:, 1] / values[:, 0]).reshape(runs, pairs, 1, 3)
