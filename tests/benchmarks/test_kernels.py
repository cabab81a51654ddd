"""Decode and prefill kernels on this machine: KV bytes per second against the machine's own read ceiling.

    python -m pytest tests/benchmarks/test_kernels.py

The ceiling is the fastest that torch sums or dots the very same KV memory. Figures are in `extra_info`
(`--benchmark-json`): kv_gb_per_s and ceiling_gb_per_s (1 GB = 1e9 bytes, from the fastest round), ratio.
On a shared machine trust the fastest round. Runs on the CUDA device if there is one, else on the CPU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from kernels import default_backend, get_backend
from kernels.api import AttentionOptions
from kernels.kv_formats import KV_FORMATS
from kernels.quantized import FP8_MAX, QuantizedKV

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
HEADS, KV_HEADS, DIM = (32, 8, 128) if CUDA else (8, 4, 64)
SHAPES = [(64, 4096), (1, 32768)] if CUDA else [(32, 1024), (8, 4096), (1, 32768)]  # (batch, context)
OPTIONS = AttentionOptions(scale=DIM**-0.5)
CONTIGUOUS = 0  # as a page size: one unaligned run of slots per sequence


@dataclass(frozen=True)
class Batch:
    """A decode step over sequences of one length, pages in random order."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    page_starts: torch.Tensor
    seq_lens: torch.Tensor
    page_size: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV that one decode step has to read."""
        return int(self.seq_lens.sum()) * KV_HEADS * DIM * 2 * self.k.element_size()


def make_batch(batch: int, context: int, page_size: int) -> Batch:
    """Random KV for ``batch`` sequences of ``context`` tokens."""
    torch.manual_seed(0)
    if page_size == CONTIGUOUS:
        page_size, pages = context + 1, 1  # a gap of one slot, so that bases are not aligned
    else:
        pages = -(-context // page_size)
    starts = torch.randperm(batch * pages).view(batch, pages) * page_size
    k, v = (torch.randn(batch * pages * page_size, KV_HEADS, DIM, dtype=DTYPE, device=DEVICE) for _ in "kv")
    q = torch.randn(batch, HEADS, DIM, dtype=DTYPE, device=DEVICE)
    return Batch(q, k, v, starts.to(DEVICE), torch.full((batch,), context, device=DEVICE), page_size)


def quantised(name: str, x: torch.Tensor) -> QuantizedKV:
    """The rows of ``x [slots, Hkv, D]`` in a cache of the format called ``name``."""
    kv_format = KV_FORMATS[name]
    scale = 2 * max(float(x.abs().max()), 1.0) / FP8_MAX[kv_format] if kv_format in FP8_MAX else None
    cache = QuantizedKV.zeros(kv_format, *x.shape, x.device, scale)
    cache.store(torch.arange(len(x), device=x.device), x)
    return cache


def wait() -> None:
    """Until the GPU is done; nothing on a CPU."""
    if CUDA:
        torch.cuda.synchronize()


def ceiling(b: Batch) -> float:
    """GB/s at which torch reads this batch's KV, the better of sum and dot, fastest of 10."""
    flat = [x.view(-1) for x in (b.k, b.v)]
    best = 0.0
    for read in (torch.sum, lambda x: torch.dot(x, x)):
        for _ in range(10):
            wait()
            start = time.perf_counter()
            for x in flat:
                read(x)
            wait()
            best = max(best, sum(x.nbytes for x in flat) / (time.perf_counter() - start) / 1e9)
    return best


def measure(benchmark, b: Batch, step) -> None:
    """Time ``step`` and put KV throughput beside the ceiling, measured right before."""
    top = ceiling(b)

    def timed() -> None:
        step()
        wait()

    benchmark.pedantic(timed, rounds=40, warmup_rounds=5)
    achieved = b.kv_bytes / benchmark.stats.stats.min / 1e9
    benchmark.extra_info.update(
        kv_gb_per_s=round(achieved, 2), ceiling_gb_per_s=round(top, 2), ratio=round(achieved / top, 3)
    )
    print(f"\n  {achieved:.1f} GB/s of KV, ceiling {top:.1f} GB/s, ratio {achieved / top:.2f}")


@pytest.mark.parametrize("page_size", [1, 7, 8, 16, 64, 256, CONTIGUOUS])
@pytest.mark.parametrize(("batch", "context"), SHAPES)
def test_decode(benchmark, batch, context, page_size):
    backend, b = get_backend(default_backend(DEVICE, DTYPE)), make_batch(batch, context, page_size)
    out = torch.empty_like(b.q)
    args = (b.q, b.k, b.v, b.page_starts, b.seq_lens, b.page_size)
    plan = backend.plan_decode(b.page_starts, b.seq_lens, b.page_size, max_tokens=context)
    benchmark.group = f"decode {batch} x {context}"
    measure(benchmark, b, lambda: backend.decode_attention(*args, OPTIONS, out=out, plan=plan))


@pytest.mark.skipif(CUDA, reason="no backend decodes quantised KV on a GPU but the reference")
@pytest.mark.parametrize("name", list(KV_FORMATS))
@pytest.mark.parametrize(("batch", "context"), SHAPES)
def test_decode_quantised(benchmark, batch, context, name):
    """`time_of_float32`: its time over that of the same step on float32 KV, rounds alternating, fastest of each."""
    backend, b = get_backend("numba"), make_batch(batch, context, 16)
    k, v = (quantised(name, x) for x in (b.k, b.v))
    args = (b.page_starts, b.seq_lens, b.page_size)
    best = {}
    for _ in range(40):
        for kind, caches in (("float32", (b.k, b.v)), (name, (k, v))):
            start = time.perf_counter()
            backend.decode_attention(b.q, *caches, *args, OPTIONS)
            best[kind] = min(best.get(kind, 1e9), time.perf_counter() - start)
    benchmark.group = f"decode {batch} x {context}"
    benchmark.pedantic(lambda: backend.decode_attention(b.q, k, v, *args, OPTIONS), rounds=20)
    read = 2 * batch * context * KV_HEADS * KV_FORMATS[name].row_bytes(DIM)
    ratio = best[name] / best["float32"]
    benchmark.extra_info.update(
        kv_bytes=read, kv_gb_per_s=round(read / best[name] / 1e9, 2), time_of_float32=round(ratio, 3)
    )
    print(f"\n  {read / best[name] / 1e9:.1f} GB/s of codes and scales, {ratio:.2f} of the time over float32")


@pytest.mark.skipif(CUDA, reason="no backend writes quantised KV on a GPU but the reference")
@pytest.mark.parametrize("name", ["auto", *KV_FORMATS])
@pytest.mark.parametrize("tokens", [16, 512])
def test_write(benchmark, tokens, name):
    """K and V of one layer's new tokens, heads first in memory; float_gb_per_s counts what is read."""
    rows = torch.randn(KV_HEADS, tokens, DIM).transpose(0, 1)
    caches = [torch.zeros(4096, KV_HEADS, DIM) for _ in "kv"]
    if name != "auto":
        caches = [quantised(name, x) for x in caches]
    slots = torch.randperm(4096)[:tokens]
    benchmark.group = f"write {tokens}"
    benchmark.pedantic(lambda: get_backend("numba").write_kv(rows, rows, *caches, slots), rounds=200, warmup_rounds=5)
    benchmark.extra_info["float_gb_per_s"] = round(2 * rows.nbytes / benchmark.stats.stats.min / 1e9, 2)


@pytest.mark.parametrize(("batch", "context"), SHAPES)
def test_decode_by_gather_and_sdpa(benchmark, batch, context):
    """What there was before paged kernels: gather all KV, then SDPA."""
    b = make_batch(batch, context, 16)
    tokens = torch.arange(context, device=DEVICE)
    slots = b.page_starts[:, tokens // 16] + tokens % 16

    def step() -> torch.Tensor:
        k, v = (x[slots].transpose(1, 2) for x in (b.k, b.v))
        return F.scaled_dot_product_attention(b.q[:, :, None], k, v, enable_gqa=True)

    benchmark.group = f"decode {batch} x {context}"
    measure(benchmark, b, step)


@pytest.mark.parametrize(("batch", "context"), SHAPES)
def test_decode_by_sdpa_on_contiguous_kv(benchmark, batch, context):
    """The best that torch does when nothing is paged: the GQA group packed as query rows."""
    b = make_batch(batch, context, 16)
    k, v = (x.view(batch, context, KV_HEADS, DIM).transpose(1, 2) for x in (b.k, b.v))
    q = b.q.view(batch, KV_HEADS, HEADS // KV_HEADS, DIM)
    benchmark.group = f"decode {batch} x {context}"
    measure(benchmark, b, lambda: F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize(("new", "context"), [(128, 0), (512, 0), (128, 512), (512, 1536)])
@pytest.mark.parametrize(
    ("page_size", "name"), [(16, "auto"), (CONTIGUOUS, "auto"), (16, "fp8_e4m3"), (16, "int8_per_token_head")]
)
def test_prefill(benchmark, new, context, page_size, name):
    """One sequence's chunk after ``context`` tokens."""
    backend, b = get_backend(default_backend(DEVICE, DTYPE, name)), make_batch(1, new + context, page_size)
    q = torch.randn(new, HEADS, DIM, dtype=DTYPE, device=DEVICE)
    new_kv = tuple(torch.randn(new, KV_HEADS, DIM, dtype=DTYPE, device=DEVICE) for _ in "kv")
    k, v = (b.k, b.v) if name == "auto" else (quantised(name, x) for x in (b.k, b.v))
    starts, out = torch.tensor([0, new], device=DEVICE), torch.empty_like(q)
    args = (q, k, v, b.page_starts, starts, b.seq_lens, b.page_size)
    bounds = {"max_queries": new, "max_tokens": new + context}
    plan = backend.plan_prefill(b.page_starts, starts, b.seq_lens, b.page_size, **bounds)
    benchmark.group = f"prefill {new} after {context}"

    def step() -> None:
        backend.prefill_attention(*args, OPTIONS, out=out, new_kv=new_kv, plan=plan)
        wait()

    benchmark.pedantic(step, rounds=30, warmup_rounds=3)
    pairs = new * context + new * (new + 1) / 2  # query x key pairs under the causal mask
    benchmark.extra_info["gflop_per_s"] = round(4 * pairs * HEADS * DIM / benchmark.stats.stats.min / 1e9, 1)
