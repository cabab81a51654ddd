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

from kvbench_kernels import numba_dot
from kvbench_kernels.cpu_memory import HugeArena, huge_empty
from kvbench_kernels.kv_formats import INT8
from kvbench_kernels.layer_parts import Heads, Norm, Rotation
from kvbench_kernels.layers_cpu import PackedLinear, add_norm, can_norm, can_pack, can_rotate, gated, rotate_and_write
from kvbench_kernels.numba_amx import PANEL as TILE_PANEL
from kvbench_kernels.numba_amx import pack_bf16
from kvbench_kernels.numba_bf16 import CHUNK, has_bf16
from kvbench_kernels.numba_gemm import DEPTH, PANEL, ROW_BLOCK, ROWS
from kvbench_kernels.numba_memory import compiles_for
from kvbench_kernels.numba_quantised import load_rows
from kvbench_kernels.quantized import QuantizedKV

ARENA = HugeArena()
fast_bf16 = pytest.mark.skipif(not has_bf16(), reason="no CPU that multiplies bfloat16")


def in_float64(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    bias = None if linear.bias is None else linear.bias.double()
    return F.linear(x.double(), linear.weight.double(), bias)


def near(got: torch.Tensor, expected: torch.Tensor) -> None:
    """To bfloat16 one rounding, half a unit in the last place at most, and the sums' own errors."""
    atol, rtol = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-4, 1.05 * 2**-8)}[got.dtype]
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, atol=atol, rtol=rtol, equal_nan=True)


DTYPES = (torch.float32, torch.bfloat16)
ACTS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
HOW = ["plain", "residual", *ACTS]


def products(
    rows: int, inputs: int, outputs: int, bias: bool, how: str, threads: int, seed: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A product with what ``how`` says, ours and in float64. The weights must come back as they were."""
    torch.manual_seed(seed)
    linear, gate = (nn.Linear(inputs, outputs, bias=bias).to(dtype) for _ in range(2))
    with torch.no_grad():
        gate.weight.mul_(4)  # far into both arms of the activation
    x, residual = torch.randn(rows, inputs).to(dtype), torch.randn(rows, 2, outputs).to(dtype)[:, 1]
    packed, packed_gate, before = PackedLinear([linear], ARENA), PackedLinear([gate], ARENA), torch.get_num_threads()
    assert can_pack(linear) and torch.equal(packed.weight, linear.weight)
    expected = in_float64(linear, x)
    torch.set_num_threads(threads)
    try:
        if how in ACTS:
            got, expected = gated(packed_gate, packed, how, x), expected * ACTS[how](in_float64(gate, x))
        elif how == "residual":
            got, expected = packed(x, residual), expected + residual.double()
        else:
            got = packed(x)
        assert got.dtype == dtype
        return got, expected
    finally:
        torch.set_num_threads(before)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rows=st.one_of(st.integers(0, 3 * ROWS + 1), st.sampled_from([ROW_BLOCK - 1, ROW_BLOCK, 2 * ROW_BLOCK + 1])),
    inputs=st.one_of(st.integers(1, 40), st.sampled_from([DEPTH - 1, DEPTH, DEPTH + 1, 3 * DEPTH])),
    outputs=st.integers(1, 12).map(lambda vectors: 16 * vectors),
    bias=st.booleans(),
    how=st.sampled_from(HOW),
    threads=st.integers(1, 3),
    seed=st.integers(0, 9),
)
@torch.inference_mode()
def test_products_equal_float64(rows, inputs, outputs, bias, how, threads, seed):
    near(*products(rows, inputs, outputs, bias, how, threads, seed, torch.float32))


@torch.inference_mode()
def test_several_layers_side_by_side_and_parts_of_them():
    layers = [nn.Linear(40, PANEL, bias=True), nn.Linear(40, 2 * PANEL, bias=False), nn.Linear(40, PANEL, bias=True)]
    joint, x = PackedLinear(layers, ARENA), torch.randn(2, 5, 40)
    expected = [in_float64(layer, x) for layer in layers]
    near(joint(x), torch.cat(expected, -1))
    near(joint.part(PANEL, 3 * PANEL)(x), expected[1])
    assert torch.equal(joint.weight, torch.cat([layer.weight for layer in layers]))
    assert joint.part(0, PANEL).packed.data_ptr() == joint.packed.data_ptr(), "a part has no memory of its own"


@torch.inference_mode()
def test_strided_rows_and_what_is_not_finite():
    linear, wide = nn.Linear(24, 32), torch.randn(9, 2, 48)
    near(PackedLinear([linear], ARENA)(wide[:, 1, :24]), in_float64(linear, wide[:, 1, :24]))
    near(PackedLinear([linear], ARENA)(wide[:, 1, ::2]), in_float64(linear, wide[:, 1, ::2]))
    gate, x = nn.Linear(24, 32), torch.randn(7, 24)
    gate.weight[3, 0] = math.nan
    x[2, 5] = math.nan
    got = gated(PackedLinear([gate], ARENA), PackedLinear([linear], ARENA), "silu", x)
    expected = F.silu(gate(x)) * linear(x)
    assert torch.equal(got.isnan(), expected.isnan()) and got[2].isnan().all() and got[:, 3].isnan().all()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5, equal_nan=True)
    x[4, 0] = math.inf
    assert not PackedLinear([linear], ARENA)(x)[4].isfinite().any()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=fast_bf16)])
def test_gate_far_out(dtype):
    """silu of +-200 is 200 and -0, not NaN from an overflowing exponential."""
    gate, up = nn.Linear(32, 16, bias=False).to(dtype), nn.Linear(32, 16, bias=False).to(dtype)
    gate.weight[:] = 0
    gate.weight[:, 0] = torch.tensor([-200.0, 200.0, -88.0, 88.0] * 4)
    x = torch.ones(1, 32, dtype=dtype)
    got = gated(PackedLinear([gate], ARENA), PackedLinear([up], ARENA), "silu", x)
    near(got, F.silu(in_float64(gate, x)) * in_float64(up, x))


def norm_in_float64(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * (norm.weight.double() + norm.offset)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 16), (1, 48), (37, 1024)])  # the last on more threads than one
def test_norm_and_residual_sum(shape, dtype):
    x, residual = (3 * torch.randn(2, *shape).to(dtype)).unbind(0)
    residual = torch.cat([residual, residual], 1)[:, : shape[1]]  # rows further apart
    norm, post = Norm(torch.randn(shape[1]).to(dtype), 1e-5, 0.0), Norm(torch.randn(shape[1]).to(dtype), 1e-2, 1.0)
    for offset in (norm, post):
        total, normed = add_norm(x, offset)
        assert total is x
        near(normed, norm_in_float64(x, offset))
    for after, added in ((None, x.double()), (post, norm_in_float64(x, post))):
        before = residual.clone()
        total, normed = add_norm(x, norm, residual, after)
        near(total, before.double() + added)
        near(normed, norm_in_float64(total, norm))
        assert torch.equal(residual, before)
        alone, same = add_norm(x, None, residual, after)
        assert same is alone and torch.equal(alone, total)


def rotated_in_float64(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """transformers' own rotation of heads ``x [T, heads, D]``, after a norm that is rounded as a module's result."""
    x = x if norm is None else norm_in_float64(x, norm).to(x.dtype)
    turned, rest = x.double().split([cos.shape[1], x.shape[2] - cos.shape[1]], 2)
    turned, _ = apply_rotary_pos_emb(
        turned[None], turned[None], cos.double()[None], sin.double()[None], unsqueeze_dim=2
    )
    return torch.cat([turned[0], rest], 2)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "rotated"),
    [
        (6, Heads(3, 1, 32, 32), 32),
        (5, Heads(2, 2, 80, 32), 32),
        (9, Heads(4, 2, 128, 128), 96),
        (3, Heads(2, 1, 64, 64), 0),
        (70, Heads(8, 2, 64, 64), 64),  # on more threads than one
    ],
)
def test_rotation_and_kv_write(tokens, heads, rotated, normed, dtype):
    """Q and K as transformers rotates them; K and V where the slots say; what has no slot is not written."""
    dims = (heads.dim, heads.dim, heads.value_dim)
    widths = [count * dim for count, dim in zip((heads.query, heads.kv, heads.kv), dims, strict=True)]
    qkv, angles = torch.randn(tokens, sum(widths)).to(dtype), torch.randn(tokens, rotated)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = tuple(Norm(torch.randn(heads.dim).to(dtype), eps, offset) for eps, offset in ((1e-5, 0.0), (1e-2, 1.0)))
    parts = [part.unflatten(1, (-1, dim)) for part, dim in zip(qkv.clone().split(widths, 1), dims, strict=True)]
    used = norms if normed else (None, None)
    expected = [rotated_in_float64(x, cos, sin, norm) for x, norm in zip(parts[:2], used, strict=True)]
    slots = torch.randperm(tokens + 4)[:tokens]
    slots[1] = -1
    k_cache, v_cache = (torch.full((tokens + 4, heads.kv, dim), 7.0, dtype=dtype) for dim in dims[1:])
    given = norms if normed else None
    q, (k, v) = rotate_and_write(qkv, (cos, sin), heads, Rotation(rotated), given, k_cache, v_cache, slots)
    for got, wanted in zip((q, k), expected, strict=True):
        if normed and dtype == torch.bfloat16:  # a norm that rounds the other way is one unit off, before the rotation
            torch.testing.assert_close(got.double(), wanted, atol=0.07, rtol=2**-7)
        else:
            near(got, wanted)
    assert torch.equal(v, parts[2])
    stored = slots >= 0
    for cache, new in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[slots[stored]], new[stored])
        cache[slots[stored]] = 7.0
        assert bool((cache == 7.0).all()), "nothing else was written"


@torch.inference_mode()
def test_quantised_kv_is_written_from_rotated_keys():
    heads, slots = Heads(2, 1, 64, 64), torch.tensor([3, 0, 2])
    qkv, angles = torch.randn(3, 256), torch.randn(3, 64)
    caches = [QuantizedKV.zeros(INT8, 4, 1, 64, "cpu") for _ in range(2)]
    _, new = rotate_and_write(qkv, (angles.cos(), angles.sin()), heads, Rotation(64), None, *caches, slots)
    for cache, x in zip(caches, new, strict=True):
        step = x.abs().amax(-1, keepdim=True) / 127
        assert bool(((load_rows(cache, slots, torch.empty(3, 1, 64)) - x).abs() <= 0.51 * step).all())


def test_what_is_left_to_torch():
    assert can_pack(nn.Linear(7, 16)) and not can_pack(nn.Linear(7, 17))
    assert not can_pack(nn.Linear(7, 16).double()) and not can_pack(nn.Conv1d(7, 16, 1))
    assert can_norm(torch.ones(32)) and not can_norm(torch.ones(33)) and not can_norm(torch.ones(32).half())
    heads = Heads(4, 2, 64, 64)
    assert can_rotate(heads, Rotation(32), 32) and not can_rotate(heads, Rotation(48), 48)
    assert not can_rotate(heads, Rotation(64, pairs=True), 64)
    assert not can_rotate(Heads(4, 2, 40, 40), Rotation(32), 32) and not can_rotate(heads, Rotation(64), 32)


@fast_bf16
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rows=st.one_of(st.integers(0, 70), st.sampled_from([CHUNK - 1, CHUNK + 1, CHUNK + 17])),
    inputs=st.sampled_from([32, 64, 288]),
    outputs=st.integers(1, 7).map(lambda vectors: 16 * vectors),
    bias=st.booleans(),
    how=st.sampled_from(HOW),
    threads=st.integers(1, 3),
    seed=st.integers(0, 9),
)
@torch.inference_mode()
def test_products_in_bfloat16_equal_float64(rows, inputs, outputs, bias, how, threads, seed):
    near(*products(rows, inputs, outputs, bias, how, threads, seed, torch.bfloat16))


@fast_bf16
@torch.inference_mode()
def test_parts_strided_rows_and_what_is_not_finite_in_bfloat16():
    layers = [nn.Linear(64, width, bias=width > 32).bfloat16() for width in (64, 32, 48)]
    joint, wide = PackedLinear(layers, ARENA), torch.randn(9, 2, 128).bfloat16()
    x = wide[:, 1, :64]
    expected = [in_float64(layer, x) for layer in layers]
    near(joint(x), torch.cat(expected, -1))
    near(joint.part(64, 96)(x), expected[1])
    x = x.clone()
    x[2, 5] = math.nan
    got = gated(joint, joint, "silu", x)
    assert got[2].isnan().all() and got[[0, 1, *range(3, 9)]].isfinite().all()


@pytest.mark.skipif(not compiles_for("avx512bf16"), reason="no AVX512-BF16 here")
@pytest.mark.parametrize("rows", [1, numba_dot.ROWS, numba_dot.ROWS + 1, 32])
def test_vectors_set_sums_and_add_to_them(rows):
    """Also on a CPU with AMX, where layers use its tiles."""
    x, weight = torch.randn(rows, 96).bfloat16(), torch.randn(TILE_PANEL, 96).bfloat16()
    packed, sums, expected = pack_bf16(weight), torch.full((rows, 48), 7.0), x.double() @ weight.double().T
    where = (x.data_ptr(), 192, packed.data_ptr(), 3, 0, sums.data_ptr(), 192, rows)
    for times, add in ((1, 0), (2, 1)):
        numba_dot.multiply_rows(*where, add)
        torch.testing.assert_close(sums[:, :TILE_PANEL].double(), times * expected, atol=1e-4, rtol=1e-5)
    assert (sums[:, TILE_PANEL:] == 7).all(), "nothing beyond the panel is written"


AS_COMPILED_FOR_AVX2 = """
import torch
import torch.nn.functional as F
from torch import nn
from kvbench_kernels.cpu_memory import HugeArena
from kvbench_kernels.layer_parts import Norm
from kvbench_kernels.layers_cpu import PackedLinear, add_norm, can_pack
from kvbench_kernels.numba_gemm import PANEL

assert PANEL == 16
with torch.inference_mode():
    linear, x = nn.Linear(450, 80), torch.randn(33, 450)
    torch.testing.assert_close(PackedLinear([linear], HugeArena())(x), linear(x), atol=1e-5, rtol=1e-5)
    assert not can_pack(linear.bfloat16()), "left to torch where nothing multiplies bfloat16"
    weight, x = torch.randn(48).bfloat16(), torch.randn(3, 48).bfloat16()
    expected = F.rms_norm(x.double(), (48,), weight.double(), 1e-5)
    torch.testing.assert_close(add_norm(x, Norm(weight, 1e-5, 0.0))[1].double(), expected, atol=0, rtol=1.05 * 2**-8)
"""


@pytest.mark.full
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
