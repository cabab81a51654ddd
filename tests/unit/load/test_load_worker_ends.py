"""How a worker ends, and what a load makes of one that does not stay: stopped, silent, or gone at the wrong moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.loads import ROOT, SUPPORT, LoadRunner, free_port
from tests.support.raw_worker import RawWorker
from tests.unit.load.test_load_shared import LIMIT_S, ended, master_of, requests, start, wait_for


def waiting(port: str, words: str) -> subprocess.Popen:
    """A worker that has said ``words``."""
    worker = start("--worker", "--master-port", port)
    assert any(words in line for line in worker.stdout)
    return worker


def ended_with(worker: subprocess.Popen) -> tuple[int, list[str]]:
    """Exit code, and what was said on stderr."""
    _, err = worker.communicate(timeout=LIMIT_S)
    return worker.returncode, err.splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_that_waits_for_its_master_can_be_stopped(number: signal.Signals) -> None:
    port = str(free_port())
    worker = waiting(port, f"waiting up to 300 s for the master at 127.0.0.1:{port}")
    time.sleep(0.3)
    worker.send_signal(number)
    code, said = ended_with(worker)
    assert code == 130
    assert said == [f"kvbench load: stopped by {number.name} while it waited for the master at 127.0.0.1:{port}"]


@pytest.mark.parametrize("host", ["nosuch.invalid", "a..b"])
def test_a_master_whose_name_nobody_knows_is_not_waited_for(host: str) -> None:
    code, said = ended_with(start("--worker", "--master-host", host))
    assert code == 2
    assert len(said) == 1 and f"--master-host '{host}' is no machine's name or address" in said[0]


def test_a_worker_that_leaves_before_the_load_makes_room_for_another(loads: LoadRunner) -> None:
    spec = loads.spec(requests(20, tag=8500), model="mock")
    master, port = master_of(spec, 2)
    leaving = waiting(port, "the master has answered")
    time.sleep(0.3)
    leaving.send_signal(signal.SIGINT)
    assert ended_with(leaving) == (130, ["kvbench load: this worker ends: stopped by SIGINT"])
    workers = [start("--worker", "--master-port", port) for _ in range(2)]
    result = ended(master, spec.parent)
    assert result.code == 0, result.stderr
    assert [w.wait(timeout=10) for w in workers] == [0, 0]
    assert result.samples["ok"].all() and len(result.samples) == 20
    assert sorted(p["name"][:13] for p in result.load["client"]["processes"]) == ["worker 1 of 2", "worker 2 of 2"]


def test_a_worker_stopped_during_the_load_ends_it_and_the_others_say_why(loads: LoadRunner) -> None:
    spec = loads.spec(requests(300, tag=8600, max_tokens=20), model="mock?itl_ms=20")
    master, port = master_of(spec, 2)
    workers = [start("--worker", "--master-port", port) for _ in range(2)]
    wait_for(master, 0.5)
    workers[0].send_signal(signal.SIGINT)
    result = ended(master, spec.parent)
    assert result.code == 4 and "was stopped by SIGINT" in result.stderr
    assert len(result.load["client"]["processes"]) == 2  # what the stopped one had measured came back, too
    (code, said), (other_code, other_said) = (ended_with(w) for w in workers)
    assert (code, other_code) == (130, 4)
    for line in (said[-1], other_said[-1]):
        assert "this worker ends: the load failed: worker" in line and "was stopped by SIGINT" in line


def test_a_worker_lost_between_its_last_stream_and_its_samples_is_told(loads: LoadRunner) -> None:
    """It says that it has ended, and nothing more; the other one's samples are kept."""
    spec = loads.spec(requests(20, tag=8700), model="mock")
    master, port = master_of(spec, 2)
    real = start("--worker", "--master-port", port)
    with RawWorker(port) as raw:
        raw.greet()
        for call in raw.calls(LIMIT_S):
            now = time.perf_counter()
            raw.reply(call, t2=now, t3=now, users=2, left_s=1.0)
            if call["op"] == "start":
                raw.say("kvbench_event", {"event": "ended", "done": 10, "failed": 0, "gone": None, "signal": 0})
                break
        result = ended(master, spec.parent)
    assert result.code == 4
    assert "on raw) was lost: it did not answer" in result.stderr
    load = result.load
    assert load["incomplete"] and len(load["client"]["processes"]) == 1
    assert load["completed"] == len(result.samples) == 10
    assert "10 requests were never finished" in " ".join(load["invalid_reasons"])
    assert real.wait(timeout=10) == 4


def calibrating(loads: LoadRunner, tag: int) -> tuple[subprocess.Popen, subprocess.Popen, str]:
    """A master whose only worker measures its own client."""
    spec = loads.spec(requests(20, tag=tag), concurrency=4, model="mock?itl_ms=5", calibrate_workers=True)
    master, port = master_of(spec, 1)
    worker = start("--worker", "--master-port", port)
    assert json.loads(master.stdout.readline())["event"] == "calibrating"
    return master, worker, spec.parent


def test_a_worker_lost_while_it_calibrates_is_not_waited_for(loads: LoadRunner) -> None:
    """A calibration may take 120 s."""
    master, worker, folder = calibrating(loads, 8800)
    worker.kill()
    result = ended(master, folder)
    assert result.code == 4 and "was lost: its heartbeats stopped" in result.stderr
    assert not (folder / "load.json").exists()


def test_a_stop_while_workers_calibrate_is_heard_at_once(loads: LoadRunner) -> None:
    master, worker, folder = calibrating(loads, 8900)
    psutil.Process(worker.pid).suspend()
    try:
        master.send_signal(signal.SIGTERM)
        result = ended(master, folder)
    finally:
        psutil.Process(worker.pid).resume()
    assert result.code == 143
    assert result.events[-1]["error"] == "stopped before the load began"
    code, said = ended_with(worker)
    assert code in (4, 143) and "this worker ends" in said[-1]


@pytest.mark.parametrize("how", ["begin", "priority", "silent"])
def test_a_worker_whose_measuring_dies_ends_the_load_with_its_error(loads: LoadRunner, how: str) -> None:
    """Its heartbeats go on: only what it says of the load, or that it says nothing, tells that it is over."""
    spec = loads.spec(requests(20, tag=8950), model="mock")
    master, port = master_of(spec, 1)
    place = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    worker = subprocess.Popen([sys.executable, str(SUPPORT / "dying_worker.py"), port, how], **place)
    try:
        result = ended(master, spec.parent)
        assert worker.wait(timeout=LIMIT_S) == 4
    finally:
        worker.kill()
    assert result.code == 4
    why = "told no progress for 10 s" if how == "silent" else "could not go on measuring: OSError(24, 'Too many open"
    assert why in result.stderr and why in " ".join(result.load["invalid_reasons"])
    assert result.load["incomplete"]
