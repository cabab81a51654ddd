"""A sweep of vLLM's CPU build, launched by its preset. VLLM_PYTHON names a Python that has it."""

from __future__ import annotations

import json
import os

import pytest

from tests.integration.test_target_transformers import MODEL
from tests.support.sweep_parts import Bench, complaints, manifest

ENGINE = {
    "device": "cpu", "page_size": 16, "kv_budget": "4MiB", "max_model_len": 256, "max_num_seqs": 8,
    "max_num_batched_tokens": 256, "enable_prefix_caching": True, "num_threads": 2,
}  # fmt: skip
BYTES_A_TOKEN = 2 * 2 * 2 * 32 * 4  # layers x (K and V) x KV heads x head_dim x float32


@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no Python with vLLM's CPU build")
@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_sweep_of_vllm(tmp_path, endpoint):
    bench = Bench(tmp_path, {"KVBENCH_NO_CALIBRATION": "1"})
    (tmp_path / "tiny.json").write_text(json.dumps(MODEL | {"head_dim": 32}))
    path = bench.write(
        model={"config": "tiny.json", "dtype": "float32"}, engine=ENGINE, sweep={"preemption_mode": ["swap"]},
        load={
            "endpoint": endpoint, "concurrency": [2, 4], "repeats": 1, "cache_state": "cold", "timeout_s": 60.0,
            "num_requests": 12,
            "prompts": {
                "kind": "synthetic", "shared_prefix": {"tokens": 64, "share": 1.0},
                "classes": [{"name": "a", "share": 1.0, "prompt_tokens": [4, 32], "output_tokens": [4, 12]}],
            },
        },
    )  # fmt: skip
    words = [str(path), "--target", "vllm", "--target-args", "--enforce-eager", "--no-report"]
    done = bench.sweep(*words, fake=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = bench.only_run()
    assert complaints(run) == []  # among them: hits outside what the prompts' own prefixes allow
    facts = manifest(run)
    assert facts["backend"] == "vllm" and "page_size is 32 instead of 16" in done.stdout
    assert "skipped paged-p32-swap: vLLM cannot have preemption_mode swap" in " ".join(facts["notes"])
    (served,) = facts["servers"].values()
    assert served["versions"]["vllm"] and served["engine"]["page_size"] == 32
    cores = sorted(os.sched_getaffinity(0))
    assert served["resolved"]["bound_cores"] == cores[:2] and facts["num_threads"] == 2  # left to itself: one of two
    assert served["server"]["notes"] == []
    command = served["server"]["command"]
    given = int(command[command.index("--kv-cache-memory-bytes") + 1])
    assert 0.98 * (4 << 20) <= given <= 4 << 20  # without what our page table takes, as every other server gets
    pages = given // (32 * BYTES_A_TOKEN)
    assert facts["capacity"]["paged-p32"]["num_pages"] == pages
    assert facts["capacity"]["paged-p32"]["capacity_tokens"] == 32 * pages
    for cell in ("paged-p32-c2", "paged-p32-c4"):
        told = json.loads((run / "cells" / cell / "loads" / "1" / "done.json").read_text())
        # The cache was emptied before each load, and then held the 64 shared tokens for all but the first users.
        users = int(cell[-1])
        assert 64 * (12 - users) <= told["prefix_cache"]["hits"] <= 64 * 11
        assert told["metrics"]["completed"] == 12
        assert told["metrics"]["total_cached_tokens"] == told["prefix_cache"]["hits"]  # each request was told
        counters = json.loads((run / "cells" / cell / "loads" / "1" / "counters.json").read_text())
        assert counters["generation_tokens_total"] == told["metrics"]["total_output_tokens"]
        assert 0 <= counters["kv_cache_usage_perc_peak"] < 1  # polled four times a second: it may miss a short load
