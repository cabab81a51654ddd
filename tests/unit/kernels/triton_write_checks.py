"""The Triton KV write against ``QuantizedKV.store``, bit for bit. Run like triton_checks.py."""

from __future__ import annotations

import math

import pytest
import torch
from triton_cases import DEVICE, backend_on, full

from kvbench_kernels.api import KVCache
from kvbench_kernels.kv_formats import FP8_E4M3, FP8_E5M2, KV_FORMATS, KVFormat
from kvbench_kernels.quantized import FP8_DTYPE, FP8_MAX, QuantizedKV, first_values, raw_tensors
from kvbench_kernels.tune.problems import put

FORMATS = list(KV_FORMATS.values())
by_name = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)


def hostile_rows(dim: int) -> torch.Tensor:
    """``[tokens, 3, dim]``: ties, ends of ranges, subnormals, zeros of both signs, NaN and infinity, and noise."""
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(24, 3, dim, generator=generator)
    x[1] *= 1e-3
    x[2] *= 1e4
    x[3] = 0.0
    x[4] = -0.0
    x[5] = torch.arange(3 * dim).view(3, dim) / 2  # half codes
    x[6] = x[5] + 2.0**-20
    x[7, :, 0], x[7, :, 1:] = 127.0, torch.arange(3 * (dim - 1)).view(3, -1) % 253 / 2 - 63  # int8: ties at scale 1
    x[8, :, 0], x[8, :, 1:] = 7.0, torch.arange(3 * (dim - 1)).view(3, -1) % 27 / 2 - 6.5  # int4: ties at scale 1
    x[9, 0, 0], x[9, 1, -1], x[9, 2, dim // 2] = math.nan, -math.nan, math.nan
    x[10, 0, 0], x[10, 1, -1] = math.inf, -math.inf
    x[11] = 2.0**-126 * x[0]  # scales that are no normal float32
    x[12] = 2.0**-119 * x[0]
    x[13] = 3e38
    x[14, 0, 0], x[14, 0, -1] = math.inf, math.nan
    return x.to(DEVICE)


def every_fp8_tie(format: KVFormat) -> torch.Tensor:
    """All finite values of the format, the middles between neighbours, and the floats on either side of those."""
    values = torch.arange(256).to(torch.uint8).view(FP8_DTYPE[format]).float()
    values = values[values.isfinite()].unique()
    middles = (values[1:] + values[:-1]) / 2
    beyond = torch.tensor([1.01, 1.07, 2.0, 1e30]) * FP8_MAX[format]
    all_of_them = torch.cat([values, middles, beyond, -beyond, torch.tensor([-0.0, math.nan, math.inf, -math.inf])])
    up, down = (torch.nextafter(all_of_them, torch.tensor(to)) for to in (math.inf, -math.inf))
    return torch.cat([all_of_them, up, down]).to(DEVICE)


def both(format: KVFormat, rows: torch.Tensor, scale: float | None) -> tuple[QuantizedKV, QuantizedKV]:
    """``rows [n, heads, dim]`` as the Triton kernel and as the reference store them, in slots in reverse."""
    slots = torch.arange(len(rows) - 1, -1, -1, device=DEVICE)
    ours, theirs = (QuantizedKV.zeros(format, len(rows), *rows.shape[1:], DEVICE, scale) for _ in range(2))
    backend_on(4).write_kv(rows, rows, ours, ours, slots)
    theirs.store(slots, rows)
    return ours, theirs


def assert_same_bits(ours: KVCache, theirs: KVCache) -> None:
    for one, other in zip(raw_tensors(ours), raw_tensors(theirs), strict=True):  # codes, scales
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@by_name
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(33, torch.float32), full(64, torch.bfloat16), full(2, torch.float32), full(64, torch.float16)],
)
def test_codes_of_hostile_values_are_the_references(format, dim, dtype):
    for scale in (1.0, 0.037) if format in FP8_MAX else (None,):
        assert_same_bits(*both(format, hostile_rows(dim).to(dtype), scale))


@pytest.mark.parametrize("format", [FP8_E4M3, FP8_E5M2], ids=lambda f: f.name)
def test_every_tie_of_fp8_is_rounded_like_the_reference(format):
    values = every_fp8_tie(format)
    rows = torch.nn.functional.pad(values, (0, -len(values) % 64)).view(-1, 1, 64)
    for scale in (1.0, 3.0):
        ours, theirs = both(format, rows * scale, scale)
        assert_same_bits(ours, theirs)
    assert len(ours.codes.unique()) > 240  # all finite codes were there


@pytest.mark.parametrize("kind", ["auto", *KV_FORMATS])
def test_a_latent_row_is_written_once(kind):
    row = torch.randn(3, 1, 21, device=DEVICE)
    slots, scale = torch.tensor([4, -1, 0], device=DEVICE), 0.01 if kind.startswith("fp8") else None
    if kind == "auto":
        cache, expected = (torch.full((6, 1, 21), 9.0, device=DEVICE) for _ in range(2))
    else:
        cache, expected = (QuantizedKV.zeros(KV_FORMATS[kind], 6, 1, 21, DEVICE, scale) for _ in range(2))
    backend_on(4).write_kv(row, row[..., :13] * math.nan, cache, first_values(cache, 13), slots)
    put(expected, slots[[0, 2]], row[[0, 2]])
    assert_same_bits(cache, expected)


@pytest.mark.parametrize("kind", ["auto", *KV_FORMATS])
@pytest.mark.parametrize(("heads", "dims"), [(40, (64, 33)), full(3, (8, 6)), full(1, (256, 128))])
def test_write_skips_padding_and_touches_nothing_else(kind, heads, dims):
    """K and V of different sizes, heads first in memory, more heads than a program stores."""
    rows = [torch.randn(heads, 4, dim, device=DEVICE).transpose(0, 1) for dim in dims]
    slots = torch.tensor([7, -1, 0, -5], device=DEVICE)
    if kind == "auto":
        caches, expected = (
            [torch.zeros(9, heads, dim, dtype=torch.float16, device=DEVICE) for dim in dims] for _ in range(2)
        )
    else:
        scale = 0.01 if KV_FORMATS[kind] in FP8_MAX else None
        caches, expected = (
            [QuantizedKV.zeros(KV_FORMATS[kind], 9, heads, dim, DEVICE, scale) for dim in dims] for _ in range(2)
        )
    backend_on(4).write_kv(*rows, *caches, slots)
    for got, wanted, new in zip(caches, expected, rows, strict=True):
        put(wanted, slots[[0, 2]], new[[0, 2]])
        assert_same_bits(got, wanted)
