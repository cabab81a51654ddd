"""One sweep that is ended at every point of its way and goes on each time: nothing finished is measured twice."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys

import pytest

from kvbench.lockstep import sitting
from kvbench.runs.quality import QUALITY, read_quality
from kvbench.targets import choose
from tests.support.fake_lockstep import FakeProcess, fake_clock
from tests.support.loads import FAKE, ROOT
from tests.support.quality_results import figures, result
from tests.support.sweep_parts import Bench, Script, alive, complaints, finished, manifest, wait_until

CELLS = ("paged-p16-c2", "paged-p8-c2")
LOADS = {(cell, repeat) for cell in CELLS for repeat in ("1", "2")}
KILL, STOP = signal.SIGKILL, signal.SIGINT


def measure_quality(workload, configurations, **options):
    facts = {"seconds": 1.0, "left_out": 0, "prompts": 4, "dtype": "float32", "device": "cpu"}
    found = {each.config_id: figures() for each in configurations}
    return result(found, beside=True, model="kvbench-tiny", facts=facts)


def end_at(where, nth, number):
    """Sends this process the signal when the function is called for the ``nth`` time."""
    owner, _, name = where.rpartition(".")
    module, _, class_name = owner.partition(":")
    owner = importlib.import_module(module)
    owner = getattr(owner, class_name) if class_name else owner
    whole, calls = getattr(owner, name), []

    def ended(*arguments, **options):
        calls.append(1)
        if len(calls) == nth:
            os.kill(os.getpid(), number)
        return whole(*arguments, **options)

    setattr(owner, name, ended)


def ended_at(bench, where, nth, number, *words):
    """Runs a sweep in a process of its own until the signal; its exit code and what it printed."""
    printed = bench.folder / "printed.txt"

    def run():
        end_at(where, nth, number)
        done = bench.kvbench(*words)
        printed.write_text(done.stdout)
        os._exit(done.returncode)

    printed.write_text("")
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(100)
    assert process.exitcode is not None, f"{where} was not reached"
    return process.exitcode, printed.read_text()


# Where the sweep is ended: the function, at which of its calls and how, over HTTP or not, loads that are finished then.
ENDS = {
    "engine time": ("tests.support.fake_lockstep:FakeProcess.greet", 3, STOP, False, 0),
    "engine time again": ("tests.support.fake_lockstep:FakeProcess.greet", 1, STOP, False, 0),
    "a load over HTTP": ("kvbench.sweep.run:SweepProgress.load_progress", 3, KILL, True, 0),
    "a load over HTTP, by Ctrl-C": ("kvbench.sweep.run:SweepProgress.load_progress", 3, STOP, True, 0),
    "between loads": ("kvbench.sweep.run:SweepProgress.load_finished", 1, KILL, False, 1),
    "a load that is written": ("kvbench.runs.folder.flush", 6, KILL, False, 2),
    "a load that is renamed": ("pathlib:Path.rename", 1, STOP, False, 2),
    "the last load": ("kvbench.sweep.run:SweepProgress.load_finished", 2, KILL, False, 4),
    "cells that are written": ("kvbench.sweep.run.aggregate_cell", 2, KILL, False, 4),
    "quality": ("kvbench.quality.measure.measure", 1, STOP, False, 4),
    "the report": ("kvbench.report.page.markdown", 1, STOP, False, 4),
}


def test_a_sweep_that_is_ended_anywhere_goes_on_with_what_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(choose, "BUILTIN_COMMAND", (sys.executable, str(FAKE)))
    monkeypatch.setattr(sitting, "EngineProcess", FakeProcess)
    fake_clock(monkeypatch)
    monkeypatch.setattr("kvbench.quality.measure.measure", measure_quality)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("KVBENCH_NO_QUALITY", raising=False)
    bench, http = Bench(tmp_path, script=Script()), Bench(tmp_path, {"FAKE_TOKEN_S": "0.03"})
    path = str(bench.write(sweep={"page_size": [8]}, load={"concurrency": [2]}))
    words = bench.command(path, "--lockstep-minutes", "9", fake=False)[3:]
    before = {}
    for name, (where, nth, number, over_http, loads) in ENDS.items():
        code, printed = ended_at(http if over_http else bench, where, nth, number, *words)
        run = bench.only_run()
        words = ["sweep", "--resume", str(run)]
        after, complete = finished(run), name in ("quality", "the report")
        assert code == (-KILL if number == KILL else 130), f"{name}: {printed}"
        assert number == KILL or "--resume" in printed or "kvbench report" in printed, name
        assert before.items() <= after.items(), f"{name}: what was finished is as it was"
        assert len(after) == loads, name
        assert manifest(run)["status"] == ("complete" if complete else "incomplete"), name
        wait_until(lambda: not any(alive(launch["pid"]) for launch in http.launches), 15)
        before = after
        if name == "engine time":
            first = json.loads((run / "lockstep" / "effects.json").read_text())
            assert not first["finished"] and first["launches"] == 2
            assert "engine time after 2 launches, " in printed and "page 8 at c2" in printed, "what is decided so far"
            assert "### Engine time" in (run / "report.md").read_text(), "an interrupted sweep reports what it has"
            planned = bench.kvbench(*words, "--dry-run").stdout
            assert "9 minutes of it are engine time" in planned, "as the run was begun"
            words += ["--lockstep-minutes", "0.05"]
        if name == "engine time again":
            kept = json.loads((run / "lockstep" / "effects.json").read_text())
            assert kept == first, "what was decided stays until as much is decided anew"
    assert "nothing is left" in bench.kvbench("sweep", "--resume", str(run), "--dry-run").stdout
    assert bench.kvbench(*words).returncode == 0
    assert finished(run) == before and set(before) == LOADS and complaints(run) == []
    assert manifest(run)["status"] == "complete" and len(manifest(run)["resumed"]) == 7, "with loads left"
    effects = json.loads((run / "lockstep" / "effects.json").read_text())
    assert effects["finished"] and effects["order_seed"] != first["order_seed"]
    (change,) = (each for each in effects["effects"] if each["metric"] == "output_throughput")
    assert change["cell"] == "paged-p8-c2" and change["ratio"] == pytest.approx(1.0, abs=0.2)
    assert "engine time" in (run / "report.md").read_text()
    assert manifest(run)["measured_s"] > effects["seconds"], "it counts against --max-minutes"
    assert list(read_quality(run).configurations) == ["paged-p16", "paged-p8"] and (run / QUALITY).is_file()
    assert (run / "report.html").is_file()
    again = bench.kvbench("sweep", path, "--resume", "--no-report", "--output-dir", str(bench.results))
    assert again.returncode == 2, "no run of this workload is incomplete"
