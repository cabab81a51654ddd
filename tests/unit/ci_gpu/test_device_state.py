"""The GPU's power, throttling and clocks over a part, from NVML's counters."""

from __future__ import annotations

import sys
import types

import pytest

from ci.gpu import device_state


@pytest.fixture
def nvml(monkeypatch):
    """A library like pynvml that tells of one GPU; its counters may be set, and a clock is not known to the driver."""
    module = types.SimpleNamespace(
        NVMLError=type("NVMLError", (Exception,), {}), NVML_PERF_POLICY_POWER=0, NVML_PERF_POLICY_THERMAL=1,
        NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0, open=0, millijoules=5_000,
        nanoseconds=[2 * 10**9, 0],
    )  # fmt: skip

    def clock(gpu, kind):
        if kind == module.NVML_CLOCK_MEM:
            raise module.NVMLError("Not Supported")
        return 1980

    def opened(by):
        module.open += by

    module.nvmlInit, module.nvmlShutdown = lambda: opened(1), lambda: opened(-1)
    module.nvmlDeviceGetHandleByIndex = lambda index: f"GPU {index}"
    module.nvmlDeviceGetTotalEnergyConsumption = lambda gpu: module.millijoules
    module.nvmlDeviceGetViolationStatus = lambda gpu, policy: types.SimpleNamespace(
        violationTime=module.nanoseconds[policy]
    )
    module.nvmlDeviceGetClockInfo, module.nvmlDeviceGetTemperature = clock, lambda gpu, sensor: 61
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_power_is_energy_over_time_and_throttling_what_the_counters_grew(nvml, monkeypatch):
    now = iter((100.0, 104.0))
    monkeypatch.setattr(device_state.time, "monotonic", lambda: next(now))
    before = device_state.read_state()
    nvml.millijoules, nvml.nanoseconds = 5_000 + 4 * 600_000, [2_500_000_000, 0]
    assert device_state.change(before, device_state.read_state()) == {
        "power_w": 600.0, "throttled_by_power_s": 0.5, "throttled_by_heat_s": 0.0, "sm_mhz": 1980, "celsius": 61
    }  # fmt: skip
    assert nvml.open == 0


def test_a_machine_without_a_gpu_tells_nothing(nvml):
    def refuse(*_):
        raise nvml.NVMLError("no device")

    nvml.nvmlDeviceGetHandleByIndex = refuse
    assert device_state.change(device_state.read_state(), device_state.read_state()) == {}
    nvml.nvmlInit = refuse
    assert device_state.change(device_state.read_state(), device_state.read_state()) == {}
    assert nvml.open == 0
