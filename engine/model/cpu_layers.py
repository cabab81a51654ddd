"""Fused layers (fused_layers.py) on a CPU in float32 or bfloat16, with the kernels of kvbench_kernels.layers_cpu.

Linear layers of other modules get packed weights too. Each is tried out, on small and large numbers, and is replaced
only if both give the same. In bfloat16 there are fewer roundings between the steps of a layer than transformers has.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from kvbench_engine.kv.budget import KVShape
from kvbench_engine.model.attention import PACKED
from kvbench_engine.model.fused_layers import fuse_layers
from kvbench_engine.model.latent import folded_modules
from kvbench_engine.model.try_out import PROBE_SIZES, PROBE_TOKENS, named, same_numbers
from kvbench_kernels import layers_cpu
from kvbench_kernels.api import AttentionBackend
from kvbench_kernels.cpu_memory import HugeArena
from kvbench_kernels.layers_cpu import GATES, PackedLinear, can_pack, gated, panel_of


@torch.inference_mode()
def use_cpu_layers(
    model: PreTrainedModel,
    backend: AttentionBackend,
    kv_shape: KVShape,
    query_heads: tuple[int, ...],
    fuse: bool = True,
) -> None:
    """Fuse what can be fused if ``fuse``, pack every other linear layer, and free the weights.

    A head tied to the embedding stays as it is, because the embedding would be kept beside its packed weights, and so
    do the layers whose weights folded attention reads.
    """
    arena = HugeArena()
    if fuse and not hasattr(model, PACKED):  # packed layers can no longer be joined
        fuse_layers(model, CpuKernels(arena), backend, kv_shape, query_heads)
    setattr(model, PACKED, True)
    embedding = model.get_input_embeddings().weight
    kept = {embedding, *(module.kv_b_proj.weight for module in folded_modules(model))}
    for name, linear in named(model, lambda module: can_pack(module) and module.weight not in kept):
        ours = PackedLinear([linear], arena)
        x = torch.randn(1, PROBE_TOKENS, linear.in_features, generator=torch.Generator().manual_seed(0)).to(model.dtype)
        if all(same_numbers(linear(x * size), ours(x * size)) for size in PROBE_SIZES[model.dtype]):
            model.set_submodule(name, ours)


class CpuKernels:
    """See kvbench_engine.model.fused_layers.LayerKernels. ``arena``: where packed weights lie."""

    add_norm = staticmethod(layers_cpu.add_norm)
    can_norm = staticmethod(layers_cpu.can_norm)
    can_rotate = staticmethod(layers_cpu.can_rotate)
    rotate_and_write = staticmethod(layers_cpu.rotate_and_write)

    def __init__(self, arena: HugeArena):
        self._arena = arena

    def product(self, module: nn.Module, names: tuple[str, ...]) -> _Product | None:
        linears = [getattr(module, name) for name in names]
        widths = [linear.out_features for linear in linears]
        if not all(can_pack(linear) for linear in linears):
            return None
        if len(linears) > 1 and any(width % panel_of(linears[0].weight.dtype) for width in widths):
            return None
        return _Product(module, names, PackedLinear(linears, self._arena), widths)

    def gated(self, module: nn.Module, names: tuple[str, ...], activation: str) -> _CpuGatedProduct | None:
        linears = [getattr(module, name) for name in names]
        if activation not in GATES or not all(can_pack(linear) for linear in linears):
            return None
        if any((linear.bias is None) != (linears[0].bias is None) for linear in linears):
            return None
        half = linears[0].out_features // 2
        if len(linears) == 1 and half % panel_of(linears[0].weight.dtype):
            return None
        packed = [PackedLinear([linear], self._arena) for linear in linears]
        if len(packed) > 1:
            return _CpuGatedProduct(module, names, packed, packed, activation)
        return _CpuGatedProduct(
            module, names, packed, [packed[0].part(0, half), packed[0].part(half, 2 * half)], activation
        )


class _Product:
    """Linear layers side by side. Once adopted, the module's layers are parts of the same memory."""

    def __init__(self, module: nn.Module, names: tuple[str, ...], packed: PackedLinear, widths: list[int]):
        self._module, self._names, self._packed, self._widths = module, names, packed, widths
        self._run = packed.forward  # without the checks of nn.Module.__call__

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._run(rows)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._run(rows, residual)

    def adopt(self) -> None:
        start = 0
        for name, width in zip(self._names, self._widths, strict=True):
            whole = width == self._packed.out_features
            setattr(self._module, name, self._packed if whole else self._packed.part(start, start + width))
            start += width


class _CpuGatedProduct:
    """Gate and up. ``packed``: the layers that the module has as ``names`` once they are adopted."""

    def __init__(
        self, module: nn.Module, names: tuple[str, ...], packed: list[PackedLinear], parts: list[PackedLinear], act: str
    ):
        self._module, self._names, self._packed = module, names, packed
        self._gate, self._up, self._activation = *parts, act

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return gated(self._gate, self._up, self._activation, rows)

    def adopt(self) -> None:
        for name, packed in zip(self._names, self._packed, strict=True):
            setattr(self._module, name, packed)
