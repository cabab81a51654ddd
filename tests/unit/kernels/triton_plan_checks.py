"""The work list of decode: the kernel that makes it, and decode by it. Run like triton_checks.py."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_plan_model import expected_list
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import KINDS, PLAIN, Problem, build_cache, check_decode
from triton_cases import DEVICE, TOLERANCE, backend_on
from triton_checks import DEEP, QUIET

import kernels.triton_launch
import kernels.triton_plan
from kernels import get_backend
from kernels.api import AttentionOptions
from kernels.launch import PROGRAMS_PER_SM
from kernels.triton_common import reduce_constants, reduce_kernel
from kernels.triton_plan import make_work
from kernels.tune.problems import as_float64

LN2 = math.log(2)
BASE = Problem(lens=(1,), new=(0,), shape=(2, 16, 16), kv_heads=2, page_size=64, device=DEVICE)
LENGTHS = st.one_of(st.sampled_from([0, 1, 64, 255, 256, 257, 512, 513]), st.integers(0, 3000), st.integers(0, 70_000))


def check_list(lens: Sequence[int], window: int | None, kv_heads: int, sms: int, bound: int | None = None) -> int:
    """Compare the table with what NumPy makes of the lengths; the number of items."""
    work = make_work(torch.tensor(lens, device=DEVICE), bound or max(lens), window, kv_heads, PROGRAMS_PER_SM * sms)
    if work is None:
        assert min(bound or max(lens), window or 1 << 30) <= 256 or kv_heads > 2 * sms
        return len(lens)
    items, cut = expected_list(lens, window, kv_heads, sms, work.most_items)
    table = [tuple(row) for row in work.table[:, :3].tolist()]
    assert work.table[1 : 1 + len(items), 3].tolist() == [lens[b] for b, _, _ in items]
    assert table[0][:2] == (len(items), len(cut))
    assert table[1 : 1 + len(items)] == items
    assert table[1 + work.most_items :][: len(cut)] == cut
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
        *(skewed(f"{n}", every_tenth_is_long(n), sms=6, full=n != 17, **SMALL) for n in (1, 17, 40)),
    ],
)
def test_skewed_batches_agree_with_float64(lens, kind, sms, changes):
    """Parts that nobody wrote are NaN: none is read."""
    p = replace(BASE, lens=lens, new=(0,) * len(lens), **changes)
    check_decode(backend_on(sms, hardware=True), p, TOLERANCE[p.dtype], kind, every_form=False)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_reduction_of_more_parts_than_it_takes_at_a_time(with_sinks):
    """Some parts are empty, and the largest are among the last."""
    heads, dim, parts = 3, 16, 70
    generator = torch.Generator().manual_seed(0)
    values, lse = (torch.randn(parts, heads, *size, generator=generator) for size in ((dim,), ()))
    lse = 20 * lse.sort(0).values
    lse[::7] = -torch.inf
    sinks = torch.randn(heads, generator=generator) + 60 if with_sinks else None
    scores = lse * LN2 if sinks is None else torch.cat([lse * LN2, sinks[None]])
    expected = torch.einsum("phd,ph->hd", values.double(), scores.double().softmax(0)[:parts])
    constants = reduce_constants(heads, dim, listed=False, sinks=with_sinks)
    assert constants["BLOCK_P"] < parts
    on = [x.to(DEVICE) for x in (values, lse, lse if sinks is None else sinks)]
    out = torch.full((1, heads, dim), float("nan"), device=DEVICE)
    reduce_kernel[(-(-heads // constants["BLOCK_H"]),)](*on, out, on[1], parts, **constants)
    torch.testing.assert_close(out[0].cpu().double(), expected, atol=1e-5, rtol=1e-5)


class Launches:
    """Stands in front of the kernels of a decode step: runs them, and keeps what was launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.names: list[str] = []
        self.calls: list[Callable[[], None]] = []
        self.most_programs: int | None = None
        for module, name in (
            (kernels.triton_plan, "plan_kernel"),
            (kernels.triton_launch, "decode_kernel"),
            (kernels.triton_launch, "reduce_kernel"),
        ):
            monkeypatch.setattr(module, name, self._front(name, getattr(module, name)))

    def _front(self, name: str, kernel: Any) -> Any:
        launches = self

        class Front:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                def launch(*args: Any, **kwargs: Any) -> None:
                    launches.names.append(name)
                    first = grid if launches.most_programs is None else (launches.most_programs,)
                    launches.calls.append(lambda: kernel[first](*args, **kwargs))
                    launches.calls[-1]()

                return launch

        return Front()


def test_a_step_plans_once_for_each_window_and_launches_no_more(monkeypatch):
    """Three layers of each of two windows, and of one that is too short for a sequence to be cut."""
    p = replace(BASE, lens=(900, 5, 300), new=(0, 0, 0))
    backend, cache, launches = backend_on(4), build_cache(p), Launches(monkeypatch)
    launches.most_programs = 1  # the launches count, not what they do
    lens, q = torch.tensor(p.lens, device=DEVICE), p.random(3, 4, 16)
    plan = backend.plan_decode(cache.page_starts, lens, cache.page_size, max_tokens=max(p.lens))
    for _, window in itertools.product(range(3), (None, 400, 100)):
        options = AttentionOptions(0.25, window)
        backend.decode_attention(q, cache.k, cache.v, cache.page_starts, lens, cache.page_size, options, plan=plan)
    counts = {name: launches.names.count(name) for name in set(launches.names)}
    assert counts == {"plan_kernel": 2, "decode_kernel": 9, "reduce_kernel": 6}


@pytest.mark.parametrize("bound", [250, 900])
def test_the_heads_of_a_sequence_run_side_by_side(monkeypatch, bound):
    """The first programs are all KV heads of one item, with a list and without: what they read lies together."""
    p = replace(BASE, lens=(100, 250, 30), new=(0, 0, 0), kv_heads=4)
    backend, cache, launches = backend_on(1), build_cache(p), Launches(monkeypatch)
    q, out = p.random(3, 8, 16), torch.full((3, 8, 16), float("nan"), device=DEVICE)
    lens = torch.tensor(p.lens, device=DEVICE)
    launches.most_programs = p.kv_heads
    where = (cache.page_starts, lens, cache.page_size)
    plan = backend.plan_decode(*where, max_tokens=bound)
    backend.decode_attention(q, cache.k, cache.v, *where, PLAIN, out=out, plan=plan)
    expected = get_backend("torch").decode_attention(
        q.double(), as_float64(cache.k), as_float64(cache.v), *where, PLAIN
    )
    written = [b for b in range(3) if not out[b].isnan().any()]
    assert len(written) == 1 and out.isnan().any(-1).any(-1).sum() == 2
    torch.testing.assert_close(out[written].double(), expected[written], atol=2e-5, rtol=2e-5)


def test_a_captured_step_plans_anew_when_it_is_replayed(monkeypatch):
    """A replay launches the same kernels on the same tensors, and no Python runs: the lengths alone have changed.

    As engine.execution.graphs has it: captured with lengths of 0 and room for the longest; padding has length 0.
    """
    p = replace(BASE, lens=(700,) * 4, new=(0,) * 4, kv_heads=1)
    backend, cache, launches = backend_on(8), build_cache(p), Launches(monkeypatch)
    q, lens = p.random(4, 2, 16), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    where = (cache.page_starts, lens, cache.page_size)
    plan = backend.plan_decode(*where, max_tokens=700)
    layers = [
        backend.decode_attention(q, cache.k, cache.v, *where, AttentionOptions(0.25, window), plan=plan)
        for window in (None, 500)
    ]
    captured = launches.calls.copy()
    truth, exact = get_backend("torch"), (as_float64(cache.k), as_float64(cache.v))
    for values in ((700, 3, 40, 0), (1, 2, 600, 700), (7, 0, 0, 0)):
        lens.copy_(torch.tensor(values))
        for out in layers:
            out.fill_(float("nan"))
        for launch in captured:
            launch()
        for out, window in zip(layers, (None, 500), strict=True):
            expected = truth.decode_attention(q.double(), *exact, *where, AttentionOptions(0.25, window))
            torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)
