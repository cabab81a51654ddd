"""Storing and loading quantised KV: stated bounds, bit patterns by enumeration, and Numba bit for bit as torch."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench_kernels import get_backend
from kvbench_kernels.kv_formats import FP8_E4M3, FP8_E5M2, INT4, INT8, KV_FORMATS
from kvbench_kernels.quantized import FP8_MAX, QuantizedKV, count_saturated, first_values, raw_tensors

FORMATS = list(KV_FORMATS.values())
PER_HEAD = (INT8, INT4)
by_backend = pytest.mark.parametrize("backend", ["torch", "numba"])
by_name = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)


def sample(kind: str, tokens: int, heads: int, dim: int, seed: int = 0) -> torch.Tensor:
    """``[tokens, heads, dim]`` float32 as K and V come: plain, or with loud channels and loud tokens."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads, dim, generator=generator)
    if kind == "outliers":
        x[:, :, :: max(1, dim // 3)] *= 50  # a few channels, as keys have them
        x[:: max(1, tokens // 3)] *= 100  # a few tokens, as attention sinks have them
    elif kind == "ties":
        x = (x * 8).round() / 2
    elif kind == "tiny":
        x = x * 10.0 ** torch.randint(-44, -34, (tokens, heads, 1), generator=generator)
    return x


def new_cache(format, slots: int, x: torch.Tensor, share: float = 0.5) -> QuantizedKV:
    """A cache for x; fp8's range is taken to the given share by x's largest value."""
    scale = (
        max(float(x.nan_to_num(0, 0, 0).abs().max()), 1e-30) / share / FP8_MAX[format] if format in FP8_MAX else None
    )
    return QuantizedKV.zeros(format, slots, x.shape[1], x.shape[2], "cpu", scale)


def written(backend: str, cache: QuantizedKV, x: torch.Tensor) -> QuantizedKV:
    """The cache with the rows of ``x`` in its first slots."""
    get_backend(backend).write_kv(x, x, cache, cache, torch.arange(len(x)))
    return cache


def bound(format, x: torch.Tensor, scale: float) -> torch.Tensor:
    """The bound that kernels/quantized.py states, in float64."""
    x = x.double()
    row = x.abs().amax(-1, keepdim=True).expand_as(x)
    half_step = {
        INT8: row / 254,
        INT4: row / 14,
        FP8_E4M3: (x.abs() / 16).clamp(min=scale / 1024),
        FP8_E5M2: (x.abs() / 8).clamp(min=scale / 131072),
    }[format]
    flushed = 127 * 2.0**-126 if format in PER_HEAD else 0.0
    return half_step + 3e-7 * x.abs() + flushed


@pytest.mark.parametrize(("format", "next_code"), [(FP8_E4M3, 416), (FP8_E5M2, 49152)])
def test_saturated_values_are_those_of_the_largest_code_at_the_slots_asked_for(format, next_code):
    top = FP8_MAX[format]
    cache = QuantizedKV.zeros(format, 4, 1, 6, "cpu", 1.0)
    cache.store(torch.tensor([1, 2]), torch.tensor([[[top, -top, 9 * top, math.inf, next_code, 0]], [[-top] * 6]]))
    assert [int(count_saturated(cache, torch.tensor(at, dtype=int))) for at in ([1], [0, 3], [1, 2], [])] == [
        4,
        0,
        10,
        0,
    ]


@by_name
@pytest.mark.parametrize("kind", ["random", "outliers", "ties", "tiny"])
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_error_of_every_value_is_within_the_stated_bound(format, kind, dim):
    x = sample(kind, 60, 3, dim)
    cache, slots = new_cache(format, 80, x), torch.randperm(80)[:60]
    cache.store(slots, x)
    error = (cache.load(slots).double() - x.double()).abs()
    allowed = bound(format, x, cache.scale)
    assert (error <= allowed).all()
    if kind in ("random", "outliers") and dim == 64:  # and the bound says something: some values come near it
        assert (error > 0.8 * allowed).any()


def fp8_values(format) -> list[float]:
    """Value of each non-negative finite code, from the definition of the format; index = code."""
    mantissa_bits, bias = (3, 7) if format == FP8_E4M3 else (2, 15)
    steps = 1 << mantissa_bits
    values = []
    for code in range(128):
        exponent, fraction = code >> mantissa_bits, code % steps
        if exponent == 0:
            values.append(2.0 ** (1 - bias) * fraction / steps)
        else:
            values.append(2.0 ** (exponent - bias) * (1 + fraction / steps))
    return values[:127] if format == FP8_E4M3 else values[:124]  # above: NaN, and infinity in e5m2


@by_backend
@pytest.mark.parametrize("format", FP8_MAX, ids=lambda f: f.name)
def test_fp8_codes_are_the_nearest_with_ties_to_even(backend, format):
    """Against enumeration: every value, every midpoint, and a float32 to either side of each midpoint.

    What is beyond the range saturates and never becomes NaN.
    """
    values = torch.tensor(fp8_values(format), dtype=torch.float64)
    assert values[-1] == FP8_MAX[format]
    middle = (values[1:] + values[:-1]) / 2
    beside = [torch.nextafter(middle.float(), torch.tensor(to)) for to in (-math.inf, math.inf)]
    beyond = torch.tensor([1.03, 1.1, 1e30, math.inf]) * values[-1].float()
    x = torch.cat([values.float(), middle.float(), *beside, beyond])
    distance = (x.double().clamp(max=2 * FP8_MAX[format])[:, None] - values[None]).abs()
    nearest = distance.argmin(1)
    tie = (distance == distance.gather(1, nearest[:, None])).sum(1) == 2
    expected = torch.where(tie & (nearest % 2 == 1), nearest + 1, nearest)  # of two codes in a row one is even
    for sign in (1, -1):
        cache = written(backend, QuantizedKV.zeros(format, len(x), 1, 1, "cpu", scale=1.0), sign * x[:, None, None])
        assert torch.equal(cache.codes.flatten().long(), expected + (128 if sign < 0 else 0))
        assert torch.equal(cache.load(slice(None)).flatten().double(), sign * values[expected])


@by_backend
@by_name
def test_what_a_model_got_wrong_stays_visible_until_it_is_overwritten(backend, format):
    """NaN loads as NaN, in the row (integer formats) or the value (fp8) where it was, and nowhere else."""
    x = sample("random", 4, 2, 39)
    cache, expected = new_cache(format, 4, x), torch.zeros(x.shape, dtype=torch.bool)
    expected[1, 0, slice(None) if format in PER_HEAD else 5] = True
    for wrong in (math.nan, math.inf) if format in PER_HEAD else (math.nan,):
        x[1, 0, 5] = wrong
        assert torch.equal(written(backend, cache, x).load(slice(None)).isnan(), expected)
    zeros = torch.zeros_like(x)
    assert torch.equal(written(backend, cache, zeros).load(slice(None)), zeros)


def test_codes_and_scales_by_hand():
    """Symmetric, ties to even, two int4 codes a byte with the second half of the row in the high bits."""
    row = torch.tensor([7.0, -7.0, 0.5, 0.0, -2.5])[None, None]
    four = QuantizedKV.zeros(INT4, 1, 1, 5, "cpu")
    four.store(torch.tensor([0]), row)
    assert four.codes[0, 0].tolist() == [0x07, 0xE9, 0x00] and four.scales.item() == 1.0
    assert four.load(torch.tensor([0]))[0, 0].tolist() == [7, -7, 0, 0, -2]
    eight = QuantizedKV.zeros(INT8, 1, 1, 5, "cpu")
    eight.store(torch.tensor([0]), row * 127 / 7)
    assert eight.codes[0, 0].tolist() == [127, -127, 9, 0, -45] and eight.scales.item() == 1.0


@by_name
@given(
    tokens=st.integers(1, 9),
    heads=st.integers(1, 3),
    dim=st.sampled_from([1, 39, 64]),  # each is compiled
    kind=st.sampled_from(["random", "outliers", "ties", "tiny"]),
    share=st.sampled_from([0.5, 1.0, 4.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_numba_writes_the_very_bits_of_the_reference(format, tokens, heads, dim, kind, share, seed):
    """Codes and scales equal, padding skipped, other slots untouched; heads first in memory as models send them."""
    x = sample(kind, heads, tokens, dim, seed).transpose(0, 1)
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:tokens]
    slots[seed % tokens] = -1 - seed
    caches = []
    for backend in ("torch", "numba"):
        cache = new_cache(format, 20, x, share)
        for tensor in raw_tensors(cache):
            tensor.fill_(77)
        get_backend(backend).write_kv(x, x, cache, cache, slots.to(torch.int32))
        caches.append(cache)
        untouched = sorted(set(range(20)) - set(slots.tolist()))
        assert all((t[untouched] == 77).all() for t in raw_tensors(cache))
    for expected, got in zip(*map(raw_tensors, caches), strict=True):
        assert torch.equal(expected, got)


@by_backend
@pytest.mark.parametrize("kind", ["auto", *KV_FORMATS])
def test_a_latent_row_is_written_once_and_nothing_beside_it(backend, kind):
    """The row's last values are the largest: a scale of V alone would be another one."""
    x = sample("random", 3, 1, 39)
    x[..., 33:] *= 9
    format = KV_FORMATS.get(kind)
    caches = [new_cache(format, 9, x) if format else torch.empty(9, 1, 39) for _ in range(2)]
    for tensor in (t for cache in caches for t in raw_tensors(cache)):
        tensor.fill_(77)
    expected, cache = caches
    for at, row in ((4, 0), (6, 2)):
        slot = torch.tensor([at])
        expected.store(slot, x[row : row + 1]) if format else expected.index_copy_(0, slot, x[row : row + 1])
    rows = torch.cat([x, x], -1)[..., :39]  # a step's rows need not be dense
    get_backend(backend).write_kv(rows, rows[..., :33], cache, first_values(cache, 33), torch.tensor([4, -1, 6]))
    assert all(map(torch.equal, raw_tensors(expected), raw_tensors(cache)))


@pytest.mark.full
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="names an x86-64 target")
def test_fp8_loads_on_a_machine_without_float16_instructions(tmp_path):
    """Every code, compiled for the oldest x86-64, which virtual machines pretend to be: it was a segmentation fault."""
    code = """
import torch
from kvbench_kernels.kv_formats import FP8_E4M3, FP8_E5M2
from kvbench_kernels.numba_quantised import load_rows
from kvbench_kernels.quantized import QuantizedKV
for format in (FP8_E4M3, FP8_E5M2):
    cache = QuantizedKV.zeros(format, 4, 1, 64, "cpu", 0.37)
    cache.codes.copy_(torch.arange(256, dtype=torch.uint8).view(4, 1, 64))
    slots = torch.arange(4)
    got, expected = load_rows(cache, slots, torch.empty(4, 1, 64)), cache.load(slots)
    finite = expected.isfinite()
    assert torch.equal(got[finite], expected[finite]) and not got[~finite].isfinite().any()
print("equal")
"""
    target = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    env = os.environ | target | {"PYTHONPATH": os.getcwd()}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.stdout.strip() == "equal", run.stderr


@by_name
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_bytes_of_a_row_are_the_bytes_in_memory(format, dim):
    cache = QuantizedKV.zeros(format, 10, 3, dim, "cpu", 0.1 if format in FP8_MAX else None)
    tensors = raw_tensors(cache)
    assert all(t.shape[0] == 10 and t.is_contiguous() for t in tensors) and cache.shape == (10, 3, dim)
    assert sum(t.nbytes for t in tensors) == 10 * 3 * format.row_bytes(dim)
    assert [KV_FORMATS[name].row_bytes(128) for name in sorted(KV_FORMATS)] == [128, 128, 68, 132]


@pytest.mark.parametrize("scale", [None, 0.0, -1.0, math.inf, math.nan])
def test_fp8_without_a_usable_scale_is_refused(scale):
    """FP8 scales silently 1.0 (sglang#18882): here there is no default to fall back to."""
    with pytest.raises(ValueError, match=rf"fp8_e4m3 needs a positive, finite scale.*not {scale}"):
        QuantizedKV.zeros(FP8_E4M3, 4, 1, 8, "cpu", scale)
    with pytest.raises(ValueError, match="int8_per_token_head finds a scale per token and head"):
        QuantizedKV.zeros(INT8, 4, 1, 8, "cpu", 0.5)
