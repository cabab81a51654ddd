"""What `kvbench dev tune` runs on a device, in Triton's interpreter. Run like triton_checks.py."""

from __future__ import annotations

import pytest
import torch

from kvbench.cli.tune import default_tiles
from kvbench_kernels.triton_launch import Chip
from kvbench_kernels.tune.device import Checker, TuningProblem
from kvbench_kernels.tune.search import TuningCase
from kvbench_kernels.tuning import bucket_of

CHIP, CPU = Chip(0, 4), torch.device("cpu")
LENS = {"decode": ((1, 33, 20, 0), (1, 1, 1, 1)), "prefill": ((20, 1, 33), (20, 1, 7))}


def problem_of(kernel: str, kind: str, page_size: int = 16) -> TuningProblem:
    case = TuningCase(bucket_of(kernel, kind, 2, 20, 36, 4), 2, 20, 36, page_size)
    return TuningProblem(case, *LENS[kernel], 2, CHIP, CPU)


@pytest.mark.parametrize(
    ("kernel", "kind", "page_size"), [("decode", "int4_per_token_head", 7), ("prefill", "auto", 1)]
)
def test_right_tiles_pass_and_wrong_numbers_do_not(kernel, kind, page_size):
    problem = problem_of(kernel, kind, page_size)
    check, tiles = Checker(problem), default_tiles(problem.case, 0)
    assert check(tiles) is None
    assert check(tiles._replace(block_n=16)) is None
    check._expected[0, 0] *= 1.001  # one row of one head
    assert "differs from the reference" in check(tiles)


def test_a_kernel_that_writes_nothing_is_wrong():
    """The output is poisoned before every run: what an earlier run left there must not pass for this one's."""
    problem = problem_of("decode", "auto")
    check, tiles = Checker(problem), default_tiles(problem.case, 0)
    assert check(tiles) is None
    problem.run = lambda tiles: None
    assert "inf" in check(tiles)


def test_tiles_that_do_not_launch_are_refused():
    problem = problem_of("decode", "auto")
    assert "does not run" in Checker(problem)(default_tiles(problem.case, 0)._replace(block_n=24))
