"""The CPU's backends against float64, over drawn problems in every KV format and the cases that bit others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernel_cases import (
    KINDS,
    Problem,
    check_attention,
    check_beyond_two_gibibytes,
    check_live_nan_is_not_hidden,
    problems,
)

from kvbench_kernels import get_backend
from kvbench_kernels.api import AttentionOptions, PrefillBatch
from kvbench_kernels.kv_formats import KV_FORMATS
from kvbench_kernels.numba_bf16 import has_bf16

TOLERANCE = 1e-5
NUMBA, BACKENDS = get_backend("numba"), [get_backend("torch"), get_backend("numba")]
SHAPES = [(1, 16, 16), (2, 64, 64), (2, 36, 80), (8, 32, 32), (5, 80, 48)]  # each is compiled, which takes seconds
QUANTISED_SHAPES = [(2, 64, 64), (3, 7, 33)]  # compiled for each format; odd dims leave int4 half a byte


def quiet(examples: int) -> settings:
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
    )


@pytest.fixture(autouse=True)
def one_thread():
    """Hundreds of tiny calls wait for each other's threads on a busy machine; tests of threads set more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@given(problem=problems(SHAPES), planned=st.booleans())
@example(problem=Problem(lens=(1,), new=(1,), page_size=1), planned=False)
@example(problem=Problem(lens=(0, 0), new=(0, 0)), planned=True)
@example(problem=Problem(lens=(150,), new=(8,), page_size=7, window=150), planned=True)
@quiet(35)
def test_decode_and_prefill_agree_with_float64(backend, problem, planned):
    check_attention(backend, problem, TOLERANCE, planned=planned)


@pytest.mark.parametrize("kind", KV_FORMATS)
@given(problem=problems(QUANTISED_SHAPES))
@example(problem=Problem(lens=(1,), new=(1,), page_size=1, shape=(3, 7, 33)))
@example(problem=Problem(lens=(0, 90), new=(0, 90), window=33, softcap=1.0, with_sinks=True, shape=(3, 7, 33)))
@quiet(15)
def test_quantised_attention_agrees_with_float64_over_the_same_codes(kind, problem):
    for backend in BACKENDS:
        check_attention(backend, problem, TOLERANCE, kind)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_prefill_over_threads(threads):
    """More threads than blocks of queries, sequences without queries between others, chunks after long context."""
    torch.set_num_threads(threads)  # the fixture puts it back
    p = Problem(lens=(130, 0, 300, 64, 1), new=(130, 0, 70, 1, 1), page_size=7, shape=(2, 36, 80), with_sinks=True)
    for problem in (p, replace(p, window=65, softcap=3.0), replace(p, contiguous=True)):
        check_attention(NUMBA, problem, TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_decode_split_over_threads(threads, kind):
    """One sequence over all threads, pieces that meet mid-page, shares that hold no token."""
    torch.set_num_threads(threads)
    for lens in [(1,), (2,), (1000,), (3, 700, 1, 0, 64), (1,) * 17]:
        for sinks in (False, True):
            p = Problem(lens=lens, new=(0,) * len(lens), page_size=5, with_sinks=sinks)
            check_attention(NUMBA, p, TOLERANCE, kind, planned=False)


def test_large_scores_neither_overflow_nor_lose_small_weights():
    check_attention(NUMBA, Problem(lens=(90, 33), new=(90, 33), seed=3, loudness=5), 1e-3)


@pytest.mark.parametrize("fast", [True, False])
@given(problem=problems([(2, 64, 64), (3, 32, 96)], dtypes=[torch.bfloat16]))
@example(problem=Problem(lens=(1,), new=(1,), page_size=1, dtype=torch.bfloat16))
@example(problem=Problem(lens=(0, 0), new=(0, 0), dtype=torch.bfloat16))
@example(problem=Problem(lens=(150, 64, 33), new=(140, 64, 17), page_size=7, window=65, dtype=torch.bfloat16))
@quiet(20)
def test_bfloat16_agrees_with_float64(fast, problem):
    """Off by the rounding of outputs and softmax weights, 1/256 each. Prefill computes in floats where
    the CPU does not multiply bfloat16.
    """
    if fast and not has_bf16():
        pytest.skip("no CPU that multiplies bfloat16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench_kernels.prefill_cpu.has_bf16", lambda: fast)
        check_attention(NUMBA, problem, 2e-2)


@pytest.mark.parametrize(
    "kind",
    ["auto", "int8_per_token_head", *(pytest.param(k, marks=pytest.mark.full) for k in KINDS[1:] if "int8" not in k)],
)
def test_bfloat16_models_in_every_kv_format(kind):
    torch.set_num_threads(3)
    p = Problem(lens=(90, 33, 0), new=(20, 33, 0), dtype=torch.bfloat16, with_sinks=True, window=40)
    check_attention(NUMBA, p, 2e-2, kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_backend_serves_half_precision(dtype):
    p = Problem(lens=(70, 5, 0), new=(20, 5, 0), shape=(2, 256, 256), dtype=dtype, with_sinks=True)
    check_attention(get_backend("torch"), p, 2e-2)


def test_what_numba_cannot_compute_is_refused_and_not_read_as_something_else():
    options, one = AttentionOptions(0.1), (torch.tensor([[0]]), torch.tensor([3]), 8)
    q, cache = torch.randn(1, 2, 64), torch.randn(8, 2, 64)
    batch = PrefillBatch(one[0], torch.tensor([0, 5]), *one[1:])
    with pytest.raises(ValueError, match="sequence 0 has 5 new tokens but a length of 3"):
        NUMBA.prefill_attention(torch.randn(5, 2, 64), cache, cache, batch, options)
    half, in_half = q.bfloat16(), cache.bfloat16()
    for tensors in (
        (q, in_half, in_half),
        (half, cache, cache),
        (half, in_half, cache),
        [x.half() for x in (q, cache, cache)],
    ):
        with pytest.raises(ValueError, match=r"all in float32 or all in bfloat16, not with torch\."):
            NUMBA.decode_attention(*tensors, *one, options)
    gaps = torch.randn(8, 2, 128)[:, :, :64]
    with pytest.raises(ValueError, match="must be dense"):
        NUMBA.decode_attention(q, gaps, gaps, *one, options)


def test_prefill_of_neighbouring_pages_in_another_order():
    """First and last slot look like one run of slots, but the pages between are swapped."""
    torch.manual_seed(0)
    q, k, v = torch.randn(10, 4, 64), torch.randn(16, 2, 64), torch.randn(16, 2, 64)
    batch = PrefillBatch(torch.tensor([[0, 8, 4, 12]]), torch.tensor([0, 10]), torch.tensor([16]), 4)
    options = AttentionOptions(scale=0.1)
    expected, got = (backend.prefill_attention(q, k, v, batch, options) for backend in BACKENDS)
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fp8_e5m2"])
@pytest.mark.parametrize("shape", [(16, 576, 512), (20, 39, 33), (7, 40, 32)], ids=str)
def test_latent_rows_agree_with_float64(kind, shape):
    """A row for all heads, whose first values are V; new tokens alone and after others, slots without tokens NaN."""
    torch.set_num_threads(3)
    for page_size, lens in {1: (129, 0, 40, 3), 3: (1,), 16: (90,)}.items():
        new = tuple(min(n, 40) for n in lens)
        p = Problem(lens, new, page_size=page_size, shape=shape, kv_heads=1, latent=True)
        for backend in BACKENDS:
            check_attention(backend, p, TOLERANCE, kind)


@pytest.mark.parametrize("kind", ["auto", "int8_per_token_head", pytest.param("fp8_e4m3", marks=pytest.mark.full)])
def test_latent_rows_of_128_heads_in_bfloat16(kind):
    """Windows, softcaps and sinks too; the smaller rows are no multiple of the tiles of bfloat16."""
    torch.set_num_threads(2)
    for shape in ((128, 576, 512), (16, 48, 33)):
        p = Problem((90, 33, 0), (20, 33, 0), shape=shape, kv_heads=1, latent=True, dtype=torch.bfloat16)
        check_attention(NUMBA, p, 2e-2, kind)
        check_attention(NUMBA, replace(p, window=40, softcap=3.0, with_sinks=True), 2e-2, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_of_a_live_token_is_not_hidden(kind):
    check_live_nan_is_not_hidden(NUMBA, kind)


@pytest.mark.parametrize(("kind", "value_bytes"), [("auto", 4), ("int8_per_token_head", 1)])
def test_numba_addresses_slots_beyond_two_gibibytes(kind, value_bytes):
    check_beyond_two_gibibytes(NUMBA, kind, torch.float32, TOLERANCE, value_bytes=value_bytes)
