"""The Triton kernels against float64: on CPU tensors in Triton's interpreter, on the GPU where there is one.

Not collected by itself (no test_ prefix): TRITON_INTERPRET must be set before Triton is imported, so
test_kernels_triton.py runs these files in a process of their own. KVBENCH_DEEP=10 draws ten times as many problems.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import KINDS, Problem, problems
from triton_cases import DEVICE, TOLERANCE, backend_on, check

DEEP = int(os.environ.get("KVBENCH_DEEP", "1"))
BASE = Problem(lens=(70, 1, 33, 0), new=(20, 1, 33, 0), device=DEVICE)
SHAPES = [(1, 64, 64), (2, 16, 16), (4, 64, 64), (3, 7, 33), (5, 20, 36), (8, 96, 64), (16, 80, 48), (2, 128, 128)]
# On a GPU each problem compiles its kernels, which takes seconds.
EXAMPLES = (30 if DEVICE == "cpu" else 3) * DEEP
QUIET = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)


@pytest.mark.full
@given(
    problem=problems(SHAPES, 3, (1, 8, 40), tuple(TOLERANCE), DEVICE),
    kind=st.sampled_from(KINDS),
    sms=st.sampled_from([1, 4, 40]),
    hardware=st.booleans(),
)
@QUIET
def test_drawn_problems_agree_with_float64(problem, kind, sms, hardware):
    """With 40 multiprocessors the keys are split, with 1 they are not."""
    check(problem, kind, backend_on(sms, hardware))


def case(name: str, kind: str = "auto", sms: int = 4, full: bool = False, **changes):
    return pytest.param(changes, kind, sms, id=f"{name}, {kind}", marks=[pytest.mark.full] * full)


# Of int4 the last byte of a row is half empty, and no dim is a power of two.
ODD = {"new": (3, 1, 2, 0), "shape": (2, 33, 7), "page_size": 5}
WIDE = {"lens": (70, 33), "new": (3, 33), "kv_heads": 1, "page_size": 32, "dtype": torch.float16}
# Splits with nothing in them, lengths that end inside a split.
SPLIT = {"lens": (400, 64, 1, 0, 129), "new": (1, 5, 0, 0, 2), "shape": (2, 16, 16), "kv_heads": 1, "page_size": 3}
HALF = {"lens": (70, 33), "new": (3, 33), "shape": (2, 16, 16), "dtype": torch.bfloat16}
# Chunks whose first and last row see different tiles, and tiles that all rows see in full.
WINDOW = {"lens": (170,), "new": (40,), "shape": (1, 16, 16), "kv_heads": 1, "page_size": 9}
# Damage that depends on prompt length mod page size (vllm#50749): around a page's and a tile's end.
ENDS = {"lens": (1, 3, 4, 61, 63, 64, 65, 67), "new": (1, 3, 4, 6, 6, 6, 6, 6), "shape": (2, 16, 16), "kv_heads": 1}
LATENT = {"latent": True, "kv_heads": 1, "shape": (20, 48, 32)}  # of 20 query heads 16 or 32 share a program
LATENT_KINDS = [kind for kind in KINDS if kind != "int4_per_token_head"]
CASES = [
    *(case("odd dims", kind, **ODD) for kind in KINDS),
    *(case("wide heads", kind, full=True, **WIDE, shape=(1, 192, 128)) for kind in KINDS),
    *(case(f"{shape}", full=True, **WIDE, shape=shape) for shape in ((2, 256, 256), (32, 64, 64))),
    *(case("half precision", kind, full="fp8" in kind, **HALF) for kind in KINDS),
    case("splits", sms=60, **SPLIT),
    case("splits", "fp8_e4m3", 60, **SPLIT, window=300, softcap=9.0),
    case("splits", "int4_per_token_head", 60, **SPLIT, with_sinks=True),
    case("a few queries after a long context", sms=60, lens=(400, 9), new=(8, 1), page_size=7, shape=(4, 32, 32)),
    *(case(f"window {n}", full=n not in (31, 128), **WINDOW, window=n) for n in (1, 31, 32, 40, 95, 128, 159, 170)),
    *(case("latent rows", kind, **LATENT) for kind in LATENT_KINDS),
    *(case("latent rows, half precision", kind, full="fp8" in kind, **HALF | LATENT) for kind in LATENT_KINDS),
    case("latent rows, splits", sms=60, **SPLIT | LATENT, window=300, with_sinks=True),
    case("latent rows, odd sizes", sms=60, **SPLIT | LATENT | {"shape": (33, 21, 13)}, softcap=3.0),
    case("latent rows, splits", "int8_per_token_head", 60, **SPLIT | LATENT | {"shape": (33, 22, 14)}, softcap=3.0),
    case("latent rows of DeepSeek", full=True, **WIDE | LATENT | {"shape": (16, 576, 512)}),
    case("ends of pages of 4", **ENDS, page_size=4),
    case("ends of pages of 64", "int8_per_token_head", **ENDS, page_size=64),
    # A padding row's queries get zeros though its length is 0; so does a sequence without tokens in decode.
    *(case("padding", lens=(0, 40), new=new, with_sinks=True) for new in ((0, 0), (3, 2))),
]


@pytest.mark.parametrize(("changes", "kind", "sms"), CASES)
def test_decode_and_prefill_agree_with_float64(changes, kind, sms):
    check(replace(BASE, **changes), kind, backend_on(sms))
