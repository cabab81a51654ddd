"""A metric that is added as one row of METRICS and its function is in tables, report, history, limits and files."""

from __future__ import annotations

import csv
import json
import shutil

import pytest
import yaml

from kvbench.common import foreign_cpu
from kvbench.metrics import rows
from kvbench.metrics.definitions import LOWER, METRICS, Metric
from tests.support.decisions import kvbench
from tests.support.loads import fake_server
from tests.support.sweep_parts import TINY

POLICY = "limits: [{metric: p95_stall_ms, max: 0.0001}]\n"


@pytest.fixture
def stall(monkeypatch):
    """A metric of ours: the longest gap of each request."""
    row = Metric(
        "stall", "stall_ms", "ms", LOWER, "longest stall", "stall", ("p95",), samples=rows.longest_gaps, compared="p95"
    )
    monkeypatch.setitem(METRICS, row.name, row)
    monkeypatch.setattr(foreign_cpu, "MIN_FOREIGN_CORES", 1000.0)  # other work on the test machine is not tested here
    monkeypatch.setattr(foreign_cpu, "MAX_STEAL_SHARE", 1.0)


def test_an_added_metric_is_measured_shown_limited_and_kept(stall, tmp_path):
    workload = tmp_path / "tiny.yaml"
    workload.write_text(yaml.safe_dump({**TINY, "sweep": {}}))
    with fake_server("--page-size", "4", "--max-model-len", "256") as (_, url):
        swept = kvbench("sweep", workload, "--target", url, "--no-calibration", "--output-dir", tmp_path / "results")
    assert swept.code == 0, swept.err
    (run,) = (tmp_path / "results" / "tiny").iterdir()

    done = next(json.loads(path.read_text()) for path in run.glob("cells/*/loads/*/done.json"))
    assert done["metrics"]["stall_ms"]["p95"] > 0
    assert "stall" in (run / "report.md").read_text()
    with (run / "summary.csv").open(newline="") as file:
        assert all(float(row["stall_ms_p95"]) > 0 for row in csv.DictReader(file))

    shown = json.loads(kvbench("history", run.parent, "--json").out)
    assert any(series["metric"] == "p95_stall_ms" and series["last"] > 0 for series in shown["series"])

    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    assert kvbench("gate", run, "--policy", policy).code == 1

    beside = shutil.copytree(run, tmp_path / "beside")
    assert kvbench("report", run, beside, "--output-dir", tmp_path / "both").code == 0
    assert "| p95 stall, ms |" in (tmp_path / "both" / "compare.md").read_text()
