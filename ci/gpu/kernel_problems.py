"""Attention problems drawn for a device, and how far a backend is from their float64 answers.

KV caches are hostile (kernels.tune.problems), outputs poisoned beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels import get_backend
from kernels.api import AttentionBackend, AttentionOptions, KVCache, PrefillBatch
from kernels.quantized import QuantizedKV, first_values, raw_tensors
from kernels.tune.problems import HostileKV, as_float64, distance, hostile_kv, wide

CONTIGUOUS = 0  # as a page size: one unaligned run of slots per sequence
LENGTHS, NEW = (1030, 1, 257, 0, 64), (190, 1, 257, 0, 3)  # tokens, and how many of them a prefill step brings
TINY_LENGTHS, TINY_NEW = (40, 1, 0, 17), (12, 1, 0, 17)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of a row's norm


@dataclass(frozen=True)
class KernelProblem:
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
    latent: bool = False  # V is the first values of K's rows
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
                ("latent", self.latent),
            )
            if on
        ]
        return ", ".join([self.kv, str(self.dtype).removeprefix("torch."), page, dims, f"group {self.group}", *extras])


def check_support(backend: AttentionBackend, case: KernelProblem, device: str) -> None:
    """Raises ValueError where ``backend`` does not serve the case on ``device``."""
    backend.check_support(
        num_heads=case.group * case.kv_heads, num_kv_heads=case.kv_heads, head_dim=case.dim,
        v_head_dim=case.v_dim, dtype=case.dtype, device=device, kv_cache_dtype=case.kv, latent=case.latent,
    )  # fmt: skip


@dataclass(frozen=True)
class DrawnKV(HostileKV):
    """Tensors of a case. ``lengths``: tokens by sequence; ``new``: how many of them a prefill step brings."""

    lengths: tuple[int, ...]
    new: tuple[int, ...]
    options: AttentionOptions


def draw(case: KernelProblem, device: str, seed: int = 0) -> DrawnKV:
    """Tensors of ``case`` on ``device``."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    lengths, new = (TINY_LENGTHS, TINY_NEW) if case.tiny else (LENGTHS, NEW)
    page_size = None if case.page_size == CONTIGUOUS else case.page_size
    kv = hostile_kv(
        lengths, case.kv, case.kv_heads, (case.dim, case.v_dim), page_size, random, dtype=case.dtype, device=device
    )
    if case.latent:
        kv = replace(kv, v=first_values(kv.k, case.v_dim))
    sinks = random(case.group * case.kv_heads).to(case.dtype) if case.sinks else None
    options = AttentionOptions(case.dim**-0.5, case.window, case.softcap, sinks)
    return DrawnKV(**vars(kv), lengths=lengths, new=new, options=options)


def check_decode(
    case: KernelProblem, drawn: DrawnKV, backend: Any, device: str, reference: DrawnKV | None = None
) -> float:
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
        q.double(), as_float64(same.k), as_float64(same.v), same.page_starts, lens, same.page_size, wide(drawn.options)
    )
    return distance(out, expected)


def check_prefill(
    case: KernelProblem, drawn: DrawnKV, backend: Any, device: str, reference: DrawnKV | None = None
) -> float:
    """Distance of one step of chunks from float64; queries heads first in memory, as the engine has them."""
    same = reference or drawn
    heads, total = case.group * case.kv_heads, sum(drawn.new)
    q = torch.randn(heads, total, case.dim, device=device).to(case.dtype).transpose(0, 1)
    lens = torch.tensor(drawn.lengths, device=device)
    starts = torch.tensor([0, *torch.tensor(drawn.new).cumsum(0).tolist()], device=device)
    out = torch.full((total, heads, case.v_dim), float("nan"), dtype=case.dtype, device=device)
    batch = PrefillBatch(drawn.page_starts, starts, lens, drawn.page_size)
    plan = backend.plan_prefill(batch, max_queries=max(drawn.new), max_tokens=max(drawn.lengths))
    new_kv = None
    if case.kv == "auto":
        slots = torch.cat([s[len(s) - n :] for s, n in zip(drawn.slots, drawn.new, strict=True)])
        new_kv = (drawn.k[slots], drawn.v[slots])
    backend.prefill_attention(q, drawn.k, drawn.v, batch, drawn.options, out=out, new_kv=new_kv, plan=plan)
    batch = replace(batch, page_starts=same.page_starts)
    expected = get_backend("torch").prefill_attention(
        q.double(), as_float64(same.k), as_float64(same.v), batch, wide(drawn.options)
    )
    return distance(out, expected)


def check_write(case: KernelProblem, drawn: DrawnKV, backend: Any, device: str) -> str | None:
    """Checks a write of new rows, some of them skipped (slot < 0): None, or what is wrong.

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
    written = [(drawn.k, k)] if case.latent else [(drawn.k, k), (drawn.v, v)]  # latent: V lies in K's rows
    for cache, rows in written:
        wrong = write_error(cache, slots[kept], rows[kept])
        if wrong is not None:
            return wrong
    return None


def write_error(cache: KVCache, slots: torch.Tensor, rows: torch.Tensor) -> str | None:
    """Compares ``cache`` at ``slots`` with ``rows``: None, or how they differ by more than its format allows."""
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
