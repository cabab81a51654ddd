"""The dense layers of the CPU kernels against float64 and against transformers' own functions."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kernels.cpu_memory import HugeArena, huge_empty
from kernels.layers_cpu import GatedMLP, PackedLinear, RMSNorm, can_norm, can_pack, can_rotate, rotate
from kernels.numba_amx import CHUNK, has_amx
from kernels.numba_gemm import DEPTH, PANEL, ROW_BLOCK, ROWS

ARENA = HugeArena()


def in_float64(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    bias = None if linear.bias is None else linear.bias.double()
    return F.linear(x.double(), linear.weight.double(), bias)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == torch.float32 and got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    rows=st.one_of(st.integers(0, 3 * ROWS + 1), st.sampled_from([ROW_BLOCK - 1, ROW_BLOCK, 2 * ROW_BLOCK + 1])),
    inputs=st.one_of(st.integers(1, 40), st.sampled_from([DEPTH - 1, DEPTH, DEPTH + 1, 3 * DEPTH])),
    outputs=st.integers(1, 12).map(lambda vectors: 16 * vectors),
    bias=st.booleans(),
    gated=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 9),
)
@torch.inference_mode()
def test_linear_equals_float64(rows, inputs, outputs, bias, gated, threads, seed):
    torch.manual_seed(seed)
    linear = nn.Linear(inputs, outputs, bias=bias)
    x, gate = torch.randn(rows, inputs), 4 * torch.randn(rows, outputs) if gated else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = PackedLinear([linear], ARENA)(x, gate)
    finally:
        torch.set_num_threads(before)
    expected = in_float64(linear, x)
    assert torch.equal(PackedLinear([linear], ARENA).weight, linear.weight)
    assert_close(got, expected * F.silu(gate.double()) if gated else expected)


@torch.inference_mode()
def test_several_layers_side_by_side_and_parts_of_them():
    layers = [nn.Linear(40, PANEL, bias=True), nn.Linear(40, 2 * PANEL, bias=False), nn.Linear(40, PANEL, bias=True)]
    joint, x = PackedLinear(layers, ARENA), torch.randn(2, 5, 40)
    expected = [in_float64(layer, x) for layer in layers]
    assert_close(joint(x), torch.cat(expected, -1))
    assert_close(joint.part(PANEL, 3 * PANEL)(x), expected[1])
    assert torch.equal(joint.weight, torch.cat([layer.weight for layer in layers]))
    assert joint.part(0, PANEL).packed.data_ptr() == joint.packed.data_ptr(), "a part has no memory of its own"


@torch.inference_mode()
def test_strided_rows_and_what_is_not_finite():
    linear, wide = nn.Linear(24, 32), torch.randn(9, 2, 48)
    assert_close(PackedLinear([linear], ARENA)(wide[:, 1, :24]), in_float64(linear, wide[:, 1, :24]))
    assert_close(PackedLinear([linear], ARENA)(wide[:, 1, ::2]), in_float64(linear, wide[:, 1, ::2]))
    x, gate = torch.randn(7, 24), torch.randn(7, 32)
    x[2, 5], x[4, 0], gate[6, 31] = float("nan"), float("inf"), float("nan")
    got = PackedLinear([linear], ARENA)(x, gate)
    expected = linear(x) * F.silu(gate)
    assert torch.equal(got.isnan(), expected.isnan()) and got[2].isnan().all() and got[6, 31].isnan()
    assert_close(got[[0, 1, 3, 5]], expected[[0, 1, 3, 5]].double())


@torch.inference_mode()
def test_gate_far_out():
    """silu of +-200 is 200 and -0, not NaN from an overflowing exponential."""
    linear = nn.Linear(3, 16, bias=False)
    x, gate = torch.ones(1, 3), torch.tensor([[-200.0, 200.0, -88.0, 88.0] * 4])
    assert_close(PackedLinear([linear], ARENA)(x, gate), in_float64(linear, x) * F.silu(gate.double()))


@torch.inference_mode()
def test_gated_mlp():
    gate, up, down = nn.Linear(48, 80), nn.Linear(48, 80), nn.Linear(80, 48)
    mlp, x = GatedMLP(*(PackedLinear([layer], ARENA) for layer in (gate, up, down))), torch.randn(3, 7, 48)
    hidden = F.silu(in_float64(gate, x)) * in_float64(up, x)
    assert_close(mlp(x), F.linear(hidden, down.weight.double(), down.bias.double()))


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(0, 16), (1, 1, 48), (2, 5, 3, 64)])
def test_rms_norm(shape):
    x, weight = 3 * torch.randn(shape), torch.randn(shape[-1])
    expected = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert_close(RMSNorm(weight, 1e-5)(x), expected)
    assert_close(RMSNorm(weight, 1e-5)(x.transpose(0, -2)), expected.transpose(0, -2))


@torch.inference_mode()
@pytest.mark.parametrize(("dim", "rotated"), [(32, 32), (64, 64), (80, 32), (128, 96)])
def test_rotation_is_that_of_transformers(dim, rotated):
    rows = torch.randn(6, 5, dim)  # three query heads, one KV head, and V, which stays as it is
    angles = torch.randn(1, 6, rotated)
    q, k = rows[None, :, :3].transpose(1, 2), rows[None, :, 3:4].transpose(1, 2)
    turned = apply_rotary_pos_emb(q[..., :rotated], k[..., :rotated], angles.cos(), angles.sin())
    expected = rows.clone()
    for heads, part in ((slice(0, 3), turned[0]), (slice(3, 4), turned[1])):
        expected[:, heads, :rotated] = part[0].transpose(0, 1)
    rotate(rows[:, :4], angles.cos()[0], angles.sin()[0])
    torch.testing.assert_close(rows, expected, atol=1e-6, rtol=1e-6)


def test_what_is_left_to_torch():
    assert can_pack(nn.Linear(7, 16)) and not can_pack(nn.Linear(7, 17))
    assert not can_pack(nn.Linear(7, 16).double()) and not can_pack(nn.Conv1d(7, 16, 1))
    assert can_norm(torch.ones(32)) and not can_norm(torch.ones(33)) and not can_norm(torch.ones(32).half())
    assert can_rotate(32) and not can_rotate(48)


def assert_close_in_bfloat16(got: torch.Tensor, expected: torch.Tensor) -> None:
    """One rounding to bfloat16, half a unit in the last place at most, and the sums' own errors."""
    assert got.dtype == torch.bfloat16 and got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1.05 * 2**-8, equal_nan=True)


@pytest.mark.skipif(not has_amx(), reason="no AMX here")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.one_of(st.integers(0, 70), st.sampled_from([CHUNK - 1, CHUNK + 1, CHUNK + 17])),
    inputs=st.sampled_from([32, 64, 288]),
    outputs=st.integers(1, 7).map(lambda vectors: 16 * vectors),
    bias=st.booleans(),
    gated=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 9),
)
@torch.inference_mode()
def test_linear_in_bfloat16_equals_float64(rows, inputs, outputs, bias, gated, threads, seed):
    torch.manual_seed(seed)
    linear = nn.Linear(inputs, outputs, bias=bias).bfloat16()
    x, gate = torch.randn(rows, inputs).bfloat16(), 4 * torch.randn(rows, outputs).bfloat16() if gated else None
    packed, before = PackedLinear([linear], ARENA), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = packed(x, gate)
    finally:
        torch.set_num_threads(before)
    expected = in_float64(linear, x)
    assert can_pack(linear) and torch.equal(packed.weight, linear.weight)
    assert_close_in_bfloat16(got, expected * F.silu(gate.double()) if gated else expected)


@pytest.mark.skipif(not has_amx(), reason="no AMX here")
@torch.inference_mode()
def test_parts_strided_rows_and_what_is_not_finite_in_bfloat16():
    layers = [nn.Linear(64, width, bias=width > 32).bfloat16() for width in (64, 32, 48)]
    joint, wide = PackedLinear(layers, ARENA), torch.randn(9, 2, 128).bfloat16()
    x = wide[:, 1, :64]
    expected = [in_float64(layer, x) for layer in layers]
    assert_close_in_bfloat16(joint(x), torch.cat(expected, -1))
    assert_close_in_bfloat16(joint.part(64, 96)(x), expected[1])
    x, gate = x.clone(), torch.tensor([-200.0, 200.0, -88.0, 88.0] * 36).bfloat16().repeat(9, 1)
    x[2, 5], x[4, 0], gate[6, 31] = math.nan, math.inf, math.nan
    got, expected = joint(x, gate), torch.cat([in_float64(layer, x) for layer in layers], -1) * F.silu(gate.double())
    assert got[2].isnan().all() and not got[4].isfinite().any() and got[6, 31].isnan()
    got[4], expected[4] = 0, 0  # infinity times a gate of -0 is NaN, and times a subnormal one infinity
    assert_close_in_bfloat16(got, expected)


@torch.inference_mode()
def test_norm_and_rotation_in_bfloat16_round_once():
    x, weight = 3 * torch.randn(2, 5, 48).bfloat16(), torch.randn(48).bfloat16()
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert can_norm(weight)
    assert_close_in_bfloat16(RMSNorm(weight, 1e-5)(x), expected)
    rows, angles = torch.randn(6, 5, 80).bfloat16(), torch.randn(6, 32)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    turned = rows[:, :4, :32].double()
    half = torch.cat([-turned[..., 16:], turned[..., :16]], -1)
    expected = rows.double()
    expected[:, :4, :32] = turned * cos.double()[:, None] + half * sin.double()[:, None]
    rotate(rows[:, :4], cos, sin)
    assert_close_in_bfloat16(rows, expected)


AS_COMPILED_FOR_AVX2 = """
import torch
import torch.nn.functional as F
from torch import nn
from kernels.cpu_memory import HugeArena
from kernels.layers_cpu import PackedLinear, RMSNorm, can_pack
from kernels.numba_gemm import PANEL

assert PANEL == 16
with torch.inference_mode():
    linear, x = nn.Linear(450, 80), torch.randn(33, 450)
    torch.testing.assert_close(PackedLinear([linear], HugeArena())(x), linear(x), atol=1e-5, rtol=1e-5)
    assert not can_pack(linear.bfloat16()), "left to torch without AMX"
    norm, x = RMSNorm(torch.randn(48).bfloat16(), 1e-5), torch.randn(3, 48).bfloat16()
    expected = F.rms_norm(x.double(), (48,), norm.weight.double(), 1e-5)
    torch.testing.assert_close(norm(x).double(), expected, atol=0, rtol=1.05 * 2**-8)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="an instruction set of x86")
def test_tiles_for_half_the_registers():
    target = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}
    subprocess.run([sys.executable, "-c", AS_COMPILED_FOR_AVX2], env=os.environ | target, check=True, timeout=100)


def test_arena_pieces_do_not_overlap():
    arena = HugeArena()
    pieces = [arena.take((3, 5)), arena.take((17,)), arena.take((20 << 20,)), arena.take((1,))]
    for value, piece in enumerate(pieces):
        piece.fill_(value)
    assert all(bool((piece == value).all()) for value, piece in enumerate(pieces))
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces)
    assert huge_empty((3, 4), torch.int8).shape == (3, 4)
