"""Drawn attention problems: hostile caches, and the float64 answer to compare with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels import get_backend
from kernels.api import AttentionOptions
from kernels.kv_formats import KVFormat
from kernels.quantized import QuantizedKV
from kernels.tune.problems import HostileKV, hostile_kv, nan_cache, wide

SHAPES = [(1, 16, 16), (2, 64, 64), (3, 20, 36), (4, 128, 128), (8, 32, 32), (5, 80, 48)]  # (group, D, Dv)


@dataclass(frozen=True)
class Problem:
    """Lengths per sequence (0: padding) and how many of them are new, under one cache layout."""

    lens: tuple[int, ...]
    new: tuple[int, ...]
    page_size: int = 16
    contiguous: bool = False
    shape: tuple[int, int, int] = (2, 64, 64)
    kv_heads: int = 2
    window: int | None = None
    softcap: float | None = None
    with_sinks: bool = False
    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    index_dtype: torch.dtype = torch.int64
    generator: torch.Generator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "generator", torch.Generator().manual_seed(self.seed))

    def random(self, *shape: int) -> torch.Tensor:
        """Normal floats of the problem's dtype on its device."""
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)


def build_cache(p: Problem) -> HostileKV:
    """The problem's tokens in plain caches."""
    page_size = None if p.contiguous else p.page_size
    return hostile_kv(p.lens, "auto", p.kv_heads, p.shape[1:], page_size, p.random, dtype=p.dtype, device=p.device)


def quantise(cache: HostileKV, format: KVFormat, backend: str = "torch") -> tuple[QuantizedKV, QuantizedKV]:
    """The problem's tokens in a quantised cache whose every other slot is NaN."""
    live = torch.cat(cache.slots)
    k, v = (
        nan_cache(
            format.name, *plain.shape, plain.dtype, plain.device, float(plain[live].abs().max()) if len(live) else 1.0
        )
        for plain in (cache.k, cache.v)
    )
    get_backend(backend).write_kv(cache.k[live], cache.v[live], k, v, live)
    return k, v


def draw_options(p: Problem) -> AttentionOptions:
    """The problem's options, its sinks drawn."""
    group, dim, _ = p.shape
    sinks = p.random(group * p.kv_heads) if p.with_sinks else None
    return AttentionOptions(dim**-0.5, p.window, p.softcap, sinks)


def check_decode(backend_name: str, p: Problem, tolerance: float, planned: bool = False) -> None:
    """One decode step against float64, with `out` poisoned beforehand."""
    backend, cache, options = get_backend(backend_name), build_cache(p), draw_options(p)
    heads = p.shape[0] * p.kv_heads
    q = p.random(len(p.lens), heads, p.shape[1])
    lens = torch.tensor(p.lens, device=p.device, dtype=p.index_dtype)
    expected = get_backend("torch").decode_attention(
        q.double(), cache.k.double(), cache.v.double(), cache.page_starts, lens, cache.page_size, wide(options)
    )
    out = torch.full((len(p.lens), heads, p.shape[2]), float("nan"), dtype=p.dtype, device=p.device)
    plan = backend.plan_decode(cache.page_starts, lens, cache.page_size, max_tokens=max(p.lens)) if planned else None
    result = backend.decode_attention(
        q, cache.k, cache.v, cache.page_starts, lens, cache.page_size, options, out=out, plan=plan
    )
    assert result is out
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)
    fresh = backend.decode_attention(q, cache.k, cache.v, cache.page_starts, lens, cache.page_size, options)
    assert torch.equal(fresh, result)


def check_prefill(backend_name: str, p: Problem, tolerance: float, planned: bool = False) -> None:
    """One prefill step against float64, with and without the packed new KV."""
    backend, cache, options = get_backend(backend_name), build_cache(p), draw_options(p)
    heads = p.shape[0] * p.kv_heads
    starts = torch.tensor([0, *torch.tensor(p.new).cumsum(0).tolist()], device=p.device, dtype=p.index_dtype)
    lens = torch.tensor(p.lens, device=p.device, dtype=p.index_dtype)
    total = int(starts[-1])
    # As the engine has it: heads first in memory, so neither tokens nor heads are contiguous rows.
    q = p.random(heads, total, p.shape[1]).transpose(0, 1)
    new_slots = torch.cat([s[len(s) - n :] for s, n in zip(cache.slots, p.new, strict=True)])
    new_kv = cache.k[new_slots], cache.v[new_slots]
    expected = get_backend("torch").prefill_attention(
        q.double(),
        cache.k.double(),
        cache.v.double(),
        cache.page_starts,
        starts,
        lens,
        cache.page_size,
        wide(options),
    )
    plan = None
    if planned:
        bounds = {"max_queries": max(p.new), "max_tokens": max(p.lens)}
        plan = backend.plan_prefill(cache.page_starts, starts, lens, cache.page_size, **bounds)
    for given in (None, new_kv):
        out = torch.full((total, heads, p.shape[2]), float("nan"), dtype=p.dtype, device=p.device)
        result = backend.prefill_attention(
            q, cache.k, cache.v, cache.page_starts, starts, lens, cache.page_size,
            options, out=out, new_kv=given, plan=plan,
        )  # fmt: skip
        assert result is out
        torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)
    fresh = backend.prefill_attention(
        q, cache.k, cache.v, cache.page_starts, starts, lens, cache.page_size, options, plan=plan
    )
    torch.testing.assert_close(fresh.double(), expected, atol=tolerance, rtol=tolerance)
