"""Draws of tokens with random numbers that are a function of (seed, position, token id) and of nothing else.

Gumbel-max (Gumbel 1954; Maddison et al. 2014): the argmax of ``logit + G`` over tokens, with independent standard
Gumbel ``G = -log(-log U)``, is a draw from the softmax. The noise is counter-based (Salmon et al. 2011): there is no
state to advance, so who else is in the batch, what was preempted and in which order rows are computed changes nothing.
The integers are the same bits on a CPU and on a GPU; the logarithms may differ there in the last places.
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
_BLOCK_ELEMENTS = 2**15  # logits drawn from at once: torch gives so few to one thread, and they stay in a core's cache


def row_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One key for each draw, ``[M]`` int64, from ``seeds [M]`` uint64 and ``positions [M]`` in the sequence."""
    weyl = np.uint64(_WEYL)
    return _mix64(_mix64(seeds + weyl) + positions.astype(np.uint64) * weyl).view(np.int64)


def _mix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output function, a bijection on uint64 whose every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX[1])
    return x ^ (x >> np.uint64(31))


def random_bits(keys: torch.Tensor, vocab: int, token_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Make 63 random bits for each token id, ``[M, vocab]`` int64 in [0, 2^63), from ``keys [M]`` int64.

    ``token_ids [vocab]`` int64: the tokens, else 0 to vocab - 1. A Weyl sequence over the token ids that starts
    at the key, through SplitMix64's output function. torch's right shift copies the sign bit, which makes
    ``x ^ x >> s`` map x and ~x to one and the same non-negative number: two of 2^64 states meet, the bits stay uniform,
    and no shift needs a mask.
    """
    steps = _weyl_steps(vocab, keys.device) if token_ids is None else token_ids * _signed(_WEYL)
    bits = keys[:, None] + steps
    shifted = bits >> 32
    bits.bitwise_xor_(shifted).mul_(_signed(_MIX[0]))
    torch.bitwise_right_shift(bits, 29, out=shifted)
    bits.bitwise_xor_(shifted).mul_(_signed(_MIX[1]))
    torch.bitwise_right_shift(bits, 32, out=shifted)
    return bits.bitwise_xor_(shifted)


def add_gumbel_(scores: torch.Tensor, keys: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Add standard Gumbel noise to ``scores [M, vocab]`` float32 in place; ``keys [M]`` int64. -inf stays -inf.

    ``token_ids [vocab]`` int64: the tokens of the scores, else 0 to vocab - 1.

    ``G = -log(E)`` with ``E = -log(1 - U)``, a standard exponential: small E decide, and there a float32 U has all its
    digits, so that no two tokens of a large vocabulary tie and no tail is cut off before 2^-63.
    """
    uniform = random_bits(keys, scores.shape[1], token_ids).to(torch.float32).mul_(2.0**-63)
    return scores.sub_(uniform.clamp_(_SMALLEST, _LARGEST).neg_().log1p_().neg_().log_())


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
    """Write one token for each of S draws from ``logits [N, vocab]`` to ``out [M]`` int64 at ``at [S]`` int64.

    Returns the largest logit of each draw's row ``[S]``, not a finite one where there is a NaN. Where it is not finite,
    any token of the vocabulary is drawn. ``rows [S]`` int64: which row each is from. ``temperature [S]`` float32,
    ``keys [S]`` int64. Only tokens that ``top_k [S]`` int64 (vocab or more: all) and then ``top_p [S]``
    float32 (1: all) allow are drawn:

    - top-k: the k largest logits, and those that equal the last of them;
    - top-p: the fewest most probable tokens of these whose probabilities reach ``top_p`` (Holtzman et al. 2020), as in
      vLLM and transformers; of equally probable ones at the edge, those with the lowest ids.
    """
    if logits.is_cuda:
        from kvbench_kernels import triton_sample

        return triton_sample.draw_into(out, at, logits, rows, temperature, keys, top_k, top_p)
    largest = logits.amax(-1).float()  # subtracted, so that no temperature overflows
    finite = largest.isfinite()[rows].numpy()
    limited = (top_k < logits.shape[1]).logical_or_(top_p < 1).numpy()
    tokens = torch.zeros(len(rows), dtype=torch.int64)
    free = torch.from_numpy(np.flatnonzero(finite & ~limited))
    for part in free.split(max(1, _BLOCK_ELEMENTS // logits.shape[1])):
        scores = logits.index_select(0, rows[part]).float()
        scores.sub_(largest[rows[part], None]).div_(temperature[part, None])
        tokens[part] = torch.argmax(add_gumbel_(scores, keys[part]), dim=-1)
    for i in np.flatnonzero(finite & limited).tolist():
        row = int(rows[i])
        below = logits[row].float().sub(largest[row])
        allowed = allowed_tokens(below.numpy(), temperature[i].numpy(), int(top_k[i]), top_p[i].numpy())
        ids = torch.from_numpy(allowed)  # the noise is made for these alone
        tokens[i] = ids[add_gumbel_(below[ids].div_(temperature[i])[None], keys[i, None], ids).argmax()]
    out.index_copy_(0, at, tokens)
    return largest[rows]


def allowed_tokens(logits: np.ndarray, temperature: np.float32, top_k: int, top_p: np.float32) -> np.ndarray:
    """Ids of the tokens that top-k and then top-p allow, ascending: see ``draw_into``.

    ``logits [vocab]`` float32, the largest of them 0. Only the values that may belong to the top-p are sorted: the
    tokens that weigh less than ``(1 - top_p) / vocab`` of all together weigh less than what top-p leaves out.
    """
    vocab = len(logits)
    reach = logits >= np.partition(logits, vocab - top_k)[vocab - top_k] if top_k < vocab else None
    if top_p >= 1:
        return np.arange(vocab) if reach is None else np.flatnonzero(reach)
    with np.errstate(over="ignore"):  # of a low temperature: -inf weighs nothing, as it should
        scores = logits / temperature
    weights = np.exp(scores)
    if reach is not None:
        weights *= reach
    total = weights.sum(dtype=np.float64)
    likely = weights > (1.0 - float(top_p)) * total / vocab * 0.999  # what is summed in float32 is that exact
    order = -np.sort(-logits[likely])
    with np.errstate(over="ignore"):
        sorted_weights = np.exp(order / temperature).astype(np.float64)
    before = np.cumsum(sorted_weights) - sorted_weights
    count = max(1, int(np.count_nonzero((before / total).astype(np.float32) < top_p)))
    edge = order[count - 1]
    larger = np.flatnonzero(logits > edge)
    equal = np.flatnonzero(logits == edge)[: count - len(larger)]
    return np.sort(np.concatenate([larger, equal]))


@cache
def _weyl_steps(vocab: int, device: torch.device) -> torch.Tensor:
    """Compute ``token id * increment`` modulo 2^64, ``[vocab]`` int64."""
    return torch.arange(vocab, dtype=torch.int64, device=device) * _signed(_WEYL)


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - 2**64 if value >= 2**63 else value
