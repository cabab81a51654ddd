"""Workers on other machines measure their own client, and the load is judged by what they found."""

from __future__ import annotations

import json
import signal
import sys
import time

import psutil
import pytest

from kvbench.calibration.calibrate import Calibration, CalibrationSettings, Limits
from kvbench.load.multi.calibration import calibrate_here, calibration_reasons, streams_of
from kvbench.load.spec import LoadSpec
from tests.support.loads import LoadRunner
from tests.unit.calibration.test_calibration import GOOD
from tests.unit.load.test_load_merge import result, sample
from tests.unit.load.test_load_shared import ended, master_of, requests, start

SETTINGS = CalibrationSettings(streams=4, itl_ms=20.0)  # 200 chunks a second


def found(*reasons: str) -> dict:
    return Calibration(SETTINGS, GOOD, Limits(0.7), reasons, "m", "2026-01-01T00:00:00Z").to_json()


def test_each_worker_is_held_to_the_limits_of_a_load() -> None:
    results = [result(f"worker {k}", [sample(k, 0.0, 5.0)]) for k in range(3)]
    assert calibration_reasons([found()] * 3, results, 10.0) == []
    assert calibration_reasons([found(), found("too late."), found()], results, 10.0) == ["worker 1: too late."]


def test_a_worker_that_had_more_to_do_than_it_was_tried_with_is_told() -> None:
    many = [sample(k, 0.0, 5.0) for k in range(5)]
    (said,) = calibration_reasons([found()], [result("worker 1", many)], 10.0)
    assert said.startswith("worker 1 had up to 5 streams at once and ") and "was calibrated at 4 and 200" in said
    fast = [sample(0, 0.0, 0.5, itl=0.0016), sample(1, 3.0, 3.5, itl=0.1)]  # 32 a second of the whole
    (said,) = calibration_reasons([found()], [result("worker 1", fast)], 10.0)
    assert "1 streams at once and 31" in said and "chunks a second" in said


def test_what_a_worker_has_to_bear_is_its_share() -> None:
    spec = LoadSpec(
        base_url="https://h", model="m", mode="closed", concurrency=100, requests_file="", out_dir="", timeout_s=1.0
    )
    assert streams_of(spec, 3) == 34


def test_a_worker_that_cannot_calibrate_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match="could not be calibrated"):
        calibrate_here(4, False)


def test_a_worker_that_is_stopped_takes_its_calibration_along(loads: LoadRunner) -> None:
    spec = loads.spec(requests(20, tag=7960), concurrency=4, model="mock", calibrate_workers=True)
    master, port = master_of(spec, 1)
    worker = start("--worker", "--master-port", port)
    assert json.loads(master.stdout.readline())["event"] == "calibrating"
    due = time.monotonic() + 20
    while len(found := psutil.Process(worker.pid).children(recursive=True)) < 3:  # the command, its server, its client
        assert time.monotonic() < due
        time.sleep(0.02)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=20) == 130
    _, alive = psutil.wait_procs(found, timeout=3)
    assert not alive  # left alone, the command takes over 5 s
    outcome = ended(master, spec.parent)
    assert outcome.code == 4 and "it went away" in outcome.stderr


def test_a_master_has_its_workers_calibrated_first(loads: LoadRunner) -> None:
    spec = loads.spec(requests(20, tag=7950), concurrency=4, model="mock?itl_ms=5", calibrate_workers=True)
    master, port = master_of(spec, 2)
    workers = [start("--worker", "--master-port", port) for _ in range(2)]
    outcome = ended(master, spec.parent)
    assert outcome.code == 0, outcome.stderr
    assert [w.wait(timeout=10) for w in workers] == [0, 0]
    assert outcome.events[0]["event"] == "calibrating"
    for process in outcome.load["client"]["processes"]:
        each = Calibration.from_json(process["calibration"])
        assert each.settings.streams == 4 and each.figures.events > 100 and each.figures.requests_lost == 0
