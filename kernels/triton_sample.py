"""Draws of tokens from rows of logits, which are read where they lie: temperature, Gumbel noise, argmax, top-k, top-p.

    noise_kernel    one program a draw and piece of the vocabulary: the largest logit and the best token of the piece
    settle_kernel   one program a draw: the best of the pieces, and whether top-k and top-p allow it

No logits are copied, sorted or masked. The argmax of score + noise over all tokens is also the argmax over the allowed
ones if it is allowed itself, as it is in at least nine draws of ten with top-p 0.9. One pass shows whether it is: it
counts and weighs the tokens that are more probable. If it is not allowed, neither is any less probable token, and the
best of the more probable ones is looked at next.

In torch the noise is a dozen passes over an int64 tensor four times the size of the logits; here it stays in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

from kvbench_kernels.launch import cdiv, next_power_of_two

NOISE_BLOCK, NOISE_WARPS = 4096, 8  # token ids of a program: 16 a thread, whose int64 noise stays in registers
SETTLE_BLOCK, SETTLE_WARPS = 8192, 16  # token ids at a time: one program reads a row, two 16-byte loads a thread
INTERPRETED = tl.constexpr(knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def hardware_log2(x):
    """log2 in one instruction: wrong by 2**-22 at most, of the result or, between 0.5 and 2, absolutely (PTX ISA,
    ``lg2.approx``). The interpreter has no inline assembly."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def gumbel_bits(key, token):
    """Returns 63 random bits for each token id; ``key`` and ``token`` int64.

    SplitMix64's output function over a Weyl sequence, with shifts that copy the sign: integer for integer what
    ``kvbench_engine.execution.gumbel.random_bits`` gives.
    """
    bits = key + token * -7046029254386353131
    bits = (bits ^ (bits >> 32)) * -4658895280553007687
    bits = (bits ^ (bits >> 29)) * -7723592293110705685
    return bits ^ (bits >> 32)


@triton.jit
def noisy_score(logits, largest, inverse, key, token):
    """``(logits - largest) * inverse`` plus Gumbel noise, both in units of log 2 and up to one constant.

    The noise is ``-log2(E)``, ``E = -log2(1 - U)``: a standard exponential, but for a factor that shifts all scores
    alike. Below 0.1 the series of E serves, because 1 - U would lose the digits of a small U.
    """
    bits = gumbel_bits(key, token.to(tl.int64))
    u = tl.minimum(tl.maximum(bits.to(tl.float32) * 1.0842021724855044e-19, 5.421010862427522e-20), 0.9999999403953552)
    # LOG2E * (u + u**2 / 2 + ... + u**6 / 6)
    series = 0.36067376 + u * (0.28853901 + u * 0.24044917)
    series = u * (1.4426950 + u * (0.72134752 + u * (0.48089835 + u * series)))
    return (logits - largest) * inverse - hardware_log2(tl.where(u < 0.1, series, -hardware_log2(1 - u)))


@triton.jit
def load_logits(row_ptr, token, vocab):
    """Logits of the token ids as float32; -inf beyond the vocabulary."""
    return tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)


@triton.jit(
    do_not_specialize_on_alignment=["rows_ptr", "temperature_ptr", "keys_ptr", "score_ptr", "tops_ptr", "token_ptr"]
)
def noise_kernel(
    logits_ptr,  # [N, vocab], rows ``stride`` apart
    rows_ptr,  # int64 [S]: which row each draw is from
    temperature_ptr,  # float32 [S]
    keys_ptr,  # int64 [S]
    tops_ptr,  # float32 [S, pieces]: the largest logit of each piece, infinity where there is a NaN
    score_ptr,  # float32 [S, pieces]: the best score, from the piece's largest logit on: no temperature overflows it
    token_ptr,  # int32 [S, pieces]: whose it is
    vocab,
    stride,
    BLOCK: tl.constexpr,
):
    draw = tl.program_id(0)
    piece = tl.program_id(1)
    place = draw.to(tl.int64) * tl.num_programs(1) + piece
    row = tl.load(rows_ptr + draw)
    token = piece * BLOCK + tl.arange(0, BLOCK)
    logits = load_logits(logits_ptr + row * stride, token, vocab)
    top = tl.max(tl.where(logits == logits, logits, float("inf")), 0)
    inverse = LOG2E / tl.load(temperature_ptr + draw)
    base = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    score = noisy_score(logits, base, inverse, tl.load(keys_ptr + draw), token)
    best, at = tl.max(score, 0, return_indices=True)
    tl.store(tops_ptr + place, top)
    tl.store(score_ptr + place, best)
    tl.store(token_ptr + place, piece * BLOCK + at)


@triton.jit
def ordered(logits):
    """float32 as int32 in the same order; both zeros become 0."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def kth_largest(row_ptr, largest, top_k, vocab, BLOCK: tl.constexpr):
    """A number in the order of ``ordered`` that exactly the ``top_k`` largest logits of the row reach.

    Logits that equal the last of them reach it too.

    Each pass over the row counts at three places between one that enough logits reach and one that too few reach.
    """
    low = tl.full((), -2147483648, tl.int64)
    high = ordered(largest).to(tl.int64) + 1
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        reached1 = tl.zeros((BLOCK,), tl.int32)
        reached2 = tl.zeros((BLOCK,), tl.int32)
        reached3 = tl.zeros((BLOCK,), tl.int32)
        middle1 = low + step
        middle2 = tl.minimum(middle1 + step, high)
        middle3 = tl.minimum(middle2 + step, high)
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            value = ordered(load_logits(row_ptr, token, vocab))
            reached1 += (value >= middle1.to(tl.int32)).to(tl.int32)
            reached2 += (value >= middle2.to(tl.int32)).to(tl.int32)
            reached3 += (value >= middle3.to(tl.int32)).to(tl.int32)
        count1 = tl.sum(reached1)
        count2 = tl.sum(reached2)
        count3 = tl.sum(reached3)
        if count3 >= top_k:
            low = middle3
        elif count2 >= top_k:
            low = middle2
            high = middle3
        elif count1 >= top_k:
            low = middle1
            high = middle2
        else:
            high = middle1
        if (count1 == top_k) | (count2 == top_k) | (count3 == top_k):
            low = tl.where(count1 == top_k, middle1, tl.where(count2 == top_k, middle2, middle3))
            high = low
    return low.to(tl.int32)


@triton.jit
def weigh_before(row_ptr, token, value, floor, largest, inverse, vocab, BLOCK: tl.constexpr):
    """Counts tokens with a larger logit than ``token``, whose logit is ``value``, and weighs those before it.

    Third is the weight of all tokens. Those whose logits do not reach ``floor`` weigh nothing.

    Larger logits come first, of equal ones the lower id. The weights are summed in one order, whatever the token: the
    weight before it cannot but grow along the order. Before the first one there is none.
    """
    larger = tl.zeros((BLOCK,), tl.int32)
    before = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = load_logits(row_ptr, ids, vocab)
        weight = tl.where(ordered(logits) >= floor, tl.exp2((logits - largest) * inverse), 0.0)
        larger += (logits > value).to(tl.int32)
        before += tl.where((logits > value) | ((logits == value) & (ids < token)), weight, 0.0)
        total += weight
    return tl.sum(larger), tl.sum(before), tl.sum(total)


@triton.jit
def best_before(row_ptr, token, value, largest, inverse, key, vocab, BLOCK: tl.constexpr):
    """The token with the largest noisy score of those before ``token``, whose logit is ``value``."""
    best_score = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_token = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = load_logits(row_ptr, ids, vocab)
        score = noisy_score(logits, largest, inverse, key, ids)
        is_before = (logits > value) | ((logits == value) & (ids < token))
        better = is_before & (score > best_score)
        best_score = tl.where(better, score, best_score)
        best_token = tl.where(better, ids, best_token)
    best = tl.max(best_score, 0)
    return tl.min(tl.where(best_score == best, best_token, vocab), 0)


@triton.jit(
    do_not_specialize_on_alignment=[
        "out_ptr", "largest_ptr", "at_ptr", "rows_ptr", "temperature_ptr", "keys_ptr", "top_k_ptr", "top_p_ptr",
        "tops_ptr", "score_ptr", "token_ptr",
    ]
)  # fmt: skip
def settle_kernel(
    out_ptr,  # int64: the tokens; of a row whose largest logit is not finite any token of the vocabulary
    largest_ptr,  # float32 [S]: each row's largest logit, infinity where there is a NaN
    at_ptr,  # int64 [S]: where in out
    logits_ptr,  # [N, vocab], rows ``stride`` apart
    rows_ptr,  # int64 [S]
    temperature_ptr,  # float32 [S]
    keys_ptr,  # int64 [S]
    top_k_ptr,  # int64 [S]: 1 to vocab, which allows all
    top_p_ptr,  # float32 [S]: above 0, at most 1, which allows all
    tops_ptr,  # float32 [S, pieces]
    score_ptr,  # float32 [S, pieces]
    token_ptr,  # int32 [S, pieces]
    vocab,
    stride,
    pieces,
    PIECES_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    draw = tl.program_id(0)
    row = tl.load(rows_ptr + draw)
    top_k = tl.load(top_k_ptr + draw).to(tl.int32)
    top_p = tl.load(top_p_ptr + draw)
    inverse = LOG2E / tl.load(temperature_ptr + draw)
    piece = tl.arange(0, PIECES_PAD)
    first = draw.to(tl.int64) * pieces
    tops = tl.load(tops_ptr + first + piece, mask=piece < pieces, other=float("-inf"))
    largest = tl.max(tops, 0)
    tl.store(largest_ptr + draw, largest)
    token = tl.zeros((), tl.int32)
    finite = tl.abs(largest) < float("inf")
    if finite:
        score = tl.load(score_ptr + first + piece, mask=piece < pieces, other=float("-inf"))
        token = tl.load(token_ptr + first + tl.argmax(score + (tops - largest) * inverse, 0))
    if finite & ((top_k < vocab) | (top_p < 1)):
        row_ptr = logits_ptr + row * stride
        key = tl.load(keys_ptr + draw)
        floor = tl.full((), -2147483648, tl.int32)
        if (top_k < vocab) & (top_p < 1):
            floor = kth_largest(row_ptr, largest, top_k, vocab, BLOCK)
        searching = 1
        while searching == 1:
            value = tl.load(row_ptr + token).to(tl.float32)
            larger, before, total = weigh_before(row_ptr, token, value, floor, largest, inverse, vocab, BLOCK)
            if (larger < top_k) & ((top_p == 1) | (before / total < top_p)):  # so it is with the first of all
                searching = 0
            else:
                token = best_before(row_ptr, token, value, largest, inverse, key, vocab, BLOCK)
    tl.store(out_ptr + tl.load(at_ptr + draw), token.to(tl.int64))


def noise_constants() -> dict[str, int]:
    """The compile-time arguments of ``noise_kernel`` with num_warps."""
    return {"BLOCK": NOISE_BLOCK, "num_warps": NOISE_WARPS}


def settle_constants(vocab: int) -> dict[str, int]:
    """The compile-time arguments of ``settle_kernel`` with num_warps, for logits of ``vocab`` tokens."""
    pieces = next_power_of_two(cdiv(vocab, NOISE_BLOCK))
    return {"PIECES_PAD": pieces, "BLOCK": SETTLE_BLOCK, "num_warps": SETTLE_WARPS}


def draw_into(
    out: torch.Tensor,
    at: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """Write one token for each of S draws to ``out [M]`` int64 at ``at [S]`` int64: execution.gumbel.draw_into.

    ``logits [N, vocab]`` of any float dtype, read in place; ``rows [S]`` int64; ``temperature [S]`` float32;
    ``keys [S]`` int64; ``top_k [S]`` int64; ``top_p [S]`` float32. Returns the largest logits, float32 ``[S]``.
    """
    count, vocab = len(rows), logits.shape[1]
    pieces = cdiv(vocab, NOISE_BLOCK)
    tops, scores = torch.empty(2, count, pieces, dtype=torch.float32, device=logits.device)
    largest = torch.empty(count, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(count, pieces, dtype=torch.int32, device=logits.device)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    noise_kernel[(count, pieces)](
        logits, rows, temperature, keys, tops, scores, tokens, vocab, logits.stride(0), **noise_constants()
    )  # fmt: skip
    settle_kernel[(count,)](
        out, largest, at, logits, rows, temperature, keys, top_k, top_p, tops, scores, tokens,
        vocab, logits.stride(0), pieces, **settle_constants(vocab),
    )  # fmt: skip
    return largest
