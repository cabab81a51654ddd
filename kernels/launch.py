"""Launch parameters of the Triton kernels: small pure functions, testable without a GPU."""

from __future__ import annotations

from typing import NamedTuple

MIN_DOT = 16  # tl.dot takes no dimension under 16
SHARED_BYTES = 64 * 1024  # of K and V tiles in flight; the smallest block limit, 99 KiB of sm_86, 89 and 120, has room
MIN_SPLIT_TOKENS = 256  # a shorter split costs more in the reduction than it gains
MAX_SPLITS = 64


class Tiles(NamedTuple):
    """``block_m`` query rows, ``block_n`` tokens, padded head dims, pipeline stages, warps."""

    block_m: int
    block_n: int
    d_pad: int
    v_pad: int
    num_stages: int
    num_warps: int


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def padded_dim(dim: int) -> int:
    """A head dim as tl.dot can take it."""
    return max(MIN_DOT, next_power_of_two(dim))


def _tokens_and_stages(d_pad: int, v_pad: int, itemsize: int, largest: int) -> tuple[int, int]:
    """The longest token tile, then the deepest pipeline of at most 3 stages, that fit SHARED_BYTES."""
    block_n = largest
    while block_n > MIN_DOT and block_n * (d_pad + v_pad) * itemsize * 2 > SHARED_BYTES:
        block_n //= 2
    stages = SHARED_BYTES // (block_n * (d_pad + v_pad) * itemsize)
    return block_n, max(1, min(3, stages))


def decode_tiles(group: int, head_dim: int, v_head_dim: int, itemsize: int) -> Tiles:
    """Tiles of the decode kernel: all query heads of a KV head are its rows."""
    d_pad, v_pad = padded_dim(head_dim), padded_dim(v_head_dim)
    block_n, stages = _tokens_and_stages(d_pad, v_pad, itemsize, largest=64)
    return Tiles(max(MIN_DOT, next_power_of_two(group)), block_n, d_pad, v_pad, stages, 4)


def prefill_tiles(group: int, head_dim: int, v_head_dim: int, itemsize: int) -> Tiles:
    """Tiles of the prefill kernel: its rows are query tokens x the query heads of one KV head."""
    d_pad, v_pad = padded_dim(head_dim), padded_dim(v_head_dim)
    block_n, stages = _tokens_and_stages(d_pad, v_pad, itemsize, largest=64)
    rows = 128 if d_pad <= 128 and itemsize <= 2 else 64
    block_m = max(rows, next_power_of_two(group))
    return Tiles(block_m, block_n, d_pad, v_pad, min(stages, 2), 8 if block_m >= 128 else 4)


def num_kv_splits(batch: int, kv_heads: int, max_tokens: int, num_sms: int) -> int:
    """How many pieces decode cuts each sequence into, so that about two programs per SM run.

    One piece when the batch alone fills the GPU or no sequence is long enough to share. Powers of two: the kernel is
    compiled once for each number, and a batch that grows must not compile in the middle of a measurement.
    """
    programs = max(1, batch * kv_heads)
    wanted = cdiv(2 * num_sms, programs) if programs < num_sms else 1
    pieces = max(1, min(wanted, cdiv(max_tokens, MIN_SPLIT_TOKENS), MAX_SPLITS))
    return 1 << (pieces.bit_length() - 1)
