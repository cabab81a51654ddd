"""Bugs that other engines' kernels shipped, one test each, and what our own design could get wrong.

Run like triton_checks.py: in a process of its own, by test_kernels_triton.py.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    KINDS,
    PLAIN,
    attend_both,
    attend_once,
    check_beyond_two_gibibytes,
    check_live_nan_is_not_hidden,
    filled,
)
from triton_cases import DEVICE, INTERPRETED, backend_on

import kvbench_kernels.triton_launch
import kvbench_kernels.triton_plan
from kvbench_kernels import get_backend
from kvbench_kernels.api import AttentionOptions, PrefillBatch
from kvbench_kernels.triton_launch import Attention, Chip, Splits
from kvbench_kernels.triton_plan import DecodePlan, PrefillPieces
from kvbench_kernels.tune.problems import as_float64


def truth(q: torch.Tensor, k, v, length: int, options: AttentionOptions = PLAIN) -> torch.Tensor:
    """``attend_once`` by the reference in float64 over the same codes."""
    return attend_once(get_backend("torch"), q.double(), as_float64(k), as_float64(v), length, options)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["auto", "int8_per_token_head", "int4_per_token_head"])
def test_a_page_beyond_two_gibibytes(kind):
    """int32 overflow of page x stride (vllm#47671, sglang#20389)."""
    check_beyond_two_gibibytes(backend_on(4), kind, torch.float16, 3e-3, DEVICE)


class RecordedLaunches:
    """Stands in for a kernel and keeps the grids it is launched with."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        self.grids.append(grid)
        return lambda *args, **kwargs: None


@pytest.fixture
def recorded(monkeypatch) -> RecordedLaunches:
    """All launches of attention but those of plans; ``plans`` has these."""
    launches = RecordedLaunches()
    launches.plans = RecordedLaunches()
    for name in ("decode_kernel", "prefill_kernel", "reduce_kernel"):
        monkeypatch.setattr(kvbench_kernels.triton_launch, name, launches)
    monkeypatch.setattr(kvbench_kernels.triton_plan, "plan_kernel", launches.plans)
    return launches


def test_a_step_plans_once_for_each_window_and_launches_no_more(recorded):
    """Three layers of each of two windows, and of one that is too short for a sequence to be cut."""
    q, cache, lens = torch.empty(3, 4, 16), torch.empty(1024, 2, 16), torch.tensor([900, 5, 300])
    where = (torch.zeros(3, 15, dtype=torch.int64), lens, 64)
    backend = backend_on(4)
    plan = backend.plan_decode(*where, max_tokens=900)
    for window in (None, 400, 100) * 3:
        backend.decode_attention(q, cache, cache, *where, AttentionOptions(0.25, window), plan=plan)
    assert len(recorded.plans.grids) == 2 and len(recorded.grids) == 9


@pytest.mark.parametrize(
    ("chunks", "queries", "context", "launches"),
    # Query length 2-8 fell off the split path (vllm#51995): one sequence ran on as many programs as KV heads.
    [*((1, queries, 32768, 2) for queries in (1, 2, 5, 8)), (4, 2048, 4096, 1)],
)
def test_keys_are_split_where_the_queries_do_not_fill_the_gpu(chunks, queries, context, launches, recorded):
    """With 32 / 8 heads, by the first launch; the second is the reduction. Blocks that hold nothing are not counted."""
    q, cache = torch.empty(chunks * queries, 32, 128), torch.empty(1, 8, 128)
    table = torch.empty(1, context // 16, dtype=torch.int64)
    attention = Attention(q, cache, cache, table, 16, PLAIN, torch.empty_like(q), Chip(90, 132))
    lens = torch.full((chunks,), context)
    attention.prefill(PrefillPieces(torch.arange(chunks + 1) * queries, lens, queries, context), Splits())
    _, splits = recorded.grids[0]
    assert len(recorded.grids) == launches and (8 * splits >= 132 if launches == 2 else splits == 1)


def test_a_batch_may_be_larger_than_a_grid_dimension(recorded):
    """Dimensions y and z of a grid end at 65,535."""
    batch = 70_000
    q, cache = torch.empty(batch, 1, 16), torch.empty(1, 1, 16)
    args = (q, cache, cache, torch.empty(batch, 1, dtype=torch.int64), 16, PLAIN, torch.empty_like(q), Chip(90, 132))
    lens = torch.empty(batch, dtype=torch.int64)
    for max_tokens in (16, 4096):
        Attention(*args).decode(lens, DecodePlan(lens, max_tokens), Splits())
    Attention(*args).prefill(PrefillPieces(torch.arange(batch + 1), torch.ones(batch), 1, 16), Splits())
    decode, of_pieces, prefill = recorded.grids
    for grid in (decode, of_pieces, prefill):
        assert grid[0] >= batch and max(grid[1:], default=1) <= 65535


@pytest.mark.parametrize(("kind", "hardware"), [("fp8_e4m3", False), ("fp8_e4m3", True), ("fp8_e5m2", False)])
def test_fp8_scales_count(kind, hardware):
    """FP8 scales silently 1.0 (sglang#18882): K's and V's are used, each for itself, in decode and prefill."""
    rows = [torch.randn(50, 2, 32, device=DEVICE) for _ in "kv"]
    backend, q = backend_on(4, hardware), torch.randn(1, 4, 32, device=DEVICE)
    k, v = filled(kind, rows[0], scale=0.03), filled(kind, rows[1], scale=0.007)
    expected = truth(q, k, v, 50)
    for side in ("k", "v"):
        other = {"k": k, "v": v} | {side: replace({"k": k, "v": v}[side], scale=1.0)}
        assert (truth(q, other["k"], other["v"], 50) - expected).abs().max() > 0.1  # else this would prove nothing
    for got in attend_both(backend, q, k, v, [0], 50, 50):
        torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2", "int8_per_token_head"])
def test_a_needle_in_a_long_context(kind, dtype):
    """Two-level accumulation: half of the weight on one token, half on 2,047 whose values must not be lost."""
    length, dim = 2048, 64
    q = torch.zeros(1, 1, dim, dtype=dtype, device=DEVICE)
    q[0, 0, 0] = 7.625  # exp(7.625) = 2048
    keys = torch.zeros(length, 1, dim, device=DEVICE)
    keys[777, 0, 0] = 1.0
    values = torch.ones(length, 1, dim, device=DEVICE)
    values[777] = 3.0
    k, v = filled(kind, keys, scale=1.0), filled(kind, values, scale=1.0)
    got = attend_once(backend_on(1, hardware=True), q, k, v, length, AttentionOptions(scale=1.0)).double()
    assert (truth(q, k, v, length, AttentionOptions(scale=1.0)) - 2.0).abs().max() < 0.1
    torch.testing.assert_close(got, truth(q, k, v, length, AttentionOptions(scale=1.0)), atol=8e-3, rtol=4e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_of_a_live_token_is_not_hidden(kind):
    # The interpreter's own conversion makes 480 of e4m3's NaN: the chips' is checked on a GPU.
    for hardware in (False,) if INTERPRETED else (False, True):
        check_live_nan_is_not_hidden(backend_on(4, hardware), kind, DEVICE)


@pytest.mark.parametrize("kind", ["int8_per_token_head", "int4_per_token_head"])
def test_small_and_large_values_survive_float16_weights(kind):
    """A weight times a scale may be under float16's smallest number, or over its largest."""
    q = torch.randn(1, 2, 32, dtype=torch.float16, device=DEVICE)
    k = filled(kind, torch.randn(80, 1, 32, device=DEVICE))
    for size in (1e-4, 2e4):
        v = filled(kind, size * torch.randn(80, 1, 32, device=DEVICE))
        got, expected = attend_once(backend_on(4), q, k, v, 80).double(), truth(q, k, v, 80)
        assert (got - expected).abs().max() < 2e-3 * expected.abs().max()


def test_a_plan_with_a_larger_bound_changes_nothing():
    """What a captured graph does: the bound of the largest step serves every step."""
    backend = backend_on(4)
    q, kv = torch.randn(2, 4, 32, device=DEVICE), torch.randn(40, 2, 32, device=DEVICE)
    args = torch.tensor([[0], [20]], device=DEVICE), torch.tensor([20, 3], device=DEVICE), 20
    exactly = backend.decode_attention(q, kv, kv, *args, PLAIN, plan=backend.plan_decode(*args, max_tokens=20))
    for plan in (backend.plan_decode(*args, max_tokens=4096), None):
        bounded = backend.decode_attention(q, kv, kv, *args, PLAIN, plan=plan)
        torch.testing.assert_close(exactly, bounded, atol=1e-6, rtol=1e-6)


def test_plans_read_no_tensor():
    """A meta tensor has no values: reading one of a CUDA tensor would wait for the GPU."""
    backend, nothing = backend_on(4), torch.empty(3, 4, dtype=torch.int64, device="meta")
    assert backend.plan_decode(nothing, nothing[:, 0], 16, max_tokens=50).max_tokens == 50
    batch = PrefillBatch(nothing, nothing[0], nothing[:, 0], 16)
    assert backend.plan_prefill(batch, max_queries=4, max_tokens=50).max_queries == 4


@pytest.mark.parametrize("captured", [True, False])
def test_split_buffers_are_shared_and_kept_for_graphs(captured, monkeypatch):
    monkeypatch.setattr(kvbench_kernels.triton_launch, "is_capturing", lambda device: captured)
    buffers, device = Splits(), torch.device(DEVICE)
    parts, lse, numbers = buffers.take(12, 16, device, 5)
    assert parts.shape == (12, 16) and lse.shape == (12,) and parts.dtype == lse.dtype == torch.float32
    assert numbers.shape == (5,) and numbers.dtype == torch.int32
    assert parts.data_ptr() + parts.nbytes <= lse.data_ptr() and lse.data_ptr() + lse.nbytes <= numbers.data_ptr()
    parts.fill_(7.0)
    assert buffers.take(6, 16, device)[0].data_ptr() == parts.data_ptr()  # the next layer, a smaller step
    memory = weakref.ref(parts._base)
    del parts, lse, numbers
    buffers.take(120, 16, device)
    assert (memory() is not None) == captured  # a captured graph still writes there


def test_caches_with_gaps_are_refused():
    gaps, q = torch.randn(8, 2, 128, device=DEVICE)[:, :, :64], torch.randn(1, 2, 64, device=DEVICE)
    with pytest.raises(ValueError, match=r"cache \(8, 2, 64\) with strides \(256, 128, 1\) must be dense"):
        attend_once(backend_on(4), q, gaps, gaps, 3)
