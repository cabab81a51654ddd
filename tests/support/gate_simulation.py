"""Comparisons that were never measured, to see how often the timing gate errs: noise by launch, looks, decisions.

A run of the matrix is a series of launches in time. In each pair every configuration is launched twice, one launch
right after the other, and a coin of its own says which of the two is the candidate's, as ``timing.plan`` has it;
the cells of a configuration (its loads) share the launch and the coin. ``PAIR_SD``: what differences of pairs scatter
by, in logs. ``interrupted``: the same with a clock that stops runs, runs that go on, and launches that are repeated.

Decisions are those of ``gate.timing.judge``, for thousands of runs at once: the flips come in random order, and a run
is left as soon as more of them reach what was observed than its alpha allows. That changes no decision, as the count
only grows. ``tests/unit/gate/test_judge_rates.py`` holds them against ``judge`` itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvbench.gate.compare.conclude import look_points
from kvbench.gate.compare.pair_runner import ATTEMPTS
from kvbench.gate.timing.pairs import HarmHypothesis, PairTable, hypotheses
from kvbench.gate.timing.rules import DEFAULT_RULES, Look
from kvbench.gate.timing.signflip import adjusted_p, scaled

CELLS, CLASSES = 24, 4
CONFIGURATIONS = 12  # of two loads each; 1: all cells are loads of one launch
NAMES = tuple(f"w{cell // (CELLS // CLASSES)}/c{cell}" for cell in range(CELLS))
OF_CLASS = tuple(name.split("/")[0] for name in NAMES)
PAIR_SD = np.array([0.01, 0.04, 0.015])  # of log output throughput, p95 TTFT, p95 ITL
NOISES = ("normal", "t4", "ar1", "bimodal", "drifting")
VOID = 0.05  # of the attempts at a configuration's pair, in ``interrupted``
_TIE = 1e-9
_AT_ONCE = 6_000_000  # signed sums in memory


@dataclass(frozen=True)
class Decisions:
    """``failed`` and ``passed`` [runs]: the look (1, 2, ...) that said so, 0 for none; whichever came first stands.

    ``rejected``: the look at which some hypothesis had a p small enough, whatever its size (a FAIL with floors of 0).
    """

    failed: np.ndarray
    passed: np.ndarray
    rejected: np.ndarray


def table(log_ratio: np.ndarray) -> PairTable:
    """One run's table from [pairs, cells, metrics], of all cells or the first so many."""
    cells = log_ratio.shape[1]
    return PairTable(log_ratio, NAMES[:cells], OF_CLASS[:cells], DEFAULT_RULES.metrics)


def _unit(noise: str, rng: np.random.Generator, runs: int, launches: int, parts: int) -> np.ndarray:
    """[runs, launches, parts] launch noise whose pair differences have sd 1 (drift comes on top)."""
    shape = (runs, launches, parts)
    if noise == "normal":
        return rng.normal(size=shape) / np.sqrt(2)
    if noise == "t4":
        return rng.standard_t(4, size=shape) / 2  # its variance is 2
    if noise == "bimodal":  # one launch in four is in the machine's slow mode, six of its own sds away
        slow = (rng.random(shape) < 0.25) * 6.0
        return (rng.normal(size=shape) + slow) / np.sqrt(2 * (1 + 36 * 0.25 * 0.75))
    if noise == "drifting":  # up and down by several sds of a pair within a run
        time = np.linspace(0, 1, launches)[None, :, None]
        slope, swing, phase = rng.normal(size=(3, runs, 1, parts))
        return rng.normal(size=shape) / np.sqrt(2) + 8 * slope * time + 3 * swing * np.sin(2 * np.pi * (time + phase))
    if noise == "ar1":
        rho = 0.8
        series = rng.normal(size=shape)
        for i in range(1, launches):
            series[:, i] = rho * series[:, i - 1] + np.sqrt(1 - rho**2) * series[:, i]
        return series / np.sqrt(2 * (1 - rho))
    raise ValueError(noise)


def halves(
    noise: str, rng: np.random.Generator, runs: int, pairs: int, shared: float, configurations: int
) -> np.ndarray:
    """[runs, pairs, 2, configurations, cells of each, metrics] what the first and the second launch have of noise.

    ``shared``: the part of each metric's variance that the cells of a launch have in common; it goes through the
    launches of all configurations in time.
    """
    cells, metrics = CELLS // configurations, len(PAIR_SD)
    own = _unit(noise, rng, runs, 2 * pairs, CELLS * metrics)
    found = np.sqrt(1 - shared) * own.reshape(runs, pairs, 2, configurations, cells, metrics)
    if shared:
        series = _unit(noise, rng, runs, 2 * pairs * configurations, metrics)
        in_time = series.reshape(runs, pairs, configurations, 2, 1, metrics).swapaxes(2, 3)
        found += np.sqrt(shared) * in_time
    return found * PAIR_SD


def log_ratios(
    noise: str,
    rng: np.random.Generator,
    runs: int,
    pairs: int,
    shared: float = 0.0,
    configurations: int = CONFIGURATIONS,
) -> np.ndarray:
    """[runs, pairs, cells, metrics] of a candidate that is the base, a coin for each configuration of each pair."""
    found = halves(noise, rng, runs, pairs, shared, configurations)
    coin = rng.choice([-1.0, 1.0], size=(runs, pairs, configurations, 1, 1))
    return (coin * (found[:, :, 1] - found[:, :, 0])).reshape(runs, pairs, CELLS, -1)


def interrupted(noise: str, rng: np.random.Generator, runs: int, shared: float) -> tuple[np.ndarray, np.ndarray]:
    """``log_ratios`` of runs that are stopped and gone on with, where slow launches are repeated; and their looks.

    A launch is void when one of its p95 TTFT is among the slowest: both halves are then measured again in the other
    order, up to three times; after the third the run stops. A run stops too when its time is over, which goes by the
    same launches: slow ones take longer. What stopped takes its next look with the pairs that are there, and goes on.
    Returns also [runs, looks], the pairs that each look of DEFAULT_RULES was taken after.
    """
    pairs, ttft = DEFAULT_RULES.looks[-1].pairs, 1
    tried = halves(noise, rng, runs, pairs * ATTEMPTS, shared, CONFIGURATIONS)
    tried = tried.reshape(runs, pairs, ATTEMPTS, *tried.shape[2:])
    slowest = tried[..., ttft].max(axis=(3, 5))  # of both halves: [runs, pairs, attempts, configurations]
    void = slowest > np.quantile(slowest, 1 - VOID)
    kept = np.where(void.all(axis=2), ATTEMPTS - 1, void.argmin(axis=2))  # the first that is not void
    found = np.take_along_axis(tried, kept[:, :, None, None, :, None, None], axis=2)[:, :, 0]
    coin = rng.choice([-1.0, 1.0], size=kept.shape) * np.where(kept % 2, -1.0, 1.0)
    y = coin[..., None, None] * (found[:, :, 1] - found[:, :, 0])
    took = np.exp(found[..., ttft].mean(axis=(2, 3, 4))) * (1 + kept.mean(axis=2))
    clock = np.cumsum(took / took.mean(), axis=1)  # in pairs
    points = [look_points(DEFAULT_RULES, stops) for stops in _stops(clock, void.all(axis=2).any(axis=2), rng)]
    return y.reshape(runs, pairs, CELLS, -1), np.array(points)


def _stops(clock: np.ndarray, failed: np.ndarray, rng: np.random.Generator) -> Iterator[list[int]]:
    """After how many pairs each run stopped, by its times [runs, pairs] and the pairs that could not be measured."""
    for times, could_not in zip(clock, failed, strict=True):
        stops: list[int] = []
        ends = rng.uniform(2, 20)
        for done in range(1, len(times)):
            if could_not[done] or times[done - 1] > ends:
                ends = times[done - 1] + rng.uniform(2, 20)
                if done not in look_points(DEFAULT_RULES, stops):
                    stops.append(done)
        yield stops


def harms(log_ratio: np.ndarray) -> tuple[tuple[HarmHypothesis, ...], np.ndarray]:
    """The hypotheses, and [runs, pairs, hypotheses]; they are sums of log ratios: each is made once."""
    runs, pairs, cells, metrics = log_ratio.shape
    made = hypotheses(table(np.eye(cells * metrics).reshape(-1, cells, metrics)))
    return made.each, (log_ratio.reshape(runs * pairs, -1) @ made.harm).reshape(runs, pairs, -1)


def at_most(x: np.ndarray, alpha: float, jointly: bool) -> np.ndarray:
    """[runs] whether the largest u of ``x`` [runs, pairs, hypotheses] has a max-T p of at most ``alpha``.

    Not ``jointly``: whether each hypothesis alone has one. Exact.
    """
    pairs = x.shape[1]
    x = scaled(x)
    observed = x.sum(axis=1)
    if jointly:
        observed = observed.max(axis=1, keepdims=True)
    observed = observed[:, None, :] - _TIE
    most = int(alpha * 2**pairs + _TIE)
    reached = np.zeros((len(x), observed.shape[2]), dtype=int)
    open_ = np.arange(len(x)) if most else np.empty(0, dtype=int)
    order = np.random.default_rng(0).permutation(2 ** (pairs - 1))  # the other half of the patterns: minus these
    begin = 0
    while begin < len(order) and len(open_):
        many = max(16, min(128, _AT_ONCE // (len(open_) * x.shape[2])))  # small products need no BLAS threads
        patterns = 1.0 - 2.0 * ((order[begin : begin + many, None] >> np.arange(pairs)) & 1)
        sums = patterns @ x[open_]  # [runs, patterns, hypotheses]
        highest, lowest = (sums.max(2, keepdims=True), sums.min(2, keepdims=True)) if jointly else (sums, sums)
        reached[open_] += ((highest >= observed[open_]).sum(axis=1)) + (-lowest >= observed[open_]).sum(axis=1)
        open_ = open_[(reached[open_] <= most).all(axis=1)]
        begin += many
    result = np.zeros(len(x), dtype=bool)
    result[open_] = True
    return result


def _failed(harm: np.ndarray, floors: np.ndarray, look: Look, rejected: np.ndarray) -> np.ndarray:
    """[runs] whether a hypothesis that is rejected reaches its floor; further steps only where the first does not."""
    mean = harm.mean(axis=1)
    largest = scaled(harm).sum(axis=1).argmax(axis=1)
    first = mean[np.arange(len(harm)), largest] >= floors[largest]
    failed = rejected & first
    for run in np.flatnonzero(rejected & ~first & (mean >= floors).any(axis=1)):
        failed[run] = ((adjusted_p(harm[run]) <= look.alpha) & (mean[run] >= floors)).any()
    return failed


def decide(
    log_ratio: np.ndarray,
    passes: bool = True,
    points: np.ndarray | None = None,
) -> Decisions:
    """Each run of [runs, pairs, cells, metrics] through all looks. Not ``passes``: no run ends with a PASS.

    ``points`` [runs, looks]: after how many pairs each look is taken; None: when the rules say.
    """
    if points is None:
        points = np.tile([look.pairs for look in DEFAULT_RULES.looks], (len(log_ratio), 1))
    each, harm = harms(log_ratio)
    floors, margins = np.array([h.floor for h in each]), np.array([h.margin for h in each])
    failed, passed, rejected = (np.zeros(len(harm), dtype=int) for _ in range(3))
    for number, look in enumerate(DEFAULT_RULES.looks, start=1):
        for pairs in np.unique(points[:, number - 1]):
            open_ = np.flatnonzero((failed == 0) & (passed == 0) & (points[:, number - 1] == pairs))
            x = harm[open_, :pairs]
            small = at_most(x, look.alpha, jointly=True)
            fails = _failed(x, floors, look, small)
            failed[open_[fails]] = number
            rejected[open_[small & (rejected[open_] == 0)]] = number
            if passes:
                left = open_[~fails]
                fine = at_most(margins - harm[left, :pairs], look.alpha_pass, jointly=False)
                passed[left[fine]] = number
    return Decisions(failed, passed, rejected)


def worsened(log_ratio: np.ndarray, metric: int, share: float, cells: slice | int) -> np.ndarray:
    """[runs, pairs, cells, metrics] with a metric worse by ``share`` (0.05: 5 %) in some cells."""
    rule = DEFAULT_RULES.metrics[metric]
    changed = log_ratio.copy()
    changed[:, :, cells, metric] += rule.harm_of(share) * (-1 if rule.higher_is_better else 1)
    return changed


def passes_at_margin(noise: str, rng: np.random.Generator, runs: int) -> int:
    """How many runs one hypothesis passes at some look though its true harm is its margin, the others aside."""
    looks = DEFAULT_RULES.looks
    y = log_ratios(noise, rng, runs // CELLS + 1, looks[-1].pairs)[..., 1]  # each cell of a run alone
    noise_alone = y.transpose(0, 2, 1).reshape(-1, looks[-1].pairs, 1)[:runs]  # margin - harm
    small = [at_most(noise_alone[:, : look.pairs], look.alpha_pass, jointly=True) for look in looks]
    return int(np.any(small, axis=0).sum())
