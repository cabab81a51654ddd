"""What the work list of decode is worth, by a model of a GPU's waves: no GPU was measured.

That the kernel makes these lists is checked in Triton's interpreter (triton_plan_checks.py).
"""

from __future__ import annotations

import numpy as np
import pytest
from decode_plan_model import evenly_split_time, expected_list, ideal_time, planned_time
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench_kernels.launch import MIN_SPLIT_TOKENS, PROGRAMS_PER_SM, cdiv, most_decode_items

BATCHES = (1, 2, 3, 5, 8, 16, 33, 48, 64, 128)
H100 = 132  # multiprocessors
MODELS = [(8, H100), (4, H100), (8, 40)]  # KV heads, multiprocessors


def one_long(others: int, batch: int) -> list[int]:
    return [others] * (batch - 1) + [32768]


def of_all_sizes(low: int, batch: int) -> list[int]:
    """Drawn evenly by their logarithm."""
    draw = np.random.default_rng(batch)
    return np.exp(draw.uniform(np.log(low), np.log(32768), batch)).astype(int).tolist()


def of_one_length(tokens: int, batch: int) -> list[int]:
    return [tokens] * batch


@pytest.mark.parametrize(("kv_heads", "sms"), MODELS)
@pytest.mark.parametrize(
    ("lengths", "tokens", "smallest", "of_ideal", "of_even_split"),
    [
        *((one_long, tokens, 2, 1.35, 0.65) for tokens in (16, 512)),
        *((of_all_sizes, tokens, 2, 1.4, 1.0) for tokens in (64, 4096)),
        *((of_one_length, tokens, 1, np.inf, 1.02) for tokens in (512, 2048, 32768)),
    ],
)
def test_batches_end_near_the_ideal_and_before_those_that_are_split_evenly(
    lengths, tokens, smallest, of_ideal, of_even_split, kv_heads, sms
):
    for batch in BATCHES:
        if batch >= smallest:
            lens = lengths(tokens, batch)
            took = planned_time(lens, kv_heads, sms)
            assert took <= of_ideal * ideal_time(lens, kv_heads, sms), batch
            assert took <= of_even_split * evenly_split_time(lens, kv_heads, sms), batch


def test_what_one_sequence_of_32k_among_63_of_512_takes():
    """The figures of the docs: estimates for 8 KV heads on 132 multiprocessors, in tokens of one KV head."""
    lens = [32768] + [512] * 63
    took = [round(f(lens, 8, H100)) for f in (ideal_time, planned_time, evenly_split_time)]
    assert took == [2095, 2240, 33408]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    lens=st.lists(st.integers(0, 1 << 18), min_size=1, max_size=60),
    kv_heads=st.sampled_from([1, 2, 8, 32]),
    sms=st.sampled_from([1, 4, 132]),
)
def test_every_list_has_room_and_misses_nothing(lens, kv_heads, sms):
    most = most_decode_items(len(lens), kv_heads, max(lens), PROGRAMS_PER_SM * sms)
    items = expected_list(lens, None, kv_heads, sms, most)
    assert len(lens) <= len(items) <= most
    assert sorted(items) == [(b, i, n) for b, _, n in sorted({(b, 0, n) for b, _, n in items}) for i in range(n)]
    assert {b for b, _, _ in items} == set(range(len(lens)))


@given(batch=st.integers(1, 600), heads=st.integers(1, 128), tokens=st.integers(0, 1 << 20), sms=st.integers(1, 200))
def test_room_for_items_is_bounded(batch, heads, tokens, sms):
    """Never under one a sequence; four waves of programs more at most than the batch alone fills; and short sequences
    are never cut."""
    places = PROGRAMS_PER_SM * sms
    most = most_decode_items(batch, heads, tokens, places)
    assert batch <= most <= batch * max(1, cdiv(tokens, MIN_SPLIT_TOKENS))
    assert most * heads <= (cdiv(batch * heads, places) + 4) * places
    assert (most == batch) if tokens <= MIN_SPLIT_TOKENS else (most > batch or heads > places)
