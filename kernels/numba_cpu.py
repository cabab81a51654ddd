"""Decode attention in Numba: walks the page table, copies no KV, splits the work statically.

All tokens of all sequences form one line that is cut into equal shares, one per thread ("stream-K"),
so that every core is busy even with one sequence and nobody waits for the longest. A share covers
whole sequences, whose rows are final, and at most two pieces of sequences that it shares with its
neighbours; pieces are merged after the parallel region.

Inside a share: blocks of BLOCK tokens; scores of all heads, online softmax, then the V rows. Only
tokens that exist are ever read, so NaN in unused slots cannot reach a result.

Arguments travel as one int64 array (``A_*`` below): the worker runs on torch's own OpenMP threads,
which hand over one pointer (see numba_threads.py for why).
"""

from __future__ import annotations

import math
from functools import cache

import numba

from kvbench_kernels.numba_codes import KIND_BF16, KIND_FLOAT, PER_HEAD_KINDS, decode_row, row_code_bytes
from kvbench_kernels.numba_memory import (
    JIT,
    call_get_int,
    call_parallel,
    compile_c,
    fill_bytes,
    load_f32,
    load_i64,
    prefetch_line,
    store_f32,
    store_i64,
)
from kvbench_kernels.numba_simd import add_weighted_rows, exp_minus, max_of, scale_values, score_token, softcap_of

BLOCK = 32  # tokens; K and V of a block (Hkv * D * 4 bytes * 32 each) stay in the L1/L2 cache
OFFSETS_BYTES = 3 * 8 * BLOCK  # where the K rows, then the V rows, then the scales of a block lie
NO_SCORE = -1e30  # finite, so that NO_SCORE - NO_SCORE is 0 and not NaN

(
    A_Q, A_K, A_V, A_PAGES, A_LENS, A_OUT, A_WORK, A_SINKS, A_FLOATS,
    A_BATCH, A_HEADS, A_GROUP, A_V_DIM, A_PAGES_STRIDE, A_PAGE_SIZE, A_K_STRIDE, A_V_STRIDE,
    A_Q_STRIDE, A_Q_HEAD_STRIDE, A_OUT_STRIDE, A_WINDOW, A_TOTAL, A_THREADS, A_THREADS_RAN, A_WORK_STRIDE,
    A_WORKER, A_PARALLEL, A_THREAD_NUM, A_NUM_THREADS, A_K_SCALES, A_V_SCALES, A_SCALES_STRIDE, A_KIND,
    NUM_ARGS,
) = range(34)  # fmt: skip
# Strides in bytes, lengths int64. A_FLOATS points to float32 [scale, softcap (0 = none), V scale].
# A_KIND: of q and out, KIND_FLOAT or KIND_BF16.


def work_layout(num_heads: int, head_dim: int, v_head_dim: int) -> tuple[int, int]:
    """Bytes of scratch per thread, and bytes of one accumulator set ``[H, Dv] + m [H] + l [H]``."""
    accumulators = 4 * num_heads * (v_head_dim + 2)
    total = 3 * accumulators + 4 * num_heads * head_dim + 4 * num_heads * BLOCK + 2 * OFFSETS_BYTES
    return (total + 127) // 64 * 64 + 64, accumulators


@numba.njit(**JIT)
def _visible(args: int, b: int) -> int:
    """The number of tokens that sequence b attends to: its length, or its window."""
    length = load_i64(load_i64(args + 8 * A_LENS) + 8 * b)
    window = load_i64(args + 8 * A_WINDOW)
    return min(length, window) if window > 0 else length


@numba.njit(**JIT)
def _fill_offsets(args: int, b: int, token: int, count: int, offsets: int) -> None:
    """Write byte offsets of K rows, V rows and scales of sequence b's tokens token..token+count-1."""
    pages = load_i64(args + 8 * A_PAGES) + b * load_i64(args + 8 * A_PAGES_STRIDE)
    page_size = load_i64(args + 8 * A_PAGE_SIZE)
    k_stride, v_stride = load_i64(args + 8 * A_K_STRIDE), load_i64(args + 8 * A_V_STRIDE)
    scales_stride = load_i64(args + 8 * A_SCALES_STRIDE)
    page = token // page_size
    within = token - page * page_size
    done = 0
    while done < count:
        slot = load_i64(pages + 8 * page) + within
        run = min(page_size - within, count - done)
        for _ in range(run):
            store_i64(offsets + 8 * done, slot * k_stride)
            store_i64(offsets + 8 * (BLOCK + done), slot * v_stride)
            store_i64(offsets + 8 * (2 * BLOCK + done), slot * scales_stride)
            slot += 1
            done += 1
        page += 1
        within = 0


@numba.njit(**JIT)
def _reset(acc: int, heads: int, v_dim: int) -> None:
    """Empty accumulators: zero sums, no score seen."""
    for i in range(heads * v_dim):
        store_f32(acc + 4 * i, numba.float32(0.0))
    for h in range(heads):
        store_f32(acc + 4 * (heads * v_dim + h), numba.float32(NO_SCORE))
        store_f32(acc + 4 * (heads * (v_dim + 1) + h), numba.float32(0.0))


@numba.njit(**JIT)
def _softmax_block(scores: int, acc: int, heads: int, v_dim: int, count: int, cap: float) -> None:
    """Turn scores ``[H, BLOCK]`` into weights in place; tops, sums and accumulators follow a risen maximum."""
    blocks = (count + 15) // 16
    tops, sums = acc + 4 * heads * v_dim, acc + 4 * heads * (v_dim + 1)
    for h in range(heads):
        s = scores + 4 * h * BLOCK
        if cap > 0:
            softcap_of(s, cap, blocks)
        for j in range(count, 16 * blocks):
            store_f32(s + 4 * j, numba.float32(NO_SCORE))
        old, total = load_f32(tops + 4 * h), load_f32(sums + 4 * h)
        top = max(old, max_of(s, blocks))
        if top > old:
            factor = numba.float32(math.exp(old - top))
            total *= factor
            store_f32(tops + 4 * h, top)
            for d in range(v_dim):
                at = acc + 4 * (h * v_dim + d)
                store_f32(at, load_f32(at) * factor)
        store_f32(sums + 4 * h, total + exp_minus(s, top, blocks))


@numba.njit(**JIT)
def _fill_next(args: int, b: int, place: int, end: int, offsets: int) -> int:
    """Fill ``offsets`` for the first block of the sequence after b, and return its number of tokens.

    ``place``: where that sequence begins in the line of all tokens. ``end``: where this thread's share of it ends.
    """
    if b + 1 >= load_i64(args + 8 * A_BATCH) or place >= end:
        return 0
    visible = _visible(args, b + 1)
    count = min(BLOCK, visible, end - place)
    first = load_i64(load_i64(args + 8 * A_LENS) + 8 * (b + 1)) - visible
    _fill_offsets(args, b + 1, first, count, offsets)
    return count


@numba.njit(**JIT)
def _prefetch_row(row: int, size: int, level: int) -> None:
    """Ask for all cache lines of a row, into the L1 or L2 cache.

    The hardware's own prefetching ends at each page of the table. Measured on one core, 67 MB of KV, as a share of the
    read ceiling, when only the next block of the same sequence was asked for: 0.58 to 0.74 with pages of 16 tokens,
    0.35 to 0.53 with pages of 1.
    """
    for line in range(0, size, 64):
        if level == 1:
            prefetch_line(row + line, 1)
        else:
            prefetch_line(row + line, 2)


@numba.njit(**JIT)
def _scale_weights(scores: int, v_scales: int, offsets: int, count: int, kv_heads: int, group: int) -> None:
    """Multiply weights ``[H, BLOCK]`` by their token's V scale, after their own sum has been taken."""
    for j in range(count):
        scales = v_scales + load_i64(offsets + 8 * j)
        for n in range(kv_heads):
            scale = load_f32(scales + 4 * n)
            for g in range(group):
                at = scores + 4 * ((n * group + g) * BLOCK + j)
                store_f32(at, load_f32(at) * scale)


@numba.njit(**JIT)
def _finish(args: int, b: int, acc: int) -> None:
    """Write sequence b's row: accumulators over the softmax denominator, sinks joined, times the V scale."""
    heads, v_dim = load_i64(args + 8 * A_HEADS), load_i64(args + 8 * A_V_DIM)
    tops, sums = acc + 4 * heads * v_dim, acc + 4 * heads * (v_dim + 1)
    out = load_i64(args + 8 * A_OUT) + b * load_i64(args + 8 * A_OUT_STRIDE)
    sinks = load_i64(args + 8 * A_SINKS)
    v_scale = load_f32(load_i64(args + 8 * A_FLOATS) + 8)
    kind = load_i64(args + 8 * A_KIND)
    value_bytes = 2 if kind == KIND_BF16 else 4
    for h in range(heads):
        factor, total = numba.float32(1.0), load_f32(sums + 4 * h)
        if sinks:
            sink, top = load_f32(sinks + 4 * h), load_f32(tops + 4 * h)
            joint = max(top, sink)
            factor = numba.float32(math.exp(top - joint))
            total = total * factor + numba.float32(math.exp(sink - joint))
        factor = factor / total * v_scale
        scale_values(acc + 4 * h * v_dim, out + value_bytes * h * v_dim, factor, v_dim, KIND_FLOAT, kind)


@numba.njit(**JIT)
def _merge_into(args: int, target: int, source: int) -> None:
    """Fold one piece's accumulators into another's, piece by piece of the same sequence."""
    heads, v_dim = load_i64(args + 8 * A_HEADS), load_i64(args + 8 * A_V_DIM)
    tops, sums = 4 * heads * v_dim, 4 * heads * (v_dim + 1)
    for h in range(heads):
        a, b = load_f32(target + tops + 4 * h), load_f32(source + tops + 4 * h)
        top = max(a, b)
        fa, fb = numba.float32(math.exp(a - top)), numba.float32(math.exp(b - top))
        store_f32(target + tops + 4 * h, top)
        total = load_f32(target + sums + 4 * h) * fa + load_f32(source + sums + 4 * h) * fb
        store_f32(target + sums + 4 * h, total)
        for d in range(v_dim):
            at = 4 * (h * v_dim + d)
            store_f32(target + at, load_f32(target + at) * fa + load_f32(source + at) * fb)


@numba.njit(**JIT)
def _merge_pieces(args: int, num_threads: int) -> None:
    """Merge the pieces of sequences that lie across shares and write their rows.

    Thread t left the piece of a sequence begun before its share in set 0, and the piece of one that
    goes on after its share in set 1.
    """
    heads, v_dim = load_i64(args + 8 * A_HEADS), load_i64(args + 8 * A_V_DIM)
    set_bytes = 4 * heads * (v_dim + 2)
    work, stride = load_i64(args + 8 * A_WORK), load_i64(args + 8 * A_WORK_STRIDE)
    total = load_i64(args + 8 * A_TOTAL)
    start = 0
    for b in range(load_i64(args + 8 * A_BATCH)):
        stop = start + _visible(args, b)
        target = 0
        for t in range(num_threads):
            lo, hi = total * t // num_threads, total * (t + 1) // num_threads
            if hi <= start or lo >= stop or hi == lo or (lo <= start and stop <= hi):
                continue  # not in this share, or wholly in it
            piece = work + t * stride + (set_bytes if lo <= start else 0)
            if target:
                _merge_into(args, target, piece)
            else:
                target = piece
        if target:
            _finish(args, b, target)
        start = stop


@compile_c
def run_decode(args):
    """Run one decode step: the worker on every thread, then the merge."""
    total = 0
    for b in range(load_i64(args + 8 * A_BATCH)):
        visible = _visible(args, b)
        if visible == 0:  # a padding row
            out = load_i64(args + 8 * A_OUT) + b * load_i64(args + 8 * A_OUT_STRIDE)
            value_bytes = 2 if load_i64(args + 8 * A_KIND) == KIND_BF16 else 4
            fill_bytes(out, 0, value_bytes * load_i64(args + 8 * A_HEADS) * load_i64(args + 8 * A_V_DIM))
        total += visible
    store_i64(args + 8 * A_TOTAL, total)
    if total == 0:
        return
    call_parallel(load_i64(args + 8 * A_PARALLEL), load_i64(args + 8 * A_WORKER), args, load_i64(args + 8 * A_THREADS))
    ran = load_i64(args + 8 * A_THREADS_RAN)
    if ran > 1:
        _merge_pieces(args, ran)


@cache
def build_worker(group: int, head_dim: int, v_head_dim: int, kind: int, q_kind: int, latent: bool = False):
    """Compile the worker for one kind of heads, KV rows and q, as a Numba cfunc.

    ``group``: query heads per KV head. ``latent``: all groups of query heads share one row, whose first values are V. A
    scale per tensor (fp8) is not applied here: K's is part of the softmax scale, V's of ``_finish``. The closure holds
    plain ints only, so that Numba's on-disk cache finds it again in another process.
    """

    k_bytes, v_bytes = row_code_bytes(kind, head_dim), row_code_bytes(kind, v_head_dim)
    k_step, v_step, scale_step = (0, 0, 0) if latent else (k_bytes, v_bytes, 4)  # from one KV head to the next
    per_head = kind in PER_HEAD_KINDS

    def worker(args):
        thread = call_get_int(load_i64(args + 8 * A_THREAD_NUM))
        threads = call_get_int(load_i64(args + 8 * A_NUM_THREADS))
        if thread == 0:
            store_i64(args + 8 * A_THREADS_RAN, threads)
        heads = load_i64(args + 8 * A_HEADS)
        kv_heads = heads // group
        rows = 1 if latent else kv_heads
        q_head_stride = load_i64(args + 8 * A_Q_HEAD_STRIDE)
        set_bytes = 4 * heads * (v_head_dim + 2)
        sets = load_i64(args + 8 * A_WORK) + thread * load_i64(args + 8 * A_WORK_STRIDE)
        offsets, ahead = sets + 3 * set_bytes, sets + 3 * set_bytes + OFFSETS_BYTES
        q_scaled = ahead + OFFSETS_BYTES
        scores = q_scaled + 4 * heads * head_dim
        k_base, v_base = load_i64(args + 8 * A_K), load_i64(args + 8 * A_V)
        k_scales, v_scales = load_i64(args + 8 * A_K_SCALES), load_i64(args + 8 * A_V_SCALES)
        k_scale = numba.float32(1.0)
        scale, cap = load_f32(load_i64(args + 8 * A_FLOATS)), load_f32(load_i64(args + 8 * A_FLOATS) + 4)
        total = load_i64(args + 8 * A_TOTAL)
        lo, hi = total * thread // threads, total * (thread + 1) // threads
        stop = 0
        for b in range(load_i64(args + 8 * A_BATCH)):
            visible = _visible(args, b)
            start, stop = stop, stop + visible
            if stop <= lo or start >= hi or visible == 0:
                continue
            whole = lo <= start and stop <= hi
            acc = sets + (2 * set_bytes if whole else (set_bytes if lo <= start else 0))
            _reset(acc, heads, v_head_dim)
            q_row = load_i64(args + 8 * A_Q) + b * load_i64(args + 8 * A_Q_STRIDE)
            for h in range(heads):
                decode_row(q_row + h * q_head_stride, q_scaled + 4 * h * head_dim, scale, head_dim, q_kind)
            first = load_i64(load_i64(args + 8 * A_LENS) + 8 * b) - visible - start
            token, last = first + max(lo, start), first + min(hi, stop)
            _fill_offsets(args, b, token, min(BLOCK, last - token), offsets)
            while token < last:
                count, count_ahead = min(BLOCK, last - token), min(BLOCK, max(0, last - token - BLOCK))
                if count_ahead:
                    _fill_offsets(args, b, token + count, count_ahead, ahead)
                else:
                    count_ahead = _fill_next(args, b, stop, hi, ahead)
                v_offsets = offsets + 8 * BLOCK
                for j in range(count):
                    row = k_base + load_i64(offsets + 8 * j)
                    _prefetch_row(v_base + load_i64(v_offsets + 8 * j), rows * v_bytes, 1)  # read after the scores
                    for i in range(j, count_ahead, count):  # rows of the next block, of which there may be more
                        _prefetch_row(k_base + load_i64(ahead + 8 * i), rows * k_bytes, 2)
                        _prefetch_row(v_base + load_i64(ahead + 8 * (BLOCK + i)), rows * v_bytes, 2)
                    for n in range(kv_heads):
                        q_at, k_at = q_scaled + 4 * n * group * head_dim, row + n * k_step
                        s_at = scores + 4 * (n * group * BLOCK + j)
                        if per_head:
                            k_scale = load_f32(k_scales + load_i64(offsets + 8 * (2 * BLOCK + j)) + scale_step * n)
                        score_token(q_at, k_at, s_at, k_scale, group, head_dim, BLOCK, kind)
                _softmax_block(scores, acc, heads, v_head_dim, count, cap)
                if per_head:
                    _scale_weights(scores, v_scales, offsets + 16 * BLOCK, count, rows, heads // rows)
                for n in range(kv_heads):
                    acc_at, p_at = acc + 4 * n * group * v_head_dim, scores + 4 * n * group * BLOCK
                    v_at = v_base + n * v_step
                    add_weighted_rows(acc_at, p_at, v_at, v_offsets, count, group, v_head_dim, BLOCK, kind)
                token += count
                offsets, ahead = ahead, offsets
            if whole:
                _finish(args, b, acc)

    return compile_c(worker)
