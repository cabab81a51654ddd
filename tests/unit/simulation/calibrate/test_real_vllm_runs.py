"""Real vLLM on two GPUs: calibrated on one run, the simulator predicts the other, from its GPU's operator tables."""

from __future__ import annotations

import dataclasses
import os
from functools import cache
from pathlib import Path

import pytest

from kvbench.capacity.gpus import find_gpu
from kvbench.capacity.model import plan_model
from kvbench.simulation.calibrate.calibration import errors, fit_run, fitted_by_default
from kvbench.simulation.calibrate.measured_run import machine_for, predict, read_measured_run, series_errors
from kvbench.simulation.cost.cost_model import CostCalibration
from kvbench.simulation.cost.machine import Machine
from kvbench.simulation.cost.tables import find_tables, read_tables

SHARED = Path(__file__).resolve().parents[5] / "shared" / "gpu_measured"
MEASURED = Path(os.environ.get("KVBENCH_GPU_MEASURED", SHARED))
GPUS = ("RTX4090", "RTXPRO6000")
LIMITS = {"ttft_mean": 0.10, "tpot_mean": 0.05, "ttft_p95": 0.15, "tpot_p95": 0.15}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not MEASURED.is_dir(), reason=f"needs the measured runs in {MEASURED}"),
]


@cache
def measured(gpu):
    run = read_measured_run(MEASURED / "runs" / gpu / "Llama-3.1-8B")
    device, model, gpus = machine_for(run, None, None, None)
    planned = plan_model(model)
    tables = read_tables(find_tables(MEASURED / "ops", device, planned.name, gpus))
    return run, Machine(planned, find_gpu(device), gpus, tables)


@pytest.mark.parametrize(("on", "other"), [GPUS, GPUS[::-1]])
def test_calibrated_on_one_run_the_other_is_predicted(on, other):
    run, machine = measured(on)
    expected = fit_run(run, machine, fitted_by_default(machine, run))
    run, machine = measured(other)
    predicted = predict(run, dataclasses.replace(machine, calibration=expected))
    actual = errors(run, predicted)
    assert all(abs(actual[name]) <= limit for name, limit in LIMITS.items()), actual
    near = series_errors(run, predicted)
    assert near["running"] < 3 and near.get("kv_cache_pct", 0) < 4
    plain = errors(run, predict(run, dataclasses.replace(machine, calibration=CostCalibration())))
    assert all(abs(plain[name]) <= limit for name, limit in LIMITS.items()), plain
