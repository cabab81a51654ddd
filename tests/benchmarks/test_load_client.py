"""How well the load client measures: against the mock server, which notes when it sent each chunk.

In full mode a figure over its bar (``bench_bars.py``) fails, once another program cannot have been the reason for
all of ``ATTEMPTS``.
"""

from __future__ import annotations

import dataclasses

import pytest
from bench_timing import MODE, choose, note

from kvbench.calibration.calibrate import CalibrationSettings, aims, calibrate
from kvbench.common.machine import usable_cores
from tests.benchmarks.bench_bars import missed

CASES = choose(full=[(64, 1), (256, 1), (256, 4)], quick=[(64, 1)], smoke=[(8, 1)])
SECONDS = choose(full=10.0, quick=5.0, smoke=1.0)
ATTEMPTS = choose(full=3, quick=1, smoke=1)
CORES_A_PROCESS = 2  # the mock server and the machine's own work want some, too


@pytest.mark.parametrize(("streams", "processes"), CASES)
def test_load_client(benchmark, streams: int, processes: int) -> None:
    cores = usable_cores()
    if processes > 1 and cores < processes * CORES_A_PROCESS:
        pytest.skip(f"{processes} load processes need {processes * CORES_A_PROCESS} cores, here are {cores}")
    benchmark.group = "load client against the mock server, a chunk every 20 ms on each stream"
    settings = CalibrationSettings(streams, itl_ms=20.0, processes=processes, seconds=SECONDS)
    calibration = benchmark.pedantic(calibrate, args=(settings, aims(settings), ATTEMPTS), rounds=1)
    figures = dataclasses.asdict(calibration.figures)
    lost = ("events_lost", "requests_lost", "requests_repeated", "faults_counted", "whole_failed")
    assert not [name for name in lost if figures[name]]
    shown = {"coalesced_pct": figures["coalesced_share"] * 100}
    for name in ("lag_p50_ms", "lag_p99_ms", "itl_error_p99_ms", "cpu_us_per_event", "loop_lag_p99_ms",
                 "server_late_p99_ms", "turnaround_p50_ms", "events"):  # fmt: skip
        shown[name] = figures[name]
    note(benchmark, **shown)
    if MODE == "full":
        assert missed("test_load_client", {"streams": streams, "processes": processes}, shown) == []
