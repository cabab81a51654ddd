"""A client that is broken in one way must be caught by the calibration, for the right reason.

What is lost on the way is counted in test_calibration.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvbench.calibration.calibrate import CalibrationSettings, ClientCalibration, calibrate
from kvbench.common import processes
from tests.support.loads import ROOT, SUPPORT, LoadRunner, requests_of

SETTINGS = CalibrationSettings(streams=16, itl_ms=20.0, seconds=0.8)
CAUGHT = {  # by validity's limits, which make loads invalid
    "slow": "were read together with the one before",
    "early": "its timestamps are wrong: p99 ",
    "stampless": "its timestamps are wrong: p99 ",
    "tardy": "its users wait ",
    "buffering": "were read together with the one before",
    "secretly retrying": "1 requests were sent again",
}


@pytest.fixture(scope="module")
def mutants() -> Iterator[dict[str, ClientCalibration]]:
    """The calibration of every mutant, and of the sound client run in the same way ("none")."""
    local, launch = threading.local(), processes.launch

    def launch_mutant(command, **options):
        at = command.index("kvbench.load")
        mutant = [str(SUPPORT / "mutant_load.py"), local.name]
        return launch([*command[: at - 1], *mutant, *command[at + 1 :]], **options)

    def taken(name: str) -> ClientCalibration:
        local.name = name
        return calibrate(SETTINGS, attempts=3 if name == "none" else 1)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(processes, "launch", lambda c, **o: (launch_mutant if "kvbench.load" in c else launch)(c, **o))
        names = [*CAUGHT, "none"]
        yield dict(zip(names, pool.map(taken, names), strict=True))


def test_the_sound_client_is_within_the_limits(mutants: dict[str, ClientCalibration]) -> None:
    sound = mutants["none"]
    assert sound.reasons == () or all(each.disturbed for each in sound.attempts)  # of a machine that others use
    figures = sound.figures
    assert figures.events_lost == figures.requests_lost == figures.faults_counted == figures.whole_failed == 0
    assert figures.requests == 32 and figures.faults == 3 and figures.events > 400
    assert 0 < figures.lag_p50_ms < figures.lag_p99_ms
    assert figures.cpu_us_per_event > 1
    assert figures.unstamped_share < 0.01
    if Path("/proc/stat").exists():
        assert all(each.foreign_cpu_cores >= 0 <= each.steal_share for each in sound.attempts)


def test_figures_tell_what_was_broken(mutants: dict[str, ClientCalibration]) -> None:
    """The same reason has several causes: the figures tell them apart."""
    assert mutants["early"].figures.lag_p50_ms < -1 < 0 < mutants["none"].figures.lag_p50_ms
    assert mutants["stampless"].figures.unstamped_share == 1.0
    assert mutants["secretly retrying"].figures.faults_counted == 0  # the second try was served whole


@pytest.mark.parametrize("name", CAUGHT)
def test_a_broken_client_is_caught(mutants: dict[str, ClientCalibration], name: str) -> None:
    reasons = " ".join(mutants[name].reasons)
    assert CAUGHT[name] in reasons
    assert "at 16 streams of 20 ms ITL" in reasons


def load_of(mutant: str, spec: Path) -> dict:
    """load.json of a load with that client."""
    command = [sys.executable, str(SUPPORT / "mutant_load.py"), mutant, str(spec)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=120)
    return json.loads((spec.parent / "load.json").read_text())


def test_a_client_that_sends_late_makes_an_open_loop_load_invalid(loads: LoadRunner) -> None:
    """The calibration is in closed loop; here the requests have times of their own."""
    told = load_of("tardy", loads.spec(requests_of(60, 8100, 2, 0.02), mode="open", concurrency=None))
    assert told["client"]["schedule_slip_p99_ms"] > 9
    assert any(reason.startswith("arrivals slipped: p99") for reason in told["invalid_reasons"])


def test_a_client_whose_loop_stands_still_makes_a_load_invalid_though_its_stamps_are_right(loads: LoadRunner) -> None:
    """Every send waits for the loop, so the throughput is the client's; streams of 80 ms."""
    told = load_of("blocked", loads.spec(requests_of(60, 8200, 2), model="mock?ttft_ms=20&itl_ms=60", concurrency=6))
    assert any("between a stream's end and the next send" in reason for reason in told["invalid_reasons"])
    client = told["client"]
    assert client["turnarounds"] == 54 and client["turnaround_p99_ms"] > client["turnaround_p50_ms"] > 4
    assert client["turnaround_share"] > 0.04
