"""Launch arithmetic of the Triton kernels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.launch import SHARED_BYTES, decode_tiles, num_kv_splits, padded_dim, prefill_tiles


@given(
    group=st.integers(1, 64), dim=st.integers(1, 256), v_dim=st.integers(1, 256), size=st.sampled_from([2, 4])
)
def test_tiles_hold_the_work_and_fit_the_chip(group, dim, v_dim, size):
    for tiles in (decode_tiles(group, dim, v_dim, size), prefill_tiles(group, dim, v_dim, size)):
        assert tiles.block_m >= max(16, group) and tiles.block_n >= 16
        assert dim <= tiles.d_pad < 2 * max(dim, 9) and v_dim <= tiles.v_pad < 2 * max(v_dim, 9)
        for n in (tiles.block_m, tiles.block_n, tiles.d_pad, tiles.v_pad):
            assert n & (n - 1) == 0
        assert tiles.block_n * (tiles.d_pad + tiles.v_pad) * size * tiles.num_stages <= SHARED_BYTES


@pytest.mark.parametrize(
    ("batch", "kv_heads", "tokens", "sms", "splits"),
    [
        (64, 8, 8192, 132, 1),  # the batch fills the GPU
        (1, 8, 32768, 132, 32),  # 256 programs for 132 SMs
        (1, 8, 300, 132, 2),  # never under 256 tokens a split
        (1, 1, 1 << 20, 132, 64),  # the reduction's limit
        (1, 8, 100, 132, 1),
        (1, 8, 0, 132, 1),
    ],
)
def test_number_of_splits(batch, kv_heads, tokens, sms, splits):
    assert num_kv_splits(batch, kv_heads, tokens, sms) == splits


def test_padded_dims():
    assert [padded_dim(d) for d in (1, 16, 20, 64, 80, 128, 192)] == [16, 16, 32, 64, 128, 128, 256]
