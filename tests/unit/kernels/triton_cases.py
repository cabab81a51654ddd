"""What the checks of the Triton kernels share: a backend on any chip, and one problem through every kernel."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import triton.language as tl
from kernel_cases import Problem, build_cache, draw_options, quantise
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kernels import get_backend
from kernels.api import AttentionOptions, KVCache
from kernels.kv_formats import KV_FORMATS
from kernels.triton_backend import TritonBackend, read_chip
from kernels.triton_launch import Chip, Splits
from kernels.tune.problems import HostileKV, as_float64, wide

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# Half precision: of a weight, then of the result; the values are of order 1.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def interpreted_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter keeps bfloat16 as bits, and its dot multiplies them as integers: hand it floats."""
    right = InterpreterBuilder.create_dot

    def floats(x: TensorHandle) -> TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *args):
        return right(self, floats(a), floats(b), *args)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


class PoisonedSplits(Splits):
    """Buffers that hold NaN whenever they are taken."""

    def take(self, *args) -> tuple[torch.Tensor, torch.Tensor]:
        taken = super().take(*args)
        for tensor in taken:
            tensor.fill_(float("nan"))
        return taken


def backend_on(num_sms: int, hardware: bool = False) -> TritonBackend:
    """A backend that takes its device for one with ``num_sms``, with or without conversions of fp8."""
    arch = read_chip(torch.device(DEVICE)).arch if not INTERPRETED else 90 if hardware else 80
    backend = TritonBackend(lambda device: Chip(arch, num_sms))
    backend._splits = PoisonedSplits()
    return backend


def stored(p: Problem, kind: str) -> tuple[HostileKV, KVCache, KVCache]:
    """The problem's cache, and its K and V in the format called ``kind``."""
    cache = build_cache(p)
    k, v = (cache.k, cache.v) if kind == "auto" else quantise(cache, KV_FORMATS[kind])
    return cache, k, v


def check_attention(p: Problem, kind: str, backend: TritonBackend) -> None:
    """A step of decode and a step of prefill against float64 over the same codes, outputs poisoned beforehand."""
    cache, k, v = stored(p, kind)
    options, heads = draw_options(p), p.shape[0] * p.kv_heads
    lens = torch.tensor(p.lens, device=p.device, dtype=p.index_dtype)
    starts = torch.tensor([0, *torch.tensor(p.new).cumsum(0).tolist()], device=p.device, dtype=p.index_dtype)
    place = (cache.page_starts, lens, cache.page_size)
    truth, double = get_backend("torch"), (as_float64(k), as_float64(v))

    q = p.random(len(p.lens), heads, p.shape[1])
    plan = backend.plan_decode(*place, max_tokens=max(p.lens))
    got = backend.decode_attention(q, k, v, *place, options, out=poison(q, p), plan=plan)
    compare(got, truth.decode_attention(q.double(), *double, *place, wide(options)), p)

    # As the engine has it: heads first in memory, so neither tokens nor heads are contiguous rows.
    q = p.random(heads, sum(p.new), p.shape[1]).transpose(0, 1)
    place = (cache.page_starts, starts, lens, cache.page_size)
    plan = backend.plan_prefill(*place, max_queries=max(p.new), max_tokens=max(p.lens))
    got = backend.prefill_attention(q, k, v, *place, options, out=poison(q, p), plan=plan)
    compare(got, truth.prefill_attention(q.double(), *double, *place, wide(options)), p)


def poison(q: torch.Tensor, p: Problem) -> torch.Tensor:
    """An output where whatever is not written is NaN."""
    return torch.full((*q.shape[:2], p.shape[2]), float("nan"), dtype=p.dtype, device=p.device)


def compare(got: torch.Tensor, expected: torch.Tensor, p: Problem) -> None:
    tolerance = TOLERANCE[p.dtype]
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def attend_once(
    backend: TritonBackend, q: torch.Tensor, k: KVCache, v: KVCache, length: int, options: AttentionOptions
) -> torch.Tensor:
    """Decode of one sequence whose tokens are the first slots of the cache."""
    where = torch.zeros(1, 1, dtype=torch.int64, device=q.device), torch.tensor([length], device=q.device)
    return backend.decode_attention(q, k, v, *where, k.shape[0], options)
