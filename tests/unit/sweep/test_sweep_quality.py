"""A sweep that measures its quality at the end: loads and the measurement are scripted, the command line is real."""

from __future__ import annotations

import json

import pytest

from kvbench.common.errors import UsageError
from kvbench.runs.quality import QUALITY, read_quality
from tests.support.quality_results import figures, result
from tests.support.sweep_parts import Bench, Script, finished, manifest


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.delenv("KVBENCH_NO_QUALITY", raising=False)
    return Bench(tmp_path, script=Script())


@pytest.fixture
def measured(monkeypatch):
    """The ids of the configurations of each measurement; ``measured.fails``: what it raises."""

    class Calls(list):
        fails: BaseException | None = None

    calls = Calls()

    def measure(workload, configurations, *, say, **_):
        say("measuring")
        calls.append([each.config_id for each in configurations])
        if calls.fails:
            raise calls.fails
        facts = {"seconds": 1.0, "left_out": 0, "prompts": 4, "dtype": "float32", "device": "cpu"}
        found = dict.fromkeys(calls[-1], figures())
        return result(found, beside=True, model="kvbench-tiny", facts=facts)

    monkeypatch.setattr("kvbench.quality.measure.measure", measure)
    return calls


def sweep(bench, *words):
    path = bench.write(load={"repeats": 1}, sweep={"page_size": [8]})
    return bench.sweep(str(path), "--lockstep-minutes", "0", *words, fake=False)


IDS = ["paged-p16", "paged-p8"]


def test_it_is_measured_after_the_loads_and_is_in_the_report(bench, measured):
    done = sweep(bench)
    run = bench.only_run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "answers of 2 configurations" in sweep(bench, "--dry-run").stdout
    assert "answers of" not in sweep(bench, "--dry-run", "--no-quality").stdout
    assert measured == [IDS] and list(read_quality(run).configurations) == IDS
    assert "kvbench-tiny" in (run / "report.md").read_text() and "kvbench-tiny" in done.stdout
    assert bench.kvbench("sweep", "--resume", str(run), "--no-report").returncode == 0
    assert len(measured) == 1  # it is there
    (run / QUALITY).write_text('{"format": "kvbench-quality/1"}')
    assert "quality" in bench.kvbench("sweep", "--resume", str(run), "--dry-run").stdout
    for stale in (None, {"paged-p16": figures()}, dict.fromkeys(IDS, figures())):
        if stale:
            other = result(stale, git={"sha": "f" * 40} if len(stale) > 1 else {})
            (run / QUALITY).write_text(json.dumps(other.to_json()))
        stored = json.loads((run / "manifest.json").read_text())
        (run / "manifest.json").write_text(json.dumps(stored | {"git": {"sha": "a" * 40}}))
        before = len(measured)
        assert bench.kvbench("sweep", "--resume", str(run), "--no-report", "--force").returncode == 0
        assert len(measured) == before + 1  # of another format, of fewer configurations, of another commit
    assert len(finished(run)) == 2 and not (run / "lockstep").exists()  # which was given no minutes


def test_no_quality_and_another_server_measure_none(bench, measured):
    assert sweep(bench, "--no-quality", "--no-report").returncode == 0
    assert not measured and not (bench.only_run() / QUALITY).exists()
    assert bench.sweep(str(bench.folder / "tiny.yaml"), "--no-report").returncode == 0  # by --serve-cmd
    assert not measured


@pytest.mark.parametrize(
    ("error", "words"), [(UsageError("no tokenizer"), ["--no-report"]), (RuntimeError("out of memory"), [])]
)
def test_a_failure_costs_neither_the_run_nor_its_report(bench, measured, error, words):
    measured.fails = error
    done = sweep(bench, *words)
    run = bench.only_run()
    assert done.returncode == 0 and manifest(run)["status"] == "complete"
    assert (run / "report.html").is_file() == (not words)
    assert str(error) in done.stdout and "kvbench quality " in done.stdout and not (run / QUALITY).exists()
