"""A sweep and a load calibrate the client first: once, told in every result, and what it says makes loads invalid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbench.calibration import cache as module
from kvbench.calibration.calibrate import DEFAULT_ITL_MS, Calibration, CalibrationSettings
from tests.support.sweep_parts import Bench
from tests.unit.calibration.test_calibration import taken

WHY = "the load client does not keep up with the mock server"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[CalibrationSettings]:
    """What was asked for; the answer is that the client is good up to 4 streams."""
    asked: list[CalibrationSettings] = []

    def calibrate(settings: CalibrationSettings, attempts: int) -> Calibration:
        asked.append(settings)
        return taken(settings, () if settings.streams <= 4 else (WHY,))

    monkeypatch.setattr(module, "calibrate", calibrate)
    monkeypatch.setenv("KVBENCH_NO_CALIBRATION", "")
    return asked


def dones(folder: Path) -> dict[str, dict]:
    rows = [json.loads(p.read_text()) for p in folder.glob("cells/*/loads/*/done.json")]
    return {row["cell_id"].rsplit("-", 1)[-1]: row for row in rows}


def test_a_sweep_calibrates_once_per_setting_and_believes_it(tmp_path, measured) -> None:
    bench = Bench(tmp_path)
    path = bench.write(load={"concurrency": [2, 3, 6], "repeats": 1}, sweep={})
    done = bench.sweep(str(path), "--no-report")
    said, folder = done.stdout, bench.only_run()
    assert done.returncode == 4, said
    at_first = [s.streams for s in measured if s.itl_ms == DEFAULT_ITL_MS]
    assert sorted(at_first) == [4, 16]
    assert len(set(measured)) == len(measured) > len(at_first)  # the fake server sends more chunks a second than that
    loads = dones(folder)
    assert {name: row["calibration"]["settings"]["streams"] for name, row in loads.items()} == {
        "c2": 4,
        "c3": 4,
        "c6": 16,
    }
    assert WHY in loads["c6"]["invalid_reasons"] and f"loads of 16 streams will be invalid: {WHY}" in said
    assert not any(WHY in loads[name]["invalid_reasons"] for name in ("c2", "c3"))
    told = json.loads((folder / "manifest.json").read_text())["calibration"]
    assert told["left_out"] is False
    assert {c["settings"]["streams"] for c in told["measured"]} == {4, 16} and len(told["measured"]) == len(measured)
    for name, row in loads.items():
        settings, metrics = CalibrationSettings(**row["calibration"]["settings"]), row["metrics"]
        assert 1.26 * settings.events_per_s >= metrics["client"]["chunks"] / metrics["duration_s"], name
