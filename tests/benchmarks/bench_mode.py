"""How much is measured: the environment variable KVBENCH_BENCH.

full (default): the whole matrix, about 10 minutes on 2 cores.  quick: the corners of it, about 4 minutes.
smoke: everything once and tiny, seconds; its figures mean nothing, it shows that the benchmarks still run.
"""

from __future__ import annotations

import os
from typing import TypeVar

import torch

from tests.benchmarks.bench_run import MODES

T = TypeVar("T")
MODE = os.environ.get("KVBENCH_BENCH", "full")
if MODE not in MODES:
    raise ValueError(f"KVBENCH_BENCH cannot be {MODE!r}: choose one of {', '.join(MODES)}")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def choose(*, full: T, quick: T, smoke: T) -> T:
    """What the mode asks for."""
    return {"full": full, "quick": quick, "smoke": smoke}[MODE]
