"""The steps that the decode and prefill kernels share: where a tile lies, loading it, scores, softmax, the end.

A program attends some query rows [M] to the tokens begin..end-1 of one sequence under one KV head, a tile of BLOCK_N
tokens at a time. Tiles start at multiples of BLOCK_N, so that where BLOCK_N divides the page size no tile crosses a
page. Scores are in units of log 2 (exp2 serves as exp); the launcher folds log2(e), the softcap and an fp8 cache's
K scale into ``score_scale``, and its V scale is ``v_scale``, used once at the end.

K and V of a quantised cache become 16-bit values before ``tl.dot`` (``triton_codes``), and the products are
summed in float32. No dot takes fp8: Hopper's tensor cores add fp8 products with 14 bits and lose a needle in a long
context unless the sum is taken out of them every few tokens, and 16-bit operands have no such limit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvbench_kernels.triton_codes import (
    is_integer,
    query_parts,
    row_bytes,
    split_columns,
    unpack_keys,
    unpack_values,
    value_dtype,
    value_parts,
    weight_exponent,
    weight_unit,
)

LOG2E = 1.4426950408889634


@triton.jit
def columns(DIM: tl.constexpr, PAD: tl.constexpr, KIND: tl.constexpr):
    """The index of the DIM values that each of PAD columns holds, and whether it holds one.

    A byte of int4 unpacks into two neighbouring columns, the values i and i + ceil(DIM / 2).
    """
    column = tl.arange(0, PAD)
    if KIND == "int4_per_token_head":
        HALF: tl.constexpr = (DIM + 1) // 2
        value = column // 2 + column % 2 * HALF
        return value, (column // 2 < HALF) & (value < DIM)
    else:
        return column, column < DIM


@triton.jit
def tile_place(page_row, start, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The place of the tile at ``start``: its first slot if tiles never cross a page, else the slot of each token.

    The page table is read for tokens before ``end`` only: it may end there.
    """
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(page_row + start // PAGE_SIZE, mask=start < end, other=0)
        return page.to(tl.int32) + start % PAGE_SIZE
    elif BLOCK_N % PAGE_SIZE == 0:  # tiles begin where pages do
        offsets = tl.arange(0, BLOCK_N)
        pages = tl.load(page_row + start // PAGE_SIZE + offsets // PAGE_SIZE, mask=offsets < end - start, other=0)
        return pages.to(tl.int32) + offsets % PAGE_SIZE
    else:
        tokens = start + tl.arange(0, BLOCK_N)
        pages = tl.load(page_row + tokens // PAGE_SIZE, mask=tokens < end, other=0)
        return pages.to(tl.int32) + tokens % PAGE_SIZE


@triton.jit
def load_tile(
    base, stride, slots, in_range,
    MASKED: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Loads [N, PAD] rows of K or V at ``slots``, of a quantised cache as words: see ``kvbench_kernels.triton_codes``.

    Masked loads give 0 and not what lies there: 0 * NaN from an unused slot would be NaN.
    """
    rows = base + slots[:, None].to(tl.int64) * stride  # int64: slot x stride passes 2**31 in a large cache
    BYTES: tl.constexpr = row_bytes(DIM, KIND)
    if KIND == "auto":
        return load_columns(rows, in_range, MASKED, DIM, PAD)
    else:
        WORDS: tl.constexpr = PAD // 4 if KIND == "int4_per_token_head" else PAD // 2
        if BYTES % 2 == 0:
            return load_columns(rows.to(tl.pointer_type(tl.int16), bitcast=True), in_range, MASKED, BYTES // 2, WORDS)
        else:
            rows = rows.to(tl.pointer_type(tl.uint8), bitcast=True)
            column = 2 * tl.arange(0, WORDS)[None, :]
            low = tl.load(rows + column, mask=in_range[:, None] & (column < BYTES), other=0)
            high = tl.load(rows + column + 1, mask=in_range[:, None] & (column + 1 < BYTES), other=0)
            return low.to(tl.int16) | (high.to(tl.int16) << 8)


@triton.jit
def load_columns(rows, in_range, MASKED: tl.constexpr, USED: tl.constexpr, PAD: tl.constexpr):
    """Loads [N, PAD] with 0 in the columns from USED on; with MASKED, also the rows that are not ``in_range``."""
    column = tl.arange(0, PAD)[None, :]
    if MASKED:
        return tl.load(rows + column, mask=in_range[:, None] & (column < USED), other=0)
    elif USED == PAD:
        return tl.load(rows + column)
    else:
        return tl.load(rows + column, mask=column < USED, other=0)


@triton.jit
def score_tile(q, k, k_scales, score_scale, KIND: tl.constexpr, FP8_HARDWARE: tl.constexpr):
    """Computes the scores [M, N] of a query's parts q and the tile k. They are in units of log 2, without a softcap."""
    k_parts = unpack_keys(tl.trans(k), q[0].dtype, KIND, FP8_HARDWARE)
    s = tl.dot(q[0], k_parts[0], input_precision="ieee")
    if KIND != "auto":
        s = tl.dot(q[1], k_parts[1], s, input_precision="ieee")
    if KIND == "int4_per_token_head":
        s = tl.dot(q[2], k_parts[2], s, input_precision="ieee")
        s = tl.dot(q[3], k_parts[3], s, input_precision="ieee")
    s = s * score_scale[0]
    if is_integer(KIND):
        s = (s + score_scale[1]) * k_scales[None, :]
    return s


@triton.jit
def add_values(acc, fade, p, v, unit, HAS_UNIT: tl.constexpr):
    """Computes acc [M, Dv] * fade [M] + p [M, N] x v [N, Dv] * unit."""
    acc = acc * fade[:, None]
    if HAS_UNIT:
        return acc + tl.dot(p, v, input_precision="ieee") * unit
    else:
        return tl.dot(p, v, acc, input_precision="ieee")


@triton.jit
def softmax_tile(acc, top, total, s, v, v_scales, model: tl.constexpr, KIND: tl.constexpr, FP8_HARDWARE: tl.constexpr):
    """Folds the scores s [M, N] and the tile v into the running sums.

    ``acc``: a part for each part of v. ``total``: [M], or [M, N] where each column has a sum of its own, and these are
    added up after the last tile.
    """
    dtype: tl.constexpr = value_dtype(model, KIND)
    v_parts = unpack_values(v, dtype, KIND, FP8_HARDWARE)
    new_top = tl.maximum(top, tl.max(s, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that sees nothing yet
    fade = tl.exp2(top - base)
    p = tl.exp2(s - (base - weight_exponent(KIND))[:, None])
    total = total * fade[:, None] + p if len(total.shape) == 2 else total * fade + tl.sum(p, 1)
    unit = 1.0
    HAS_UNIT: tl.constexpr = is_integer(KIND) and dtype == tl.float16
    if HAS_UNIT:
        # A product of weight and scale may be under float16's range: the tile's largest scale waits outside the dot.
        unit = tl.max(tl.where(v_scales == v_scales, v_scales, 0.0), 0)
        unit = tl.where(unit > 0, unit, 1.0)
        p = p * (v_scales / unit)[None, :]
    elif is_integer(KIND):
        p = p * v_scales[None, :]
    p = p.to(dtype)
    if KIND == "auto":
        acc = (add_values(acc[0], fade, p, v_parts[0], unit, HAS_UNIT),)
    elif KIND == "int4_per_token_head":
        low_0 = add_values(acc[0], fade, p, v_parts[0], unit, HAS_UNIT)
        high_0 = add_values(acc[1], fade, p, v_parts[1], unit, HAS_UNIT)
        low_1 = add_values(acc[2], fade, p, v_parts[2], unit, HAS_UNIT)
        acc = (low_0, high_0, low_1, add_values(acc[3], fade, p, v_parts[3], unit, HAS_UNIT))
    else:
        low = add_values(acc[0], fade, p, v_parts[0], unit, HAS_UNIT)
        acc = (low, add_values(acc[1], fade, p, v_parts[1], unit, HAS_UNIT))
    return acc, new_top, total


@triton.jit
def load_rope(q_at, row_ok, D: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, KIND: tl.constexpr):
    """Loads the last ROPE values [M, ROPE_PAD] of queries of D + ROPE values, for a latent cache; see ``attend``."""
    value, value_ok = columns(ROPE, ROPE_PAD, KIND)
    return tl.load(q_at[:, None] + D + value[None, :], mask=row_ok[:, None] & value_ok[None, :], other=0.0)


@triton.jit
def attend_tiles(
    state, queries, position, tokens_of, tiles, cache, score_scale, softcap,
    MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, KIND: tl.constexpr, FP8_HARDWARE: tl.constexpr, model: tl.constexpr,
):  # fmt: skip
    """Fold the tiles from tiles[0] to before tiles[1] into ``state`` = (acc, top, total).

    The page table is read one tile ahead. Only MASKED tiles ask which tokens exist and which of them each row sees.
    With a softcap c, ``softcap`` is c * log2(e), and ``score_scale`` (see ``query_parts``) has the factor
    2 * log2(e) / c: c * tanh(x / c) = c - 2c / (1 + exp(2x / c)).
    """
    q, q_rope = queries
    acc, top, total = state
    begin, end = tokens_of
    page_row, k_base, v_base, k_scales, v_scales, k_stride, v_stride = cache
    place = tile_place(page_row, tiles[0], end, PAGE_SIZE, BLOCK_N)
    for start in tl.range(tiles[0], tiles[1], BLOCK_N, num_stages=1 if MASKED else None):
        ahead = tile_place(page_row, start + BLOCK_N, end, PAGE_SIZE, BLOCK_N)
        offsets = tl.arange(0, BLOCK_N)
        tokens = start + offsets
        in_range = (tokens >= begin) & (tokens < end)
        slots = place + offsets if PAGE_SIZE % BLOCK_N == 0 else place
        k = load_tile(k_base, k_stride, slots, in_range, MASKED, D, D_PAD, KIND)
        if ROPE > 0:
            v = k
            k_rope = load_tile(k_base + row_bytes(D, KIND), k_stride, slots, in_range, MASKED, ROPE, ROPE_PAD, KIND)
        else:
            v = load_tile(v_base, v_stride, slots, in_range, MASKED, DV, DV_PAD, KIND)
        k_scale, v_scale = in_range, in_range  # not used
        if is_integer(KIND):
            scale_at = slots.to(tl.int64) * KV_HEADS
            k_scale = tl.load(k_scales + scale_at, mask=in_range if MASKED else None)
            v_scale = k_scale if ROPE > 0 else tl.load(v_scales + scale_at, mask=in_range if MASKED else None)
        s = score_tile(q, k, k_scale, score_scale[0], KIND, FP8_HARDWARE)
        if ROPE > 0:
            s += score_tile(q_rope, k_rope, k_scale, score_scale[1], KIND, FP8_HARDWARE)
        if HAS_SOFTCAP:
            s = softcap - 2 * softcap / (1 + tl.exp2(s))
        if MASKED:
            visible = in_range[None, :] & (tokens[None, :] <= position[:, None])
            if WINDOW > 0:
                visible = visible & (tokens[None, :] > position[:, None] - WINDOW)
            s = tl.where(visible, s, float("-inf"))
        acc, top, total = softmax_tile(acc, top, total, s, v, v_scale, model, KIND, FP8_HARDWARE)
        place = ahead
    return acc, top, total


@triton.jit
def attend(
    q, q_rope, position, tokens_of, unmasked, split, num_splits, cache, score_scale, softcap,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, KIND: tl.constexpr, FP8_HARDWARE: tl.constexpr,
):  # fmt: skip
    """Returns (acc [M, DV_PAD], top [M], total [M]) of one split's share of the tiles of tokens begin..end-1.

    Every row sees all of the tokens unmasked[0] to before unmasked[1]; other tiles are masked. A split may have no
    tile: then top is -inf and the rest 0. ROPE > 0: the cache has latent rows of D + ROPE values, of which the first D
    are V too, and are loaded once; ``q_rope`` meets the rest.
    """
    begin, end = tokens_of
    first_tile = begin // BLOCK_N
    per_split = tl.cdiv(tl.cdiv(end, BLOCK_N) - first_tile, num_splits)
    first = (first_tile + split * per_split) * BLOCK_N
    last = tl.minimum(first + per_split * BLOCK_N, tl.cdiv(end, BLOCK_N) * BLOCK_N)
    last = tl.maximum(last, first)
    free = tl.minimum(tl.maximum(tl.cdiv(unmasked[0], BLOCK_N) * BLOCK_N, first), last)
    bound = tl.minimum(tl.maximum(unmasked[1] // BLOCK_N * BLOCK_N, free), last)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # With few rows the warps share a tile's columns, and to add them up in every tile would make the warps wait.
    total = tl.zeros([BLOCK_M, BLOCK_N] if BLOCK_M == 16 else [BLOCK_M], tl.float32)
    state = (split_columns(tl.zeros([BLOCK_M, DV_PAD], tl.float32), KIND), top, total)
    parts, a, b = query_parts(q, score_scale, KIND)
    scales = ((a, b), (a, b))
    queries = (parts, parts)
    if ROPE > 0:
        rope_parts, a_rope, b_rope = query_parts(q_rope, score_scale, KIND)
        scales = ((a, b), (a_rope, b_rope))
        queries = (parts, rope_parts)
    if WINDOW > 0:
        state = attend_tiles(
            state, queries, position, tokens_of, (first, free), cache, scales, softcap,
            True, PAGE_SIZE, WINDOW, KV_HEADS, D, DV, D_PAD, DV_PAD, ROPE, ROPE_PAD, BLOCK_N, HAS_SOFTCAP, KIND,
            FP8_HARDWARE, q.dtype,
        )  # fmt: skip
    state = attend_tiles(
        state, queries, position, tokens_of, (free, bound), cache, scales, softcap,
        False, PAGE_SIZE, WINDOW, KV_HEADS, D, DV, D_PAD, DV_PAD, ROPE, ROPE_PAD, BLOCK_N, HAS_SOFTCAP, KIND,
        FP8_HARDWARE, q.dtype,
    )  # fmt: skip
    state = attend_tiles(
        state, queries, position, tokens_of, (bound, last), cache, scales, softcap,
        True, PAGE_SIZE, WINDOW, KV_HEADS, D, DV, D_PAD, DV_PAD, ROPE, ROPE_PAD, BLOCK_N, HAS_SOFTCAP, KIND,
        FP8_HARDWARE, q.dtype,
    )  # fmt: skip
    total = tl.sum(state[2], 1) if BLOCK_M == 16 else state[2]
    return value_parts(state[0], KIND), state[1], total * weight_unit(KIND)


@triton.jit
def join_sinks(top, total, row_ok, heads, sinks_ptr):
    """Returns (factor of the values [M], denominator [M]) of rows whose softmax their heads' sinks have joined."""
    sink = tl.load(sinks_ptr + heads, mask=row_ok, other=0.0).to(tl.float32) * 1.4426950408889634
    joint = tl.maximum(top, sink)
    fade = tl.exp2(top - joint)
    return fade, total * fade + tl.exp2(sink - joint)


@triton.jit
def finish(
    acc, top, total, pieces, whole, part, row_ok, heads, sinks_ptr, out_ptr, parts_ptr, lse_ptr, v_scale,
    DV: tl.constexpr, DV_PAD: tl.constexpr, KIND: tl.constexpr, SPLIT: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Write the result to the rows ``whole`` [M] of ``out``, or, of one of several pieces, to ``part`` of ``parts``.

    A part is normalised, and its lse the log2 of its denominator: -inf where it is empty. Sinks join once, here or in
    ``add_parts``. A row that saw nothing gets 0.
    """
    scale, below = v_scale, total
    if HAS_SINKS:
        fade, joint = join_sinks(top, total, row_ok, heads, sinks_ptr)
        scale = tl.where(pieces == 1, fade, 1.0) * v_scale
        below = tl.where(pieces == 1, joint, total)
    # not "> 0": a NaN that the model computed must stay visible
    result = acc * (scale / tl.where(below == 0, 1.0, below))[:, None]
    value, value_ok = columns(DV, DV_PAD, KIND)
    ok = row_ok[:, None] & value_ok[None, :]
    if pieces == 1:
        tl.store(out_ptr + whole[:, None] * DV + value[None, :], result.to(out_ptr.dtype.element_ty), mask=ok)
    elif SPLIT:
        tl.store(lse_ptr + part, top + tl.log2(total), mask=row_ok)
        tl.store(parts_ptr + part[:, None] * DV + value[None, :], result, mask=ok)


@triton.jit
def arrive(arrived_ptr, pieces):
    """Counts this program among the ``pieces`` of its rows: true for the last one, which sees what all have written.

    The counter is 0 before the launch and after it.
    """
    tl.debug_barrier()  # the counting thread speaks for the writes of the others
    last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == pieces - 1
    if last:
        tl.store(arrived_ptr, 0)
    return last


@triton.jit
def add_parts(
    pieces, whole, first, row_ok, heads, sinks_ptr, out_ptr, parts_ptr, lse_ptr,
    ROWS: tl.constexpr, BLOCK_P: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Weigh the parts of ROWS rows by their denominators, and write their sums at the rows ``whole`` [ROWS] of ``out``.

    ``first`` [ROWS] (int64): the row of each one's first part; its next one is HEADS rows on. BLOCK_P parts at a time.
    """
    dv = tl.arange(0, DV_PAD)
    ok = row_ok[:, None] & (dv < DV)[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV_PAD], tl.float32)
    # The loads of two blocks at a time, where the registers hold them.
    for start in tl.range(0, pieces, BLOCK_P, loop_unroll_factor=2 if BLOCK_P > 1 else 1):
        part = start + tl.arange(0, BLOCK_P)
        there = part < pieces
        row = first[None, :] + part[:, None] * HEADS
        lse = tl.load(lse_ptr + row, mask=there[:, None] & row_ok[None, :], other=float("-inf"))
        parts_at = parts_ptr + row[:, :, None] * DV + dv[None, None, :]
        parts = tl.load(parts_at, mask=there[:, None, None] & ok[None, :, :], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(lse - base[None, :])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 0)
        acc = acc * fade[:, None] + tl.sum(parts * weights[:, :, None], 0)
        top = new_top
    scale = 1.0
    if HAS_SINKS:
        scale, total = join_sinks(top, total, row_ok, heads, sinks_ptr)
    result = acc * (scale / tl.where(total == 0, 1.0, total))[:, None]
    tl.store(out_ptr + whole[:, None] * DV + dv[None, :], result.to(out_ptr.dtype.element_ty), mask=ok)
