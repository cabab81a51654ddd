"""Attention and KV-write kernels: bytes per second against the machine's own read ceiling, and against torch.

    python -m pytest tests/benchmarks/test_kernels.py

Runs on the CUDA device if there is one, else on the CPU. In ``extra_info``, everything from the fastest of alternating
rounds (``bench_timing``): kv_gb_per_s and ceiling_gb_per_s (1 GB = 1e9 bytes; the ceiling is the faster of torch's sum
and dot over the same bytes), ratio of the two; vs_X: how many times as fast as X, where X is gather_sdpa (what there
was before paged kernels: gather all KV, then SDPA) or contiguous_sdpa (SDPA where nothing is paged, the GQA group
packed as query rows: the best that torch does); over_contiguous: time over that of the same kernel on the contiguous
layout; over_float: time over that of the same step on a float cache.

One layer's KV may lie in the L3 of a CPU or the L2 of a GPU, for the kernel and for the ceiling alike: nothing is
flushed between rounds. test_decode_of_many_layers goes through more memory than caches hold, as an engine does;
ci/gpu.sh times kernels with a flushed L2.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from bench_kv import (
    CACHES,
    CONTIGUOUS,
    DIM,
    FLOAT,
    FLOATS,
    HEADS,
    KV_DTYPES,
    KV_HEADS,
    OPTIONS,
    PAGE_SIZES,
    Cache,
    backend_for,
    bandwidth,
    bytes_per_token,
    compute_dtype,
    make_cache,
    quantise,
    readers,
    side_by_side,
    slots_of,
)
from bench_timing import CUDA, DEVICE, Step, choose, note, race

from kvbench_kernels.api import PrefillBatch

SHAPES = choose(  # (batch, context): 8 x 4096 on a CPU and 64 x 4096 on a GPU have bars
    full=[(64, 4096), (64, 8192), (1, 32768)] if CUDA else [(32, 1024), (8, 4096), (1, 32768)],
    quick=[(64, 4096)] if CUDA else [(8, 4096)],
    smoke=[(2, 48)],
)


def require_kernel(kv: str) -> None:
    """Skip what only the reference computes: it is right, and no kernel to be measured."""
    if backend_for(kv).name == "torch":
        pytest.skip(f"no kernel serves a cache of {kv} with {compute_dtype(kv)} on {DEVICE}, only the torch reference")


def decode_step(kv: str, cache: Cache, q: torch.Tensor, context: int) -> Step:
    """One layer's decode of the engine, planned as the engine plans."""
    backend, out = backend_for(kv), torch.empty_like(q)
    plan = backend.plan_decode(*cache.where, max_tokens=context)
    return lambda: backend.decode_attention(q, cache.k, cache.v, *cache.where, OPTIONS, out=out, plan=plan)


def sdpa_rivals(cache: Cache, q: torch.Tensor, batch: int, context: int) -> dict[str, Step]:
    """Decode by torch's own attention on a float cache."""
    slots, packed = slots_of(cache, context), q.view(batch, KV_HEADS, HEADS // KV_HEADS, DIM)
    k, v = side_by_side(cache, batch, context)

    def gather() -> torch.Tensor:
        k, v = (x[slots].transpose(1, 2) for x in (cache.k, cache.v))
        return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

    return {"gather_sdpa": gather, "contiguous_sdpa": lambda: F.scaled_dot_product_attention(packed, k, v)}


def ratios(own: float, fastest: dict[str, float]) -> dict[str, float]:
    """``vs_X``: the rival's time over ours; ``over_X``: ours over that of our own kernel on other memory."""
    figures = {f"vs_{name}": s / own for name, s in fastest.items() if name.endswith(("_sdpa", "_attn", "copy"))}
    return figures | {f"over_{name}": own / s for name, s in fastest.items() if name in ("contiguous", "float")}


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize(("batch", "context"), SHAPES)
def test_decode(benchmark, batch, context, kv, page_size):
    require_kernel(kv)
    cache = make_cache(kv, batch, context, page_size)
    q = torch.randn(batch, HEADS, DIM, dtype=compute_dtype(kv), device=DEVICE)
    num_bytes = batch * context * bytes_per_token(kv)
    rivals = readers(cache, num_bytes)
    if page_size != CONTIGUOUS:
        rivals["contiguous"] = decode_step(kv, make_cache(kv, batch, context, CONTIGUOUS), q, context)
    if kv in FLOATS:
        rivals |= sdpa_rivals(cache, q, batch, context)
    else:
        rivals["float"] = decode_step(FLOAT, make_cache(FLOAT, batch, context, page_size), q, context)
    benchmark.group = f"decode, {batch} sequences of {context} tokens"
    own, fastest = race(benchmark, decode_step(kv, cache, q, context), rivals)
    figures = bandwidth(num_bytes, own, fastest, "kv_gb_per_s")
    note(benchmark, backend=backend_for(kv).name, **figures, **ratios(own, fastest))


def test_decode_of_one_long_sequence_among_short_ones(benchmark):
    """Beside a batch of one length with as many tokens."""
    usual = (32, 8192, 256) if CUDA else (8, 4096, 128)
    batch, context, short = choose(full=usual, quick=usual, smoke=(3, 48, 6))
    require_kernel(FLOAT)
    cache = make_cache(FLOAT, batch, context, 16)
    lens = torch.full_like(cache.seq_lens, short)
    lens[-1] = context
    each = int(lens.sum()) // batch  # without a remainder
    skewed, even = replace(cache, seq_lens=lens), replace(cache, seq_lens=torch.full_like(lens, each))
    q = torch.randn(batch, HEADS, DIM, dtype=compute_dtype(FLOAT), device=DEVICE)
    num_bytes = batch * each * bytes_per_token(FLOAT)
    rivals = readers(cache, num_bytes) | {"even": decode_step(FLOAT, even, q, each)}
    benchmark.group = f"decode, 1 sequence of {context} tokens among {batch - 1} of {short}"
    own, fastest = race(benchmark, decode_step(FLOAT, skewed, q, context), rivals)
    figures = bandwidth(num_bytes, own, fastest, "kv_gb_per_s")
    note(benchmark, backend=backend_for(FLOAT).name, over_even=own / fastest["even"], **figures)


LAYERS = choose(full=16, quick=8, smoke=2)  # 67 MB of float32 each, but for smoke


def test_decode_of_many_layers(benchmark):
    """One decode step's attention, each layer with a cache of its own."""
    batch, context = choose(full=(8, 4096), quick=(8, 4096), smoke=(2, 48))
    require_kernel(FLOAT)
    first = make_cache(FLOAT, batch, context, 16)
    layers = [replace(first, k=first.k.clone(), v=first.v.clone()) for _ in range(LAYERS)]
    q = torch.randn(batch, HEADS, DIM, dtype=compute_dtype(FLOAT), device=DEVICE)
    of_layer = batch * context * bytes_per_token(FLOAT)
    steps, reads = [decode_step(FLOAT, cache, q, context) for cache in layers], [readers(x, of_layer) for x in layers]
    benchmark.group = f"decode of {LAYERS} layers, {batch} sequences of {context} tokens, page size 16"
    rivals = {name: lambda name=name: [read[name]() for read in reads] for name in reads[0]}
    own, fastest = race(benchmark, lambda: [step() for step in steps], rivals)
    num_bytes = LAYERS * of_layer
    figures = bandwidth(num_bytes, own, fastest, "kv_gb_per_s")
    note(benchmark, working_set_mb=num_bytes / 1e6, **figures)


PREFILLS = choose(  # (batch, new tokens each, context before them)
    full=[(1, 512, 0), (4, 128, 0), (1, 128, 1920), (1, 512, 1536), *([(8, 2048, 0)] if CUDA else [])],
    quick=[(1, 512, 0), (1, 512, 1536)],
    smoke=[(2, 16, 32)],
)


def prefill_step(kv: str, cache: Cache, q: torch.Tensor, new_kv: tuple, batch: int, new: int, total: int) -> Step:
    """One layer's chunked prefill of the engine."""
    backend, out = backend_for(kv), torch.empty_like(q)
    starts = torch.arange(batch + 1, device=DEVICE) * new
    chunks = PrefillBatch(cache.page_starts, starts, cache.seq_lens, cache.page_size)
    plan = backend.plan_prefill(chunks, max_queries=new, max_tokens=total)
    return lambda: backend.prefill_attention(q, cache.k, cache.v, chunks, OPTIONS, out=out, new_kv=new_kv, plan=plan)


def prefill_rivals(cache: Cache, q: torch.Tensor, batch: int, new: int, total: int) -> dict[str, Step]:
    """Prefill by torch's own attention on a float cache."""
    padded = q.view(batch, new, HEADS, DIM).transpose(1, 2)
    k, v = side_by_side(cache, batch, total)
    mask = torch.ones(new, total, dtype=torch.bool, device=DEVICE).tril(total - new)
    how = {"enable_gqa": True} | ({"is_causal": True} if new == total else {"attn_mask": mask})
    slots = slots_of(cache, total)

    def gather() -> torch.Tensor:
        k, v = (x[slots].transpose(1, 2) for x in (cache.k, cache.v))
        return F.scaled_dot_product_attention(padded, k, v, **how)

    return {"gather_sdpa": gather, "contiguous_sdpa": lambda: F.scaled_dot_product_attention(padded, k, v, **how)}


def varlen_rival(cache: Cache, q: torch.Tensor, batch: int, new: int, total: int) -> dict[str, Step]:
    """torch's own variable-length attention on contiguous KV, where this torch and this device have it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return {}
    k, v = (x[: batch * total] for x in (cache.k, cache.v))
    q_starts, k_starts = (torch.arange(batch + 1, device=DEVICE, dtype=torch.int32) * n for n in (new, total))

    def attend() -> object:
        return varlen_attn(q, k, v, q_starts, k_starts, new, total, window_size=(-1, 0), enable_gqa=True)

    try:
        attend()
    except (TypeError, RuntimeError, NotImplementedError) as error:
        print(f"  without torch's varlen_attn: {error}")
        return {}
    return {"varlen_attn": attend}


@pytest.mark.parametrize(("kv", "page_size"), CACHES)
@pytest.mark.parametrize(("batch", "new", "context"), PREFILLS)
def test_prefill(benchmark, batch, new, context, kv, page_size):
    """A chunk of ``new`` tokens after ``context``. The ceiling is torch's matrix product of the same dtype."""
    require_kernel(kv)
    total = new + context
    cache = make_cache(kv, batch, total, page_size)
    q = torch.randn(batch * new, HEADS, DIM, dtype=compute_dtype(kv), device=DEVICE)
    new_kv = tuple(torch.randn(batch * new, KV_HEADS, DIM, dtype=q.dtype, device=DEVICE) for _ in "kv")
    a = torch.randn(choose(full=1024, quick=1024, smoke=32), 1024, dtype=q.dtype, device=DEVICE)
    product = torch.empty(len(a), len(a), dtype=q.dtype, device=DEVICE)
    rivals: dict[str, Step] = {"product": lambda: torch.mm(a, a.T, out=product)}
    if page_size != CONTIGUOUS:
        rivals["contiguous"] = prefill_step(kv, make_cache(kv, batch, total, CONTIGUOUS), q, new_kv, batch, new, total)
    if kv in FLOATS:
        rivals |= prefill_rivals(cache, q, batch, new, total)
        rivals |= varlen_rival(cache, q, batch, new, total) if CUDA else {}
    else:
        floats = make_cache(FLOAT, batch, total, page_size)
        rivals["float"] = prefill_step(FLOAT, floats, q, new_kv, batch, new, total)
    benchmark.group = f"prefill, {batch} sequences of {new} tokens after {context}"
    own, fastest = race(benchmark, prefill_step(kv, cache, q, new_kv, batch, new, total), rivals)
    pairs = batch * (new * context + new * (new + 1) / 2)  # query x key pairs under the causal mask
    speed, top = 4 * pairs * HEADS * DIM / own, 2 * len(a) ** 2 * 1024 / fastest["product"]
    note(
        benchmark, backend=backend_for(kv).name, kv_gb_per_s=batch * total * bytes_per_token(kv) / own / 1e9,
        gflop_per_s=speed / 1e9, ceiling_gflop_per_s=top / 1e9, ratio=speed / top, **ratios(own, fastest),
    )  # fmt: skip


WRITES = choose(full=[16, 512, 32768], quick=[512, 32768], smoke=[16])


@pytest.mark.parametrize(("kv", "page_size"), [cache for cache in CACHES if cache[1] != CONTIGUOUS])
@pytest.mark.parametrize("tokens", WRITES)
def test_write(benchmark, tokens, kv, page_size):
    """K and V of one layer's new tokens, heads first in memory, into pages in random order.

    gb_per_s counts what is read and what is written; vs_copy: against a plain copy of as many bytes in a row.
    """
    require_kernel(kv)
    dtype = compute_dtype(kv)
    k, v = (torch.randn(KV_HEADS, tokens, DIM, dtype=dtype, device=DEVICE).transpose(0, 1) for _ in "kv")
    pages = -(-tokens // page_size) + 1
    shape = (pages * page_size, KV_HEADS, DIM)
    caches = [torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in "kv"]
    if kv not in FLOATS:
        caches = [quantise(kv, x) for x in caches]
    starts = torch.randperm(pages, device=DEVICE) * page_size
    slots = (starts[:, None] + torch.arange(page_size, device=DEVICE)).view(-1)[:tokens]
    num_bytes = 2 * k.nbytes + tokens * bytes_per_token(kv)
    source, target = torch.ones(2, num_bytes // 8, dtype=torch.float32, device=DEVICE)
    rivals = {
        "copy": lambda: target.copy_(source),
        "read_sum": lambda: (torch.sum(source), torch.sum(target)),
        "read_dot": lambda: (torch.dot(source, source), torch.dot(target, target)),
    }
    backend = backend_for(kv)
    benchmark.group = f"KV write of {tokens} tokens"
    own, fastest = race(benchmark, lambda: backend.write_kv(k, v, *caches, slots), rivals)
    note(benchmark, backend=backend.name, **bandwidth(num_bytes, own, fastest), **ratios(own, fastest))
