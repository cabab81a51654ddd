"""A model's dense layers on a CPU in float32: linear with packed weights (numba_gemm.py), gated MLP, RMSNorm, RoPE."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from copy import copy

import torch
from torch import nn

from kernels.cpu_memory import HugeArena
from kernels.numba_gemm import HAS_BIAS, HAS_GATE, NUM_GEMM_ARGS, PANEL, build_gemm, run_gemm
from kernels.numba_layers import (
    NUM_NORM_ARGS,
    NUM_ROPE_ARGS,
    norm_worker,
    rope_worker,
    run_norm,
    run_rope,
)
from kernels.numba_threads import thread_team
from kernels.numba_vectors import LANES

ONE_THREAD = 1 << 15  # values of an elementwise pass; torch's own grain

_GEMM_ARGS = struct.Struct(f"{NUM_GEMM_ARGS}q")
_NORM_ARGS = struct.Struct(f"{NUM_NORM_ARGS}q")
_ROPE_ARGS = struct.Struct(f"{NUM_ROPE_ARGS}q")


class _Scratch(threading.local):
    """Arguments of one calling thread, in memory that stays put."""

    def __init__(self) -> None:
        self.args = torch.zeros(max(NUM_GEMM_ARGS, NUM_NORM_ARGS, NUM_ROPE_ARGS), dtype=torch.int64)
        self.address = self.args.data_ptr()
        self.view = memoryview(self.args.numpy()).cast("B")


_scratch = _Scratch()


def _threads_for(values: int) -> int:
    """One thread for what is done sooner than another one has begun."""
    return torch.get_num_threads() if values > ONE_THREAD else 1


def can_pack(linear: nn.Module) -> bool:
    """A plain linear layer, float32 on a CPU, with whole vectors of output features."""
    if type(linear) is not nn.Linear:
        return False
    weight = linear.weight
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and linear.out_features % LANES == 0


def pack_weight(weight: torch.Tensor, arena: HugeArena) -> torch.Tensor:
    """``[N, K]`` as panels ``[ceil(N / PANEL), K, PANEL]``; missing output features are zeros."""
    n, k = weight.shape
    packed = arena.take((-(-n // PANEL), k, PANEL))
    whole = n // PANEL
    packed[:whole] = weight[: whole * PANEL].view(whole, PANEL, k).transpose(1, 2)
    if whole < len(packed):
        packed[whole] = 0
        packed[whole, :, : n - whole * PANEL] = weight[whole * PANEL :].T
    return packed


class PackedLinear(nn.Module):
    """One ``nn.Linear``, or several that read the same input, side by side, with packed weights. Inference only;
    ``can_pack`` says for which layers."""

    def __init__(self, linears: Sequence[nn.Linear], arena: HugeArena):
        super().__init__()
        weights = [linear.weight.detach() for linear in linears]
        self.out_features, self.in_features = sum(len(weight) for weight in weights), weights[0].shape[1]
        self.packed = pack_weight(weights[0] if len(weights) == 1 else torch.cat(weights), arena)
        self.bias: torch.Tensor | None = None
        if any(linear.bias is not None for linear in linears):
            parts = [w.new_zeros(len(w)) if m.bias is None else m.bias for m, w in zip(linears, weights, strict=True)]
            self.bias = torch.cat(parts).detach()

    @property
    def weight(self) -> torch.Tensor:
        """``[N, K]``, unpacked anew: for code that asks a layer for its weights, not for computing."""
        return self.packed.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]

    def part(self, start: int, stop: int) -> PackedLinear:
        """The layer of output features start..stop-1, multiples of PANEL, on the same memory."""
        assert start % PANEL == stop % PANEL == 0
        part = copy(self)
        part.packed, part.out_features = self.packed[start // PANEL : stop // PANEL], stop - start
        part.bias = None if self.bias is None else self.bias[start:stop]
        return part

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """``x [..., K]`` float32 -> ``[..., N]``, times ``silu(gate [..., N])`` if there is a gate."""
        rows = x.reshape(-1, self.in_features)
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        out = rows.new_empty(rows.shape[0], self.out_features)
        assert rows.dtype == torch.float32 and (gate is None or gate.is_contiguous())
        epilogue = (HAS_BIAS if self.bias is not None else 0) | (HAS_GATE if gate is not None else 0)
        _GEMM_ARGS.pack_into(
            _scratch.view, 0,
            rows.data_ptr(), self.packed.data_ptr(), out.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(), 0 if gate is None else gate.data_ptr(),
            rows.shape[0], self.out_features, self.in_features,
            4 * rows.stride(0), 4 * self.out_features, 4 * self.out_features, torch.get_num_threads(),
            build_gemm(epilogue).address, *thread_team(),
        )  # fmt: skip
        run_gemm.ctypes(_scratch.address)  # ctypes releases the GIL during the call
        return out.view(*x.shape[:-1], self.out_features)


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, the product taken while up's results are in registers."""

    def __init__(self, gate: PackedLinear, up: PackedLinear, down: PackedLinear):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.up_proj(x, self.gate_proj(x)))


def can_norm(weight: torch.Tensor) -> bool:
    """One dimension, float32 on a CPU, whole vectors."""
    return (
        weight.dim() == 1
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and len(weight) % LANES == 0
    )


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last dimension; ``can_norm`` says with which weights."""

    def __init__(self, weight: torch.Tensor, eps: float):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._eps = torch.tensor([eps], dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dim = self.weight.shape[0]
        rows = x.reshape(-1, dim)
        out = rows.new_empty(rows.shape)
        assert rows.dtype == torch.float32 and rows.stride(-1) == 1
        _NORM_ARGS.pack_into(
            _scratch.view, 0,
            rows.data_ptr(), self.weight.data_ptr(), out.data_ptr(), self._eps.data_ptr(),
            rows.shape[0], dim, 4 * rows.stride(0),
            _threads_for(rows.numel()), *thread_team(), norm_worker.address,
        )  # fmt: skip
        run_norm.ctypes(_scratch.address)
        return out.view(x.shape)


def can_rotate(rotated: int) -> bool:
    """Whether ``rotate`` takes this many rotated values a head."""
    return rotated % (2 * LANES) == 0


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotary embedding in place: ``x [T, heads, D]`` (dense within a token), ``cos`` and ``sin [T, rotated <= D]``."""
    tokens, heads, dim = x.shape
    assert x.dtype == cos.dtype == torch.float32 and x.stride(2) == cos.stride(1) == 1 and x.stride(1) == dim
    assert cos.stride() == sin.stride() and can_rotate(cos.shape[1])
    _ROPE_ARGS.pack_into(
        _scratch.view, 0,
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, heads, cos.shape[1] // 2,
        4 * x.stride(0), 4 * dim, 4 * cos.stride(0), _threads_for(x.numel()), *thread_team(), rope_worker.address,
    )  # fmt: skip
    run_rope.ctypes(_scratch.address)
