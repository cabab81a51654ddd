"""Prefill attention of one sequence in Numba: causal, with earlier context, window, softcap and sinks.

Two parallel regions. First K and V are copied from wherever their rows lie (a page table's slots, or one run) into
panels of PANEL tokens: K transposed, ``[D, PANEL]``, V as it is, ``[PANEL, 64]`` for each 64 of Dv. Both products of
attention are then tiles of numba_gemm.py. Second, items of one query head and BLOCK queries go round the threads; each
passes over the panels that its queries see, with online softmax. There is no mask tensor: panels that no query sees are
not visited, and at the window's two edges scores are overwritten.
"""

from __future__ import annotations

import math

import numba

from kvbench_kernels.numba_codes import KIND_FLOAT
from kvbench_kernels.numba_gemm import FIRST_SLICE, LAST_SLICE, PANEL, ROWS, multiply_tile
from kvbench_kernels.numba_memory import (
    JIT,
    call_get_int,
    call_parallel,
    compile_c,
    copy_bytes,
    fill_bytes,
    load_f32,
    load_i64,
    store_f32,
    store_i64,
)
from kvbench_kernels.numba_simd import exp_minus, max_of, scale_values, softcap_of, transpose_tile

BLOCK = 48  # queries of an item: K, V, scores and sums of a panel together fit the L1 cache at D = 64
NO_SCORE = -1e30  # finite, so that NO_SCORE - NO_SCORE is 0 and not NaN

(
    P_Q, P_K, P_V, P_SLOTS, P_OUT, P_SINKS, P_FLOATS, P_PACKED, P_WORK, P_WORK_STRIDE,
    P_QUERIES, P_KEYS, P_HEADS, P_KV_HEADS, P_DIM, P_V_DIM, P_WINDOW,
    P_Q_STRIDE, P_Q_HEAD_STRIDE, P_K_STRIDE, P_K_HEAD_STRIDE, P_V_STRIDE, P_V_HEAD_STRIDE, P_OUT_STRIDE,
    P_THREADS, P_PARALLEL, P_THREAD_NUM, P_NUM_THREADS, P_PACK_WORKER, P_WORKER,
    P_CHUNKS, P_NUM_CHUNKS, P_ALL_Q, P_ALL_OUT, P_LAYER_WINDOW, P_VALUE_BYTES,
    P_CACHE,
) = range(37)  # fmt: skip
# Strides in bytes, lengths int64. P_SLOTS and P_SINKS may be 0. P_FLOATS: float32 [scale, softcap (0 = none)].
# P_VALUE_BYTES: of q and out. P_WINDOW: how many tokens a query sees at most. What is a chunk's own is set by
# run_prefill, from a row of P_CHUNKS, a table ``[P_NUM_CHUNKS, NUM_FIELDS]``, and from two places where K and V can
# lie: the cache, and the new tokens.
S_K, S_V, S_K_STRIDE, S_K_HEAD_STRIDE, S_V_STRIDE, S_V_HEAD_STRIDE, NUM_SOURCE = range(7)
P_NEW = P_CACHE + NUM_SOURCE
NUM_PREFILL_ARGS = P_NEW + NUM_SOURCE
C_FIRST, C_QUERIES, C_KEYS, C_NEW, C_SLOTS, C_ROW, NUM_FIELDS = range(7)
# C_FIRST: first row of q and out. C_NEW: 1 if K and V are those of the new tokens. Else C_SLOTS: address of the tokens'
# slots, or 0 and C_ROW: the slot of the first, the others following it.


def packed_floats(keys: int, kv_heads: int, dim: int, v_dim: int) -> int:
    """float32 values of all panels."""
    return -(-keys // PANEL) * PANEL * kv_heads * (dim + -(-v_dim // PANEL) * PANEL)


def work_floats(dim: int, v_dim: int) -> int:
    """float32 values of one thread's scratch: queries, scores, sums, and each row's top and total."""
    return BLOCK * (dim + PANEL + -(-v_dim // PANEL) * PANEL + 2) + 16


@numba.njit(**JIT)
def _panel_bytes(args: int) -> int:
    """Bytes of one panel of one KV head: K, then V."""
    v_panels = (load_i64(args + 8 * P_V_DIM) + PANEL - 1) // PANEL
    return 4 * PANEL * (load_i64(args + 8 * P_DIM) + v_panels * PANEL)


@numba.njit(**JIT)
def find_rows(args: int, head: int, first: int, count: int, k_rows: int, v_rows: int) -> None:
    """Addresses of the K and V rows of ``count`` tokens from ``first`` on, wherever the page table has them."""
    slots = load_i64(args + 8 * P_SLOTS)
    k = load_i64(args + 8 * P_K) + head * load_i64(args + 8 * P_K_HEAD_STRIDE)
    v = load_i64(args + 8 * P_V) + head * load_i64(args + 8 * P_V_HEAD_STRIDE)
    for j in range(count):
        row = load_i64(slots + 8 * (first + j)) if slots else first + j
        store_i64(k_rows + 8 * j, k + row * load_i64(args + 8 * P_K_STRIDE))
        store_i64(v_rows + 8 * j, v + row * load_i64(args + 8 * P_V_STRIDE))


@numba.njit(**JIT)
def _pack_panel(k_rows: int, v_rows: int, count: int, dim: int, v_dim: int, k_at: int) -> None:
    """Pack K transposed, then V. Memory beyond the last token or value stays as it was: nothing depends on it."""
    whole_rows, whole_dim = count // 16 * 16, dim // 16 * 16
    for j in range(0, whole_rows, 16):
        for d in range(0, whole_dim, 16):
            transpose_tile(k_rows + 8 * j, 4 * d, k_at + 4 * (d * PANEL + j), 4 * PANEL)
    for j in range(count):
        k = load_i64(k_rows + 8 * j)
        for d in range(whole_dim if j < whole_rows else 0, dim):
            store_f32(k_at + 4 * (d * PANEL + j), load_f32(k + 4 * d))
        for column in range(0, v_dim, PANEL):
            target = k_at + 4 * PANEL * (dim + column + j)
            copy_bytes(target, load_i64(v_rows + 8 * j) + 4 * column, 4 * min(PANEL, v_dim - column))


@compile_c
def pack_worker(args):
    """Copy this thread's share of the panels."""
    thread = call_get_int(load_i64(args + 8 * P_THREAD_NUM))
    threads = call_get_int(load_i64(args + 8 * P_NUM_THREADS))
    keys, size = load_i64(args + 8 * P_KEYS), _panel_bytes(args)
    panels = (keys + PANEL - 1) // PANEL
    total = load_i64(args + 8 * P_KV_HEADS) * panels
    rows = load_i64(args + 8 * P_WORK) + thread * load_i64(args + 8 * P_WORK_STRIDE)
    for index in range(total * thread // threads, total * (thread + 1) // threads):
        first = index % panels * PANEL
        count = min(PANEL, keys - first)
        find_rows(args, index // panels, first, count, rows, rows + 8 * PANEL)
        dim, v_dim = load_i64(args + 8 * P_DIM), load_i64(args + 8 * P_V_DIM)
        _pack_panel(rows, rows + 8 * PANEL, count, dim, v_dim, load_i64(args + 8 * P_PACKED) + index * size)


@numba.njit(**JIT)
def _multiply(x: int, x_step: int, rows: int, w: int, depth: int, out: int, out_step: int, stage: int) -> None:
    """Set or add to ``out [rows, PANEL]`` the product ``x [rows, depth] @ w [depth, PANEL]``, in tiles."""
    tiles = (rows + ROWS - 1) // ROWS
    for tile in range(tiles):
        row = rows * tile // tiles
        count = rows * (tile + 1) // tiles - row
        x_at, out_at = x + row * x_step, out + row * out_step
        multiply_tile(x_at, x_step, w, depth, w, 0, 0, 0, 0, 0, out_at, out_step, PANEL, count, stage, 0)


@numba.njit(**JIT)
def weigh(s: int, top_at: int, total_at: int, acc: int, width: int, low: int, high: int, cap: float) -> None:
    """Turn a row's scores ``s [PANEL]``, of which low..high-1 are seen, into weights; its sums follow a risen top."""
    blocks = PANEL // 16
    if cap > 0:
        softcap_of(s, cap, blocks)
    for j in range(min(low, PANEL)):
        store_f32(s + 4 * j, numba.float32(NO_SCORE))
    for j in range(max(high, 0), PANEL):
        store_f32(s + 4 * j, numba.float32(NO_SCORE))
    old, total = load_f32(top_at), load_f32(total_at)
    top = max(old, max_of(s, blocks))
    if top > old:
        factor = numba.float32(math.exp(old - top))
        total *= factor
        store_f32(top_at, top)
        scale_values(acc, acc, factor, width, KIND_FLOAT, KIND_FLOAT)
    store_f32(total_at, total + exp_minus(s, top, blocks))


@numba.njit(**JIT)
def finish_row(args: int, head: int, out: int, acc: int, top: float, total: float, kind: int) -> None:
    """Divide by the softmax denominator, the head's sink joined."""
    factor, sinks = numba.float32(1.0), load_i64(args + 8 * P_SINKS)
    if sinks:
        sink = load_f32(sinks + 4 * head)
        joint = max(top, sink)
        factor = numba.float32(math.exp(top - joint))
        total = total * factor + numba.float32(math.exp(sink - joint))
    factor = factor / total
    scale_values(acc, out, factor, load_i64(args + 8 * P_V_DIM), KIND_FLOAT, kind)


@numba.njit(**JIT)
def _attend(args: int, head: int, first: int, count: int, work: int) -> None:
    """Compute one item: queries first..first+count-1 of a head."""
    dim, width = load_i64(args + 8 * P_DIM), (load_i64(args + 8 * P_V_DIM) + PANEL - 1) // PANEL * PANEL
    keys, window = load_i64(args + 8 * P_KEYS), load_i64(args + 8 * P_WINDOW)
    scale, cap = load_f32(load_i64(args + 8 * P_FLOATS)), load_f32(load_i64(args + 8 * P_FLOATS) + 4)
    scores, acc = work + 4 * BLOCK * dim, work + 4 * BLOCK * (dim + PANEL)
    tops = acc + 4 * BLOCK * width
    totals = tops + 4 * BLOCK
    fill_bytes(acc, 0, 4 * BLOCK * width)
    for r in range(count):
        q = load_i64(args + 8 * P_Q) + (first + r) * load_i64(args + 8 * P_Q_STRIDE)
        q += head * load_i64(args + 8 * P_Q_HEAD_STRIDE)
        scale_values(q, work + 4 * r * dim, scale, dim, KIND_FLOAT, KIND_FLOAT)
        store_f32(tops + 4 * r, numba.float32(NO_SCORE))
        store_f32(totals + 4 * r, numba.float32(0.0))
    kv_head = head // (load_i64(args + 8 * P_HEADS) // load_i64(args + 8 * P_KV_HEADS))
    place = keys - load_i64(args + 8 * P_QUERIES) + first  # the first query's own token
    panels, size = (keys + PANEL - 1) // PANEL, _panel_bytes(args)
    for panel in range(max(0, place + 1 - window) // PANEL, (place + count - 1) // PANEL + 1):
        k = load_i64(args + 8 * P_PACKED) + (kv_head * panels + panel) * size
        v = k + 4 * PANEL * dim
        _multiply(work, 4 * dim, count, k, dim, scores, 4 * PANEL, FIRST_SLICE | LAST_SLICE)
        for r in range(count):
            s, high = scores + 4 * PANEL * r, place + r + 1 - panel * PANEL
            if high - window < PANEL and high > 0:
                weigh(s, tops + 4 * r, totals + 4 * r, acc + 4 * width * r, width, high - window, high, cap)
            else:
                fill_bytes(s, 0, 4 * PANEL)  # sees nothing of this panel
        depth = min(PANEL, keys - panel * PANEL)
        for column in range(0, width, PANEL):
            into = acc + 4 * column
            _multiply(scores, 4 * PANEL, count, v + 4 * column * PANEL, depth, into, 4 * width, LAST_SLICE)
    for r in range(count):
        out = load_i64(args + 8 * P_OUT) + (first + r) * load_i64(args + 8 * P_OUT_STRIDE)
        out += 4 * head * load_i64(args + 8 * P_V_DIM)
        top, total = load_f32(tops + 4 * r), load_f32(totals + 4 * r)
        finish_row(args, head, out, acc + 4 * width * r, top, total, KIND_FLOAT)


@compile_c
def attend_worker(args):
    """Compute this thread's items, one in ``threads`` of them: neighbours cost about the same."""
    thread = call_get_int(load_i64(args + 8 * P_THREAD_NUM))
    threads = call_get_int(load_i64(args + 8 * P_NUM_THREADS))
    heads, queries = load_i64(args + 8 * P_HEADS), load_i64(args + 8 * P_QUERIES)
    work = load_i64(args + 8 * P_WORK) + thread * load_i64(args + 8 * P_WORK_STRIDE)
    for item in range(thread, (queries + BLOCK - 1) // BLOCK * heads, threads):
        first = item // heads * BLOCK
        _attend(args, item % heads, first, min(BLOCK, queries - first), work)


@numba.njit(**JIT)
def _enter_chunk(args: int, chunk: int) -> None:
    """Set the arguments that are this chunk's own."""
    first, keys = load_i64(chunk + 8 * C_FIRST), load_i64(chunk + 8 * C_KEYS)
    new, window = load_i64(chunk + 8 * C_NEW), load_i64(args + 8 * P_LAYER_WINDOW)
    source = args + 8 * (P_NEW if new else P_CACHE)
    row = first if new else load_i64(chunk + 8 * C_ROW)
    k_stride, v_stride = load_i64(source + 8 * S_K_STRIDE), load_i64(source + 8 * S_V_STRIDE)
    store_i64(args + 8 * P_K, load_i64(source + 8 * S_K) + row * k_stride)
    store_i64(args + 8 * P_V, load_i64(source + 8 * S_V) + row * v_stride)
    store_i64(args + 8 * P_K_STRIDE, k_stride)
    store_i64(args + 8 * P_V_STRIDE, v_stride)
    store_i64(args + 8 * P_K_HEAD_STRIDE, load_i64(source + 8 * S_K_HEAD_STRIDE))
    store_i64(args + 8 * P_V_HEAD_STRIDE, load_i64(source + 8 * S_V_HEAD_STRIDE))
    store_i64(args + 8 * P_SLOTS, 0 if new else load_i64(chunk + 8 * C_SLOTS))
    store_i64(args + 8 * P_QUERIES, load_i64(chunk + 8 * C_QUERIES))
    store_i64(args + 8 * P_KEYS, keys)
    store_i64(args + 8 * P_WINDOW, window if window > 0 else keys)
    store_i64(args + 8 * P_Q, load_i64(args + 8 * P_ALL_Q) + first * load_i64(args + 8 * P_Q_STRIDE))
    store_i64(args + 8 * P_OUT, load_i64(args + 8 * P_ALL_OUT) + first * load_i64(args + 8 * P_OUT_STRIDE))


@compile_c
def run_prefill(args):
    """Compute one chunk after the other: pack, then attend, each on every thread. A chunk without keys gives zeros."""
    parallel, threads = load_i64(args + 8 * P_PARALLEL), load_i64(args + 8 * P_THREADS)
    row_bytes = load_i64(args + 8 * P_VALUE_BYTES) * load_i64(args + 8 * P_HEADS) * load_i64(args + 8 * P_V_DIM)
    for index in range(load_i64(args + 8 * P_NUM_CHUNKS)):
        _enter_chunk(args, load_i64(args + 8 * P_CHUNKS) + 8 * NUM_FIELDS * index)
        if load_i64(args + 8 * P_KEYS) > 0:
            call_parallel(parallel, load_i64(args + 8 * P_PACK_WORKER), args, threads)
            call_parallel(parallel, load_i64(args + 8 * P_WORKER), args, threads)
        else:
            for query in range(load_i64(args + 8 * P_QUERIES)):
                out = load_i64(args + 8 * P_OUT) + query * load_i64(args + 8 * P_OUT_STRIDE)
                fill_bytes(out, 0, row_bytes)
