"""The energy that this machine's GPUs have used, from NVML's own counter."""

from __future__ import annotations


def gpu_energy_j() -> float | None:
    """Joules since the driver was loaded, over all GPUs; None without NVML, a GPU, or the counter (before Volta)."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        used = [pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles]  # mJ
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    return sum(used) / 1000 if used else None
