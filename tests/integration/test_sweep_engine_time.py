"""A sweep that begins with a sitting in engine time: engines and servers are fake, the command line is real."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys

import pytest

from kvbench.lockstep import sitting
from kvbench.lockstep.process import EngineProcess
from kvbench.targets import choose
from tests.support.loads import FAKE, ROOT
from tests.support.sweep_parts import Bench, finished, manifest

MINUTES = ("--lockstep-minutes", "0.05")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(choose, "BUILTIN_COMMAND", (sys.executable, str(FAKE)))
    monkeypatch.setattr(sitting, "LOCKSTEP_COMMAND", (sys.executable, "-m", "tests.support.fake_lockstep"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Bench(tmp_path)


def effects(run):
    return json.loads((run / "lockstep" / "effects.json").read_text())


def write(bench):
    return bench.write(load={"repeats": 1}, sweep={"page_size": [8]})


def test_a_sweep_measures_engine_time_first_and_reports_it_beside_what_was_served(bench):
    done = bench.sweep(str(write(bench)), *MINUTES, fake=False)
    run = bench.only_run()
    assert done.returncode == 0, done.stdout + done.stderr
    found = effects(run)
    assert found["finished"] and found["launches"] >= 2 and len(finished(run)) == 2
    (change,) = (each for each in found["effects"] if each["metric"] == "output_throughput")
    assert change["cell"] == "paged-p8-c2" and change["ratio"] == pytest.approx(1.0, abs=0.2)
    assert "engine time" in (run / "report.md").read_text() and "engine time" in done.stdout
    assert manifest(run)["measured_s"] > found["seconds"]  # it counts against --max-minutes

    again = bench.kvbench("sweep", "--resume", str(run), "--no-report", *MINUTES)
    assert again.returncode == 0 and effects(run) == found


def test_an_interrupted_sitting_begins_anew_with_a_resume(bench, monkeypatch):
    greet, launches = EngineProcess.greet, []

    def interrupted(process):
        launches.append(process)
        if len(launches) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        greet(process)

    monkeypatch.setattr(EngineProcess, "greet", interrupted)
    done = bench.sweep(str(write(bench)), *MINUTES, fake=False)
    run = bench.only_run()
    assert done.returncode == 130 and not finished(run), done.stdout + done.stderr
    first = effects(run)
    assert not first["finished"] and first["launches"] == 1 and not launches[-1].alive

    def planned():
        return bench.kvbench("sweep", "--resume", str(run), "--dry-run").stdout

    assert "2 server launches, 2 loads" in planned() and "minutes of it are engine time" in planned()
    again = bench.kvbench("sweep", "--resume", str(run), "--no-report")
    assert again.returncode == 0 and len(finished(run)) == 2, again.stdout + again.stderr
    shutil.rmtree(run / "cells" / "paged-p8-c2" / "loads" / "1")
    assert "1 server launch, 1 load," in planned() and "engine time" not in planned()  # it is finished
    assert "starts again" in again.stdout
    second = effects(run)
    assert second["finished"] and second["order_seed"] != first["order_seed"]
    assert second["limit_s"] == first["limit_s"]  # as the run was begun
