"""A small simulation of sittings, engines in turns on uneven machines; whole: tests/benchmarks/lockstep_coverage.md."""

import re
from pathlib import Path

import numpy as np
import pytest

from kvbench.lockstep.intervals import FEWEST_POOLED, Steps, as_it_recurs, launch_ratios
from tests.benchmarks import lockstep_coverage
from tests.support.lockstep_simulation import job, look, sittings, take_turns, where_they_stop

CASES = [("ar1", 0.005, 0.0), ("bimodal", 0.01, 0.02), ("drifting", 0.0, 0.02), ("bursty", 0.01, 0.0)]


def simulated(kind: str, launch_sd: float, true: float, runs: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([17, CASES.index((kind, launch_sd, true))])
    return sittings(kind, rng, runs, 5, 6, true, launch_sd, loads=1, steps=200)


@pytest.mark.parametrize(
    ("kind", "launch_sd", "true"), [CASES[1], *(pytest.param(*CASES[i], marks=pytest.mark.full) for i in (0, 2, 3))]
)
def test_intervals_cover_the_truth_after_the_fewest_launches_and_where_a_sitting_stops(kind, launch_sd, true):
    tokens, seconds = simulated(kind, launch_sd, true, runs=60)
    looks = [look(tokens, seconds[:, :n])[0] for n in (FEWEST_POOLED, 5)]
    for found in (looks[0], where_they_stop(looks)):
        assert lockstep_coverage.covers(found, true) >= 0.88  # of 300, five at a time share their base
    error = np.log([[each.ratio for each in sitting] for sitting in looks[1]]) - np.log1p(true)
    assert abs(error.mean()) < 4 * error.mean(axis=1).std() / np.sqrt(len(error))  # neither engine is favoured


def test_the_simulated_sittings_are_judged_as_a_sitting_is():
    tokens, seconds = simulated(*CASES[0], runs=3)
    judged, _ = look(tokens, seconds)
    for run, found in enumerate(judged):
        limited = as_it_recurs(seconds[0, :, run])  # [launches, engines, steps]
        for engine, each in enumerate(found, 1):
            ratios = launch_ratios(*([Steps(of[i], tokens[0]) for of in limited] for i in (0, engine)), same_work=True)
            assert each.ratio == pytest.approx(np.exp(np.mean([ratio.log_ratio for ratio in ratios])))
            assert each.n == 5 and each.low < each.ratio < each.high


def test_bursts_hardly_widen_the_intervals_and_engines_in_turns_keep_their_clocks_together():
    halves = {}
    for kind in ("ar1", "bursty"):
        tokens, seconds = sittings(kind, np.random.default_rng(3), 20, 4, 6, 0.0, 0.0, loads=1, steps=200)
        halves[kind] = np.median([each.half_width for sitting in look(tokens, seconds)[0] for each in sitting])
    assert halves["bursty"] < 1.2 * halves["ar1"]
    rng = np.random.default_rng(18)
    clocks = take_turns("bimodal", rng, job(rng, 100), np.array([[1.0, 1.0, 1.0]] * 20)).cumsum(axis=2)
    assert np.ptp(clocks[:, :, -1], axis=1).max() < 0.2 * clocks[:, :, -1].mean()
    alone = np.std(np.log(clocks[:, 0, -1]))
    assert np.std(np.log(clocks[:, 1, -1] / clocks[:, 0, -1])) < alone  # the machine's speed drops out


def test_the_committed_table_keeps_its_promise():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in Path(lockstep_coverage.__file__).with_suffix(".md").read_text(encoding="utf-8").splitlines()
        if re.match(rf"\| ({'|'.join(lockstep_coverage.MACHINES)}) \|", line)
    ]
    assert len(rows) == len(list(lockstep_coverage.cells()))
    for row in rows:
        two, *more = (float(cell.removesuffix(" %")) for cell in row[3:7])  # then the fewest, where it stops, alone
        *pooled, alone = more  # which is also looked at early
        assert 93 <= two <= 98 and min(pooled) >= 93 and alone >= 92.5 and max(more) <= 97, row
