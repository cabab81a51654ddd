"""Attention problems drawn for a device, their float64 answers, and how far a backend is from them.

Caches are hostile: pages in random order with gaps, NaN (in codes or scales, where a format has one) in every slot that
holds no token, page-table entries behind a sequence's end that point far outside, outputs poisoned beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels import get_backend
from kernels.api import AttentionOptions, KVCache
from kernels.kv_formats import KV_FORMATS
from kernels.quantized import FP8_MAX, QuantizedKV, raw_tensors

CONTIGUOUS = 0  # as a page size: one unaligned run of slots per sequence
FAR_OUTSIDE = 1 << 40
LENGTHS, NEW = (1030, 1, 257, 0, 64), (190, 1, 257, 0, 3)  # tokens, and how many of them a prefill step brings
TINY_LENGTHS, TINY_NEW = (40, 1, 0, 17), (12, 1, 0, 17)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of a row's norm


@dataclass(frozen=True)
class Case:
    """One kernel variant. ``group``: query heads of a KV head; ``page_size`` in tokens, or ``CONTIGUOUS``."""

    kv: str = "auto"
    dtype: torch.dtype = torch.bfloat16
    dim: int = 128
    v_dim: int = 128
    group: int = 4
    kv_heads: int = 2
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    tiny: bool = False

    @property
    def name(self) -> str:
        page = "contiguous" if self.page_size == CONTIGUOUS else f"page {self.page_size}"
        dims = f"D {self.dim}" + (f"/{self.v_dim}" if self.v_dim != self.dim else "")
        extras = [
            word
            for word, on in (
                (f"window {self.window}", self.window),
                (f"softcap {self.softcap}", self.softcap),
                ("sinks", self.sinks),
            )
            if on
        ]
        return ", ".join([self.kv, str(self.dtype).removeprefix("torch."), page, dims, f"group {self.group}", *extras])


@dataclass(frozen=True)
class Drawn:
    """Tensors of a case. ``slots``: of every token, by sequence."""

    k: KVCache
    v: KVCache
    page_starts: torch.Tensor
    page_size: int
    lengths: tuple[int, ...]
    new: tuple[int, ...]
    slots: list[torch.Tensor]
    options: AttentionOptions


def new_cache(kv: str, slots: int, heads: int, dim: int, dtype: torch.dtype, device: str, largest: float) -> KVCache:
    """A cache in which every slot holds NaN. ``largest``: absolute value that fp8 must be able to hold."""
    if kv == "auto":
        return torch.full((slots, heads, dim), float("nan"), dtype=dtype, device=device)
    kv_format = KV_FORMATS[kv]
    scale = 2 * largest / FP8_MAX[kv_format] if kv_format in FP8_MAX else None
    cache = QuantizedKV.zeros(kv_format, slots, heads, dim, device, scale)
    if cache.scales is None:
        cache.codes.fill_(0x7F)  # NaN in both fp8 formats
    else:
        cache.scales.fill_(float("nan"))
    return cache


def put(cache: KVCache, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Store by torch indexing, not by the code under test."""
    if isinstance(cache, QuantizedKV):
        cache.store(slots, rows)
    else:
        cache[slots] = rows.to(cache.dtype)


def as_float64(cache: KVCache) -> torch.Tensor:
    """What the cache holds, as the float64 reference reads it."""
    return cache.load(slice(None)).double() if isinstance(cache, QuantizedKV) else cache.double()


def draw(case: Case, device: str, seed: int = 0) -> Drawn:
    """Tensors of ``case`` on ``device``."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    lengths, new = (TINY_LENGTHS, TINY_NEW) if case.tiny else (LENGTHS, NEW)
    page_size = max(lengths) + 5 if case.page_size == CONTIGUOUS else case.page_size
    pages = 1 if case.page_size == CONTIGUOUS else -(-max(lengths) // page_size)
    base, gap = 3, 1  # aligned to nothing
    order = torch.randperm(len(lengths) * pages, generator=generator).view(len(lengths), pages)
    starts = base + order * (page_size + gap)
    slots = base + len(lengths) * pages * (page_size + gap)
    k = new_cache(case.kv, slots, case.kv_heads, case.dim, case.dtype, device, 8.0)
    v = new_cache(case.kv, slots, case.kv_heads, case.v_dim, case.dtype, device, 8.0)
    places = []
    for row, length in zip(starts, lengths, strict=True):
        tokens = torch.arange(length)
        places.append((row[tokens // page_size] + tokens % page_size).to(device))
        put(k, places[-1], random(length, case.kv_heads, case.dim))
        put(v, places[-1], random(length, case.kv_heads, case.v_dim))
    used = -(-torch.tensor(lengths) // page_size)
    starts = torch.where(torch.arange(pages)[None, :] < used[:, None], starts, FAR_OUTSIDE)
    sinks = random(case.group * case.kv_heads).to(case.dtype) if case.sinks else None
    options = AttentionOptions(case.dim**-0.5, case.window, case.softcap, sinks)
    return Drawn(k, v, starts.to(device), page_size, lengths, new, places, options)


def distance(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the worst row (one head of one query), the norm of the difference over the norm of ``expected``.

    By row, because a long row's values are small: in one norm over everything, the short rows would hide its errors.
    Infinite where anything is NaN or was not written, and where a row that must be zero is not.
    """
    if not bool(torch.isfinite(result).all()):
        return float("inf")
    difference, scale = (result.double() - expected).norm(dim=-1), expected.norm(dim=-1)
    worst = torch.where(difference == 0, 0.0, difference / scale)  # x / 0 is infinite
    return float(worst.max())


def check_decode(case: Case, drawn: Drawn, backend: Any, device: str, reference: Drawn | None = None) -> float:
    """Distance of one decode step from float64. ``reference``: the same tokens in a cache that float64 has room for."""
    same = reference or drawn
    heads = case.group * case.kv_heads
    q = torch.randn(len(drawn.lengths), heads, case.dim, device=device).to(case.dtype)
    lens = torch.tensor(drawn.lengths, device=device)
    out = torch.full((len(lens), heads, case.v_dim), float("nan"), dtype=case.dtype, device=device)
    plan = backend.plan_decode(drawn.page_starts, lens, drawn.page_size, max_tokens=max(drawn.lengths))
    backend.decode_attention(
        q, drawn.k, drawn.v, drawn.page_starts, lens, drawn.page_size, drawn.options, out=out, plan=plan
    )
    expected = get_backend("torch").decode_attention(
        q.double(), as_float64(same.k), as_float64(same.v), same.page_starts, lens, same.page_size, _wide(drawn)
    )
    return distance(out, expected)


def check_prefill(case: Case, drawn: Drawn, backend: Any, device: str, reference: Drawn | None = None) -> float:
    """Distance of one step of chunks from float64; queries heads first in memory, as the engine has them."""
    same = reference or drawn
    heads, total = case.group * case.kv_heads, sum(drawn.new)
    q = torch.randn(heads, total, case.dim, device=device).to(case.dtype).transpose(0, 1)
    lens = torch.tensor(drawn.lengths, device=device)
    starts = torch.tensor([0, *torch.tensor(drawn.new).cumsum(0).tolist()], device=device)
    out = torch.full((total, heads, case.v_dim), float("nan"), dtype=case.dtype, device=device)
    args = (drawn.page_starts, starts, lens, drawn.page_size)
    plan = backend.plan_prefill(*args, max_queries=max(drawn.new), max_tokens=max(drawn.lengths))
    new_kv = None
    if case.kv == "auto":
        slots = torch.cat([s[len(s) - n :] for s, n in zip(drawn.slots, drawn.new, strict=True)])
        new_kv = (drawn.k[slots], drawn.v[slots])
    backend.prefill_attention(q, drawn.k, drawn.v, *args, drawn.options, out=out, new_kv=new_kv, plan=plan)
    expected = get_backend("torch").prefill_attention(
        q.double(), as_float64(same.k), as_float64(same.v), same.page_starts, *args[1:], _wide(drawn)
    )
    return distance(out, expected)


def _wide(drawn: Drawn) -> AttentionOptions:
    sinks = drawn.options.sinks
    return replace(drawn.options, sinks=None if sinks is None else sinks.double())


def check_write(case: Case, drawn: Drawn, backend: Any, device: str) -> str | None:
    """None, or what is wrong with a write of new rows, some of them skipped (slot < 0).

    The same slots written by torch must hold the same values within half a step of the format, see kernels.quantized;
    no other slot may change by a bit.
    """
    count = min(48, len(drawn.slots[0]))
    k = torch.randn(case.kv_heads, count, case.dim, device=device).to(case.dtype).transpose(0, 1)
    v = torch.randn(case.kv_heads, count, case.v_dim, device=device).to(case.dtype).transpose(0, 1)
    slots = drawn.slots[0][:count].clone()
    slots[::5] = -1
    kept = slots >= 0
    before = [t.clone() for cache in (drawn.k, drawn.v) for t in raw_tensors(cache)]
    backend.write_kv(k, v, drawn.k, drawn.v, slots)
    for tensor, old in zip([t for c in (drawn.k, drawn.v) for t in raw_tensors(c)], before, strict=True):
        untouched = torch.ones(len(tensor), dtype=torch.bool, device=device)
        untouched[slots[kept]] = False
        if not torch.equal(tensor[untouched].view(torch.uint8), old[untouched].view(torch.uint8)):
            return "a slot that was not asked for was written"
    for cache, rows in ((drawn.k, k), (drawn.v, v)):
        wrong = write_error(cache, slots[kept], rows[kept])
        if wrong is not None:
            return wrong
    return None


def write_error(cache: KVCache, slots: torch.Tensor, rows: torch.Tensor) -> str | None:
    """None, or how ``cache`` at ``slots`` differs from ``rows`` by more than its format allows."""
    if not isinstance(cache, QuantizedKV):
        return None if torch.equal(cache[slots], rows) else "plain values differ"
    rows = rows.float()
    error = (cache.load(slots) - rows).abs()
    if cache.scales is None:
        step = {"fp8_e4m3": 1 / 16, "fp8_e5m2": 1 / 8}[cache.format.name]
        least = {"fp8_e4m3": 1024, "fp8_e5m2": 131072}[cache.format.name]
        bound = torch.maximum(rows.abs() * step, torch.full_like(rows, cache.scale / least))
    else:
        steps = {"int8_per_token_head": 254, "int4_per_token_head": 14}[cache.format.name]
        bound = (rows.abs().amax(-1, keepdim=True) / steps).expand_as(rows)
    worst = float((error / bound).max()) if bool(torch.isfinite(error).all()) else float("inf")
    return None if worst <= 1.001 else f"{cache.format.name} is {worst:.3g} times the format's half step away"
