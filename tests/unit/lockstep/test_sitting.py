"""A sitting of several configurations, with engines whose steps take chosen times."""

from __future__ import annotations

import json
import sys

import pytest

from kvbench.lockstep import sitting
from kvbench.lockstep.process import EngineFailedError
from kvbench.lockstep.sitting import Sitting
from kvbench.runs.engine_time import read_engine_time
from kvbench.runs.folder import RunFolder
from kvbench.workload.design import make_design
from kvbench.workload.file import resolve
from tests.support.loads import ROOT

LIMITS = {"vocab_size": 300, "max_model_len": 128}
DATA = {
    "name": "tiny",
    "seed": 0,
    "model": {"config": "llama-32m", "load_format": "dummy"},
    "engine": {"page_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128},
    "load": {
        "mode": "closed",
        "concurrency": [2, 4],
        "num_requests": [6, 20],
        "prompts": {
            "kind": "synthetic",
            "classes": [{"name": "chat", "share": 1.0, "prompt_tokens": [8, 40], "output_tokens": [16, 24]}],
        },
    },
}


@pytest.fixture
def sit(tmp_path, monkeypatch):
    """Makes a sitting of the baseline and ``sweep`` over the scripted engines."""
    command = (sys.executable, "-m", "tests.support.fake_lockstep")
    monkeypatch.setattr(sitting, "LOCKSTEP_COMMAND", command)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def make(limit_s, **sweep):
        workload = resolve(json.loads(json.dumps(DATA)), profile="cpu", source=None)
        design = make_design(workload.engine, sweep, workload.load_points, "one_at_a_time")
        capacity = {each.config_id: LIMITS for each in design.configurations}
        done = Sitting(RunFolder(tmp_path), workload, design, capacity, limit_s, lambda _: None, lambda: None)
        assert done.why_not() is None
        return done

    return make


def test_effects_are_those_of_the_engines_and_the_sitting_stops_when_all_are_decided(sit, tmp_path):
    found = sit(300, max_num_batched_tokens=[48], page_size=[8]).execute()
    stored = read_engine_time(tmp_path)
    by_cell = {effect.cell: effect for effect in stored.effects if effect.metric == "output_throughput"}
    assert len(by_cell) == 4  # two configurations, two loads
    for cell, effect in by_cell.items():
        truth = 1 / 1.2 if "48" in cell else 1.0
        assert effect.low < truth * 1.005 and effect.high > truth * 0.995, effect
        assert effect.call == ("behind" if "48" in cell else "level")
    assert found["launches"] < sitting.MOST_LAUNCHES and found["seconds"] < 300
    latency = next(e for e in stored.effects if e.metric == "p95_itl_ms" and "48" in e.cell)
    assert latency.ratio == pytest.approx(1.2, abs=0.03) and latency.call == "behind"


def test_time_that_is_over_ends_it_with_the_highest_load_measured(sit, tmp_path):
    found = sit(0.001, page_size=[8]).execute()
    assert found["launches"] == 1
    assert {effect.cell.rsplit("-", 1)[1] for effect in read_engine_time(tmp_path).effects} == {"c4"}
    assert len(found["notes"]) == 1 and "c2" in found["notes"][0] and "--lockstep-minutes" in found["notes"][0]


def test_a_configuration_that_cannot_be_opened_is_named_and_the_others_are_measured(sit, tmp_path):
    found = sit(0.001, page_size=[64, 8], max_num_batched_tokens=[48]).execute()
    cells = {effect.cell for effect in read_engine_time(tmp_path).effects}
    assert any("p8" in cell for cell in cells) and any("48" in cell for cell in cells)
    assert not any("p64" in cell for cell in cells)
    assert any("page_size cannot be 64" in note for note in found["notes"])


def test_an_engine_that_dies_ends_the_sitting(sit):
    with pytest.raises(EngineFailedError, match="exit code 3"):
        sit(300, page_size=[32]).execute()
