"""Every backend of this machine against float64, over drawn problems and the cases that bit others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernel_cases import SHAPES, Problem, check_decode, check_prefill

from kernels import get_backend
from kernels.api import AttentionOptions

TOLERANCE = 1e-5
QUIET = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.fixture(autouse=True)
def one_thread():
    """Hundreds of tiny calls wait for each other's threads on a busy machine; tests of threads set more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@st.composite
def problems(draw) -> Problem:
    lens = draw(st.lists(st.integers(0, 150), min_size=1, max_size=6))
    new = [draw(st.one_of(st.just(n), st.integers(0, min(n, 40)))) for n in lens]
    return Problem(
        lens=tuple(lens),
        new=tuple(new),
        page_size=draw(st.integers(1, 64)),
        contiguous=draw(st.booleans()),
        shape=draw(st.sampled_from(SHAPES)),
        kv_heads=draw(st.sampled_from([1, 2, 3])),
        window=draw(st.one_of(st.none(), st.integers(1, 160))),
        softcap=draw(st.one_of(st.none(), st.sampled_from([1.0, 30.0]))),
        with_sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
    )


@pytest.mark.parametrize("backend", ["torch", "numba"])
@given(problem=problems(), planned=st.booleans())
@example(problem=Problem(lens=(1,), new=(1,), page_size=1), planned=False)
@example(problem=Problem(lens=(0, 0), new=(0, 0)), planned=True)
@example(problem=Problem(lens=(150,), new=(8,), page_size=7, window=150), planned=True)
@QUIET
def test_decode_and_prefill_agree_with_float64(backend, problem, planned):
    check_decode(backend, problem, TOLERANCE, planned)
    if sum(problem.new):
        check_prefill(backend, problem, TOLERANCE, planned)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_prefill_over_threads(threads):
    """More threads than blocks of queries, sequences without queries between others, chunks after long context."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        p = Problem(lens=(130, 0, 300, 64, 1), new=(130, 0, 70, 1, 1), page_size=7, shape=(2, 36, 80), with_sinks=True)
        for problem in (p, replace(p, window=65, softcap=3.0), replace(p, contiguous=True)):
            check_prefill("numba", problem, TOLERANCE, planned=True)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_decode_split_over_threads(threads):
    """One sequence over all threads, pieces that meet mid-page, shares that hold no token."""
    torch.set_num_threads(threads)  # the fixture puts it back
    for lens in [(1,), (2,), (1000,), (3, 700, 1, 0, 64), (1,) * 17]:
        for sinks in (False, True):
            p = Problem(lens=lens, new=lens, page_size=5, window=None, with_sinks=sinks)
            check_decode("numba", p, TOLERANCE)


def test_large_scores_neither_overflow_nor_lose_small_weights():
    p = Problem(lens=(90, 33), new=(90, 33), page_size=16, seed=3)
    big = {name: getattr(p, name) for name in ("lens", "new", "page_size", "seed")}

    class Loud(Problem):
        def random(self, *shape):
            return 5 * super().random(*shape)

    check_decode("numba", Loud(**big), 1e-3)
    check_prefill("numba", Loud(**big), 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_backend_serves_half_precision(dtype):
    p = Problem(lens=(70, 5, 0), new=(20, 5, 0), shape=(2, 256, 256), dtype=dtype, with_sinks=True)
    check_decode("torch", p, 2e-2)
    check_prefill("torch", p, 2e-2)


def test_what_numba_cannot_compute_is_refused_and_not_read_as_something_else():
    backend, options = get_backend("numba"), AttentionOptions(0.1)
    q, cache = torch.randn(1, 2, 64), torch.randn(8, 2, 64)
    one = torch.tensor([[0]]), torch.tensor([3]), 8
    with pytest.raises(ValueError, match="sequence 0 has 5 new tokens but a length of 3"):
        backend.prefill_attention(
            torch.randn(5, 2, 64), cache, cache, one[0], torch.tensor([0, 5]), torch.tensor([3]), 8, options
        )
    with pytest.raises(ValueError, match=r"computes in torch\.float32, not with .*k_cache torch\.bfloat16"):
        backend.decode_attention(q, cache.bfloat16(), cache.bfloat16(), *one, options)
    gaps = torch.randn(8, 2, 128)[:, :, :64]
    with pytest.raises(ValueError, match="must be dense"):
        backend.decode_attention(q, gaps, gaps, *one, options)


def test_prefill_of_neighbouring_pages_in_another_order():
    """First and last slot look like one run of slots, but the pages between are swapped."""
    torch.manual_seed(0)
    q, k, v = torch.randn(10, 4, 64), torch.randn(16, 2, 64), torch.randn(16, 2, 64)
    args = (torch.tensor([[0, 8, 4, 12]]), torch.tensor([0, 10]), torch.tensor([16]), 4)
    expected = get_backend("torch").prefill_attention(q, k, v, *args, AttentionOptions(scale=0.1))
    result = get_backend("numba").prefill_attention(q, k, v, *args, AttentionOptions(scale=0.1))
    torch.testing.assert_close(result, expected, atol=TOLERANCE, rtol=TOLERANCE)
