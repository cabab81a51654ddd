"""Draws from many rows of logits in one pass over them: temperature, counter-based Gumbel noise and argmax.

In torch the noise is a dozen passes over an int64 tensor four times the size of the logits; here it stays in registers,
and a draw is meant to cost little more than reading the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import cdiv

BLOCK = 2048  # token ids of a program: 8 a thread, so that the int64 noise stays in registers
NUM_WARPS = 8


@triton.jit
def gumbel_bits(key, token):
    """63 random bits for each token id; ``key`` and ``token`` int64. SplitMix64's output function over a Weyl sequence,
    with shifts that copy the sign: integer for integer what ``engine.execution.gumbel.random_bits`` gives."""
    bits = key + token * -7046029254386353131
    bits = (bits ^ (bits >> 32)) * -4658895280553007687
    bits = (bits ^ (bits >> 29)) * -7723592293110705685
    return bits ^ (bits >> 32)


@triton.jit
def gumbel_argmax_kernel(
    logits_ptr,  # [N, vocab], rows ``stride`` apart
    rows_ptr,  # int64 [S]: which row each draw is from
    largest_ptr,  # float32 [S]: of the row, so that the scores are at most 0 and no temperature overflows them
    temperature_ptr,  # float32 [S]
    keys_ptr,  # int64 [S]
    score_ptr,  # float32 [S, pieces]: the best of each piece
    token_ptr,  # int64 [S, pieces]: whose it is
    vocab,
    stride,
    BLOCK: tl.constexpr,
):
    draw = tl.program_id(0)
    piece = tl.program_id(1)
    token = piece * BLOCK + tl.arange(0, BLOCK)
    in_range = token < vocab
    row = tl.load(rows_ptr + draw)
    logits = tl.load(logits_ptr + row * stride + token, mask=in_range, other=float("-inf")).to(tl.float32)
    score = (logits - tl.load(largest_ptr + draw)) / tl.load(temperature_ptr + draw)
    bits = gumbel_bits(tl.load(keys_ptr + draw), token.to(tl.int64))
    u = tl.minimum(tl.maximum(bits.to(tl.float32) * 1.0842021724855044e-19, 5.421010862427522e-20), 0.9999999403953552)
    # -log(1 - u), a standard exponential, by its series where 1 - u would lose the digits of a small u
    series = u * (1 + u * (0.5 + u * (0.3333333333 + u * (0.25 + u * 0.2))))
    score = score - tl.log(tl.where(u < 0.03, series, -tl.log(1 - u)))
    score = tl.where(in_range, score, float("-inf"))
    best, at = tl.max(score, 0, return_indices=True)
    place = draw.to(tl.int64) * tl.num_programs(1) + piece
    tl.store(score_ptr + place, best)
    tl.store(token_ptr + place, (piece * BLOCK + at).to(tl.int64))


def gumbel_argmax(
    logits: torch.Tensor, rows: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """One token for each of S draws, int64 ``[S]``, from ``logits [N, vocab]`` of any float dtype.

    ``rows [S]`` int64, ``largest [S]`` float32 (each draw's largest logit), ``temperature [S]`` float32, ``keys [S]``
    int64. A logit of -inf is never drawn while another is finite.
    """
    count, vocab = len(rows), logits.shape[1]
    pieces = cdiv(vocab, BLOCK)
    scores = torch.empty(count, pieces, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(count, pieces, dtype=torch.int64, device=logits.device)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    gumbel_argmax_kernel[(count, pieces)](
        logits, rows, largest, temperature, keys, scores, tokens, vocab, logits.stride(0),
        BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    return tokens.gather(1, scores.argmax(1, keepdim=True))[:, 0]
