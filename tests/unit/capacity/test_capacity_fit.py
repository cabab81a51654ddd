"""What is left for KV: against vLLM's own logs, and by hand arithmetic."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.capacity.answer import answer, as_dict, sentences
from kvbench.capacity.fit import GIB, PlannedLoad, Settings, memory_of, pick, smallest_fits
from kvbench.capacity.gpus import find_gpu, known_gpus, parse_gpus, parse_prices
from kvbench.capacity.model import known_models, plan_model
from kvbench.capacity.weights import weights_of
from kvbench.common.errors import UsageError
from kvbench_engine.config import EngineConfig
from kvbench_engine.kv.budget import capacity_of, page_table_bytes

SHARED = Path(__file__).resolve().parents[4] / "shared" / "gpu_measured"
MEASURED = Path(os.environ.get("KVBENCH_GPU_MEASURED", SHARED))


def memory(name, gpu, count=1, quantization=None, **settings):
    model = plan_model(name)
    return memory_of(model, weights_of(model, quantization), find_gpu(gpu), count, Settings(**settings))


@pytest.mark.parametrize(
    ("name", "count", "quantization", "gib", "within"),
    [  # logs of vLLM at --gpu-memory-utilization 0.9 on H100: github.com/llm-d/llm-d-benchmark,
        # config_explorer/empirical-vllm-memory-results.md
        ("Llama-3.1-8B", 1, None, 51.38, 0.03),
        ("Qwen3-0.6B", 1, None, 64.45, 0.03),
        ("Llama-3.3-70B", 2, "fp8", 32.00, 0.03),
        ("Qwen3-32B", 2, None, 34.49, 0.03),
        ("gpt-oss-20b", 1, None, 50.28, 0.03),
        ("Qwen3-32B", 1, None, 4.45, 0.11),  # so little is left that 0.4 GiB are a tenth of it
    ],
)
def test_kv_of_an_h100_is_what_vllm_logged(name, count, quantization, gib, within):
    assert memory(name, "H100-80GB", count, quantization).kv / GIB == pytest.approx(gib, rel=within)


def test_gpt_oss_120b_needs_more_than_the_default_share_of_an_h100():
    """The same logs say 3.33 GiB at 0.9; their weights, activations and context, 71.89 GiB, leave that at 0.95."""
    assert memory("gpt-oss-120b", "H100-80GB").kv < 0
    assert memory("gpt-oss-120b", "H100-80GB", max_num_seqs=256).kv > 0  # the second way out that the answer names
    assert memory("gpt-oss-120b", "H100-80GB", gpu_memory_utilization=0.95).kv / GIB == pytest.approx(3.33, abs=0.5)


@pytest.mark.skipif(not MEASURED.is_dir(), reason="the measured runs are not in ../shared/gpu_measured")
def test_the_measured_run_has_the_pages_the_step_and_the_memory_that_are_planned_with():
    meta = json.loads((MEASURED / "runs/RTX4090/Llama-3.1-8B/meta.json").read_text())
    found = memory("Llama-3.1-8B", "RTX-4090")
    assert found.gpu.memory_bytes == pytest.approx(meta["hardware"]["device_total_memory_bytes"], rel=0.001)
    arguments = meta["engine_kwargs"]
    assert (found.step.tokens, found.step.sequences) == (arguments["max_num_batched_tokens"], arguments["max_num_seqs"])
    pages = found.at_once(meta["kv_cache"]["block_size"])
    assert pages == pytest.approx(meta["kv_cache"]["num_gpu_blocks"], rel=0.02)


def test_the_question_of_the_guide_by_hand():
    """Which GPU for Qwen3-32B, 40 users, 8k context, FP8 KV?"""
    model, settings, load = (
        plan_model("Qwen/Qwen3-32B"),
        Settings(kv_cache_dtype="fp8_e4m3"),
        PlannedLoad(8192, 40, 40_960),
    )
    kv = 40 * 8192 * 64 * 8 * (128 + 128)  # users x tokens x layers x KV heads x (K + V) x 1 byte
    assert kv == 40 * 2**30
    weights = 32_762_123_264 * 2
    sampling, states = 1024 * 151_936 * 35, 2 * 8192 * 5120 * 2
    left_h200 = 0.9 * 139.8 * 2**30 - weights - sampling - states - 0.13 * 2**30
    found = smallest_fits(model, weights_of(model), known_gpus(), settings, load)
    chosen = pick(found, {})
    assert (chosen.gpu.name, chosen.count) == ("H200", 1)
    assert chosen.kv == pytest.approx(left_h200, abs=4) and left_h200 > kv
    one_h100 = 0.9 * 79.18 * 2**30 - weights - sampling - states - 0.13 * 2**30
    two_h100 = 2 * (0.9 * 79.18 * 2**30 - weights / 2 - sampling - states - 0.55 * 2**30)
    assert one_h100 < kv < two_h100
    counts = {m.gpu.name: m.count for m in found}
    assert counts["H100-80GB"] == 2 and "T4" not in counts
    step_bytes = weights - 151_936 * 5120 * 2 + kv  # the rows of the embedding are not read
    best = chosen.tokens_per_s(load)
    assert best == pytest.approx(40 * 4.8e12 / step_bytes, rel=1e-6)


WINDOWED = [model.name for model in known_models() if any(group.window for group in model.layers)]


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize("name", WINDOWED)
def test_the_built_in_engine_holds_as_many_sequences_of_layers_with_windows(name, layout):
    """Of the same bytes, beside its page tables; contiguous: of the longest reservations."""
    model, length = plan_model(name), 8192
    planned = memory(name, "H200", max_num_batched_tokens=512)
    config = EngineConfig(model=name, layout=layout, max_model_len=length + 1, max_num_batched_tokens=512)
    if layout == "contiguous":
        config = replace(config, max_model_len=length)
    tables = page_table_bytes(config, model.kv_shape())
    capacity = capacity_of(config, model.kv_shape(), planned.kv + tables)
    at_once = planned.at_once(length, contiguous=layout == "contiguous")
    assert capacity.max_concurrency(length) == at_once > planned.kv // (length * model.token_bytes())


def test_cheapest_by_price_else_fewest():
    model = plan_model("Qwen3-32B")
    found = smallest_fits(model, weights_of(model), known_gpus(), Settings(), PlannedLoad(4096, 20, 40_960))
    assert pick(found, {"H200": 4.0, "A100-80GB": 1.5}).gpu.name == "A100-80GB"  # 2 x 1.5 < 4.0
    assert pick(found, {"H200": 2.9, "A100-80GB": 1.5}).gpu.name == "H200"
    assert pick(found, {"T4": 0.2}) is None and pick([], {}) is None
    assert pick(found, {}).count == 1


def test_all_users_fit_or_not_at_the_very_last_page():
    found = memory("llama-3.1-8b", "L40S")
    most = found.at_once(1000)
    assert most == found.kv // (63 * 16 * 131_072)  # 1,000 tokens take 63 pages
    assert found.fits(PlannedLoad(1000, most, 8192)) and not found.fits(PlannedLoad(1000, most + 1, 8192))
    assert found.at_once(8192, contiguous=True) == found.kv // (8192 * 131_072)
    shown = as_dict(answer(plan_model("llama-3.1-8b"), Settings(), max_model_len=8192, gpus=parse_gpus("H100")))
    rows = shown["memory"]["at_once"]
    assert [row["tokens"] for row in rows] == [1024, 4096, 8192]
    assert len({row["contiguous"] for row in rows}) == 1  # whatever the length
    assert rows[0]["paged"] == pytest.approx(8 * rows[2]["paged"], abs=8)
    assert rows[-1]["paged"] == rows[-1]["contiguous"]
    with pytest.raises(UsageError, match="40960"):
        answer(plan_model("Qwen3-32B"), Settings(), context=50_000)
    assert answer(plan_model("Qwen3-32B"), Settings(), context=50_000, max_model_len=65_536).load.context == 50_000


@pytest.mark.parametrize(
    ("text", "found"),
    [("4xA100-80GB", (4, "A100-80GB")), ("4 x a100-80gb", (4, "A100-80GB")), ("L4", (1, "L4")),
     ("NVIDIA RTX 4090", (1, "RTX-4090")), ("NVIDIA H100 80GB HBM3", (1, "H100-80GB")),
     ("4xA101-80GB", "A100-80GB"), ("0xL4", "4xA100"), ("H10O", "H100-80GB")],
)  # fmt: skip
def test_gpus_as_they_are_written_and_unknown_ones_are_told_the_nearest(text, found):
    if isinstance(found, str):
        with pytest.raises(UsageError, match=found):
            parse_gpus(text)
    else:
        count, gpu, *_ = parse_gpus(text)
        assert (count, gpu.name) == found
    for prices in ("L4", "L4=free", "L4=-1", "L4=inf", "Q9=1"):
        with pytest.raises(UsageError):
            parse_prices(prices)


@pytest.mark.parametrize(
    ("name", "gpus", "settings", "said"),
    [
        ("OPT-13B", "4xT4", {}, []),
        ("OPT-13B", "4xT4", {"kv_cache_dtype": "fp8_e4m3"}, ["FP8"]),
        ("Qwen2.5-7B", "2xV100", {"kv_cache_dtype": "fp8_e4m3"}, ["bfloat16", "FP8"]),
        ("OPT-13B", "2xL4", {"kv_cache_dtype": "fp8_e4m3"}, []),
        ("llama-3.1-8b", "4xA100", {}, ["256"]),  # more are in memory than run at once
        ("llama-3.1-8b", "4xA100", {"max_num_seqs": 1024}, []),
        ("gpt-oss-120b", "H100", {}, ["--gpu-memory-utilization"]),
        ("llama-3.1-70b", "H100", {}, []),  # the weights alone are too large
        ("Qwen3-32B", "H100", {}, ["--max-model-len"]),
    ],
)
def test_what_else_there_is_to_know_about_named_gpus(name, gpus, settings, said):
    told = sentences(answer(plan_model(name), Settings(**settings), gpus=parse_gpus(gpus)))
    assert len(told) == 1 + len(said) and all(word in line for word, line in zip(said, told[1:], strict=True))
