"""A file of a run's folder that is damaged is said in one sentence, and ends a command with a documented exit code.

Of each kind of file 20 damages are tried, each with one command, by a fixed seed. KVBENCH_ALL_DAMAGES=1 tries every one
with each quick command and one that draws figures, and 40 wrong values in each JSON file.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict

import pytest

from tests.support.damage import OF_COMPARISON, QUICK, make_runs, trials, try_one

ALL = bool(os.environ.get("KVBENCH_ALL_DAMAGES"))
FILES = (
    "manifest.json", "summary.csv", "quality.json", "predictions.json", "lockstep/effects.json", "summary.json",
    "counters.json", "done.json", "load.json", "spec.json", "requests.parquet", "server.parquet", "served.json",
    "samples.jsonl",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The run, the comparison, and the trials of each kind of file."""
    run, comparison = make_runs(tmp_path_factory.mktemp("made"))
    values_each = 40 if ALL else 4
    by_file = defaultdict(list)
    for folder, commands in ((run, QUICK), (comparison, OF_COMPARISON)):
        for trial in trials(folder, commands, values_each=values_each):
            by_file[next((file for file in FILES if trial.file.endswith(file)), "other")].append((folder, trial))
    return by_file


@pytest.mark.parametrize("file", [*FILES, "other"])
def test_a_damaged_file_is_said_in_a_sentence(made, file, tmp_path):
    trials = made[file]
    if not ALL:
        trials = random.Random(file).sample(trials, min(len(trials), 20))
    faults = [
        f"{trial}: {wrong}"
        for number, (folder, trial) in enumerate(trials)
        if (wrong := try_one(trial, folder, tmp_path / str(number)))
    ]
    assert not faults, "\n".join(faults)
