"""KV caches for the kernel benchmarks: formats, layouts, and memory that all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from bench_timing import CUDA, DEVICE, choose

from kvbench_kernels import default_backend, get_backend
from kvbench_kernels.api import AttentionBackend, AttentionOptions
from kvbench_kernels.kv_formats import KV_FORMATS, find_format
from kvbench_kernels.quantized import FP8_MAX, QuantizedKV, raw_tensors

CONTIGUOUS = 0  # as a page size: one unaligned run of slots per sequence
ALL_PAGE_SIZES = [1, 8, 16, 32, 64, 128, 256, CONTIGUOUS]
PAGE_SIZES = choose(full=ALL_PAGE_SIZES, quick=[1, 16, 256, CONTIGUOUS], smoke=[16, CONTIGUOUS])
FLOATS = ["bfloat16", "float16", "float32"] if CUDA else ["float32"]
FLOAT = FLOATS[0]  # what the model computes in where the cache is quantised
KV_DTYPES = choose(
    full=[*FLOATS, *KV_FORMATS],
    quick=[FLOAT, "fp8_e4m3", "int8_per_token_head"],
    smoke=[FLOAT, "int4_per_token_head"],
)
CACHES = [  # (KV dtype, page size) where the format matters less: quantised ones at two page sizes only
    (kv, page_size) for kv in KV_DTYPES for page_size in PAGE_SIZES if kv in FLOATS or page_size in (16, CONTIGUOUS)
]
HEADS, KV_HEADS, DIM = (32, 8, 128) if CUDA else (8, 4, 64)
OPTIONS = AttentionOptions(scale=DIM**-0.5)


@dataclass(frozen=True)
class Cache:
    """K and V of one layer, and where the tokens of sequences of one length lie; pages in random order."""

    k: torch.Tensor | QuantizedKV
    v: torch.Tensor | QuantizedKV
    page_starts: torch.Tensor  # [batch, pages] int64
    seq_lens: torch.Tensor  # [batch] int64
    page_size: int

    @property
    def where(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.page_starts, self.seq_lens, self.page_size


def compute_dtype(kv: str) -> torch.dtype:
    """What a model with such a cache computes in."""
    return getattr(torch, kv if kv in FLOATS else FLOAT)


def backend_for(kv: str) -> AttentionBackend:
    """The engine's own choice for a cache of ``kv``, a float dtype or a quantised format."""
    return get_backend(default_backend(DEVICE, compute_dtype(kv), "auto" if kv in FLOATS else kv))


def bytes_per_token(kv: str) -> int:
    """Of K and V together, scales counted."""
    kv_format = find_format("auto" if kv in FLOATS else kv)
    return 2 * KV_HEADS * (kv_format.row_bytes(DIM) if kv_format else DIM * compute_dtype(kv).itemsize)


@lru_cache(maxsize=1)
def _floats(slots: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = (slots, KV_HEADS, DIM)
    k, v = (torch.randn(shape, dtype=dtype, device=DEVICE, generator=generator) for _ in "kv")
    return k, v


@lru_cache(maxsize=1)
def _quantised(slots: int, kv: str) -> tuple[QuantizedKV, QuantizedKV]:
    k, v = (quantise(kv, x) for x in _floats(slots, compute_dtype(kv)))
    return k, v


def quantise(kv: str, x: torch.Tensor) -> QuantizedKV:
    """The rows of ``x [slots, Hkv, D]`` in a cache of the format called ``kv``."""
    kv_format = KV_FORMATS[kv]
    scale = 2 * max(float(x.abs().max()), 1.0) / FP8_MAX[kv_format] if kv_format in FP8_MAX else None
    cache = QuantizedKV.zeros(kv_format, *x.shape, x.device, scale)
    for rows in torch.arange(len(x), device=x.device).split(65_536):
        cache.store(rows, x[rows])
    return cache


def make_cache(kv: str, batch: int, context: int, page_size: int) -> Cache:
    """Random KV of ``batch`` sequences of ``context`` tokens.

    All page sizes and the contiguous layout of one shape and format are views on the same memory, so that who is
    compared reads the same bytes.
    """
    slots = batch * (context + 256)
    k, v = _floats(slots, compute_dtype(kv)) if kv in FLOATS else _quantised(slots, kv)
    if page_size == CONTIGUOUS:
        page_size, pages = context + 1, 1  # a gap of one slot, so that bases are not aligned
    else:
        pages = -(-context // page_size)
    generator = torch.Generator().manual_seed(page_size)
    starts = torch.randperm(batch * pages, generator=generator).view(batch, pages) * page_size
    return Cache(k, v, starts.to(DEVICE), torch.full((batch,), context, device=DEVICE), page_size)


def slots_of(cache: Cache, context: int) -> torch.Tensor:
    """``[batch, context]``: the slot of each token."""
    tokens = torch.arange(context, device=DEVICE)
    return cache.page_starts[:, tokens // cache.page_size] + tokens % cache.page_size


def side_by_side(cache: Cache, batch: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a float cache's memory as if ``batch`` sequences lay in it one after the other, as SDPA wants them:
    ``[batch, Hkv, context, D]``."""
    k, v = (x[: batch * context].view(batch, context, KV_HEADS, DIM).transpose(1, 2) for x in (cache.k, cache.v))
    return k, v


def readers(cache: Cache, num_bytes: int) -> dict[str, object]:
    """Two ways in which torch reads ``num_bytes``, those of the float cache itself or as many others: the ceiling.

    The memory is written first: an untouched allocation reads one zero page at fantasy speed.
    """
    if isinstance(cache.k, torch.Tensor):
        half = num_bytes // 2 // cache.k.element_size()
        flat = [x.view(-1)[:half] for x in (cache.k, cache.v)]
    else:
        held = [t.view(-1).view(torch.uint8) for side in (cache.k, cache.v) for t in raw_tensors(side)]
        assert sum(t.numel() for t in held) >= num_bytes
        flat = list(torch.ones(num_bytes // 4, dtype=torch.float32, device=DEVICE).chunk(2))
    return {
        "read_sum": lambda: [torch.sum(x) for x in flat],
        "read_dot": lambda: [torch.dot(x, x) for x in flat],
    }


def bandwidth(num_bytes: int, own_s: float, fastest: dict[str, float], name: str = "gb_per_s") -> dict[str, float]:
    """``name``, ceiling_gb_per_s of the better reader, and ratio, of a step that touches so many bytes."""
    top = num_bytes / min(fastest["read_sum"], fastest["read_dot"])
    speed = num_bytes / own_s
    return {name: speed / 1e9, "ceiling_gb_per_s": top / 1e9, "ratio": speed / top}
