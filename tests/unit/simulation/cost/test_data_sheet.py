"""The cost model of a data sheet against closed formulas, and against measured operator times."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvbench.capacity.gpus import find_gpu, known_gpus
from kvbench.capacity.model import plan_model
from kvbench.common.errors import UsageError
from kvbench.simulation.cost.cost_model import CostCalibration
from kvbench.simulation.cost.machine import Machine
from kvbench.simulation.cost.tables import find_tables, read_tables
from kvbench_engine.config import EngineConfig
from kvbench_engine.execution.simulated_executor import StepWork

SHARED = Path(__file__).resolve().parents[5] / "shared" / "gpu_measured"
MEASURED = Path(os.environ.get("KVBENCH_GPU_MEASURED", SHARED))
NAMED = ("A100-40GB", "A100-80GB", "H100", "H200", "L4", "L40S", "RTX-4090", "RTX-PRO-6000", "B200", "MI300X")


def timer(model, gpu, gpus=1, calibration=None, **settings):
    machine = Machine(plan_model(model), find_gpu(gpu), gpus, calibration=calibration)
    return machine.step_timer(EngineConfig.from_mapping({"model": "any", **settings}))


def classes(model, gpu, work, *more, **settings):
    cost = timer(model, gpu, *more, **settings)
    return cost(work), cost.seconds


@pytest.mark.parametrize("name", NAMED)
def test_every_promised_device_can_be_simulated(name):
    performance = find_gpu(name).performance
    assert performance is not None and performance.fp8_flops >= performance.bf16_flops
    shares = (performance.gemm, performance.memory, performance.decode, performance.prefill)
    assert all(0.3 < share <= 1 for share in shares) and performance.mixed_decode >= 1


def test_a_device_of_unknown_speed_is_refused_with_those_that_are_known():
    with pytest.raises(UsageError, match=r"T4.*H200"):
        Machine(plan_model("llama-3.1-8b"), find_gpu("T4"))
    assert sum(gpu.performance is not None for gpu in known_gpus()) >= len(NAMED)


def test_one_token_reads_the_weights_and_many_use_the_flops():
    """Llama-3.1-8B: 6.98e9 parameters in its layers' matrices, 4096 x 128,256 in its head."""
    layers = 32 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336)
    _, seconds = classes("llama-3.1-8b", "H100", StepWork((), 1, 1000, 1000, 1))
    assert seconds["gemm"] == pytest.approx(2 * layers / (0.8 * 3350e9), rel=0.001)
    assert seconds["head"] == pytest.approx(2 * 4096 * 128256 / (0.8 * 3350e9), rel=0.1)
    _, seconds = classes("llama-3.1-8b", "H100", StepWork(((8192, 0),), 0, 0, 0, 1))
    assert seconds["gemm"] == pytest.approx(2 * 8192 * layers / (0.803 * 989e12), rel=0.01)
    pairs = 4 * 8192**2 / 2 * 4096 * 32
    assert seconds["attention"] == pytest.approx(pairs / (0.46 * 989e12), rel=0.1)


def test_decode_reads_the_kv_in_its_own_dtype():
    work = StepWork((), 64, 64 * 8000, 8000, 64)
    _, plain = classes("llama-3.1-8b", "H100", work)
    assert plain["attention"] == pytest.approx(64 * 8000 * 131072 / (0.83 * 3350e9), rel=0.02)
    _, quantised = classes("llama-3.1-8b", "H100", work, kv_cache_dtype="fp8")
    assert quantised["attention"] == pytest.approx(plain["attention"] / 2, rel=0.02)
    assert quantised["gemm"] == plain["gemm"]


def test_gpus_share_the_work_and_pay_for_the_exchange():
    work = StepWork((), 32, 32 * 1000, 1000, 32)
    _, one = classes("llama-3.1-70b", "B200", work)
    _, four = classes("llama-3.1-70b", "B200", work, 4)
    assert four["gemm"] == pytest.approx(one["gemm"] / 4) and not one["all_reduce"]
    sent = 2 * 3 / 4 * 32 * 8192 * 2 / 811e9
    assert four["all_reduce"] == pytest.approx(160 * (10e-6 + sent))
    _, slower = classes("llama-3.1-70b", "B200", work, 4, CostCalibration(all_reduce_s=20e-6))
    assert slower["all_reduce"] == pytest.approx(160 * (20e-6 + sent))


def test_swaps_go_over_the_host_link_and_copies_within_the_memory():
    taken, seconds = classes("llama-3.1-8b", "H100", StepWork((), 0, 0, 0, 0, 16, 32, 8))
    assert taken.move == seconds["move"] == pytest.approx(131072 * (40 / 50e9 + 2 * 16 / 3350e9))
    assert taken.execute == 0


def test_a_calibration_adds_and_scales():
    work = StepWork(((100, 0),), 3, 3000, 1000, 4)
    plain, _ = classes("llama-3.1-8b", "H100", work, 1, CostCalibration())
    expected = CostCalibration(host_s=1e-3, host_per_sequence_s=1e-5, prompt_layer_s=1e-4, kernels=1.5)
    taken, seconds = classes("llama-3.1-8b", "H100", work, 1, expected)
    assert taken.schedule == pytest.approx(1.04e-3) and seconds["launches"] == pytest.approx(32e-4)
    assert taken.total == pytest.approx(1.5 * plain.total + 1.04e-3 + 32e-4)
    decode, _ = classes("llama-3.1-8b", "H100", StepWork((), 3, 3000, 1000, 3), 1, CostCalibration(prompt_layer_s=1e-4))
    assert decode.total < plain.total


def test_a_model_that_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(UsageError, match=r"llama-3.1-70b.*131\.\d GiB.*71\.\d GiB"):
        Machine(plan_model("llama-3.1-70b"), find_gpu("H100")).settle({})


@pytest.mark.skipif(not MEASURED.is_dir(), reason=f"needs measured operator times in {MEASURED}")
@pytest.mark.parametrize(
    ("gpu", "model", "gpus"),
    [
        ("RTX-4090", "llama-3.1-8b", 1),
        ("RTX-PRO-6000", "llama-3.1-8b", 1),
        ("RTX-PRO-6000", "Qwen3-32B", 2),
        ("RTX-PRO-6000", "Qwen3-30B-A3B-Instruct-2507", 1),
    ],
)
def test_the_data_sheet_is_near_the_measured_operators(gpu, model, gpus):
    planned = plan_model(model)
    tables = read_tables(find_tables(MEASURED / "ops", gpu, planned.name, gpus))
    sheet = Machine(planned, find_gpu(gpu), gpus, calibration=CostCalibration())
    measured = Machine(planned, find_gpu(gpu), gpus, tables, CostCalibration())
    config = EngineConfig.from_mapping({"model": "any"})
    for work, within in (
        (StepWork((), 1, 1000, 1000, 1), 0.15),
        (StepWork((), 32, 32 * 1000, 1000, 32), 0.15),
        (StepWork((), 128, 128 * 1000, 1000, 128), 0.15),
        (StepWork(((512, 0),), 32, 32 * 1000, 1000, 33), 0.2),
        (StepWork(((2048, 0),), 0, 0, 0, 1), 0.15),
    ):
        seconds = [sum(machine.step_timer(config).kernels(work)) for machine in (sheet, measured)]
        assert seconds[0] == pytest.approx(seconds[1], rel=within)
