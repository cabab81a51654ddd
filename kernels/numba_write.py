"""KV write in Numba: one memcpy per token and KV head, any dtype, one thread."""

from __future__ import annotations

from kvbench_kernels.numba_memory import compile_c, copy_bytes, load_i64

(
    W_K, W_V, W_K_CACHE, W_V_CACHE, W_SLOTS, W_TOKENS, W_HEADS, W_K_BYTES, W_V_BYTES,
    W_K_STRIDE, W_V_STRIDE, W_K_HEAD_STRIDE, W_V_HEAD_STRIDE, W_K_CACHE_STRIDE, W_V_CACHE_STRIDE,
    NUM_WRITE_ARGS,
) = range(16)  # fmt: skip


@compile_c
def run_write(args):
    """Copy the K and V rows of each token to its slot; slot < 0 is skipped. Strides in bytes."""
    heads = load_i64(args + 8 * W_HEADS)
    for side in range(2):  # 0: K, 1: V; every W_V_x follows its W_K_x
        at = args + 8 * side
        row_bytes, head_stride = load_i64(at + 8 * W_K_BYTES), load_i64(at + 8 * W_K_HEAD_STRIDE)
        for t in range(load_i64(args + 8 * W_TOKENS)):
            slot = load_i64(load_i64(args + 8 * W_SLOTS) + 8 * t)
            if slot >= 0:
                source = load_i64(at + 8 * W_K) + t * load_i64(at + 8 * W_K_STRIDE)
                target = load_i64(at + 8 * W_K_CACHE) + slot * load_i64(at + 8 * W_K_CACHE_STRIDE)
                for n in range(heads):
                    copy_bytes(target + n * row_bytes, source + n * head_stride, row_bytes)
