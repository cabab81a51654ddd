"""The CPU's backends against float64, over drawn problems in every KV format and the cases that bit others."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernel_cases import (
    KINDS,
    Problem,
    build_cache,
    check_attention,
    check_beyond_two_gibibytes,
    check_live_nan_is_not_hidden,
    draw_options,
    problems,
)

from kernels import get_backend
from kernels.api import AttentionOptions, PrefillBatch
from kernels.kv_formats import FP8_E4M3, FP8_E5M2, INT4, INT8, KV_FORMATS, KVFormat
from kernels.numba_amx import has_amx
from kernels.quantized import FP8_MAX, QuantizedKV
from kernels.tune.problems import HostileKV, nan_cache, wide

TOLERANCE = 1e-5
NUMBA, BACKENDS = get_backend("numba"), [get_backend("torch"), get_backend("numba")]
SHAPES = [(1, 16, 16), (2, 64, 64), (3, 20, 36), (4, 128, 128), (8, 32, 32), (5, 80, 48)]
QUANTISED_SHAPES = [(2, 64, 64), (3, 7, 33)]  # compiled for each format; odd dims leave int4 half a byte
by_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
by_format = pytest.mark.parametrize("format", KV_FORMATS.values(), ids=lambda f: f.name)


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


@by_backend
@given(problem=problems(SHAPES), planned=st.booleans())
@example(problem=Problem(lens=(1,), new=(1,), page_size=1), planned=False)
@example(problem=Problem(lens=(0, 0), new=(0, 0)), planned=True)
@example(problem=Problem(lens=(150,), new=(8,), page_size=7, window=150), planned=True)
@quiet(50)
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


@pytest.mark.parametrize("amx", [True, False])
@given(problem=problems([(2, 64, 64), (3, 32, 96), (5, 80, 48)], dtypes=[torch.bfloat16]))
@example(problem=Problem(lens=(1,), new=(1,), page_size=1, dtype=torch.bfloat16))
@example(problem=Problem(lens=(0, 0), new=(0, 0), dtype=torch.bfloat16))
@example(problem=Problem(lens=(150, 64, 33), new=(140, 64, 17), page_size=7, window=65, dtype=torch.bfloat16))
@quiet(25)
def test_bfloat16_agrees_with_float64(amx, problem):
    """Off by the rounding of outputs and softmax weights, 1/256 each. Without AMX prefill computes in floats."""
    if amx and not has_amx():
        pytest.skip("no AMX here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernels.prefill_cpu.has_amx", lambda: amx)
        check_attention(NUMBA, problem, 2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_models_in_every_kv_format(kind):
    p = Problem(lens=(90, 33, 0), new=(20, 33, 0), dtype=torch.bfloat16, with_sinks=True)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        check_attention(NUMBA, replace(p, window=40), 2e-2, kind)


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


@pytest.mark.parametrize("kind", KINDS)
def test_nan_of_a_live_token_is_not_hidden(kind):
    check_live_nan_is_not_hidden(NUMBA, kind)


@pytest.mark.parametrize(("kind", "value_bytes"), [("auto", 4), ("int8_per_token_head", 1)])
def test_numba_addresses_slots_beyond_two_gibibytes(kind, value_bytes):
    check_beyond_two_gibibytes(NUMBA, kind, torch.float32, TOLERANCE, value_bytes=value_bytes)


# What quantising costs, against attention over the values before it.


def quantise(cache: HostileKV, format: KVFormat, backend: str = "torch") -> tuple[QuantizedKV, QuantizedKV]:
    """The tokens of a plain cache in a quantised one whose every other slot is NaN."""
    live = torch.cat(cache.slots)
    k, v = (
        nan_cache(format.name, *plain.shape, plain.dtype, plain.device, float(plain[live].abs().max()))
        for plain in (cache.k, cache.v)
    )
    get_backend(backend).write_kv(cache.k[live], cache.v[live], k, v, live)
    return k, v


def decode(backend, cache: HostileKV, k, v, q, lens, options: AttentionOptions) -> torch.Tensor:
    return backend.decode_attention(q, k, v, cache.page_starts, torch.tensor(lens), cache.page_size, options)


# Half a step of each format, relative to the row's largest value, or for fp8 to the value itself.
HALF_STEP = {INT8: 1 / 254, INT4: 1 / 14, FP8_E4M3: 1 / 16, FP8_E5M2: 1 / 8}
SCORE_ERROR = 0.02


def steps_of(format: KVFormat, side: QuantizedKV, x: torch.Tensor) -> torch.Tensor:
    """The largest error that kernels/quantized.py allows each value of ``x [S, Hkv, dim]``."""
    if format in FP8_MAX:
        return (HALF_STEP[format] * x.abs()).clamp(min=side.scale / 1024)
    return HALF_STEP[format] * x.abs().amax(-1, keepdim=True).expand_as(x)


@by_format
@pytest.mark.parametrize("outliers", [False, True])
def test_error_of_attention_is_bounded(format, outliers):
    """Against float64 over unquantised KV: an output moves by at most e_v + (exp(2 e_s) - 1) max|v|.

    e_v: the largest error of a value. e_s: the largest error of a score, scale |q| . |error of k|, made SCORE_ERROR
    by the size of q. Then every softmax weight changes by a factor within exp(+-2 e_s); a softcap only shrinks
    differences, and a sink is one more score.
    """
    for p in (
        Problem(lens=(100,), new=(0,), window=50, with_sinks=True),
        Problem(lens=(37,), new=(0,), softcap=30.0, shape=(3, 7, 33)),
    ):
        cache, options, group = build_cache(p), draw_options(p), p.shape[0]
        if outliers:  # a few channels and a few tokens
            for plain in (cache.k, cache.v):
                plain[:, :, 1::17] *= 50
                plain[cache.slots[0][::40]] *= 100
        k, v = quantise(cache, format)
        seen = cache.slots[0][-p.window :] if p.window else cache.slots[0]
        keys, values = cache.k[seen].double(), cache.v[seen].double()
        q = p.random(1, 2 * group, p.shape[1])
        size = q[0].double().abs().view(2, group, -1)
        e_score = options.scale * torch.einsum("kgd,skd->kgs", size, steps_of(format, k, keys)).amax()
        q *= SCORE_ERROR / e_score
        largest, e_value = values.abs().amax((0, 2)), steps_of(format, v, values).amax((0, 2))  # [Hkv]
        allowed = e_value + math.expm1(2 * SCORE_ERROR) * largest
        assert (allowed < 0.2 * largest).all()
        truth = decode(BACKENDS[0], cache, cache.k.double(), cache.v.double(), q.double(), p.lens, wide(options))
        for backend in BACKENDS:
            error = (decode(backend, cache, k, v, q, p.lens, options) - truth).abs().view(2, -1).amax(-1)
            assert (error <= allowed).all()


@by_backend
@by_format
def test_a_token_attends_the_same_however_it_was_chunked(backend, format):
    """Prefill at once, prefill in chunks, and decode token by token: one answer, unquantised new KV notwithstanding."""
    length = 45
    p = Problem(lens=(length,), new=(length,), page_size=7, window=30)
    cache, options = build_cache(p), draw_options(p)
    k, v = quantise(cache, format, backend.name)
    q = p.random(length, 4, 64)
    new_kv = cache.k[cache.slots[0]], cache.v[cache.slots[0]]

    def prefill(begin: int, end: int, k=k, v=v) -> torch.Tensor:
        batch = PrefillBatch(cache.page_starts, torch.tensor([0, end - begin]), torch.tensor([end]), cache.page_size)
        new = new_kv[0][begin:end], new_kv[1][begin:end]
        return backend.prefill_attention(q[begin:end], k, v, batch, options, new_kv=new)

    whole = prefill(0, length)
    for bounds in ((0, 11, 45), (0, 44, 45), range(length + 1)):
        chunked = torch.cat([prefill(*pair) for pair in itertools.pairwise(bounds)])
        torch.testing.assert_close(chunked, whole, atol=TOLERANCE, rtol=TOLERANCE)
    single = torch.cat([decode(backend, cache, k, v, q[t : t + 1], [t + 1], options) for t in range(length)])
    torch.testing.assert_close(single, whole, atol=TOLERANCE, rtol=TOLERANCE)
    # The cache's format is really what attention sees.
    assert (prefill(0, length, cache.k, cache.v) - whole).abs().max() > 1e-3
