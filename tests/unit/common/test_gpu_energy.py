"""The GPUs' energy counter: joules of all GPUs, and None wherever NVML does not tell."""

from __future__ import annotations

import pynvml
import pytest

from kvbench.common.foreign_cpu import MachineWatch, ServerProcess
from kvbench.common.machine import gpu_energy_j


@pytest.fixture
def nvml(monkeypatch):
    """An NVML with these counters [mJ], one a GPU; each reading adds 500 mJ a GPU."""

    def make(*counters: int, fails: bool = False, names: str = "same") -> None:
        used = list(counters)

        def read(index: int) -> int:
            if fails:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            used[index] += 500
            return used[index]

        for name, does in {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: len(used),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda index: names if names == "same" else names[index],
            "nvmlDeviceGetTotalEnergyConsumption": read,
        }.items():
            monkeypatch.setattr(pynvml, name, does)

    return make


@pytest.mark.parametrize(
    ("visible", "joules"), [("1", 2.5), ("1,0", 4.0), ("", 4.0), ("GPU-5f2e", 4.0), ("7", 4.0)]
)  # fmt: skip
def test_gpus_that_cuda_hides_are_not_counted(nvml, monkeypatch, visible, joules):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml(1_000, 2_000)
    assert gpu_energy_j() == joules


def test_of_unlike_gpus_the_numbers_count_only_where_cuda_has_nvmls_order(nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    nvml(1_000, 2_000, names="ab")
    assert gpu_energy_j() == 4.0
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert gpu_energy_j() == 3.0  # the third reading of the second GPU


def test_none_without_a_gpu_or_a_counter(nvml, monkeypatch):
    nvml()
    assert gpu_energy_j() is None
    nvml(1_000, fails=True)
    assert gpu_energy_j() is None

    def no_library() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_library)
    assert gpu_energy_j() is None


def test_a_load_is_charged_what_the_gpus_used_between_its_first_and_last_request(nvml):
    nvml(1_000, 1_000)
    watch = MachineWatch(ServerProcess(None))
    watch.on_phase("begin", 1)
    watch.on_phase("measured", 1)
    assert watch.report().gpu_energy_j == 1.0
    elsewhere = MachineWatch(ServerProcess(None, local=False))  # another machine's GPUs are not these
    elsewhere.on_phase("begin", 1)
    elsewhere.on_phase("measured", 1)
    assert elsewhere.report().gpu_energy_j is None
