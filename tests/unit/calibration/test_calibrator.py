"""Which calibration a load is given, when it is measured, and which are used again."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvbench.calibration import calibrate as chooser
from kvbench.calibration.calibrate import (
    DEFAULT_ITL_MS,
    Attempt,
    CalibrationSettings,
    Calibrator,
    ClientCalibration,
    ClientLoad,
    settings_for,
)
from kvbench.measure.http import recalibrated
from kvbench.measure.instrument import Clients
from kvbench.metrics.model import LoadMetrics, LoadOutcome
from tests.unit.calibration.test_calibration import GOOD, taken


@pytest.mark.parametrize("each", [1, 4, 5, 64, 65, 256, 257, 1000, 1500, 8192])
@pytest.mark.parametrize("processes", [1, 2, 7])
@pytest.mark.parametrize("rate", [None, 10.0, 9_000.0, 32_000.0])
def test_settings_ask_for_no_less_than_the_load_did(each: int, processes: int, rate: float | None) -> None:
    demand = ClientLoad(each * processes, processes, rate)
    settings = settings_for(demand)
    if demand.streams <= 8192:
        assert settings.streams >= demand.streams
        assert demand.covered_by(settings)
    assert settings.processes == processes
    least = max(500.0, min(settings.streams, 256 * processes) * 50)
    assert settings.events_per_s <= max(least * 1.0001, 1.42 * (rate or 0.0) / 1.25)


def test_settings_are_few() -> None:
    assert {settings_for(ClientLoad(n)).streams for n in range(1, 1001)} == {4, 16, 32, 64, 256, 512, 1024}
    assert {settings_for(ClientLoad(n)).itl_ms for n in range(5, 257)} == {DEFAULT_ITL_MS}
    assert {settings_for(ClientLoad(3, 1, rate)) for rate in (None, 150.0, 400.0)} == {CalibrationSettings(4, 8.0)}
    assert settings_for(ClientLoad(100, 2)) == CalibrationSettings(128, DEFAULT_ITL_MS, 2)
    rates = {settings_for(ClientLoad(64, 1, rate)).itl_ms for rate in np.geomspace(3_200, 32_000, 500)}
    assert len(rates) <= 9


Asked = tuple[CalibrationSettings, int]


class FakeMachine:
    """In place of measuring: what was asked for, and what comes out, which a test sets."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.reasons: tuple[str, ...] = ()

    def __call__(self, settings: CalibrationSettings, limits: object = None, attempts: int = 3) -> ClientCalibration:
        self.asked.append((settings, attempts))
        return taken(settings, self.reasons)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    there = FakeMachine()
    monkeypatch.setattr(chooser, "calibrate", there)
    return there


def test_measured_once_per_settings_and_kept_in_the_folder(tmp_path, machine, monkeypatch) -> None:
    said: list[str] = []
    calibrator = Calibrator(tmp_path, say=said.append)
    for streams in (3, 4, 1, 60):
        assert calibrator(ClientLoad(streams)).reasons == ()
    assert [(s.streams, n) for s, n in machine.asked] == [(4, 3), (64, 3)] and len(said) == 2
    assert [c["settings"]["streams"] for c in calibrator.facts()["measured"]] == [4, 64]
    assert Calibrator(tmp_path)(ClientLoad(4)) == taken(settings_for(ClientLoad(4)))  # another process: --resume
    assert len(machine.asked) == 2
    Calibrator(tmp_path)(ClientLoad(4, tls=True))
    assert len(machine.asked) == 3
    monkeypatch.setattr(chooser, "machine_key", lambda: "another machine")
    Calibrator(tmp_path)(ClientLoad(4))
    assert len(machine.asked) == 4
    (tmp_path / chooser.FILE).write_text('[{"settings": {"colour": "blue"}}]')  # of another version
    assert Calibrator(tmp_path)(ClientLoad(4)).figures == GOOD and len(machine.asked) == 5


def test_one_that_failed_is_told_at_once_and_tried_again(tmp_path, machine) -> None:
    """Else whoever follows its advice, a free core, would find all further loads invalid all the same."""
    said: list[str] = []
    calibrator = Calibrator(tmp_path, warn=said.append)
    machine.reasons = ("too busy.",)
    assert calibrator(ClientLoad(4)).reasons == ("too busy.",)
    assert said == ["loads of 4 streams will be invalid: too busy."]
    assert calibrator(ClientLoad(4)).reasons == ("too busy.",)
    assert [n for _, n in machine.asked] == [3, 1]  # three attempts at first, then one before each load
    assert [list(c["reasons"]) for c in calibrator.facts()["measured"]] == [["too busy."]]
    machine.reasons = ()
    resumed = Calibrator(tmp_path)
    assert resumed(ClientLoad(4)).reasons == () == resumed(ClientLoad(4)).reasons
    assert len(machine.asked) == 3
    assert [list(c["reasons"]) for c in resumed.facts()["measured"]] == [["too busy."], []]


def test_what_disturbed_a_calibration_that_failed_is_told(tmp_path, machine, monkeypatch) -> None:
    said: list[str] = []
    disturbed = Attempt(GOOD, ("too busy.",), foreign_cpu_cores=0.85)
    failed = dataclasses.replace(taken(settings_for(ClientLoad(4)), ("too busy.",)), attempts=(disturbed, disturbed))
    monkeypatch.setattr(chooser, "calibrate", lambda settings, attempts: failed)
    Calibrator(tmp_path, warn=said.append)(ClientLoad(4))
    assert len(said) == 2 and "other processes used 0.85 of a core" in said[1]


def test_a_load_that_asked_for_more_than_was_calibrated_is_calibrated_as_it_was(tmp_path, machine) -> None:
    said: list[str] = []
    calibrator = Calibrator(tmp_path, say=said.append)
    before = calibrator(ClientLoad(64))
    for enough in (ClientLoad(3, 1, 10.0), ClientLoad(64, 1, 3_900.0)):
        assert calibrator(enough, before) is before
    assert len(machine.asked) == 1
    faster, more = calibrator(ClientLoad(64, 1, 32_000.0), before), calibrator(ClientLoad(1500, 1, 1000.0), before)
    assert faster.settings.streams == 64 and faster.settings.itl_ms <= 2.5
    assert more.settings.streams == 2048 and more.reasons == ()
    assert said[0].startswith("calibrating the load client at 64 streams of 20 ms ITL (about")
    why = "calibrating the load client again, as the load needed more than expected, at"
    assert said[1].startswith(f"{why} 64 streams of") and said[2].startswith(f"{why} 2048 streams of")
    too_many = calibrator(ClientLoad(9000), before)
    assert "up to 9000 streams at once, and the client can be calibrated at 8192 at most" in too_many.reasons[0]


def test_none_is_begun_without_the_time_for_it_but_the_one_that_judges_what_is_measured(tmp_path, machine) -> None:
    seconds_left = 100.0

    def check(seconds: float) -> None:
        if seconds > seconds_left:
            raise TimeoutError

    calibrator = Calibrator(tmp_path, check=check)
    before = calibrator(ClientLoad(4))
    seconds_left = settings_for(ClientLoad(64)).seconds
    with pytest.raises(TimeoutError):
        calibrator(ClientLoad(64))
    assert calibrator(ClientLoad(4)) == before and len(machine.asked) == 1  # it takes no time
    assert calibrator(ClientLoad(64, 1, 32_000.0), before).reasons == ()


def test_what_a_load_asked_for_is_its_busiest_second() -> None:
    asked = []
    target = SimpleNamespace(base_url="http://h")
    server = SimpleNamespace(target=target, load=None)
    clients = Clients({"processes": 1})
    job = SimpleNamespace(clients=clients, calibrate=lambda demand, before: asked.append(demand))
    for client in (
        {"chunks": 165_000, "chunks_of_busiest_second": 32_000},  # 5 s of a storm in 100 s
        {"chunks": 165_000, "chunks_of_busiest_second": 1_000},
        {"chunks": 0, "chunks_of_busiest_second": 0},
    ):
        outcome = LoadOutcome(client=client, max_in_flight=64)
        recalibrated(job, server, object(), outcome, LoadMetrics(duration_s=100.0))
    assert [each.events_per_s for each in asked] == [32_000, 1650, None]


def test_what_is_not_wanted_is_not_measured_and_said(tmp_path, machine) -> None:
    calibrator = Calibrator(tmp_path, wanted=False)
    assert calibrator(ClientLoad(64)) is None
    assert machine.asked == [] and calibrator.facts() == {"left_out": True, "measured": []}


def test_a_dropped_stream_is_no_request_that_was_sent_again(tmp_path: Path) -> None:
    """A kept connection that a server closes at once may have crossed with the request, which is then sent again."""
    words = ("--streams", "4", "--itl-ms", "3.5", "--seconds", "1", "--attempts", "1", "--json", str(tmp_path / "out"))
    command = [sys.executable, "-m", "kvbench", "dev", "calibrate-client", *words]  # a client that is not forked
    subprocess.run(command, capture_output=True, timeout=120, check=False)
    figures = json.loads((tmp_path / "out").read_text())["figures"]
    assert (figures["requests_repeated"], figures["requests_lost"]) == (0, 0) and figures["faults"] > 0
