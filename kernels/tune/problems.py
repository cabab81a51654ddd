"""Hostile KV caches and float64 answers, for `kvbench dev tune`, ci/gpu and the tests.

Pages lie in random order with gaps and start at odd slots; every slot that holds no token is NaN (in codes or scales,
where a format has one); page-table entries behind a sequence's end point far outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kvbench_kernels.api import AttentionOptions, KVCache
from kvbench_kernels.kv_formats import find_format
from kvbench_kernels.launch import cdiv
from kvbench_kernels.quantized import FP8_MAX, QuantizedKV, raw_tensors

FAR_OUTSIDE = 1 << 40
LARGEST = 8.0  # absolute value of a drawn K or V that an fp8 cache must be able to hold


@dataclass(frozen=True)
class HostileKV:
    """K and V of some sequences. ``page_starts [sequences, pages]`` int64; ``slots``: of every token, by sequence."""

    k: KVCache
    v: KVCache
    page_starts: torch.Tensor
    page_size: int
    slots: list[torch.Tensor]


def hostile_kv(
    lengths: Sequence[int],
    kind: str,
    kv_heads: int,
    dims: tuple[int, int],
    page_size: int | None,
    random: Callable[..., torch.Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    gap: int = 1,
) -> HostileKV:
    """Caches of ``kind`` that hold ``lengths`` tokens, their values drawn by ``random(*shape)``.

    ``dims``: of K and of V. ``page_size``: tokens; None puts each sequence in one run of slots, as a contiguous cache
    does. ``gap``: slots between pages; 0 aligns pages as the engine does.
    """
    size = page_size or max(1, *lengths) + 5
    pages = cdiv(max(1, *lengths), size)
    first = 3 * gap
    order = torch.randperm(len(lengths) * pages, generator=torch.Generator().manual_seed(0))
    starts = first + order.view(len(lengths), pages) * (size + gap)
    num_slots = first + len(lengths) * pages * (size + gap)
    k, v = (nan_cache(kind, num_slots, kv_heads, dim, dtype, device) for dim in dims)
    slots = []
    for row, length in zip(starts, lengths, strict=True):
        tokens = torch.arange(length)
        slots.append((row[tokens // size] + tokens % size).to(device))
        for cache, dim in zip((k, v), dims, strict=True):
            put(cache, slots[-1], random(length, kv_heads, dim))
    used = cdiv(torch.tensor(lengths), size)
    starts = torch.where(torch.arange(pages)[None, :] < used[:, None], starts, FAR_OUTSIDE)
    return HostileKV(k, v, starts.to(device), size, slots)


def nan_cache(
    kind: str,
    slots: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    largest: float = LARGEST,
) -> KVCache:
    """A cache in which every slot holds NaN. ``largest``: absolute value that fp8 must be able to hold."""
    kv_format = find_format(kind)
    if kv_format is None:
        return torch.full((slots, heads, dim), float("nan"), dtype=dtype, device=device)
    scale = 2 * largest / FP8_MAX[kv_format] if kv_format in FP8_MAX else None
    cache = QuantizedKV.zeros(kv_format, slots, heads, dim, device, scale)
    codes, *scales = raw_tensors(cache)
    codes.view(torch.uint8).fill_(0x7F)  # NaN in both fp8 formats
    for tensor in scales:
        tensor.fill_(float("nan"))
    return cache


def put(cache: KVCache, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Store by torch indexing, not by the code under test."""
    if isinstance(cache, QuantizedKV):
        cache.store(slots, rows)
    else:
        cache[slots] = rows.to(cache.dtype)


def as_float64(cache: KVCache) -> torch.Tensor:
    """The values of a cache, ``[slots, heads, dim]`` float64."""
    return (cache.load(slice(None)) if isinstance(cache, QuantizedKV) else cache).double()


def wide(options: AttentionOptions) -> AttentionOptions:
    """The same options for float64 inputs."""
    return options if options.sinks is None else replace(options, sinks=options.sinks.double())


def distance(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm of ``expected``, of the worst row (one head of one query).

    By row, because a long row's values are small: one norm over everything would hide its errors behind short rows.
    Infinite where anything is NaN or was not written, and where a row that must be zero is not.
    """
    if not bool(torch.isfinite(result).all()):
        return float("inf")
    difference, scale = (result.double() - expected).norm(dim=-1), expected.norm(dim=-1)
    worst = torch.where(difference == 0, 0.0, difference / scale)  # x / 0 is infinite
    return float(worst.max())
