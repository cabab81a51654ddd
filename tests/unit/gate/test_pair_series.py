"""Pairs measured for another question than the gate's, with engines whose steps take chosen times."""

from __future__ import annotations

import pytest
import yaml

from kvbench.common.errors import MeasurementError
from kvbench.gate.compare import lockstep_pairs
from kvbench.gate.compare.request import CompareRequest
from kvbench.gate.compare.series import PairQuestion
from kvbench.workload.file import load_workload
from tests.support.fake_lockstep import FakeProcess, fake_clock
from tests.support.sweep_parts import TINY


@pytest.fixture
def question(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lockstep_pairs, "EngineProcess", FakeProcess)
    monkeypatch.setattr(lockstep_pairs, "_LEAST_S", 3.0)
    fake_clock(monkeypatch)
    engine = {"layout": "paged", "page_size": 16, "kv_budget": "8MiB", "device": "cpu", "max_num_seqs": 4,
              "max_model_len": 128, "max_num_batched_tokens": 64}  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY | {"engine": engine, "sweep": {}}))
    workloads = [load_workload(tmp_path / "tiny.yaml", profile="cpu")]

    def measure(base, candidate, decided, metric="mean_tpot_ms", points=(3, 5)):
        request = CompareRequest(base=base, candidate=candidate, output_dir=tmp_path / "out")
        asked = PairQuestion(request, workloads, metric, lambda: None, lambda text, work="": None)
        return asked.measure(request, points, decided)

    return measure


def test_a_harm_is_positive_where_the_candidate_is_worse_whatever_the_metric(question):
    for metric in ("mean_tpot_ms", "output_throughput"):
        harms, method = question("page_size=16", "max_num_batched_tokens=48", lambda harms: True, metric)
        assert method == "lockstep" and len(harms) == 3
        assert all(0.15 < harm < 0.22 for harm in harms)


def test_pairs_are_measured_until_a_look_decides(question):
    asked = []
    harms, _ = question("page_size=16", "page_size=16", lambda harms: asked.append(len(harms)) or len(harms) == 5)
    assert asked == [3, 5] and len(harms) == 5
    harms, _ = question("page_size=16", "page_size=16", lambda harms: False)
    assert len(harms) == 5


def test_an_engine_that_dies_cannot_be_measured(question):
    with pytest.raises(MeasurementError, match="exit code 3"):
        question("page_size=16", "page_size=32", lambda harms: True)
