"""Fused layers (fused_layers.py) on a GPU: Triton's kernels beside torch's matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kvbench_kernels import triton_layers
from kvbench_kernels.layer_parts import Heads, Rotation


class CudaKernels:
    """See kvbench_engine.model.fused_layers.LayerKernels."""

    add_norm = staticmethod(triton_layers.add_norm)

    def can_norm(self, weight: torch.Tensor) -> bool:
        return len(weight) <= triton_layers.MAX_NORM

    def product(self, module: nn.Module, names: tuple[str, ...]) -> _Joint:
        return _Joint([getattr(module, name) for name in names])

    def gated(self, module: nn.Module, names: tuple[str, ...], activation: str) -> _CudaGatedProduct:
        return _CudaGatedProduct(self.product(module, names), activation)

    def can_rotate(self, heads: Heads, rotation: Rotation, width: int) -> bool:
        return True

    def rotate_and_write(self, *args: Any) -> tuple[torch.Tensor, None]:
        """Attention reads the new K and V from the cache."""
        return triton_layers.rotate_and_write(*args), None


class _Joint:
    """Linear layers that read the same input, as one: their weights side by side."""

    def __init__(self, linears: list[nn.Linear]):
        self._linears = linears
        self.weight, self.bias = linears[0].weight, linears[0].bias
        if len(linears) > 1:
            weights = [linear.weight for linear in linears]
            self.weight = torch.cat(weights)
            if any(linear.bias is not None for linear in linears):
                pairs = zip(linears, weights, strict=True)
                self.bias = torch.cat([w.new_zeros(len(w)) if m.bias is None else m.bias for m, w in pairs])

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The matrix product adds to ``residual`` itself where there is no bias."""
        if self.bias is None:
            return residual.addmm_(rows, self.weight.t())
        return residual.add_(self(rows))

    def adopt(self) -> None:
        """Let the original layers read the joint weights, which frees their own."""
        if len(self._linears) == 1:
            return
        start = 0
        for linear in self._linears:
            stop = start + linear.out_features
            linear.weight.data = self.weight[start:stop]
            if linear.bias is not None:
                linear.bias.data = self.bias[start:stop]
            start = stop
        if self.weight.is_cuda:
            torch.cuda.empty_cache()  # else the freed weights of all layers, in blocks too small, add up


class _CudaGatedProduct:
    """Gate and up as one matrix product, then ``act(gate) * up``."""

    def __init__(self, joint: _Joint, activation: str):
        self._joint, self._activation = joint, activation
        self.adopt = joint.adopt

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return triton_layers.act_mul(self._joint(rows), self._activation)
