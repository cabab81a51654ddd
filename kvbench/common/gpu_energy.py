"""The energy that this machine's GPUs have used, from NVML's own counter."""

from __future__ import annotations

import os
from collections.abc import Iterable


def gpu_energy_j() -> float | None:
    """Joules since the driver was loaded, over all GPUs that we may use; None without NVML, a GPU, or the counter.

    GPUs before Volta have no counter.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in _usable(pynvml.nvmlDeviceGetCount())]
        used = [pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles]  # mJ
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    return sum(used) / 1000 if used else None


def _usable(count: int) -> Iterable[int]:
    """Those that CUDA_VISIBLE_DEVICES numbers: a cell of a Ray cluster has some of the machine's GPUs for itself.

    All, where CUDA may number them otherwise than NVML: it puts the fastest first, unless it is told not to.
    """
    ordered = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or _are_alike(count)
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if ordered else [""]
    numbers = [int(name) for name in named if name.isdecimal() and int(name) < count]
    return numbers if len(numbers) == len(named) else range(count)


def _are_alike(count: int) -> bool:
    import pynvml

    return len({pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count)}) < 2
