"""What all pairs of a comparison in engine time have in common, as the manifest keeps it."""

from __future__ import annotations

import json

import pytest

from kvbench.gate.compare.folder import CompareFolder, LockstepFacts
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
