"""Drawn attention problems: hostile caches, and the float64 answer to compare with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from kernels import get_backend
from kernels.api import AttentionOptions
from kernels.kv_formats import KVFormat
from kernels.quantized import FP8_MAX, QuantizedKV, raw_tensors

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


@dataclass(frozen=True)
class Cache:
    """KV of a problem: NaN wherever no token lives, pages in random order, nothing aligned."""

    k: torch.Tensor
    v: torch.Tensor
    page_starts: torch.Tensor
    page_size: int
    slots: list[torch.Tensor]  # per sequence, of every token


def build_cache(p: Problem) -> Cache:
    """Place every token of the problem through torch indexing, not through the code under test."""
    _, dim, v_dim = p.shape
    longest = max(1, *p.lens)
    page_size = longest + 5 if p.contiguous else p.page_size
    pages = 1 if p.contiguous else -(-longest // page_size)
    base, gap = 3, 1  # an odd base, and an odd gap between pages: starts are aligned to nothing
    order = torch.randperm(len(p.lens) * pages, generator=p.generator)
    starts = base + order.view(len(p.lens), pages) * (page_size + gap)
    num_slots = base + len(p.lens) * pages * (page_size + gap)
    k = torch.full((num_slots, p.kv_heads, dim), float("nan"), dtype=p.dtype, device=p.device)
    v = torch.full((num_slots, p.kv_heads, v_dim), float("nan"), dtype=p.dtype, device=p.device)
    slots = []
    for b, length in enumerate(p.lens):
        tokens = torch.arange(length)
        slots.append((starts[b][tokens // page_size] + tokens % page_size).to(p.device))
        k[slots[-1]] = p.random(length, p.kv_heads, dim)
        v[slots[-1]] = p.random(length, p.kv_heads, v_dim)
    # Entries after a sequence's pages are garbage in a real table: point them far outside.
    used = -(-torch.tensor(p.lens) // page_size)
    starts = torch.where(torch.arange(pages)[None, :] < used[:, None], starts, torch.full_like(starts, 1 << 40))
    return Cache(k, v, starts.to(p.device), page_size, slots)


def quantise(cache: Cache, format: KVFormat, backend: str = "torch") -> tuple[QuantizedKV, QuantizedKV]:
    """The problem's tokens in a quantised cache whose every other slot is poison: NaN scales, NaN codes."""
    live = torch.cat(cache.slots)
    sides = []
    for plain in (cache.k, cache.v):
        scale = None
        if format in FP8_MAX:
            scale = 2 * float(plain[live].abs().max() if len(live) else 1.0) / FP8_MAX[format]
        side = QuantizedKV.zeros(format, *plain.shape, plain.device, scale)
        codes, *scales = raw_tensors(side)
        codes.view(torch.uint8).fill_(0x7F)  # NaN in both fp8 formats
        for tensor in scales:
            tensor.fill_(math.nan)
        sides.append(side)
    get_backend(backend).write_kv(cache.k[live], cache.v[live], *sides, live)
    return sides[0], sides[1]


def draw_options(p: Problem) -> AttentionOptions:
    """The problem's options, its sinks drawn."""
    group, dim, _ = p.shape
    sinks = p.random(group * p.kv_heads) if p.with_sinks else None
    return AttentionOptions(dim**-0.5, p.window, p.softcap, sinks)


def widen(options: AttentionOptions) -> AttentionOptions:
    """The same options for float64 inputs."""
    return options if options.sinks is None else replace(options, sinks=options.sinks.double())


def check_decode(backend_name: str, p: Problem, tolerance: float, planned: bool = False) -> None:
    """One decode step against float64, with `out` poisoned beforehand."""
    backend, cache, options = get_backend(backend_name), build_cache(p), draw_options(p)
    heads = p.shape[0] * p.kv_heads
    q = p.random(len(p.lens), heads, p.shape[1])
    lens = torch.tensor(p.lens, device=p.device, dtype=p.index_dtype)
    expected = get_backend("torch").decode_attention(
        q.double(), cache.k.double(), cache.v.double(), cache.page_starts, lens, cache.page_size, widen(options)
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
        widen(options),
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
