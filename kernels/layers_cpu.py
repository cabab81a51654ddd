"""A model's dense layers on a CPU in float32 or bfloat16: linear with packed weights, gated MLP, RMSNorm, RoPE.

Linear layers in float32: numba_gemm.py; in bfloat16: numba_amx.py."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from copy import copy

import torch
from torch import nn

from kernels import numba_amx
from kernels.cpu_memory import HugeArena
from kernels.numba_amx import build_amx, has_amx, pack_bf16, unpack_bf16
from kernels.numba_gemm import HAS_BIAS, HAS_GATE, NUM_GEMM_ARGS, PANEL, build_gemm, run_gemm
from kernels.numba_layers import (
    NUM_NORM_ARGS,
    NUM_ROPE_ARGS,
    build_norm,
    build_rope,
    run_norm,
    run_rope,
)
from kernels.numba_quantised import KIND_OF_DTYPE
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
    """A plain linear layer on a CPU with whole vectors of output features; float32, or bfloat16 where AMX multiplies it
    and the inputs fill its tiles. What is left to torch is oneDNN's, with the instructions that there are."""
    if type(linear) is not nn.Linear or linear.weight.device.type != "cpu" or linear.out_features % LANES:
        return False
    if linear.weight.dtype == torch.bfloat16:
        return linear.in_features % numba_amx.DEPTH == 0 and has_amx()
    return linear.weight.dtype == torch.float32


def pack_weight(weight: torch.Tensor, arena: HugeArena) -> torch.Tensor:
    """``[N, K]`` as panels ``[ceil(N / PANEL), K, PANEL]``, or as numba_amx.py has them; missing output features are
    zeros."""
    n, k = weight.shape
    if weight.dtype == torch.bfloat16:
        tiles = pack_bf16(weight)
        return arena.take(tuple(tiles.shape), weight.dtype).copy_(tiles)
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
        if self.packed.dtype == torch.bfloat16:
            return unpack_bf16(self.packed, self.out_features)
        return self.packed.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]

    def part(self, start: int, stop: int) -> PackedLinear:
        """The layer of output features start..stop-1, multiples of PANEL, on the same memory."""
        panel = PANEL if self.packed.dtype == torch.float32 else numba_amx.PANEL
        assert start % panel == stop % panel == 0
        part = copy(self)
        part.packed, part.out_features = self.packed[start // panel : stop // panel], stop - start
        part.bias = None if self.bias is None else self.bias[start:stop]
        return part

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """``x [..., K]`` -> ``[..., N]``, times ``silu(gate [..., N])`` if there is a gate."""
        rows = x.reshape(-1, self.in_features)
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        out = rows.new_empty(rows.shape[0], self.out_features)
        size = self.packed.element_size()
        assert rows.dtype == self.packed.dtype and (gate is None or gate.is_contiguous())
        epilogue = (HAS_BIAS if self.bias is not None else 0) | (HAS_GATE if gate is not None else 0)
        _GEMM_ARGS.pack_into(
            _scratch.view, 0,
            rows.data_ptr(), self.packed.data_ptr(), out.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(), 0 if gate is None else gate.data_ptr(),
            rows.shape[0], self.out_features, self.in_features,
            size * rows.stride(0), size * self.out_features, size * self.out_features, torch.get_num_threads(),
            (build_gemm if size == 4 else build_amx)(epilogue).address, *thread_team(),
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
    """One dimension, float32 or bfloat16 on a CPU, whole vectors."""
    return (
        weight.dim() == 1
        and weight.dtype in KIND_OF_DTYPE
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
        assert rows.dtype == self.weight.dtype and rows.stride(-1) == 1
        _NORM_ARGS.pack_into(
            _scratch.view, 0,
            rows.data_ptr(), self.weight.data_ptr(), out.data_ptr(), self._eps.data_ptr(),
            rows.shape[0], dim, rows.element_size() * rows.stride(0),
            _threads_for(rows.numel()), *thread_team(), build_norm(KIND_OF_DTYPE[rows.dtype]).address,
        )  # fmt: skip
        run_norm.ctypes(_scratch.address)
        return out.view(x.shape)


def can_rotate(rotated: int) -> bool:
    """Whether ``rotate`` takes this many rotated values a head."""
    return rotated % (2 * LANES) == 0


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotary embedding in place: ``x [T, heads, D]`` (dense within a token), ``cos`` and ``sin [T, rotated <= D]``."""
    (tokens, heads, dim), size = x.shape, x.element_size()
    assert x.dtype == cos.dtype == sin.dtype and x.stride(2) == cos.stride(1) == 1 and x.stride(1) == dim
    assert cos.stride() == sin.stride() and can_rotate(cos.shape[1])
    _ROPE_ARGS.pack_into(
        _scratch.view, 0,
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, heads, cos.shape[1] // 2,
        size * x.stride(0), size * dim, size * cos.stride(0), _threads_for(x.numel()), *thread_team(),
        build_rope(KIND_OF_DTYPE[x.dtype]).address,
    )  # fmt: skip
    run_rope.ctypes(_scratch.address)
