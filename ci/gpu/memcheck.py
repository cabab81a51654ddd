"""Part ``memcheck``: kernel cases under compute-sanitizer's memcheck, where that tool is there.

The processes run under the tool (``--wrapper``). Each tensor has an allocation of its own, since an access beyond one
tensor that ends in another of torch's cached blocks would go unseen. Lengths are those of the tiny cases: everything is
many times slower here.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # read at torch's first allocation

from ci.gpu.check_kernels import keep, run_case
from ci.gpu.kernel_problems import CONTIGUOUS, KernelProblem
from ci.gpu.part import Planned, Report

CASES_CHECKED = (
    KernelProblem(tiny=True),
    KernelProblem(tiny=True, kv="fp8_e4m3"),
    KernelProblem(tiny=True, kv="int4_per_token_head", page_size=7),
    KernelProblem(tiny=True, kv="int8_per_token_head", page_size=CONTIGUOUS),
    KernelProblem(tiny=True, dim=576, v_dim=512, kv_heads=1, group=40, latent=True),
    KernelProblem(tiny=True, dim=80, v_dim=96, page_size=1),
    KernelProblem(tiny=True, group=7, window=9, softcap=20.0, sinks=True),
)


class MemCheck:
    """A few cases, in one process as long as none goes wrong."""

    workers = 1

    def __init__(self, args: Any):
        self.device = args.device
        self._cases = {case.name: case for case in CASES_CHECKED}
        if args.device == "cpu":
            import torch

            self._cases = {name: replace(case, dtype=torch.float32) for name, case in self._cases.items()}

    def plan(self) -> list[Planned]:
        """Lists the cases."""
        return [Planned(name) for name in self._cases]

    def run(self, name: str, report: Report) -> None:
        """Runs one case; its numbers are compared with float64 too."""
        keep(report, name, run_case(self._cases[name], self.device))


CASES = MemCheck
