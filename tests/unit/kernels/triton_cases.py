"""What the checks of the Triton kernels share: the device, a backend on any chip, tolerances."""

from __future__ import annotations

import os

import pytest
import torch
from kernel_cases import Problem, check_attention

from kvbench_kernels.triton_backend import TritonBackend, read_chip
from kvbench_kernels.triton_launch import Chip, Splits

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# Half precision: of a weight, then of the result; the values are of order 1.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def full(*values: object):
    """A row of a table of the full ring."""
    return pytest.param(*values, marks=pytest.mark.full)


class PoisonedSplits(Splits):
    """Buffers that hold NaN, and -1 for integers, whenever they are taken."""

    def take(self, *args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.taken = super().take(*args)
        for tensor in self.taken:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        return self.taken


def backend_on(num_sms: int, hardware: bool = False) -> TritonBackend:
    """A backend that takes its device for one with ``num_sms``, with or without conversions of fp8."""
    arch = read_chip(torch.device(DEVICE)).arch if not INTERPRETED else 90 if hardware else 80
    backend = TritonBackend(lambda device: Chip(arch, num_sms))
    backend._splits = PoisonedSplits()
    return backend


def check(p: Problem, kind: str, backend: TritonBackend) -> None:
    check_attention(backend, p, TOLERANCE[p.dtype], kind, every_form=False)
