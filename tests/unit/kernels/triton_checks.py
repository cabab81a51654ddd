"""The Triton kernels against float64: on CPU tensors in Triton's interpreter, on the GPU where there is one.

Not collected by itself (no test_ prefix): TRITON_INTERPRET must be set before Triton is imported, so
test_kernels_triton.py runs this file in a process of its own. KVBENCH_DEEP=10 draws ten times as many problems.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import KINDS, Problem, problems
from triton_cases import DEVICE, TOLERANCE, backend_on, check, interpreted_bfloat16  # noqa: F401

DEEP = int(os.environ.get("KVBENCH_DEEP", "1"))
BASE = Problem(lens=(70, 1, 33, 0), new=(20, 1, 33, 0), device=DEVICE)
SHAPES = [(1, 64, 64), (2, 16, 16), (4, 64, 64), (3, 7, 33), (5, 20, 36), (8, 96, 64), (16, 80, 48), (2, 128, 128)]
# On a GPU each problem compiles its kernels, which takes seconds.
EXAMPLES = (30 if DEVICE == "cpu" else 3) * DEEP
QUIET = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)


@given(
    problem=problems(SHAPES, 3, (1, 8, 40), tuple(TOLERANCE), DEVICE),
    kind=st.sampled_from(KINDS),
    sms=st.sampled_from([1, 4, 40]),
    hardware=st.booleans(),
)
@QUIET
def test_decode_and_prefill_agree_with_float64(problem, kind, sms, hardware):
    """With 40 multiprocessors the keys are split, with 1 they are not."""
    check(problem, kind, backend_on(sms, hardware))


@pytest.mark.parametrize(
    ("shape", "kind"), [((2, 256, 256), "auto"), ((32, 64, 64), "auto"), *(((1, 192, 128), kind) for kind in KINDS)]
)
def test_wide_heads_and_many_of_them(shape, kind):
    p = replace(BASE, lens=(70, 33), new=(3, 33), shape=shape, kv_heads=1, page_size=32, dtype=torch.float16)
    check(p, kind, backend_on(4))


@pytest.mark.parametrize("kind", KINDS)
def test_odd_dims_of_different_sizes(kind):
    """Of int4 the last byte of a row is half empty, and no dim is a power of two."""
    check(replace(BASE, new=(3, 1, 2, 0), shape=(2, 33, 7), page_size=5), kind, backend_on(4))


@pytest.mark.parametrize(
    ("options", "kind"),
    [({}, "auto"), ({"window": 300, "softcap": 9.0}, "fp8_e4m3"), ({"with_sinks": True}, "int4_per_token_head")],
)
def test_splits_and_their_reduction(options, kind):
    """Splits with nothing in them, lengths that end inside a split."""
    p = replace(BASE, lens=(400, 64, 1, 0, 129), new=(1, 5, 0, 0, 2), shape=(2, 16, 16), kv_heads=1, page_size=3)
    check(replace(p, **options), kind, backend_on(60))


@pytest.mark.parametrize("window", [1, 31, 32, 40, 95, 128, 159, 170])
def test_windows_that_end_anywhere_in_a_tile(window):
    """Chunks whose first and last row see different tiles, and tiles that all rows see in full."""
    p = replace(BASE, lens=(170,), new=(40,), shape=(1, 16, 16), kv_heads=1, page_size=9, window=window)
    check(p, "auto", backend_on(4))


def test_lengths_of_a_row_that_is_padding():
    """A padding row's queries get zeros though its length is 0; so does a sequence without tokens in decode."""
    for new in ((0, 0), (3, 2)):
        check(replace(BASE, lens=(0, 40), new=new, with_sinks=True), "auto", backend_on(4))
