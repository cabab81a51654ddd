"""Real engines behind their adapters: the built-in one and transformers pass the checks, and their tokens are right."""

from __future__ import annotations

import json
import math
import random
import sys

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvbench.lockstep.conformance import FAILED, NOT_OFFERED, check_engine
from kvbench.lockstep.process import EngineProcess
from kvbench.lockstep.turns import TurnTaker, take_turns
from kvbench.targets.builtin import LOCKSTEP_COMMAND
from kvbench.targets.preset import LOOP
from kvbench.targets.presets import PRESETS
from tests.integration.test_target_transformers import MODEL
from tests.support.sweep_parts import Bench

pytestmark = pytest.mark.full
PROMPTS = [[5 + 3 * i + j for j in range(9 + 4 * i)] for i in range(4)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny Llama with random weights, as Hugging Face stores it."""
    from transformers import LlamaConfig

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(LlamaConfig(**MODEL)).save_pretrained(folder)
    return folder


def transformers_command(folder):
    words = ("--cb-num-blocks", "64", "--cb-block-size", "32", "--cb-max-batch-tokens", "32", "--dtype", "float32")
    return [sys.executable, str(LOOP), str(PRESETS["transformers"].adapter), str(folder), *words]


def test_the_adapter_of_transformers_passes_and_generates_what_the_model_does(model_folder, tmp_path):
    results = list(check_engine(transformers_command(model_folder), {}, tmp_path / "log"))
    assert not [result for result in results if result.outcome == FAILED]
    assert [result.title for result in results if result.outcome == NOT_OFFERED] == [
        "A request of two answers has two sequences"
    ]
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with EngineProcess(transformers_command(model_folder), tmp_path / "log") as process:
        process.greet()
        process.ask(do="open", name="hf", settings={})
        engine = TurnTaker(process, "hf")
        rows = [[prompt, 12, None, 0] for prompt in PROMPTS]
        engine.load(requests=rows, concurrency=3, temperature=0.0, ignore_eos=True, keep_cache=False)
        take_turns([engine], random.Random(0), 3, math.inf)
        answers = process.ask(do="result", name="hf")["requests"]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt])
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
                               eos_token_id=-1, pad_token_id=0)  # fmt: skip
        assert answer[6] == alone[0, len(prompt) :].tolist()


def test_the_built_in_engine_passes_every_point(tmp_path):
    settings = {"model": "kvbench-tiny", "device": "cpu", "dtype": "float32", "kv_budget": "8MiB",
                "max_model_len": 512, "num_threads": 1, "enable_prefix_caching": True}  # fmt: skip
    outcomes = {result.outcome for result in check_engine(LOCKSTEP_COMMAND, settings, tmp_path / "log")}
    assert outcomes == {"passed"}


@pytest.mark.timeout(600)
def test_two_settings_of_transformers_are_compared_in_turns(tmp_path):
    bench = Bench(tmp_path, {"KVBENCH_NO_CALIBRATION": "1"})
    (tmp_path / "tiny.json").write_text(json.dumps(MODEL))
    path = bench.write(
        model={"config": "tiny.json", "dtype": "float32"},
        engine={"device": "cpu", "page_size": 32, "kv_budget": "2MiB", "max_model_len": 256, "max_num_seqs": 8,
                "enable_prefix_caching": True, "num_threads": 1},
        load={"concurrency": [2], "num_requests": 4},
    )  # fmt: skip
    sides = ("max_num_batched_tokens=128", "max_num_batched_tokens=32")
    done = bench.kvbench("compare", *sides, "--workload", str(path), "--target", "transformers", "--max-minutes", "1.5",
                         "--force", "--output-dir", str(tmp_path / "out"))  # fmt: skip
    assert done.returncode in (0, 1, 3), done.stdout + done.stderr
    (folder,) = (tmp_path / "out" / "compare").iterdir()
    state = json.loads((folder / "manifest.json").read_text())
    assert state["method"] == "lockstep" and not state["voids"]
    steps = [pd.read_parquet(path) for path in sorted(folder.glob("*/**/steps.parquet"))]
    assert len(steps) >= 2 and all((table["seconds"] > 0).all() and table["output_tokens"].sum() for table in steps)
