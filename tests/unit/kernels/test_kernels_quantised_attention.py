"""Attention over quantised caches: Numba against the reference, the reference against unquantised float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernel_cases import Problem, build_cache, draw_options, quantise

from kernels import get_backend
from kernels.api import AttentionOptions
from kernels.kv_formats import FP8_E4M3, FP8_E5M2, INT4, INT8, KV_FORMATS, KVFormat
from kernels.quantized import FP8_MAX, QuantizedKV
from kernels.tune.problems import HostileKV, wide

FORMATS = list(KV_FORMATS.values())
SHAPES = [(2, 64, 64), (3, 7, 33)]  # (group, D, Dv): compiled per format; odd dims leave int4 half a byte
TOLERANCE = 1e-5
by_name = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)


@pytest.fixture(autouse=True)
def one_thread():
    """As in test_kernels_attention.py: tiny calls wait for each other's threads on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loud(cache: HostileKV) -> None:
    """A few channels x50 and a few tokens x100, in place."""
    for plain in (cache.k, cache.v):
        plain[:, :, 1::17] *= 50
        for slots in cache.slots:
            plain[slots[::40]] *= 100


def decode(
    backend: str, p: Problem, cache: HostileKV, k, v, q: torch.Tensor, options: AttentionOptions, lens=None
) -> torch.Tensor:
    lens = torch.tensor(p.lens) if lens is None else lens
    return get_backend(backend).decode_attention(q, k, v, cache.page_starts, lens, cache.page_size, options)


def prefill(
    backend: str, p: Problem, cache: HostileKV, k, v, q: torch.Tensor, options: AttentionOptions, new_kv=None
) -> torch.Tensor:
    starts = torch.tensor([0, *torch.tensor(p.new).cumsum(0).tolist()])
    args = (q, k, v, cache.page_starts, starts, torch.tensor(p.lens), cache.page_size)
    return get_backend(backend).prefill_attention(*args, options, new_kv=new_kv)


@st.composite
def problems(draw) -> Problem:
    lens = draw(st.lists(st.integers(0, 120), min_size=1, max_size=5))
    new = [draw(st.one_of(st.just(n), st.integers(0, min(n, 40)))) for n in lens]
    return Problem(
        lens=tuple(lens),
        new=tuple(new),
        page_size=draw(st.integers(1, 64)),
        contiguous=draw(st.booleans()),
        shape=draw(st.sampled_from(SHAPES)),
        kv_heads=draw(st.sampled_from([1, 2, 3])),
        window=draw(st.one_of(st.none(), st.integers(1, 130))),
        softcap=draw(st.one_of(st.none(), st.sampled_from([1.0, 30.0]))),
        with_sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@by_name
@given(problem=problems())
@example(problem=Problem(lens=(1,), new=(1,), page_size=1, shape=(3, 7, 33)))
@example(problem=Problem(lens=(0, 90), new=(0, 90), window=33, softcap=1.0, with_sinks=True, shape=(3, 7, 33)))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_numba_agrees_with_the_reference_in_the_same_format(format, problem):
    """Decode and prefill, both over the very same codes; poison in unused slots reaches nothing."""
    p, cache, options = problem, build_cache(problem), draw_options(problem)
    k, v = quantise(cache, format)
    heads = p.shape[0] * p.kv_heads
    q = p.random(len(p.lens), heads, p.shape[1])
    expected = decode("torch", p, cache, k, v, q, options)
    assert expected.isfinite().all()
    torch.testing.assert_close(decode("numba", p, cache, k, v, q, options), expected, atol=TOLERANCE, rtol=TOLERANCE)
    if sum(p.new):
        q = p.random(heads, sum(p.new), p.shape[1]).transpose(0, 1)
        expected = prefill("torch", p, cache, k, v, q, options)
        assert expected.isfinite().all()
        torch.testing.assert_close(
            prefill("numba", p, cache, k, v, q, options), expected, atol=TOLERANCE, rtol=TOLERANCE
        )


@by_name
@pytest.mark.parametrize("threads", [2, 3])
def test_decode_split_over_threads(format, threads):
    torch.set_num_threads(threads)  # the fixture puts it back
    for lens in [(2,), (500,), (3, 350, 1, 0, 64)]:
        p = Problem(lens=lens, new=lens, page_size=5, with_sinks=True)
        cache, options = build_cache(p), draw_options(p)
        k, v = quantise(cache, format)
        q = p.random(len(lens), 4, 64)
        expected = decode("torch", p, cache, k, v, q, options)
        torch.testing.assert_close(
            decode("numba", p, cache, k, v, q, options), expected, atol=TOLERANCE, rtol=TOLERANCE
        )


# Half a step of each format, relative to the row's largest value, or for fp8 to the value itself.
HALF_STEP = {INT8: 1 / 254, INT4: 1 / 14, FP8_E4M3: 1 / 16, FP8_E5M2: 1 / 8}
SCORE_ERROR = 0.02


def steps_of(format: KVFormat, side: QuantizedKV, x: torch.Tensor) -> torch.Tensor:
    """The largest error that kernels/quantized.py allows each value of ``x [S, Hkv, dim]``."""
    if format in FP8_MAX:
        return (HALF_STEP[format] * x.abs()).clamp(min=side.scale / 1024)
    return HALF_STEP[format] * x.abs().amax(-1, keepdim=True).expand_as(x)


@by_name
@pytest.mark.parametrize("outliers", [False, True])
def test_error_of_attention_is_bounded(format, outliers):
    """Against float64 over unquantised KV: an output moves by at most e_v + (exp(2 e_s) - 1) max|v|.

    e_v: the largest error of a value. e_s: the largest error of a score, scale |q| . |error of k|, made SCORE_ERROR
    by the size of q. Then every softmax weight changes by a factor within exp(+-2 e_s); a softcap only shrinks
    differences, and a sink is one more score.
    """
    for length in (100, 37):
        for p in (
            Problem(lens=(length,), new=(length,), window=50, with_sinks=True),
            Problem(lens=(length,), new=(length,), softcap=30.0, shape=(3, 7, 33)),
        ):
            cache, options, group = build_cache(p), draw_options(p), p.shape[0]
            if outliers:
                loud(cache)
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
            plain = [x.double() for x in (cache.k, cache.v)]
            truth = decode("torch", p, cache, *plain, q.double(), wide(options))
            for backend in ("torch", "numba"):
                error = (decode(backend, p, cache, k, v, q, options) - truth).abs().view(2, -1).amax(-1)
                assert (error <= allowed).all()


@pytest.mark.parametrize(
    ("format", "limit"), [(INT8, 0.012), (FP8_E4M3, 0.05), (FP8_E5M2, 0.1), (INT4, 0.2)], ids=lambda p: str(p)
)
def test_relative_error_of_attention_on_normal_data(format, limit):
    """Root mean square error over root mean square output: what each format costs where nothing stands out."""
    p = Problem(lens=(400, 250, 90), new=(400, 250, 90))
    cache, options = build_cache(p), draw_options(p)
    q = p.random(3, 4, 64)
    truth = decode("torch", p, cache, cache.k, cache.v, q, options)
    for backend in ("torch", "numba"):
        error = decode(backend, p, cache, *quantise(cache, format, backend), q, options) - truth
        relative = float(error.square().mean().sqrt() / truth.square().mean().sqrt())
        assert limit / 4 < relative < limit


@pytest.mark.parametrize("backend", ["torch", "numba"])
@by_name
def test_a_token_attends_the_same_however_it_was_chunked(backend, format):
    """Prefill at once, prefill in chunks, and decode token by token: one answer, unquantised new KV notwithstanding."""
    length, group, dim = 45, 2, 64
    p = Problem(lens=(length,), new=(length,), page_size=7, window=30)
    cache, options = build_cache(p), draw_options(p)
    k, v = quantise(cache, format, backend)
    q = p.random(length, group * 2, dim)
    new_kv = cache.k[cache.slots[0]], cache.v[cache.slots[0]]
    whole = prefill(backend, p, cache, k, v, q, options, new_kv)
    for chunks in ((11, 34), (44, 1), (1,) * length):
        done, rows = 0, []
        for n in chunks:
            part, done = slice(done, done + n), done + n
            step = Problem(lens=(done,), new=(n,), page_size=7, window=30)
            given_kv = new_kv[0][part], new_kv[1][part]
            rows.append(prefill(backend, step, cache, k, v, q[part], options, given_kv))
        torch.testing.assert_close(torch.cat(rows), whole, atol=TOLERANCE, rtol=TOLERANCE)
    single = [decode(backend, p, cache, k, v, q[t : t + 1], options, lens=torch.tensor([t + 1])) for t in range(length)]
    torch.testing.assert_close(torch.cat(single), whole, atol=TOLERANCE, rtol=TOLERANCE)
    plain = prefill(backend, p, cache, cache.k, cache.v, q, options, new_kv)
    assert (plain - whole).abs().max() > 1e-3  # the cache's format is really what attention sees


@pytest.mark.parametrize("kind", ["auto", *KV_FORMATS])
def test_nan_of_a_live_token_is_not_hidden(kind):
    """Unused slots must not leak, but a NaN that the model computed has to stay visible."""
    kv, q = torch.randn(8, 2, 64), torch.randn(1, 4, 64)
    poisoned = kv.clone()
    poisoned[5, 0, 3] = math.nan
    for k, v in ((poisoned, kv), (kv, poisoned)):
        if kind == "auto":
            caches = [torch.zeros(8, 2, 64) for _ in "kv"]
        else:
            scale = 0.1 if KV_FORMATS[kind] in FP8_MAX else None
            caches = [QuantizedKV.zeros(KV_FORMATS[kind], 8, 2, 64, "cpu", scale) for _ in "kv"]
        get_backend("numba").write_kv(k, v, *caches, torch.arange(8))
        out = get_backend("numba").decode_attention(
            q, *caches, torch.tensor([[0]]), torch.tensor([8]), 8, AttentionOptions(scale=0.1)
        )
        assert out[0, :2].isnan().any(-1).all() and not out[0, 2:].isnan().any()


@pytest.mark.parametrize("kind", ["auto", "int8_per_token_head"])
def test_numba_addresses_slots_beyond_two_gibibytes(kind):
    """slot x row bytes passes 2**31; the memory is reserved, and only a few pages of it touched."""
    dim, row_bytes = 64, 64 if kind != "auto" else 256
    slots = (1 << 31) // row_bytes + 1000
    if kind == "auto":
        cache = torch.empty(slots, 1, dim)
    else:
        codes = torch.empty(slots, 1, dim, dtype=torch.int8)
        cache = QuantizedKV(INT8, codes, torch.empty(slots, 1, dtype=torch.float32), 1.0, dim)
    backend, where = get_backend("numba"), torch.arange(slots - 20, slots)
    k, q = torch.randn(20, 1, dim), torch.randn(1, 1, dim)
    backend.write_kv(k, k, cache, cache, where)
    stored = cache[where] if kind == "auto" else cache.load(where)
    assert (stored - k).abs().max() < (k.abs().max() / 254 + 1e-6 if kind != "auto" else 1e-9)
    place, options = (torch.tensor([[slots - 20]]), torch.tensor([20]), 64), AttentionOptions(scale=0.1)
    weights = torch.softmax(0.1 * (stored[:, 0] @ q[0, 0]), 0)
    for out in (
        backend.decode_attention(q, cache, cache, *place, options),
        backend.prefill_attention(q, cache, cache, place[0], torch.tensor([0, 1]), *place[1:], options),
    ):
        torch.testing.assert_close(out[0, 0], weights @ stored[:, 0], atol=TOLERANCE, rtol=TOLERANCE)
