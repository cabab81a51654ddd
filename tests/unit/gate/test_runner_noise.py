"""The noise of a class of runners: what is stored of a calibration, and what a later comparison is told."""

from __future__ import annotations

import pytest

from kvbench.cli.compare import calibrate, compare
from kvbench.common.errors import EXIT_INVALID, EXIT_OK, UsageError
from kvbench.common.files import read_json, write_json
from kvbench.gate.compare.folder import GivenUp
from kvbench.gate.compare.request import CompareRequest, StoredRequest
from kvbench.gate.compare.runner_noise import noise_notes, store_noise
from kvbench.gate.policy import load_policy
from kvbench.gate.timing.noise import FEWEST_PAIRS
from tests.support.compare_folders import noisy_pairs, stored_comparison

RULES = load_policy(None).timing


def calibrated(tmp_path, pairs, void=None):
    """The exit code of a calibration of 20 pairs that ended after so many, and what it stored."""
    folder = stored_comparison(tmp_path / "run", *noisy_pairs(pairs, 1, 3), ["mixed/a-c4"])
    folder.write(folder.state().model_copy(update={"workloads": {"mixed": {}}, "void": void}))
    request = CompareRequest(pairs=20, runner_class="here", store=tmp_path / "noise")
    code = store_noise(folder, folder.state(), RULES, request, lambda text: None)
    path = tmp_path / "noise" / "here.json"
    return code, path if path.is_file() else None


def notes(path, *workloads):
    return noise_notes(CompareRequest(noise=path), workloads, "launched", RULES)


@pytest.mark.parametrize(
    ("pairs", "void", "code"),
    [(20, None, EXIT_OK), (12, GivenUp(13, "mixed/a"), EXIT_INVALID), (3, None, EXIT_INVALID)],
)
def test_the_pairs_that_are_there_are_stored_however_the_calibration_ended(tmp_path, pairs, void, code):
    left, path = calibrated(tmp_path, pairs, void)
    assert left == code
    if pairs < FEWEST_PAIRS:
        assert path is None
        return
    assert read_json(path)["pairs"] == pairs
    few = [note for note in notes(path, "mixed") if "is known from 20 or more" in note]
    assert len(few) == (pairs < 20)
    (unknown,) = notes(path, "prefix", "mixed")  # the noise under other workloads says nothing
    assert "prefix, mixed" in unknown and "kvbench dev calibrate" in unknown
    (other,) = noise_notes(CompareRequest(noise=path), ["mixed"], "twins", RULES)  # nor by another method
    assert "--method twins" in other and "--method launched" in other


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("workloads"),
        lambda data: data.update(format="kvbench-noise/1"),
        lambda data: data["each"][0].update(stands_for=[]),
        lambda data: data["each"][0]["worst_margin"].clear(),
    ],
)
def test_a_damaged_noise_file_gets_one_sentence(tmp_path, damage):
    _, path = calibrated(tmp_path, 20)
    data = read_json(path)
    damage(data)
    write_json(path, data)
    with pytest.raises(UsageError, match=r"is no noise of a runner \(.*kvbench dev calibrate"):
        notes(path, "mixed")


def test_a_misspelt_option_is_refused_and_the_options_of_both_commands_are_known():
    with pytest.raises(ValueError, match="max_minuets"):
        CompareRequest(max_minuets=5)
    for command in (compare, calibrate):
        assert {each.name for each in command.params} - {"side", "help_all"} <= CompareRequest.model_fields.keys()
    stored = StoredRequest.parse({"base": "main", "max_minutes": 5, "twin_processes": 2})  # of an older version
    resumed = stored.resumed_by(CompareRequest(max_minutes=9))
    assert (resumed.base, resumed.max_minutes, resumed.to_json()["twin_processes"]) == ("main", 9, 2)
