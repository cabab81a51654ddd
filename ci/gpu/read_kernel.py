"""A Triton kernel that only reads, with which decode kernels are compared, beside torch's reductions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCKS = ((2048, 16, 8), (4096, 32, 8), (8192, 8, 16))  # (elements a load, loads a program, warps)


@triton.jit
def read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, LOADS: tl.constexpr):
    """Program i sums ``BLOCK * LOADS`` float32 from ``x [n]`` into ``out[i]``; n is a multiple of that."""
    start = tl.program_id(0).to(tl.int64) * (BLOCK * LOADS)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(LOADS):
        total += tl.load(x_ptr + start + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, axis=0))


def launch_read(x: torch.Tensor, out: torch.Tensor, block: int, loads: int, warps: int) -> None:
    """Launches the kernel on ``x [n]`` float32 into ``out [n / (block * loads)]`` float32."""
    read_kernel[(x.numel() // (block * loads),)](x, out, BLOCK=block, LOADS=loads, num_warps=warps)
