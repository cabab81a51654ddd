"""The cases of the part ``kernels``: Llama-8B's heads (32 query, 8 KV, head dim 128), bfloat16 on a GPU.

``bar``: the project's aim, as a share of the ceiling that is measured in the same sitting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ci.gpu.kernel_problems import CONTIGUOUS
from kernels.api import KVCache
from kernels.kv_formats import KV_FORMATS, find_format
from kernels.quantized import FP8_MAX, QuantizedKV, first_values
from tests.benchmarks import bench_bars

FILL_ROWS = 1 << 16  # slots filled at once: a large cache is quantised through float32 copies of its parts


@dataclass(frozen=True)
class AttentionHeads:
    """Heads of one layer, and their dim. ``latent_v``: V is the first so many values of K's rows."""

    query: int
    kv: int
    dim: int
    latent_v: int | None = None


@dataclass(frozen=True)
class Decode:
    """A decode step to time.

    ``context``: tokens of each sequence; ``longest``, if given: those of the last one.
    ``bar``: of the read bandwidth. ``against``: the name of the case that its time is divided by.
    """

    batch: int
    context: int
    page_size: int = 16
    kv: str = "auto"
    bar: float | None = None
    against: str | None = None
    bar_time: float | None = None  # of the ratio of times
    longest: int | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [self.context] * (self.batch - 1) + [self.longest or self.context]

    @property
    def name(self) -> str:
        """The name that tables show."""
        page = "contiguous" if self.page_size == CONTIGUOUS else f"page {self.page_size}"
        shape = f"{self.batch} x {self.context}"
        if self.longest:
            shape = f"1 x {self.longest} among {self.batch - 1} x {self.context}"
        return f"decode {self.kv}, {shape}, {page}"


def decode_cases(quick: bool) -> list[Decode]:
    """Most important first."""
    base, long, single = (Decode(*shape, bar=bar) for shape, bar in bench_bars.DECODE_SHARES.items())
    contiguous = Decode(64, 4096, CONTIGUOUS)
    cases = [base, long, single, contiguous, Decode(64, 512, longest=32768)]
    for kv in KV_FORMATS:
        bars = (bench_bars.FP8_DECODE_SHARE, bench_bars.FP8_DECODE_TIME) if kv == "fp8_e4m3" else (None, None)
        cases.append(Decode(64, 8192, kv=kv, bar=bars[0], against=long.name, bar_time=bars[1]))
    page_bars = {1: bench_bars.PAGE_OF_1_TIME, 8: None}
    cases += [
        Decode(64, 4096, page, against=contiguous.name, bar_time=page_bars.get(page, bench_bars.PAGED_TIME))
        for page in (1, 256, 8, 32, 64, 128)
    ]
    if not quick:
        cases += [Decode(batch, context) for batch in (1, 8, 32, 256) for context in (1024, 4096)]
        cases += [Decode(8, 32768), Decode(1, 131072), Decode(1, 8192, kv="fp8_e4m3"), Decode(256, 1024, 1)]
        cases.append(Decode(1, 32768, kv="fp8_e4m3", against=single.name))
    return cases


def latent_cases(tiny: bool) -> list[tuple[AttentionHeads, Decode]]:
    """Decodes over the latent rows of DeepSeek V3 (128 query heads) and V2-Lite (16)."""
    if tiny:
        return [(AttentionHeads(4, 1, 24, 16), Decode(2, 64))]
    decodes = [Decode(64, 4096), Decode(8, 32768), Decode(64, 4096, kv="fp8_e4m3"), Decode(1, 32768)]
    return [(AttentionHeads(query, 1, 576, 512), case) for query in (128, 16) for case in decodes]


def tiny_decode_cases() -> list[Decode]:
    """The cases for a CPU."""
    return [
        Decode(2, 64),
        Decode(2, 64, CONTIGUOUS),
        Decode(2, 64, kv="int8_per_token_head", against=Decode(2, 64).name),
    ]


@dataclass(frozen=True)
class DecodeTensors:
    """One decode step's inputs."""

    q: torch.Tensor
    k: KVCache
    v: KVCache
    page_starts: torch.Tensor
    seq_lens: torch.Tensor
    page_size: int
    kv_bytes: int  # codes and scales that one step must read


def filled_cache(kv: str, slots: int, heads: AttentionHeads, dtype: torch.dtype, device: str) -> KVCache:
    """Random rows in every slot."""
    if kv == "auto":
        return torch.randn(slots, heads.kv, heads.dim, dtype=dtype, device=device)
    kv_format = KV_FORMATS[kv]
    scale = 2 * 8.0 / FP8_MAX[kv_format] if kv_format in FP8_MAX else None
    cache = QuantizedKV.zeros(kv_format, slots, heads.kv, heads.dim, device, scale)
    for first in range(0, slots, FILL_ROWS):
        places = torch.arange(first, min(slots, first + FILL_ROWS), device=device)
        cache.store(places, torch.randn(len(places), heads.kv, heads.dim, device=device))
    return cache


def row_bytes(kv: str, heads: AttentionHeads, dtype: torch.dtype) -> int:
    """Bytes of one token's K and V of one layer."""
    kv_format = find_format(kv)
    one = heads.dim * dtype.itemsize if kv_format is None else kv_format.row_bytes(heads.dim)
    return (1 if heads.latent_v else 2) * heads.kv * one


def make_decode(case: Decode, heads: AttentionHeads, dtype: torch.dtype, device: str) -> DecodeTensors:
    """Sequences with their pages in random order."""
    lengths = torch.tensor(case.lengths)
    page_size = int(lengths.max()) + 1 if case.page_size == CONTIGUOUS else case.page_size
    pages = (lengths + page_size - 1) // page_size
    order = torch.randperm(int(pages.sum())) * page_size
    used = torch.arange(int(pages.max())) < pages[:, None]
    starts = torch.zeros(used.shape, dtype=torch.int32).masked_scatter(used, order.int())
    slots = len(order) * page_size
    k = filled_cache(case.kv, slots, heads, dtype, device)
    latent = heads.latent_v
    v = first_values(k, latent) if latent else filled_cache(case.kv, slots, heads, dtype, device)
    return DecodeTensors(
        q=torch.randn(case.batch, heads.query, heads.dim, dtype=dtype, device=device),
        k=k,
        v=v,
        page_starts=starts.to(device),
        seq_lens=lengths.to(device),
        page_size=page_size,
        kv_bytes=sum(case.lengths) * row_bytes(case.kv, heads, dtype),
    )


@dataclass(frozen=True)
class Prefill:
    """A prefill step to time: ``batch`` sequences with ``new`` tokens each after ``context`` cached ones."""

    batch: int
    new: int
    context: int
    kv: str = "auto"

    @property
    def name(self) -> str:
        """The name that tables show."""
        return f"prefill {self.kv}, {self.batch} x {self.new} after {self.context}"

    @property
    def pairs(self) -> float:
        """Query x key pairs under the causal mask."""
        return self.batch * (self.new * self.context + self.new * (self.new + 1) / 2)


def prefill_cases(quick: bool) -> list[Prefill]:
    """Most important first."""
    cases = [Prefill(1, 4096, 0), Prefill(4, 1024, 3072), Prefill(1, 512, 16384)]
    if not quick:
        cases += [Prefill(8, 1024, 0), Prefill(1, 16384, 0), Prefill(4, 1024, 3072, "fp8_e4m3"),
                  Prefill(4, 1024, 3072, "int8_per_token_head")]  # fmt: skip
    return cases
