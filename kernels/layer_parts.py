"""The arguments of fused layers' kernels, shared by triton_layers.py (GPU) and layers_cpu.py (CPU)."""

from __future__ import annotations

from typing import NamedTuple

import torch

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")


class Norm(NamedTuple):
    """RMSNorm: ``x / sqrt(mean(x**2) + eps) * (weight + offset)``; ``weight [C]``."""

    weight: torch.Tensor
    eps: float
    offset: float


class Rotation(NamedTuple):
    """The rotation of the first ``size`` values of a head; 0: none are.

    ``pairs``: value i is rotated with its neighbour (i ^ 1), else with the value half the size away. ``angle``: which
    column of cos and sin belongs to value i: "value" i, "pair" i // 2.
    """

    size: int
    pairs: bool = False
    angle: str = "value"


class Heads(NamedTuple):
    """Heads of a token's joint Q, K and V: ``[query x dim | kv x dim | kv x value_dim]``."""

    query: int
    kv: int
    dim: int
    value_dim: int
