"""Calibrations: known ones are found again from simulated runs and logs; files that are none are refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest

from kvbench.capacity.gpus import find_gpu
from kvbench.capacity.model import plan_model
from kvbench.common.errors import UsageError
from kvbench.simulation.calibrate.calibration import errors, fit_run, fit_steps, logged_work, read_step_log
from kvbench.simulation.calibrate.measured_run import predict, read_measured_run, series_errors
from kvbench.simulation.cost.cost_model import CostCalibration, read_calibration, write_calibration
from kvbench.simulation.cost.machine import Machine
from kvbench_engine.execution.simulated_executor import StepWork

MACHINE = Machine(plan_model("Qwen3-32B"), find_gpu("H100"), 2, calibration=CostCalibration())
SETTINGS = {"max_num_seqs": 16, "max_num_batched_tokens": 1024, "max_model_len": 4096}


def written(folder, expected, *, requests=100, stamps=True):
    """A run folder as vLLM's engine would have stamped it, had it taken as long as ``known`` says."""
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(0.1, requests))
    lengths = [(int(rng.integers(50, 900)), int(rng.integers(5, 60))) for _ in range(requests)]

    def rows(first=1.0, last=2.0, scheduled=0.5):
        stamps = [np.broadcast_to(one, requests).tolist() for one in (scheduled, first, last)]
        names = ("input_toks", "output_toks", "arrival_time", "queued_ts", "scheduled_ts", "first_token_ts",
                 "last_token_ts")  # fmt: skip
        columns = zip(lengths, (1e9 + arrivals).tolist(), *stamps, strict=True)
        return [dict(zip(names, (*both, at, 50.0, *rest), strict=True)) for both, at, *rest in columns]

    def save(content):
        (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))

    folder.mkdir(exist_ok=True)
    meta = {"model": "Qwen/Qwen3-32B", "engine_kwargs": {**SETTINGS, "tensor_parallel_size": 2}}
    (folder / "meta.json").write_text(json.dumps(meta))
    save(rows())
    made = predict(read_measured_run(folder), dataclasses.replace(MACHINE, calibration=expected))
    outputs = np.array([o for _, o in lengths])
    first = 50.0 + made.ttft
    content = rows(first, first + made.tpot * (outputs - 1), first - made.prefill)
    save(content if stamps else [{k: v for k, v in row.items() if k != "scheduled_ts"} for row in content])
    made.series.iloc[::5].to_csv(folder / "timeseries.csv", index=False)
    return read_measured_run(folder)


@pytest.mark.parametrize("stamps", [True, False])
def test_known_values_are_found_again_and_predict_the_run(tmp_path, stamps):
    expected = CostCalibration(prompt_layer_s=120e-6, all_reduce_s=24e-6)
    run = written(tmp_path / "run", expected, stamps=stamps)
    actual = fit_run(run, MACHINE, ["prompt_layer_s", "all_reduce_s"])
    assert actual.prompt_layer_s == pytest.approx(expected.prompt_layer_s, rel=0.15)
    assert actual.all_reduce_s == pytest.approx(expected.all_reduce_s, rel=0.15)
    before = errors(run, predict(run, MACHINE))
    predicted = predict(run, dataclasses.replace(MACHINE, calibration=actual))
    after = errors(run, predicted)
    assert abs(before["tpot_mean"]) > 0.05 and all(abs(value) < 0.03 for value in after.values())
    near = series_errors(run, predicted)
    assert near["running"] < 0.5 and near["kv_cache_pct"] < 0.5


def test_a_load_that_a_client_measured_gives_the_launches_back(tmp_path):
    """Its TTFT counts from the arrival, with the wait for the step in which the engine sees the request."""
    expected = CostCalibration(prompt_layer_s=150e-6)
    run = dataclasses.replace(written(tmp_path / "run", expected), from_arrival=True)
    made = predict(run, dataclasses.replace(MACHINE, calibration=expected))
    rows = [
        {"t0": spec.arrival_s, "prompt_tokens": len(spec.prompt_token_ids), "output_tokens": spec.max_tokens,
         "chunk_times": spec.arrival_s + first + gap * np.arange(spec.max_tokens)}
        for spec, first, gap in zip(run.requests, made.ttft, made.tpot, strict=True)
    ]  # fmt: skip
    (tmp_path / "load").mkdir()
    pd.DataFrame(rows).to_parquet(tmp_path / "load" / "requests.parquet")
    load = read_measured_run(tmp_path / "load")
    load = dataclasses.replace(load, settings=SETTINGS)
    assert fit_run(load, MACHINE, ["prompt_layer_s"]).prompt_layer_s == pytest.approx(150e-6, rel=0.2)
    exact = predict(load, dataclasses.replace(MACHINE, calibration=expected))
    assert exact.ttft == pytest.approx(load.ttft) and exact.tpot == pytest.approx(load.tpot)


def test_a_step_log_gives_the_host_time_and_launches_back(tmp_path):
    expected = CostCalibration(host_s=2e-3, prompt_layer_s=150e-6)
    config, _ = MACHINE.settle(SETTINGS)
    timer = dataclasses.replace(MACHINE, calibration=expected).step_timer(config)
    rng, now, rows = np.random.default_rng(0), 5.0, []
    for step in range(120):
        prompt, decodes = (int(rng.integers(100, 1000)) if step % 4 == 0 else 0), int(rng.integers(1, 17))
        row = {"prefill_tokens": prompt, "decode_tokens": decodes, "running": 16, "waiting": 0,
               "kv_slots_used": prompt + decodes * int(rng.integers(200, 3000))}  # fmt: skip
        taken = timer(logged_work(row["prefill_tokens"], row["decode_tokens"], row["kv_slots_used"])).total
        now += taken * (1 + rng.normal(0, 0.01)) + (0.5 if step in (30, 31) else 0)  # two interruptions
        rows.append({"time_s": now, **row})
    path = tmp_path / "steps.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    actual = fit_steps(read_step_log(path), MACHINE, SETTINGS, ["host_s", "prompt_layer_s"])
    held_out = actual.provenance.held_out_last_third
    assert actual.host_s == pytest.approx(expected.host_s, rel=0.1)
    assert actual.prompt_layer_s == pytest.approx(expected.prompt_layer_s, rel=0.1)
    assert abs(held_out["total"]) < 0.02 and held_out["median_step"] < 0.02 and held_out["steps"] == 40


def test_a_calibration_survives_its_file(tmp_path):
    expected = CostCalibration(host_s=1e-3, prompt_layer_s=2e-4, kernels=1.1, provenance={"run": "x"})
    write_calibration(tmp_path / "c.json", expected)
    assert read_calibration(tmp_path / "c.json") == expected


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 2}', '{"format": 1, "host": 1}', '{"format": 1, "host_s": -1}']
)
def test_what_is_no_calibration_is_refused(tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(UsageError, match=r"c\.json"):
        read_calibration(tmp_path / "c.json")


@pytest.mark.parametrize(
    "line", ["{", '{"input_toks": 3}', '{"input_toks": 0, "output_toks": 1, "queued_ts": 1, "first_token_ts": 1, '
             '"last_token_ts": 1}']
)  # fmt: skip
def test_a_broken_line_of_a_run_is_named(tmp_path, line):
    (tmp_path / "requests.jsonl").write_text("\n" + line)
    with pytest.raises(UsageError, match="line 2"):
        read_measured_run(tmp_path)
    with pytest.raises(UsageError, match=r"requests\.jsonl"):
        read_measured_run(tmp_path / "nothing")


def test_a_logged_steps_decodes_read_what_the_kv_holds_beside_its_prompt():
    assert logged_work(100, 4, 502) == StepWork(((100, 0),), 4, 402, 101, 5)
    assert logged_work(100, 0, 502) == StepWork(((100, 0),), 0, 0, 0, 1)
