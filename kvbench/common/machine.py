"""Describes this machine: processor, cores, memory, GPUs and their energy, versions; and which code runs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

import kvbench
from kvbench.common.cpu import cpu_model
from kvbench.common.git import git_state

BOOT_HEADER = "x-kvbench-boot"
"""Header of an answer whose chunks carry send times: the boot id of the machine that sent it (engine/boot.py)."""
_PACKAGES = ("torch", "triton", "transformers", "locust", "numpy", "numba", "gevent", "fastapi", "uvicorn", "pydantic")


def versions() -> dict[str, str | None]:
    """Installed versions, read from package metadata: torch need not be imported to know its version."""
    installed: dict[str, str | None] = {"kvbench": kvbench.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory in bytes, operating system."""
    return {
        "cpu": {
            "model": cpu_model(),
            "architecture": platform.machine(),
            "cores": usable_cores(),
            "cores_total": os.cpu_count(),
        },
        "memory_bytes": psutil.virtual_memory().total,
        "os": f"{platform.system()} {platform.release()}",
    }


def usable_cores() -> int:
    """Cores this process may run on (a container may have fewer than the machine)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> list[dict[str, str]]:
    """One row a GPU from nvidia-smi: name, memory, driver, clocks; empty without one."""
    fields = ("name", "memory.total", "driver_version", "clocks.sm", "clocks.mem", "power.limit")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def free_memory() -> int:
    """Bytes of this machine's memory that are free."""
    return int(psutil.virtual_memory().available)


def gpu_energy_j() -> float | None:
    """Returns joules of all GPUs that we may use, since the driver was loaded; None without NVML or a counter.

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
    """The GPUs that CUDA_VISIBLE_DEVICES numbers: a cell of a Ray cluster has some of the machine's GPUs for itself.

    All, where CUDA may number them otherwise than NVML: it puts the fastest first, unless it is told not to.
    """
    import pynvml

    kinds = {pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count)}
    ordered = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(kinds) < 2
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if ordered else [""]
    numbers = [int(name) for name in named if name.isdecimal() and int(name) < count]
    return numbers if len(numbers) == len(named) else range(count)


def environment() -> dict[str, Any]:
    """Code, versions and machine: what two parts of one run must share."""
    return {"git": git_state(), "versions": versions(), **machine(), "gpus": gpus()}


@lru_cache(maxsize=1)
def boot_id() -> str | None:
    """Identifies this boot of the kernel, within which processes share CLOCK_MONOTONIC. None if there is no such id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
    except OSError:
        return None
