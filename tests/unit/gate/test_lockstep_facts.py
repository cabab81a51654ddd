"""What all pairs of a comparison in engine time have in common, and what an engine says of itself."""

from __future__ import annotations

import json
from unittest.mock import Mock

import pytest

from kvbench.gate.compare.folder import CompareFolder, LockstepFacts
from kvbench.gate.compare.lockstep_pairs import read_info
from kvbench.lockstep.process import EngineFailedError
from kvbench.runs.results import Capacity
from tests.support.loads import ROOT

STORED = ROOT / "results" / "reference" / "gate" / "unchanged" / "manifest.json"


def test_a_comparison_of_an_older_version_keeps_the_steps_of_its_turns_when_it_goes_on(tmp_path):
    stored = json.loads(STORED.read_text())["lockstep"]
    (tmp_path / "manifest.json").write_text(STORED.read_text())
    folder = CompareFolder(tmp_path)
    state = folder.state()
    lengths = {"ci_timing/paged-p16": state.lockstep.turn_steps}
    folder.write(state.but(lockstep=state.lockstep.model_copy(update={"turn_lengths": lengths})))
    again = json.loads((tmp_path / "manifest.json").read_text())["lockstep"]
    assert again == stored | {"turn_lengths": {"ci_timing/paged-p16": stored["turn_steps"]}}


def test_what_pairs_add_is_stored_and_impossible_facts_are_refused():
    for stored in (5, {"times": []}, {"turn_steps": "8"}):
        with pytest.raises(ValueError, match="is"):
            LockstepFacts.parse(stored)
    facts = LockstepFacts().model_copy(update={"turn_lengths": {"a": 4}, "times": {"a-c3": 2}})
    assert facts.to_json() == {"turn_lengths": {"a": 4}, "times": {"a-c3": 2}}


@pytest.mark.parametrize(("told", "words"), [
    ({"capacity": {"page_size": 32}}, "its pages have 32 tokens"),
    ({"model": {"vocab_size": -1.5}}, "its description of itself is wrong"),
    ({"engine": []}, "its description of itself is wrong"),
])  # fmt: skip
def test_an_engine_with_other_settings_than_asked_for_fails(told, words):
    with pytest.raises(EngineFailedError, match=words):
        read_info(Mock(), {"page_size": 16}, Capacity(), told)
    assert read_info(Mock(), {"page_size": 16}, Capacity(), {"capacity": {"page_size": 16}}).capacity.page_size == 16
