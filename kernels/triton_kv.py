"""KV write in Triton: one program per token copies its K and V rows to their slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import next_power_of_two


@triton.jit
def write_kv_kernel(
    k_ptr,  # [T, Hkv, D], strides of tokens and heads free
    v_ptr,  # [T, Hkv, Dv]
    k_cache_ptr,  # [slots, Hkv, D]
    v_cache_ptr,  # [slots, Hkv, Dv]
    slots_ptr,  # [T] int64
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_cache_stride,
    v_cache_stride,
    D: tl.constexpr,
    DV: tl.constexpr,
    K_ROW: tl.constexpr,  # Hkv * D
    V_ROW: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    if slot < 0:  # padding
        return
    i = tl.arange(0, K_PAD)
    k = tl.load(k_ptr + t * k_token_stride + i // D * k_head_stride + i % D, mask=i < K_ROW)
    tl.store(k_cache_ptr + slot * k_cache_stride + i, k.to(k_cache_ptr.dtype.element_ty), mask=i < K_ROW)
    j = tl.arange(0, V_PAD)
    v = tl.load(v_ptr + t * v_token_stride + j // DV * v_head_stride + j % DV, mask=j < V_ROW)
    tl.store(v_cache_ptr + slot * v_cache_stride + j, v.to(v_cache_ptr.dtype.element_ty), mask=j < V_ROW)


def launch_write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store ``k [T, Hkv, D]``, ``v [T, Hkv, Dv]`` at ``slots [T]``, skipping slots < 0."""
    tokens, kv_heads, dim = k.shape
    v_dim = v.shape[2]
    k_row, v_row = kv_heads * dim, kv_heads * v_dim
    write_kv_kernel[(tokens,)](
        k, v, k_cache, v_cache, slots,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), k_cache.stride(0), v_cache.stride(0),
        D=dim, DV=v_dim, K_ROW=k_row, V_ROW=v_row,
        K_PAD=next_power_of_two(k_row), V_PAD=next_power_of_two(v_row), num_warps=4,
    )  # fmt: skip
