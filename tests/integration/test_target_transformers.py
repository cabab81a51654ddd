"""A sweep of ``transformers serve`` with continuous batching, launched by its preset, on a tiny random model."""

from __future__ import annotations

import importlib.util
import json
import sys

import pandas as pd
import psutil
import pytest

from tests.support.sweep_parts import Bench, complaints, manifest

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    "max_position_embeddings": 512, "hidden_act": "silu", "rms_norm_eps": 1e-05, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "bos_token_id": 0, "eos_token_id": 0,
    "dtype": "float32",
}  # fmt: skip
ENGINE = {
    "device": "cpu", "page_size": 16, "kv_budget": "2MiB", "max_model_len": 256, "max_num_seqs": 8,
    "enable_prefix_caching": True,
}  # fmt: skip
SWEEP = {"layout": ["contiguous"], "kv_cache_dtype": ["fp8_e4m3"], "enable_prefix_caching": [False]}
NEEDED = ("accelerate", "fastapi", "uvicorn")
REFUSED = dict(zip(("contiguous", "paged-p16-fp8_e4m3", "paged-p16-noprefix"), SWEEP, strict=True))


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in NEEDED),
    reason="transformers serve needs the packages of its extra: pip install 'transformers[serving]'",
)
@pytest.mark.full
@pytest.mark.timeout(900)  # it imports torch, a minute on a busy machine
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_sweep_of_transformers_serve(tmp_path, endpoint):
    bench = Bench(tmp_path, {"KVBENCH_NO_CALIBRATION": "1"})
    (tmp_path / "tiny.json").write_text(json.dumps(MODEL))
    path = bench.write(
        model={"config": "tiny.json", "dtype": "float32"}, engine=ENGINE, sweep=SWEEP,
        load={"endpoint": endpoint, "concurrency": [2], "repeats": 1, "cache_state": "cold", "timeout_s": 240.0},
    )  # fmt: skip
    done = bench.sweep(str(path), "--target", "transformers", "--target-python", sys.executable, fake=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = bench.only_run()
    assert complaints(run) == []
    facts = manifest(run)
    assert facts["status"] == "complete" and facts["backend"] == "transformers"
    report = (run / "report.md").read_text().replace("\\", "")
    for config_id, setting in REFUSED.items():
        (note,) = (n for n in facts["notes"] if n.startswith(f"skipped {config_id}: ") and setting in n)
        assert note in done.stdout.replace("note: ", "") and note.rpartition(": ")[2] in report
    (cell,) = (run / "cells").iterdir()
    assert cell.name == "paged-p16-c2"
    (served,) = facts["servers"].values()
    assert served["versions"].keys() == {"transformers"} and served["server"]["command"][1:4] == [
        "-m", "transformers.cli.transformers", "serve"
    ]  # fmt: skip
    assert str(tmp_path) not in json.dumps(served)
    assert len(served["model"]["weights_fingerprint"]) == 32 and facts["model"]["name"] == "tiny"
    load = cell / "loads" / "1"
    rows = pd.read_parquet(load / "requests.parquet")
    result = json.loads((load / "done.json").read_text())
    requests = [json.loads(line) for line in (run / result["requests_file"]).read_text().splitlines()]
    # The texts that were sent have exactly the tokens that were drawn, and no EOS cut an answer short. Over chat two
    # marks are added to each.
    marks = 2 if endpoint == "chat" else 0
    assert sorted(rows["prompt_tokens"]) == sorted(len(r["prompt_token_ids"]) + marks for r in requests)
    assert sorted(rows["output_tokens"]) == sorted(r["max_tokens"] for r in requests)
    assert result["metrics"]["completed"] == 6 and result["metrics"]["failed"] == 0
    counters = json.loads((load / "counters.json").read_text())
    assert not [name for name in counters if name.endswith("_total")]  # it has no /metrics: absent, not 0
    assert not list(tmp_path.glob("kvbench-model-*"))
    commands = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert not [c for c in commands if "transformers.cli.transformers" in c and str(tmp_path) in c]
