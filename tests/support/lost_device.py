"""The kernel checks of ci/gpu on a device that is lost in one case: from then on every call of that process fails.

That is what an illegal memory access does to a CUDA process.
"""

from __future__ import annotations

import os
from typing import Any

from ci.gpu import check_kernels, check_moves
from ci.gpu.part import Planned, Report
from kernels.reference import TorchBackend

LOST_IN = "fp8_e4m3, float32, page 16, D 32, group 2"
ERROR = (
    "CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call.\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
)


class Device:
    """``access`` stands before every use."""

    def __init__(self) -> None:
        self.lost = False

    def access(self) -> None:
        if self.lost:
            raise RuntimeError(ERROR)


DEVICE = Device()


class Backend(TorchBackend):
    """The reference, on that device."""

    def __getattribute__(self, name: str) -> Any:
        DEVICE.access()
        return super().__getattribute__(name)


class CASES(check_kernels.KernelChecks):
    """Five kernels and what comes last; the report also says which process a case ran in."""

    def __init__(self, args: Any):
        super().__init__(args)
        check_kernels.get_backend = check_moves.get_backend = lambda name: Backend()

    def plan(self) -> list[Planned]:
        whole = super().plan()
        return [*whole[:5], whole[-1]]

    def run(self, name: str, report: Report) -> None:
        report.put(**{f"process of {name}": os.getpid()})
        DEVICE.lost = DEVICE.lost or name == LOST_IN
        super().run(name, report)
