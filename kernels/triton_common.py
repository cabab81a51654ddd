"""What the Triton attention kernels share: finding slots, one tile of online softmax, softcap."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = 1.4426950408889634


@triton.jit
def token_slots(page_row, tokens, in_range, PAGE_SIZE: tl.constexpr):
    """Slots of ``tokens`` as int64: slot * stride passes 2**31 in a large cache."""
    starts = tl.load(page_row + tokens // PAGE_SIZE, mask=in_range, other=0).to(tl.int64)
    return starts + tokens % PAGE_SIZE


@triton.jit
def scores_log2(q, k, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores [M, N] in units of log 2, so that exp2 serves as exp."""
    s = tl.dot(q, k, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        s = softcap * (2.0 / (1.0 + tl.exp2(-2.0 * 1.4426950408889634 * s / softcap)) - 1.0)
    return s * 1.4426950408889634


@triton.jit
def online_softmax(acc, top, total, s, v):
    """Fold scores s [M, N] and values v [N, Dv] into the running accumulators."""
    new_top = tl.maximum(top, tl.max(s, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that sees nothing yet
    p = tl.exp2(s - base[:, None])
    fade = tl.exp2(top - base)
    acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return acc, new_top, total * fade + tl.sum(p, 1)
