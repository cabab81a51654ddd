"""`kvbench dev tune` as it is called, where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from kvbench.cli.main import main
from kvbench.cli.tune import describe, make_cases
from kvbench.common.errors import UsageError
from kvbench_kernels.launch import Tiles
from kvbench_kernels.tune.search import Outcome

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["dev", "tune", *arguments])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


@NO_GPU
def test_without_a_gpu_it_is_one_sentence_and_exit_code_2(capsys, tmp_path):
    code, out, err = run(capsys, "--output-dir", str(tmp_path))
    assert code == 2 and not out
    assert err.startswith("error: kvbench dev tune times kernels on a CUDA device") and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kv-cache-dtype", "fp4"), ["'fp4'", "int4_per_token_head"]),
        (("--head-dim", "512"), ["'512'", "256"]),
        (("--head-dim", "128/"), ["'128/'", "192/128"]),
        (("--head-dim", "1/2/3"), ["'1/2/3'"]),
        (("--group", "65"), ["--group", "65"]),
        (("--max-minutes", "0"), ["--max-minutes"]),
        (("--kernel", "reduce"), ["reduce", "decode"]),
    ],
)
def test_bad_input_is_refused_before_the_gpu_is_looked_for(capsys, arguments, words):
    code, _, err = run(capsys, *arguments)
    assert code == 2 and all(word in err for word in words) and "CUDA" not in err


def test_cases_are_buckets_each_once():
    cases = make_cases(["decode", "prefill"], ["auto"], ["128", "100", "192/128"], [1, 4, 16, 32], [16, 1], 2)
    assert len(cases) == len({(case.bucket, case.page_size) for case in cases})
    assert len(cases) == 2 * 2 * 2 * 2  # kernels, page sizes, (128 | 256, 128), (16 | 32 rows)
    assert cases[0].page_size == 16 and (cases[0].head_dim, cases[0].group) == (128, 1)
    with pytest.raises(UsageError):
        make_cases(["decode"], ["auto"], ["0"], [1], [1], 2)


def test_a_line_tells_the_gain():
    tiles = Tiles(16, 32, 128, 128, 3, 8)
    assert "-20.0%" in describe(Outcome(tiles, 80.0, 100.0, 12, ((tiles, "x"),), False))
    assert "%" not in describe(Outcome(tiles, 100.0, 100.0, 12, (), True))
