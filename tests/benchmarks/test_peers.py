"""The engine beside its peers, one turn of each side; ``make bench-peers`` has more turns, and bars.

vLLM's CPU backend takes part when VLLM_PYTHON is the python of an environment that has it. In ``extra_info``: output
tokens/s by side, kvbench's ratio to each, and the share of requests whose tokens are the same. The benchmark's own time
is that of all turns, loading included.
"""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from bench_engine import model_name
from bench_timing import choose, note

from kvbench_engine.bench.case import PromptBatch, make_case
from kvbench_engine.bench.command import available_sides, turns_of
from kvbench_engine.bench.compare import compare
from kvbench_engine.bench.sides import HF_SIDES, OURS, measure
from kvbench_engine.config import EngineConfig
from kvbench_engine.execution.executor import available_cpus
from kvbench_engine.model.spec import find_model


def make_config(case: PromptBatch) -> EngineConfig:
    """The settings of ``kvbench dev bench-engine``."""
    return EngineConfig(
        model=model_name(), kv_budget=choose(full=512, quick=512, smoke=1) * 2**20, max_model_len=case.longest,
        max_num_seqs=len(case.prompts),
    )  # fmt: skip


@pytest.mark.timeout(1200)
def test_peers(benchmark):
    vllm_python = os.environ.get("VLLM_PYTHON")
    vocab = find_model(model_name()).text_config["vocab_size"]
    case = make_case(*choose(full=(32, 64), quick=(32, 64), smoke=(3, 4)), vocab, 0)
    config = make_config(case)
    benchmark.group = f"peers, {len(case.prompts)} requests of {case.output_tokens} output tokens"

    def compare_sides() -> None:
        if choose(full=False, quick=False, smoke=True):  # in this process: no time for one each
            sides = [OURS, *(side for side in HF_SIDES if side != "hf-continuous-best")]  # whose thread would stay
            results.append(compare({side: partial(measure, side, config, case) for side in sides}, 1, lambda *_: None))
            return
        sides = choose(full=available_sides(vllm_python), quick=(OURS, "hf-continuous"), smoke=())
        with turns_of(sides, config, case, vllm_python) as turns:
            results.append(compare(turns, 1, lambda side, _, speed: print(f"  {side}: {speed:.1f} output tokens/s")))

    results = []
    threads = torch.get_num_threads()
    torch.set_num_threads(available_cpus())
    try:
        benchmark.pedantic(compare_sides, rounds=1, iterations=1)
    finally:
        torch.set_num_threads(threads)
    (result,) = results
    assert not result.other_work()
    note(
        benchmark,
        **{f"{side} tokens_per_s": speeds[0] for side, speeds in result.output_tokens_per_s.items()},
        **{f"vs {side}": ratios[0] for side, ratios in result.ratio.items()},
        **{f"same as {side}": share for side, share in result.same_tokens.items()},
    )
