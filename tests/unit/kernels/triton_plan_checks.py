"""The work list of decode: the kernel that makes it, and decode by it. Run like triton_checks.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from decode_plan_model import expected_list
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import KINDS, Problem, check_decode
from triton_cases import DEVICE, TOLERANCE, backend_on, check
from triton_checks import DEEP, QUIET

import kvbench_kernels.triton_launch
from kvbench_kernels.api import AttentionOptions
from kvbench_kernels.launch import PROGRAMS_PER_SM
from kvbench_kernels.triton_common import add_parts
from kvbench_kernels.triton_decode import decode_kernel
from kvbench_kernels.triton_plan import PrefillPieces, make_work

LN2 = math.log(2)
BASE = Problem(lens=(1,), new=(0,), shape=(2, 16, 16), kv_heads=2, page_size=64, device=DEVICE)
LENGTHS = st.one_of(st.sampled_from([0, 1, 64, 255, 256, 257, 512, 513]), st.integers(0, 3000), st.integers(0, 70_000))


def check_list(lens: Sequence[int], window: int | None, kv_heads: int, sms: int, bound: int | None = None) -> int:
    """Compare the table with what NumPy makes of the lengths; the number of items."""
    work = make_work(torch.tensor(lens, device=DEVICE), bound or max(lens), window, kv_heads, PROGRAMS_PER_SM * sms)
    if work is None:
        assert min(bound or max(lens), window or 1 << 30) <= 256 or kv_heads > 2 * sms
        return len(lens)
    items = expected_list(lens, window, kv_heads, sms, work.most_items)
    table = [tuple(row) for row in work.table[:, :3].tolist()]
    assert work.table[1 : 1 + len(items), 3].tolist() == [lens[b] for b, _, _ in items]
    assert table[0][0] == len(items)
    assert table[1 : 1 + len(items)] == items
    return len(items)


@pytest.mark.full
@given(
    lens=st.lists(LENGTHS, min_size=1, max_size=40),
    window=st.one_of(st.none(), st.integers(1, 5000)),
    kv_heads=st.sampled_from([1, 2, 8, 32]),
    sms=st.sampled_from([1, 4, 132]),
)
@settings(QUIET, max_examples=15 * DEEP)
def test_the_list_is_what_numpy_makes_of_the_lengths(lens, window, kv_heads, sms):
    check_list(lens, window, kv_heads, sms)


def test_long_sequences_are_cut_and_short_ones_are_not():
    assert check_list([512] * 40 + [32768] + [512] * 23, None, 8, 132) == 95
    assert check_list([512] * 40 + [32768] + [512] * 23, 512, 8, 132) == 64
    assert check_list([0] * 7 + [4096], None, 8, 132, bound=131_072) == 7 + 16


def skewed(name: str, lens: Sequence[int], kind: str = "auto", sms: int = 8, full: bool = False, **changes: Any):
    marks = [pytest.mark.full] * full
    return pytest.param(tuple(lens), kind, sms, changes, id=f"{name}, {kind}", marks=marks)


def every_tenth_is_long(batch: int) -> list[int]:
    return [1 + 37 * i % 50 if i % 10 else 600 + i for i in range(batch)]


WINDOWED = {"window": 600, "softcap": 9.0, "with_sinks": True}
SMALL = {"shape": (1, 16, 16), "kv_heads": 1, "page_size": 7}


@pytest.mark.parametrize(
    ("lens", "kind", "sms", "changes"),
    [
        *(skewed("one long", (1500, *range(0, 90, 10)), kind, full=kind != "fp8_e4m3") for kind in KINDS),
        *(skewed("windowed", (3, 700, 0, 300, 1, 900), kind, **WINDOWED) for kind in ("auto", KINDS[-1])),
        skewed("alone", (1500,), with_sinks=True),
        *(skewed(f"{n}", every_tenth_is_long(n), sms=6, full=True, **SMALL) for n in (1, 17, 40)),
    ],
)
def test_skewed_batches_agree_with_float64(lens, kind, sms, changes):
    """Parts that nobody wrote are NaN: none is read."""
    p = replace(BASE, lens=lens, new=(0,) * len(lens), **changes)
    check_decode(backend_on(sms, hardware=True), p, TOLERANCE[p.dtype], kind, every_form=False)


@triton.jit
def add_kernel(
    parts_ptr, lse_ptr, sinks_ptr, out_ptr, pieces, ROWS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Add the parts of one token's heads, 32 at a time."""
    heads = tl.arange(0, ROWS)
    add_parts(
        pieces, heads, heads.to(tl.int64), heads < HEADS, heads, sinks_ptr, out_ptr, parts_ptr, lse_ptr,
        ROWS, 32, HEADS, DIM, DIM, HAS_SINKS,
    )  # fmt: skip


@pytest.mark.parametrize("with_sinks", [False, True])
def test_more_parts_than_are_added_up_at_a_time(with_sinks):
    """Some parts are empty, and the largest are among the last."""
    heads, rows, dim, parts = 13, 16, 16, 70
    generator = torch.Generator().manual_seed(0)
    values, lse = (torch.randn(parts, heads, *size, generator=generator) for size in ((dim,), ()))
    lse = 20 * lse.sort(0).values
    lse[::7] = -torch.inf
    sinks = torch.randn(heads, generator=generator) + 60 if with_sinks else None
    scores = lse * LN2 if sinks is None else torch.cat([lse * LN2, sinks[None]])
    expected = torch.einsum("phd,ph->hd", values.double(), scores.double().softmax(0)[:parts])
    on = [x.to(DEVICE) for x in (values, lse, lse if sinks is None else sinks)]
    out = torch.full((1, heads, dim), float("nan"), device=DEVICE)
    add_kernel[(1,)](*on, out, parts, rows, heads, dim, with_sinks)
    torch.testing.assert_close(out[0].cpu().double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("sms", "window", "pieces"),
    [  # 3 programs of 2 a multiprocessor; with a window a block sees at most 531 keys
        (9, None, (4, 1, 3)),
        (40, None, (6, 1, 5)),
        (40, 500, (2, 1, 2)),
    ],
)
@pytest.mark.parametrize("most", [1300, 40_000])
def test_blocks_of_prefill_are_cut_as_many_times_as_their_step_needs(sms, window, pieces, most):
    """Whatever the launch has room for, as in a graph; a block that is in one piece is written at once."""
    p = Problem((1300, 64, 0, 900), (2, 5, 7, 2), kv_heads=1, shape=(2, 16, 16), window=window, with_sinks=True,
                device=DEVICE)  # fmt: skip
    backend = backend_on(sms)
    backend.plan_prefill = lambda batch, max_queries, max_tokens: PrefillPieces(
        batch.query_starts, batch.seq_lens, max_queries, most
    )
    check(p, "auto", backend)
    first, second, last = pieces
    assert backend._splits.taken[2].tolist() == [first] * 2 + [second] * 5 + [1] * 7 + [last] * 2


class WithoutTheLastItems:
    """The decode kernel, of which the first ``programs`` run."""

    def __init__(self, programs: int) -> None:
        self.programs = programs

    def __getitem__(self, grid: tuple[int, ...]):
        return decode_kernel[(self.programs,)]


def test_each_sequence_and_head_counts_for_itself_and_leaves_a_zero(monkeypatch):
    """On a GPU sequences run side by side: a counter that two share would be full too early."""
    lens, heads = torch.tensor([3000, 2000, 5, 2500], device=DEVICE), 2
    backend, generator = backend_on(8), torch.Generator().manual_seed(0)
    q, kv = (torch.randn(n, heads, 16, generator=generator).to(DEVICE) for n in (4, 12_000))
    where = torch.arange(4, device=DEVICE)[:, None] * 3000, lens, 3000
    plan = backend.plan_decode(*where, max_tokens=3000)
    first, second = (backend.decode_attention(q, kv, kv, *where, AttentionOptions(0.25), plan=plan) for _ in "ab")
    assert torch.equal(first, second)
    work = plan.work(None, heads, PROGRAMS_PER_SM * 8)
    assert not work.arrived.any()
    items = work.table[1 : 1 + int(work.table[0, 0]), :3].tolist()
    last, _, pieces = items[-2]  # behind it comes the sequence of 5 tokens
    assert pieces > 1 and items[-1] == [2, 0, 1]
    monkeypatch.setattr(kvbench_kernels.triton_launch, "decode_kernel", WithoutTheLastItems((len(items) - 2) * heads))
    backend.decode_attention(q, kv, kv, *where, AttentionOptions(0.25), plan=plan)
    assert work.arrived.tolist() == [[pieces - 1 if b == last else 0] * heads for b in range(4)]
