"""What every benchmark records: the device, and how much CPU time other processes used."""

from __future__ import annotations

import platform

import pytest
import torch

from kvbench.common.foreign_cpu import ForeignWatch


@pytest.fixture(autouse=True)
def conditions(request):
    """``device`` and ``foreign_cpu_cores`` in ``extra_info``."""
    if "benchmark" not in request.fixturenames:
        yield
        return
    benchmark = request.getfixturevalue("benchmark")
    benchmark.extra_info["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    watch = ForeignWatch()
    yield
    benchmark.extra_info.update(watch.report())


def pytest_benchmark_update_machine_info(config, machine_info):
    """Results may be shown around: no host name."""
    machine_info["node"] = platform.machine()
