"""Reads what the first GPU does over a part from NVML's counters, before and after it.

nvidia-smi beside a measured job would stop a busy GPU for 0.25 to 0.33 s.
"""

from __future__ import annotations

import time

Reading = dict[str, float]
NOW = ("sm_mhz", "memory_mhz", "celsius")  # the fields of a reading that are not counters


def read_state() -> Reading:
    """Reads clocks, temperature and counters of energy and throttling; without a GPU, only the time ``at`` [s].

    Counters are since the driver was loaded: energy [J], seconds in which power or heat held the clocks down. What the
    driver does not tell is left out.
    """
    state = {"at": time.monotonic()}
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # there is no such package, no driver, or no GPU
        return state
    ask = {
        "energy_j": lambda: 1e-3 * pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu),
        "throttled_by_power_s": lambda: 1e-9 * violation(pynvml.NVML_PERF_POLICY_POWER),
        "throttled_by_heat_s": lambda: 1e-9 * violation(pynvml.NVML_PERF_POLICY_THERMAL),
        "sm_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "memory_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
        "celsius": lambda: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
    }

    def violation(policy: int) -> int:
        return pynvml.nvmlDeviceGetViolationStatus(gpu, policy).violationTime

    try:
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        for name, read in ask.items():
            try:
                state[name] = read()
            except pynvml.NVMLError:
                continue
    except pynvml.NVMLError:
        return state
    finally:
        pynvml.nvmlShutdown()
    return state


def change(before: Reading, after: Reading) -> Reading:
    """Returns the mean power [W] and the seconds throttled between two readings, and the state at the end."""
    grown = {name: after[name] - before[name] for name in after if name in before and name not in NOW}
    seconds, joules = grown.pop("at"), grown.pop("energy_j", None)
    power = {"power_w": joules / seconds} if joules is not None and seconds > 0 else {}
    now = {name: after[name] for name in NOW if name in after}
    return {name: round(value, 3) for name, value in (power | grown | now).items()}
