"""The kernels of decoder layers against torch. Run like triton_checks.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from triton_cases import DEVICE, full

from kvbench_kernels.kv_formats import KV_FORMATS
from kvbench_kernels.quantized import QuantizedKV, raw_tensors
from kvbench_kernels.triton_layers import Heads, Norm, Rotation, act_mul, add_norm, rotate_and_write

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of one result, relative
# float32 shows what a kernel computes, bfloat16 where it rounds.
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, full(torch.float16)])


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within one rounding to the dtype of ``got``; sums of float32 in another order may move it by a step."""
    limit = ROUNDING[got.dtype]
    torch.testing.assert_close(got.float(), expected.float(), rtol=limit, atol=limit)


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    x = x.float()
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (norm.weight.float() + norm.offset)


@dtypes
@pytest.mark.parametrize("size", [48, full(1), full(1000)])
@pytest.mark.parametrize("parts", ["norm", "add norm", "post add norm", "post add", "add"])
def test_norms_and_the_residual_sum(dtype, size, parts):
    """Rows apart from each other, and small enough for eps to matter."""
    x = (draw(3, size + 5, dtype=dtype) * torch.tensor([[1.0], [1e-2], [30.0]], device=DEVICE).to(dtype))[:, :size]
    residual = draw(3, size, seed=1, dtype=dtype)
    post = Norm(draw(size, seed=2, dtype=dtype), 1e-3, 1.0) if "post" in parts else None
    norm = Norm(draw(size, seed=3, dtype=dtype), 1e-5, 0.0) if "norm" in parts.split() else None
    before, added = x.clone(), residual.clone()
    total, out = add_norm(x, norm, residual if "add" in parts else None, post)
    assert torch.equal(x, before) and torch.equal(residual, added), "inputs stay"
    expected = normed(x, post) if post else x.float()
    if "add" in parts:
        expected = expected + residual.float()
        close(total, expected)
        assert total.data_ptr() != residual.data_ptr()
    else:
        assert total is x
    if norm:
        close(out, normed(total, norm))  # of the sum as it was rounded
    else:
        assert out is total


@dtypes
@pytest.mark.parametrize("size", [3, full(1500)])
def test_gated_products(dtype, size):
    acts = {
        "silu": F.silu, "gelu": F.gelu, "relu": F.relu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }  # fmt: skip
    x = draw(3, 2 * size, dtype=dtype) * 3
    x[0, :2] = torch.tensor([-100.0, 100.0])  # an exponential that overflows
    for name, act in acts.items():
        close(act_mul(x, name), act(x[:, :size].float()) * x[:, size:].float())


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """``x [T, heads, D]`` float32, as the model types of transformers do it."""
    if not rotation.size:
        return x
    cos, sin = cos[:, None].float(), sin[:, None].float()
    turned, rest = x[..., : rotation.size], x[..., rotation.size :]
    if rotation.angle == "pair":
        cos, sin = (a[..., : rotation.size // 2].repeat_interleave(2, -1) for a in (cos, sin))
    elif cos.shape[-1] < rotation.size:
        cos, sin = (torch.cat([a, a], -1) for a in (cos, sin))
    if rotation.pairs:
        other = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    else:
        other = torch.cat([-turned[..., rotation.size // 2 :], turned[..., : rotation.size // 2]], -1)
    return torch.cat([turned * cos + other * sin, rest], -1)


# heads, (rotation, width of cos), norms
CASES: list[Any] = [
    (Heads(4, 2, 16, 16), (Rotation(16), 16), False),
    (Heads(4, 2, 16, 16), (Rotation(16), 16), True),
    (Heads(6, 3, 20, 12), (Rotation(8), 8), True),  # part of a head, dims that are no power of two
    (Heads(2, 1, 16, 16), (Rotation(16), 8), False),  # one angle for both halves
    (Heads(2, 2, 16, 16), (Rotation(16, pairs=True), 16), True),
    (Heads(2, 1, 15, 15), (Rotation(8, pairs=True, angle="pair"), 8), False),  # an odd dim
    (Heads(1, 1, 8, 8), (Rotation(0), 8), True),  # no rotation
    (Heads(40, 20, 64, 64), (Rotation(64), 64), True),  # several programs for the heads of a token
]
EVERY = [(case, torch.bfloat16) for case in CASES] + [(CASES[1], torch.float32)]


def problem(heads: Heads, width: int, with_norms: bool, dtype: torch.dtype) -> dict[str, Any]:
    tokens = 3
    norms = Norm(draw(heads.dim, seed=4, dtype=dtype), 1e-2, 0.0), Norm(draw(heads.dim, seed=5, dtype=dtype), 1e-3, 1.0)
    row = (heads.query + heads.kv) * heads.dim + heads.kv * heads.value_dim
    return {
        "qkv": draw(tokens, row, seed=6, dtype=dtype),
        "angles": (draw(tokens, width, seed=7, dtype=dtype), draw(tokens, width, seed=8, dtype=dtype)),
        "norms": norms if with_norms else None,
        "slots": torch.tensor([5, -1, 2], device=DEVICE),
    }


def parts(qkv: torch.Tensor, heads: Heads) -> tuple[torch.Tensor, ...]:
    widths = [heads.query * heads.dim, heads.kv * heads.dim, heads.kv * heads.value_dim]
    q, k, v = qkv.split(widths, 1)
    return (
        q.unflatten(1, (heads.query, heads.dim)), k.unflatten(1, (heads.kv, heads.dim)),
        v.unflatten(1, (heads.kv, heads.value_dim)),
    )  # fmt: skip


@pytest.mark.parametrize(("case", "dtype"), EVERY, ids=str)
def test_q_and_k_are_normed_and_rotated_and_kv_is_written(case, dtype):
    heads, (rotation, width), with_norms = case
    given = problem(heads, width, with_norms, dtype)
    caches = [torch.full((7, heads.kv, dim), 9.0, dtype=dtype, device=DEVICE) for dim in (heads.dim, heads.value_dim)]
    q = rotate_and_write(heads=heads, rotation=rotation, k_cache=caches[0], v_cache=caches[1], **given)
    expected = list(parts(given["qkv"], heads))
    for i in range(2):
        x = expected[i].float() if given["norms"] is None else normed(expected[i], given["norms"][i])
        expected[i] = rotated(x, *given["angles"], rotation)
    close(q, expected[0])
    close(caches[0][[5, 2]], expected[1][[0, 2]])
    assert torch.equal(caches[1][[5, 2]], expected[2][[0, 2]])
    for cache in caches:
        assert (cache[[0, 1, 3, 4, 6]] == 9).all(), "a slot that nobody asked for"


@pytest.mark.parametrize("kind", KV_FORMATS)
@pytest.mark.parametrize("case", [CASES[1], CASES[5]], ids=str)
def test_what_is_quantised_is_what_the_model_s_dtype_keeps(case, kind):
    """Codes and scales are those of K and V as an unquantised cache would hold them, bit for bit."""
    heads, (rotation, width), with_norms = case
    given = problem(heads, width, with_norms, torch.bfloat16)
    scale = 0.037 if kind.startswith("fp8") else None
    dims = (heads.dim, heads.value_dim)
    plain = [torch.zeros(7, heads.kv, dim, dtype=torch.bfloat16, device=DEVICE) for dim in dims]
    ours, theirs = (
        [QuantizedKV.zeros(KV_FORMATS[kind], 7, heads.kv, dim, DEVICE, scale) for dim in dims] for _ in range(2)
    )
    q = rotate_and_write(heads=heads, rotation=rotation, k_cache=plain[0], v_cache=plain[1], **given)
    also = rotate_and_write(heads=heads, rotation=rotation, k_cache=ours[0], v_cache=ours[1], **given)
    assert torch.equal(q, also)
    slots = torch.tensor([5, 2], device=DEVICE)
    for cache, rows, mine in zip(theirs, plain, ours, strict=True):
        cache.store(slots, rows[slots])
        for one, other in zip(raw_tensors(mine), raw_tensors(cache), strict=True):
            assert torch.equal(one, other)


def test_no_tokens_are_no_launch():
    x = torch.empty(0, 8, device=DEVICE)
    assert add_norm(x, Norm(torch.ones(8, device=DEVICE), 1e-5, 0.0))[1].shape == (0, 8)
    assert act_mul(x, "silu").shape == (0, 4)
