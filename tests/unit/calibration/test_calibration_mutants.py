"""A client that is broken in one way must be caught by the calibration, for the right reason.

What is lost on the way is counted in test_calibration.py.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
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
    "secretly retrying": "1 requests were sent again",
}


SLOWER = [pytest.param(name, marks=pytest.mark.full) for name in ("early", "stampless", "tardy")]


@pytest.fixture(scope="module")
def calibrated() -> Iterator[Callable[[str], ClientCalibration]]:
    """The calibration of a mutant, or of the sound client run in the same way ("none"); each is made once."""
    launch, running = processes.launch, []

    def launch_mutant(command, **options):
        if "kvbench.load" not in command:
            return launch(command, **options)
        at = command.index("kvbench.load")
        return launch([*command[: at - 1], str(SUPPORT / "mutant_load.py"), *running, *command[at + 1 :]], **options)

    @functools.cache
    def taken(name: str) -> ClientCalibration:
        running[:] = [name]
        return calibrate(SETTINGS, attempts=3 if name == "none" else 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "launch", launch_mutant)
        yield taken


def test_the_sound_client_is_within_the_limits(calibrated) -> None:
    sound = calibrated("none")
    assert sound.reasons == () or all(each.disturbed for each in sound.attempts)  # of a machine that others use
    figures = sound.figures
    assert figures.events_lost == figures.requests_lost == figures.faults_counted == figures.whole_failed == 0
    assert figures.requests == 32 and figures.faults == 3 and figures.events > 400
    assert 0 < figures.lag_p50_ms < figures.lag_p99_ms
    assert figures.cpu_us_per_event > 1
    assert figures.unstamped_share < 0.01
    if Path("/proc/stat").exists():
        assert all(each.foreign_cpu_cores >= 0 <= each.steal_share for each in sound.attempts)


@pytest.mark.full
@pytest.mark.parametrize("name", ["slow", "secretly retrying", *SLOWER])
def test_a_broken_client_is_caught(calibrated, name: str) -> None:
    """The same reason has several causes: the figures tell them apart."""
    found = calibrated(name)
    reasons = " ".join(found.reasons)
    assert CAUGHT[name] in reasons and "at 16 streams of 20 ms ITL" in reasons
    assert name != "early" or found.figures.lag_p50_ms < -1
    assert name != "stampless" or found.figures.unstamped_share == 1.0
    assert name != "secretly retrying" or found.figures.faults_counted == 0  # the second try was served whole


def load_of(mutant: str, spec: Path) -> dict:
    """load.json of a load with that client."""
    command = [sys.executable, str(SUPPORT / "mutant_load.py"), mutant, str(spec)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=120)
    return json.loads((spec.parent / "load.json").read_text())


@pytest.mark.full
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
