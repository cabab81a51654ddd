"""A file of a run's folder that is damaged is said in one sentence, and ends a command with a documented exit code.

Of each kind of file a few damages are tried, each with one command, by a fixed seed; in the full ring 40 of them, and
some with commands that draw figures.
"""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from tests.support.damage import OF_COMPARISON, QUICK, SLOW, make_runs, trials, try_one

FILES = (
    "manifest.json", "summary.csv", "quality.json", "predictions.json", "lockstep/effects.json", "summary.json",
    "counters.json", "done.json", "load.json", "spec.json", "requests.parquet", "server.parquet", "served.json",
    "samples.jsonl",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The trials of each kind of file of a run and of a comparison: with quick commands alone, and with all."""
    run, comparison = make_runs(tmp_path_factory.mktemp("made"))
    quick, every = defaultdict(list), defaultdict(list)
    for by_file, slow in ((quick, ()), (every, SLOW)):
        for folder, commands in ((run, QUICK), (comparison, OF_COMPARISON)):
            for trial in trials(folder, commands, slow if folder is run else slow[1:2], 20):
                by_file[next((file for file in FILES if trial.file.endswith(file)), "other")].append((folder, trial))
    return quick, every


def check(trials, tmp_path):
    faults = [
        f"{trial}: {wrong}"
        for number, (folder, trial) in enumerate(trials)
        if (wrong := try_one(trial, folder, tmp_path / str(number)))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("file", [*FILES, "other"])
def test_a_damaged_file_is_said_in_a_sentence(made, file, tmp_path):
    check(random.Random(file).sample(made[0][file], min(5, len(made[0][file]))), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("file", [*FILES, "other"])
def test_many_damages_are_said_in_a_sentence(made, file, tmp_path):
    check(random.Random(file).sample(made[1][file], min(40, len(made[1][file]))), tmp_path)
