"""A model's dense layers on a CPU in float32 or bfloat16: linear with packed weights, gated MLP, RMSNorm, RoPE.

Linear layers in float32: numba_gemm.py; in bfloat16: numba_bf16.py.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from copy import copy

import torch
from torch import nn

from kvbench_kernels import numba_amx
from kvbench_kernels.api import KVCache, KVPair, dense_rows
from kvbench_kernels.cpu_memory import HugeArena
from kvbench_kernels.layer_parts import Heads, Norm, Rotation
from kvbench_kernels.numba_amx import pack_bf16, unpack_bf16
from kvbench_kernels.numba_bf16 import build_bf16, has_bf16
from kvbench_kernels.numba_gemm import HAS_BIAS, HAS_GATE, IS_GELU, NUM_GEMM_ARGS, PANEL, build_gemm, run_gemm
from kvbench_kernels.numba_layers import (
    NUM_NORM_ARGS,
    NUM_ROTATE_ARGS,
    build_add_norm,
    build_rotate_write,
    run_add_norm,
    run_rotate_write,
)
from kvbench_kernels.numba_quantised import KIND_OF_DTYPE, store_rows
from kvbench_kernels.numba_threads import thread_team
from kvbench_kernels.numba_vectors import LANES
from kvbench_kernels.quantized import QuantizedKV

ONE_THREAD = 1 << 15  # values of an elementwise pass; torch's own grain
GATES = {"silu": HAS_GATE, "gelu_tanh": HAS_GATE | IS_GELU}  # activations of gated products

_GEMM_ARGS = struct.Struct(f"<{NUM_GEMM_ARGS}q")
_NORM_ARGS = struct.Struct(f"<6q{4 * 'f4x'}{NUM_NORM_ARGS - 10}q")
_ROTATE_ARGS = struct.Struct(f"<8q{4 * 'f4x'}{NUM_ROTATE_ARGS - 12}q")


class _LayerArguments(threading.local):
    """The arguments of one calling thread, in memory that stays put."""

    def __init__(self) -> None:
        self.args = torch.zeros(max(NUM_GEMM_ARGS, NUM_NORM_ARGS, NUM_ROTATE_ARGS), dtype=torch.int64)
        self.address = self.args.data_ptr()
        self.view = memoryview(self.args.numpy()).cast("B")


_scratch = _LayerArguments()
_TEAM = thread_team()
# ctypes releases the GIL during a call
_run_gemm, _run_add_norm, _run_rotate_write = run_gemm.ctypes, run_add_norm.ctypes, run_rotate_write.ctypes


def _threads_for(values: int) -> int:
    """The number of threads for ``values`` values: one where the work ends before another thread begins."""
    return torch.get_num_threads() if values > ONE_THREAD else 1


def can_pack(linear: nn.Module) -> bool:
    """Tests whether a linear layer can be packed: plain, on a CPU, with whole vectors of output features.

    float32, or bfloat16 where the CPU multiplies it and the inputs fill its tiles. torch computes the others by oneDNN.
    """
    if type(linear) is not nn.Linear or linear.weight.device.type != "cpu" or linear.out_features % LANES:
        return False
    if linear.weight.dtype == torch.bfloat16:
        return linear.in_features % numba_amx.DEPTH == 0 and has_bf16()
    return linear.weight.dtype == torch.float32


def panel_of(dtype: torch.dtype) -> int:
    """The output features that are packed together."""
    return PANEL if dtype == torch.float32 else numba_amx.PANEL


def pack_weight(weight: torch.Tensor, arena: HugeArena) -> torch.Tensor:
    """Pack ``[N, K]`` into panels ``[ceil(N / PANEL), K, PANEL]``, or into those of numba_amx.py.

    Missing output features are zeros.
    """
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
    """One ``nn.Linear``, or several side by side that read the same input, with packed weights.

    For inference only; ``can_pack`` says for which layers.
    """

    def __init__(self, linears: Sequence[nn.Linear], arena: HugeArena):
        super().__init__()
        weights = [linear.weight.detach() for linear in linears]
        self.out_features, self.in_features = sum(len(weight) for weight in weights), weights[0].shape[1]
        self.packed = pack_weight(weights[0] if len(weights) == 1 else torch.cat(weights), arena)
        self.panel = panel_of(self.packed.dtype)
        self.bias: torch.Tensor | None = None
        if any(linear.bias is not None for linear in linears):
            parts = [w.new_zeros(len(w)) if m.bias is None else m.bias for m, w in zip(linears, weights, strict=True)]
            self.bias = torch.cat(parts).detach()

    @property
    def weight(self) -> torch.Tensor:
        """The weight ``[N, K]``, unpacked anew: for code that asks a layer for its weights, not for computing."""
        if self.packed.dtype == torch.bfloat16:
            return unpack_bf16(self.packed, self.out_features)
        return self.packed.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]

    def part(self, start: int, stop: int) -> PackedLinear:
        """The layer of output features start..stop-1, multiples of PANEL, on the same memory."""
        assert start % self.panel == stop % self.panel == 0
        part = copy(self)
        part.packed, part.out_features = self.packed[start // self.panel : stop // self.panel], stop - start
        part.bias = None if self.bias is None else self.bias[start:stop]
        return part

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Compute ``x [..., K]`` -> ``[..., N]``, plus ``residual [..., N]`` if there is one."""
        rows = x.reshape(-1, self.in_features)
        out = rows.new_empty(rows.shape[0], self.out_features)
        if residual is not None:
            residual = dense_rows(residual.reshape(-1, self.out_features))
        _multiply(rows, self, out, 0, residual=residual)
        return out.view(*x.shape[:-1], self.out_features)


def gated(gate: PackedLinear, up: PackedLinear, activation: str, rows: torch.Tensor) -> torch.Tensor:
    """Compute ``activation(gate(rows)) * up(rows)``: ``[M, K]`` -> ``[M, N]``. ``activation``: one of ``GATES``.

    In bfloat16 both products are made at once; in float32 the second one reads the first.
    """
    out = rows.new_empty(rows.shape[0], up.out_features)
    if rows.dtype == torch.bfloat16:
        assert (gate.bias is None) == (up.bias is None)
        bias = 0 if gate.bias is None else gate.bias.data_ptr()
        _multiply(rows, up, out, GATES[activation], gate=(gate.packed.data_ptr(), bias, 0))
    else:
        opening = gate(rows)
        _multiply(rows, up, out, GATES[activation], gate=(opening.data_ptr(), 0, 4 * up.out_features))
    return out


def _multiply(
    rows: torch.Tensor,
    linear: PackedLinear,
    out: torch.Tensor,
    epilogue: int,
    gate: tuple[int, int, int] = (0, 0, 0),
    residual: torch.Tensor | None = None,
) -> None:
    """Compute ``out [M, N]``, dense, from ``rows [M, K]``. ``gate``: G_GATE, G_GATE_BIAS and G_GATE_STRIDE of
    numba_gemm.py.
    """
    rows, size = dense_rows(rows), linear.packed.element_size()
    assert rows.dtype == linear.packed.dtype and rows.shape[1] == linear.in_features
    opening, gate_bias, gate_step = gate
    step = size * linear.out_features
    bias, epilogue = (0, epilogue) if linear.bias is None else (linear.bias.data_ptr(), epilogue | HAS_BIAS)
    added, added_step = (0, 0) if residual is None else (residual.data_ptr(), size * residual.stride(0))
    _GEMM_ARGS.pack_into(
        _scratch.view, 0,
        rows.data_ptr(), linear.packed.data_ptr(), out.data_ptr(), bias, opening, gate_bias, added,
        rows.shape[0], linear.out_features, linear.in_features,
        size * rows.stride(0), step, gate_step, added_step, torch.get_num_threads(),
        (build_gemm if size == 4 else build_bf16)(epilogue).address, *_TEAM,
    )  # fmt: skip
    _run_gemm(_scratch.address)


def can_norm(weight: torch.Tensor) -> bool:
    """Tests whether a norm's weight is served: one dimension, float32 or bfloat16 on a CPU, whole vectors."""
    return (
        weight.dim() == 1
        and weight.dtype in KIND_OF_DTYPE
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and len(weight) % LANES == 0
    )


def add_norm(
    x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None = None, post: Norm | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (sum, normed), ``[T, C]`` each, from ``x [T, C]``; ``can_norm`` says with which weights.

    The sum is ``residual + post(x)``, or x where there is no residual; normed is ``norm(sum)``, or the sum where there
    is no norm.
    """
    assert x.dim() == 2 and (residual is not None or (post is None and norm is not None)), "there is nothing to do"
    assert residual is None or (residual.shape, residual.dtype) == (x.shape, x.dtype)
    assert all(one is None or (len(one.weight), one.weight.dtype) == (x.shape[1], x.dtype) for one in (norm, post))
    x, size = dense_rows(x), x.element_size()
    added, added_step, total = 0, 0, x
    if residual is not None:
        residual, total = dense_rows(residual), x.new_empty(x.shape)
        added, added_step = residual.data_ptr(), size * residual.stride(0)
    out = total if norm is None else x.new_empty(x.shape)
    post_weight, post_eps, post_offset = (0, 0.0, 0.0) if post is None else (post.weight.data_ptr(), *post[1:])
    weight, eps, offset = (0, 0.0, 0.0) if norm is None else (norm.weight.data_ptr(), *norm[1:])
    _NORM_ARGS.pack_into(
        _scratch.view, 0,
        x.data_ptr(), added, total.data_ptr(), out.data_ptr(), post_weight, weight,
        post_eps, post_offset, eps, offset, *x.shape, size * x.stride(0), added_step,
        _threads_for(x.numel()), *_TEAM, build_add_norm(KIND_OF_DTYPE[x.dtype]).address,
    )  # fmt: skip
    _run_add_norm(_scratch.address)
    return total, out


def can_rotate(heads: Heads, rotation: Rotation, width: int) -> bool:
    """Tests whether ``rotate_and_write`` serves these heads and this rotation; ``width``: columns of cos and sin."""
    whole = heads.dim % LANES == 0 and rotation.size % (2 * LANES) == 0 and rotation.size <= heads.dim
    return whole and not rotation.pairs and rotation.size in (0, width)


def rotate_and_write(
    qkv: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    heads: Heads,
    rotation: Rotation,
    norms: tuple[Norm, Norm] | None,
    k_cache: KVCache,
    v_cache: KVCache,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, KVPair]:
    """Norm and rotate Q and K of ``qkv [T, Q | K | V]``; store K and V at ``slots``.

    In place: returns Q ``[T, H, D]``, and K and V ``[T, Hkv, D | Dv]``, views of ``qkv``. ``slots [T]`` int64; a slot <
    0 stores nothing. ``angles``: cos and sin ``[T, rotation.size]``; ``norms``: of each head of Q and of K.
    """
    (cos, sin), size = angles, qkv.element_size()
    assert qkv.dtype == cos.dtype == sin.dtype and cos.stride() == sin.stride() and qkv.stride(1) == cos.stride(1) == 1
    assert rotation.size in (0, cos.shape[1])
    quantised = isinstance(k_cache, QuantizedKV)
    caches = (0, 0, 0) if quantised else (slots.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr())
    steps = (0, 0) if quantised else (size * k_cache.stride(0), size * v_cache.stride(0))
    q_norm, k_norm = ((0, 0.0, 0.0),) * 2 if norms is None else ((one.weight.data_ptr(), *one[1:]) for one in norms)
    _ROTATE_ARGS.pack_into(
        _scratch.view, 0,
        qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), *caches, q_norm[0], k_norm[0], *q_norm[1:], *k_norm[1:],
        len(qkv), *heads, rotation.size // 2, size * qkv.stride(0), size * cos.stride(0), *steps,
        _threads_for(qkv.numel()), *_TEAM, build_rotate_write(KIND_OF_DTYPE[qkv.dtype]).address,
    )  # fmt: skip
    _run_rotate_write(_scratch.address)
    queries, keys = heads.query * heads.dim, heads.kv * heads.dim
    q, k, v = qkv.split((queries, keys, qkv.shape[1] - queries - keys), 1)
    q = q.unflatten(1, (heads.query, heads.dim))
    k, v = k.unflatten(1, (heads.kv, heads.dim)), v.unflatten(1, (heads.kv, heads.value_dim))
    if quantised:
        store_rows(k_cache, slots, k)
        store_rows(v_cache, slots, v)
    return q, (k, v)
