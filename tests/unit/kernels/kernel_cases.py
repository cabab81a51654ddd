"""Attention problems over hostile caches, and the checks against float64 that all backends share."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace

import torch
from hypothesis import strategies as st

from kvbench_kernels import get_backend
from kvbench_kernels.api import AttentionBackend, AttentionOptions, KVCache, PrefillBatch
from kvbench_kernels.kv_formats import KV_FORMATS
from kvbench_kernels.quantized import FP8_MAX, QuantizedKV, first_values
from kvbench_kernels.tune.problems import HostileKV, as_float64, hostile_kv, wide

KINDS = ["auto", *KV_FORMATS]
PLAIN = AttentionOptions(scale=0.2)
LENGTHS = st.one_of(st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]), st.integers(0, 150))


@dataclass(frozen=True)
class Problem:
    """Lengths per sequence (0: padding) and how many of them are new, under one cache layout."""

    lens: tuple[int, ...]
    new: tuple[int, ...]
    page_size: int = 16
    contiguous: bool = False
    shape: tuple[int, int, int] = (2, 64, 64)  # query heads of a KV head, head dims of K and of V
    kv_heads: int = 2
    window: int | None = None
    softcap: float | None = None
    with_sinks: bool = False
    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    index_dtype: torch.dtype = torch.int64
    loudness: float = 1.0
    latent: bool = False  # V is the first values of K, in its memory
    generator: torch.Generator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "generator", torch.Generator().manual_seed(self.seed))

    def random(self, *shape: int) -> torch.Tensor:
        """Normal floats of the problem's dtype on its device."""
        return self.loudness * torch.randn(shape, generator=self.generator).to(self.device, self.dtype)


@st.composite
def problems(draw, shapes, sequences=6, new=(1, 40, 150), dtypes=(torch.float32,), device="cpu") -> Problem:
    """Up to ``sequences`` sequences, each with at most one of ``new`` new tokens."""
    lens = tuple(draw(st.lists(LENGTHS, min_size=1, max_size=sequences)))
    most = [min(n, draw(st.sampled_from(new))) for n in lens]
    return Problem(
        lens=lens,
        new=tuple(draw(st.one_of(st.just(n), st.integers(0, n))) for n in most),
        page_size=draw(st.one_of(st.sampled_from([1, 16, 32, 64, 128, 256]), st.integers(1, 256))),
        contiguous=draw(st.booleans()),
        shape=draw(st.sampled_from(shapes)),
        kv_heads=draw(st.sampled_from([1, 2, 3])),
        window=draw(st.one_of(st.none(), st.integers(1, 160))),
        softcap=draw(st.one_of(st.none(), st.sampled_from([1.0, 30.0]))),
        with_sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        dtype=draw(st.sampled_from(dtypes)),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        device=device,
    )


def build_cache(p: Problem, kind: str = "auto") -> HostileKV:
    """The problem's tokens in caches of the format called ``kind``; other slots are NaN (0 * NaN, vllm#30887)."""
    page_size = None if p.contiguous else p.page_size
    cache = hostile_kv(p.lens, kind, p.kv_heads, p.shape[1:], page_size, p.random, dtype=p.dtype, device=p.device)
    return replace(cache, v=first_values(cache.k, p.shape[2])) if p.latent else cache


def draw_options(p: Problem) -> AttentionOptions:
    """The problem's options, its sinks drawn."""
    group, dim, _ = p.shape
    return AttentionOptions(dim**-0.5, p.window, p.softcap, p.random(group * p.kv_heads) if p.with_sinks else None)


class Comparison:
    """A problem's cache and lengths, and the comparison of what a backend makes of them with float64.

    ``every_form``: also without an output to write to, and with the new tokens' KV at hand. Of a quantised cache that
    is what it was before it was quantised, and must not be read: else chunks would not attend to what decode does.
    """

    def __init__(self, p: Problem, tolerance: float, kind: str, every_form: bool):
        self.problem, self.tolerance, self.every_form, self.kind = p, tolerance, every_form, kind
        self.cache, self.options = build_cache(p, kind), draw_options(p)
        self.lens = torch.tensor(p.lens, device=p.device, dtype=p.index_dtype)
        k = as_float64(self.cache.k)
        self.exact = k, k[..., : p.shape[2]] if p.latent else as_float64(self.cache.v)

    def check(self, attend, expect, q: torch.Tensor, *where, plan, **more) -> None:
        """``attend`` of the backend against ``expect`` of the reference, outputs poisoned beforehand."""
        p, cache = self.problem, self.cache
        expected = expect(q.double(), *self.exact, *where, wide(self.options))
        shape = (*expected.shape[:2], cache.v.shape[2])  # latent rows of int4 give more than V
        poisoned = torch.full(shape, math.nan, dtype=p.dtype, device=p.device)
        for out in (poisoned, None) if self.every_form else (poisoned,):
            got = attend(q, cache.k, cache.v, *where, self.options, out=out, plan=plan, **more)
            assert out is None or got is out
            got = got[..., : p.shape[2]].double()
            torch.testing.assert_close(got, expected, atol=self.tolerance, rtol=self.tolerance)


def check_attention(
    backend: AttentionBackend, p: Problem, tolerance: float, kind: str = "auto", planned=True, every_form=True
) -> None:
    """A step of decode and one of prefill against float64 over the same cache."""
    comparison = Comparison(p, tolerance, kind, every_form)
    _compare_decode(backend, comparison, planned)
    _compare_prefill(backend, comparison, planned)


def check_decode(backend: AttentionBackend, p: Problem, tolerance: float, kind: str = "auto", every_form=True) -> None:
    """A step of decode alone."""
    _compare_decode(backend, Comparison(p, tolerance, kind, every_form), True)


def _compare_decode(backend: AttentionBackend, comparison: Comparison, planned: bool) -> None:
    p, cache = comparison.problem, comparison.cache
    q, where = p.random(len(p.lens), p.shape[0] * p.kv_heads, p.shape[1]), (cache.page_starts, comparison.lens)
    where = (*where, cache.page_size)
    plan = backend.plan_decode(*where, max_tokens=max(p.lens)) if planned else None
    comparison.check(backend.decode_attention, get_backend("torch").decode_attention, q, *where, plan=plan)


def _compare_prefill(backend: AttentionBackend, comparison: Comparison, planned: bool) -> None:
    p, cache, expect = comparison.problem, comparison.cache, get_backend("torch").prefill_attention
    # As the engine has it: heads first in memory, so neither tokens nor heads are contiguous rows.
    q = p.random(p.shape[0] * p.kv_heads, sum(p.new), p.shape[1]).transpose(0, 1)
    starts = torch.tensor([0, *itertools.accumulate(p.new)], device=p.device, dtype=p.index_dtype)
    batch = PrefillBatch(cache.page_starts, starts, comparison.lens, cache.page_size)
    plan = backend.plan_prefill(batch, max_queries=max(p.new), max_tokens=max(p.lens)) if planned else None
    comparison.check(backend.prefill_attention, expect, q, batch, plan=plan)
    if comparison.every_form:
        slots = torch.cat([s[len(s) - n :] for s, n in zip(cache.slots, p.new, strict=True)])
        lost = 0.0 if comparison.kind == "auto" else 1.0
        new_kv = tuple((x[slots] + lost).to(p.dtype) for x in comparison.exact)
        comparison.check(backend.prefill_attention, expect, q, batch, plan=plan, new_kv=new_kv)


def filled(kind: str, rows: torch.Tensor, slots: int | None = None, scale: float | None = None) -> KVCache:
    """A cache of the format called ``kind`` whose first slots hold ``rows [n, Hkv, D]``."""
    slots = slots or len(rows)
    if kind == "auto":
        cache = torch.full((slots, *rows.shape[1:]), math.nan, dtype=rows.dtype, device=rows.device)
        cache[: len(rows)] = rows
        return cache
    kv_format = KV_FORMATS[kind]
    scale = scale or 2 * float(rows.nan_to_num().abs().max()) / FP8_MAX[kv_format] if kv_format in FP8_MAX else None
    cache = QuantizedKV.zeros(kv_format, slots, *rows.shape[1:], rows.device, scale)
    cache.store(torch.arange(len(rows), device=rows.device), rows)
    return cache


def attend_once(
    backend: AttentionBackend, q: torch.Tensor, k: KVCache, v: KVCache, length: int, options: AttentionOptions = PLAIN
) -> torch.Tensor:
    """Decode of one sequence whose tokens are the first slots of the cache."""
    where = torch.zeros(1, 1, dtype=torch.int64, device=q.device), torch.tensor([length], device=q.device)
    return backend.decode_attention(q, k, v, *where, k.shape[0], options)


def attend_both(
    backend: AttentionBackend, q: torch.Tensor, k: KVCache, v: KVCache, table: list[int], length: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode of one sequence, and prefill of the same token."""
    starts, lens = torch.tensor([table], device=q.device), torch.tensor([length], device=q.device)
    one = torch.tensor([0, 1], device=q.device)
    decoded = backend.decode_attention(q, k, v, starts, lens, page_size, PLAIN)
    batch = PrefillBatch(starts, one, lens, page_size)
    return decoded, backend.prefill_attention(q, k, v, batch, PLAIN)


def check_live_nan_is_not_hidden(backend: AttentionBackend, kind: str, device: str = "cpu") -> None:
    """Unused slots must not leak, but a NaN that the model computed has to stay visible: to its own KV head."""
    kv, q = torch.randn(8, 2, 64, device=device), torch.randn(1, 4, 64, device=device)
    poisoned = kv.clone()
    poisoned[5, 0, 3] = math.nan
    for rows in ((poisoned, kv), (kv, poisoned)):
        out = attend_once(backend, q, *(filled(kind, x) for x in rows), 8)
        assert out[0, :2].isnan().any(-1).all() and not out[0, 2:].isnan().any()


def check_beyond_two_gibibytes(
    backend: AttentionBackend, kind: str, dtype: torch.dtype, tolerance: float, device: str = "cpu", value_bytes=1
) -> None:
    """Overflow of slot x stride at 2**31, for real; the memory is reserved, and few pages of it are touched."""
    dim = 64
    width = dim // 2 if kind.startswith("int4") else dim
    slots = (1 << 31) // (width * value_bytes) + 1000
    if kind == "auto":
        cache = torch.empty(slots, 1, dim, dtype=dtype, device=device)
    else:
        code = torch.int8 if kind.startswith("int8") else torch.uint8
        codes = torch.empty(slots, 1, width, dtype=code, device=device)
        cache = QuantizedKV(KV_FORMATS[kind], codes, torch.empty(slots, 1, device=device), 1.0, dim)
    where = torch.arange(slots - 40, slots, device=device)
    rows, q = (torch.randn(n, heads, dim, device=device).to(dtype) for n, heads in ((40, 1), (1, 2)))
    backend.write_kv(rows, rows, cache, cache, where)
    held = (cache.load(where) if isinstance(cache, QuantizedKV) else cache[where]).double()[:, 0]
    assert (held - rows[:, 0]).abs().max() < rows.abs().max() / 10
    expected = torch.softmax(PLAIN.scale * q[0].double() @ held.T, -1) @ held
    for page_size in (40, 64):  # a slot for each token, and one for a whole tile
        for got in attend_both(backend, q, cache, cache, [slots - 40], 40, page_size):
            torch.testing.assert_close(got[0].double(), expected, atol=tolerance, rtol=tolerance)
