"""What is made of a load that has ended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvbench.common.files import read_json
from kvbench.measure.http import judges_this_machine, read_metrics
from kvbench.measure.result import ServerReadings
from kvbench.metrics.model import LoadOutcome
from kvbench.targets.prometheus import MetricsSample
from tests.support.request_rows import frame, row


def counters(folder, readings: dict[float, float]) -> dict[str, float]:
    """counters.json of a load from 100.0 to 102.0 s of the process's clock; ``readings``: a gauge's, at these times."""
    frame(row(ts=0.0, t0=0.0, end=2.0)).to_parquet(folder / "requests.parquet")
    told = LoadOutcome(mode="closed", concurrency=1, zero_perf_counter=100.0)
    samples = [MetricsSample(at, {"running": n}, {}) for at, n in readings.items()]
    metrics = read_metrics(folder, SimpleNamespace(slo=None), told)
    ServerReadings(None, samples, None).store(folder, told, metrics)
    return read_json(folder / "counters.json")


def test_gauges_are_those_read_while_the_load_ran(tmp_path) -> None:
    """A warm-up before it and the next load's priming after it are none of its doing."""
    told = counters(tmp_path, {99.0: 50.0, 99.9: 40.0, 100.5: 2.0, 101.5: 4.0, 102.5: 60.0, 110.0: 70.0})
    assert told["running_peak"] == 4.0 and told["running_mean"] == pytest.approx(3.0)
    assert counters(tmp_path, {99.9: 3.0})["running_peak"] == 3.0  # of a load shorter than a reading: those nearby


@pytest.mark.parametrize(
    ("sends_here", "server_here", "workers_here", "judged"),
    [(True, False, True, True), (False, True, False, True), (False, False, False, False), (False, True, True, False)],
)
def test_a_machine_that_takes_no_part_in_a_load_is_not_judged(sends_here, server_here, workers_here, judged) -> None:
    assert judges_this_machine(sends_here, server_here, workers_here) == judged
