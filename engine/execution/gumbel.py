"""Random numbers that are a function of (seed, position, token id) and of nothing else, on any device.

Gumbel-max (Gumbel 1954; Maddison et al. 2014): the argmax of ``logit + G`` over tokens, with independent standard
Gumbel ``G = -log(-log U)``, is a draw from the softmax. The noise is counter-based (Salmon et al. 2011): there is no
state to advance, so who else is in the batch, what was preempted and in which order rows are computed changes nothing.
The integers are the same bits on a CPU and on a GPU; the logarithms may differ there in the last place.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

# SplitMix64's increment and multipliers (Steele, Lea, Flood 2014; the multipliers are Stafford's mix 13)
_WEYL = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SMALLEST = 2.0**-64
_LARGEST = 1.0 - 2.0**-24  # the largest float32 below 1


def row_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One key for each draw, ``[M]`` int64: of its seed (``[M]`` uint64) and its position in the sequence (``[M]``)."""
    weyl = np.uint64(_WEYL)
    return _mix64(_mix64(seeds + weyl) + positions.astype(np.uint64) * weyl).view(np.int64)


def _mix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output function, a bijection on uint64 whose every output bit hangs on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX[1])
    return x ^ (x >> np.uint64(31))


def random_bits(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """63 random bits for each token id, ``[M, vocab]`` int64 in [0, 2^63), from ``keys [M]`` int64.

    A Weyl sequence over the token ids that starts at the key, through SplitMix64's output function. torch's right
    shift copies the sign bit, which makes ``x ^ x >> s`` map x and ~x to one and the same non-negative number: two of
    2^64 states meet, the bits stay uniform, and no shift needs a mask.
    """
    bits = keys[:, None] + _weyl_steps(vocab, keys.device)
    shifted = bits >> 32
    bits.bitwise_xor_(shifted).mul_(_signed(_MIX[0]))
    torch.bitwise_right_shift(bits, 29, out=shifted)
    bits.bitwise_xor_(shifted).mul_(_signed(_MIX[1]))
    torch.bitwise_right_shift(bits, 32, out=shifted)
    return bits.bitwise_xor_(shifted)


def add_gumbel_(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """``scores [M, vocab]`` float32 plus standard Gumbel noise, in place; ``keys [M]`` int64. -inf stays -inf.

    ``G = -log(E)`` with ``E = -log(1 - U)``, a standard exponential: small E decide, and there a float32 U has all its
    digits, so that no two tokens of a large vocabulary tie and no tail is cut off before 2^-63.
    """
    uniform = random_bits(keys, scores.shape[1]).to(torch.float32).mul_(2.0**-63).clamp_(_SMALLEST, _LARGEST)
    return scores.sub_(uniform.neg_().log1p_().neg_().log_())


def draw(
    logits: torch.Tensor, rows: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """One token for each of S draws, ``[S]`` int64, from ``logits [N, vocab]`` of any float dtype over a temperature.

    ``rows [S]`` int64: which row each is from; ``largest [S]`` float32: its largest logit, set to 0 so that no
    temperature overflows; ``temperature [S]`` float32; ``keys [S]`` int64.
    """
    if logits.is_cuda:
        from kernels.triton_sample import gumbel_argmax

        return gumbel_argmax(logits, rows, largest, temperature, keys)
    scores = logits.index_select(0, rows).float().sub_(largest[:, None]).div_(temperature[:, None])
    return torch.argmax(add_gumbel_(scores, keys), dim=-1)


def draw_scored(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The same from scores ``[S, vocab]`` float32, each row's own and at most 0; they are written over."""
    if scores.is_cuda:
        zeros = torch.zeros(len(keys), device=scores.device)
        return draw(scores, torch.arange(len(keys), device=scores.device), zeros, zeros + 1, keys)
    return torch.argmax(add_gumbel_(scores, keys), dim=-1)


@cache
def _weyl_steps(vocab: int, device: torch.device) -> torch.Tensor:
    """``token id * increment`` modulo 2^64, ``[vocab]`` int64."""
    return torch.arange(vocab, dtype=torch.int64, device=device) * _signed(_WEYL)


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - 2**64 if value >= 2**63 else value
