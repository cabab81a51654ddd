"""A small simulation of sittings, engines in turns on uneven machines; whole: tests/benchmarks/lockstep_coverage.md."""

import re
from pathlib import Path

import numpy as np
import pytest

from kvbench.lockstep.intervals import LaunchRatio, effect, goes_on
from tests.benchmarks import lockstep_coverage
from tests.support.lockstep_simulation import job, look, sittings, stopped, take_turns

CASES = [("ar1", 0.005, 0.0), ("bimodal", 0.01, 0.02), ("drifting", 0.0, 0.02), ("bursty", 0.01, 0.0)]


def simulated(kind: str, launch_sd: float, true: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([17, CASES.index((kind, launch_sd, true))])
    return sittings(kind, rng, 150, 6, 3, true, launch_sd, loads=1, steps=200, marked=True)


@pytest.mark.parametrize(("kind", "launch_sd", "true"), CASES)
def test_intervals_cover_the_truth_after_all_launches_and_where_a_sitting_stops(kind, launch_sd, true):
    y, within = simulated(kind, launch_sd, true)
    for found in (look(y, within), stopped(y, within)):
        assert 0.90 <= found.covers(true).mean() <= 0.99  # of 300 that go together two by two
    error = y - np.log1p(true)
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(error.size / 2)  # neither engine is favoured


def test_the_simulated_sittings_are_judged_as_a_sitting_is():
    y, within = simulated(*CASES[0])
    found = stopped(y, within)
    for run in range(30):
        launches = [[LaunchRatio(*of, 32) for of in zip(y[i, run], within[i, run], strict=True)] for i in range(6)]
        n = next((n for n in (5, 6) if not goes_on(map(effect, zip(*launches[:n], strict=True)))), 6)
        assert n == found.launches[run]
        for i, each in enumerate(map(effect, zip(*launches[:n], strict=True))):
            assert np.log([each.low, each.high]) == pytest.approx(
                found.log_ratio[run, i] + found.half[run, i] * np.array([-1, 1])
            )


def test_engines_in_turns_keep_their_clocks_together():
    rng = np.random.default_rng(18)
    jobs = job(rng, 100)
    seconds, _ = take_turns("bimodal", rng, jobs, np.array([[1.0, 1.0, 1.0]] * 20))
    clocks = seconds.cumsum(axis=2)
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
        covers = [float(cell.removesuffix(" %")) for cell in row[4:6]]
        assert min(covers) >= 93
        assert max(covers) <= (99 if row[0] == "bursty" else 97.5)
