"""Outlier channels are measured, and K is balanced where that leaves every other bit of the model as it was."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvbench_engine.build import assemble_engine
from kvbench_engine.config import EngineConfig
from kvbench_engine.describe import describe_engine
from kvbench_engine.execution import executor
from kvbench_engine.model import kv_outliers, kv_scales
from kvbench_engine.model.kv_outliers import balance_keys
from kvbench_engine.model.loader import LoadedModel, load_model
from kvbench_engine.sequence import Request, SamplingParams
from kvbench_engine.teacher_forcing import with_room
from kvbench_engine.tiny_model.outliers import scale_key_channels
from tests.support.hf_parts import COMMON

IDS = torch.arange(3, 99)[None]


def model_of(tmp_path, model_type: str, dtype: str = "float32", factor: float = 1.0, **settings) -> LoadedModel:
    """A tiny model of random weights, one pair of whose channels of K is ``factor`` times larger."""
    config = AutoConfig.for_model(**{**COMMON, "model_type": model_type, **settings})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # biases and norms are zeros and ones, which would hide what is forgotten
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "attn" in name:
                parameter += torch.randn(len(parameter)) / 4
            if "k_proj" in name or "k_norm" in name:
                parameter[[0, 1, 8, 9]] *= 6  # whole pairs, whichever way RoPE makes them
    if factor != 1:
        scale_key_channels(model, factor)
    model.save_pretrained(tmp_path)
    return load_model(EngineConfig(model=str(tmp_path), device="cpu", dtype=dtype, kernel_backend="torch"))


@torch.inference_mode()
def logits_of(loaded: LoadedModel) -> torch.Tensor:
    loaded.model.set_attn_implementation("eager")
    return loaded.model(input_ids=IDS, use_cache=False).logits


full = partial(pytest.param, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [("llama", "bfloat16"), ("qwen3", "float32"), ("phi3", "float32"), ("cohere", "float32"), full("llama", "float32"),
     full("qwen2", "float32"), full("olmo2", "float32")],
)  # fmt: skip
def test_balance_changes_what_is_stored_and_no_bit_of_the_logits(tmp_path, model_type, dtype):
    loaded = model_of(tmp_path, model_type, dtype)
    expected, before = logits_of(loaded), {name: p.clone() for name, p in loaded.model.named_parameters()}
    found = balance_keys(loaded)
    assert found.why_unbalanced == "" and 1 < found.k_stored < found.k
    assert torch.equal(logits_of(loaded), expected)
    after = loaded.model.named_parameters()
    changed = {name.rsplit(".", 2)[-2] for name, p in after if not torch.equal(p, before[name])}
    assert changed and all("q_" in name or "k_" in name or "qkv" in name for name in changed)
    assert balance_keys(loaded) is found  # once a model


@pytest.mark.parametrize("factor", [100.0, 1e4, 1e6])
def test_an_outlier_is_told_with_its_factor_and_is_gone_from_what_is_stored(tmp_path, factor):
    plain = balance_keys(model_of(tmp_path / "plain", "llama"))
    found = balance_keys(model_of(tmp_path / "outlier", "llama", factor=factor))
    assert 0.2 * factor < found.k < 5 * factor
    assert found.k_stored < 3 and (found.v, found.v_layer) == (plain.v, plain.v_layer)


@pytest.mark.parametrize(
    ("model_type", "dtype", "why"),
    [
        ("llama", "float16", "float16"),
        ("gpt2", "float32", "other layers"),
        ("gemma3_text", "float32", "change"),  # whose norms multiply by 1 + weight
    ],
)
def test_a_model_whose_bits_would_change_is_left_as_it_is(tmp_path, model_type, dtype, why):
    loaded = model_of(tmp_path, model_type, dtype)
    before = {name: p.clone() for name, p in loaded.model.named_parameters()}
    found = balance_keys(loaded)
    assert why in found.why_unbalanced and found.k_stored == found.k > 1
    assert all(torch.equal(p, before[name]) for name, p in loaded.model.named_parameters())


def test_a_model_of_nan_has_figures_that_json_can_hold(tmp_path):
    loaded = model_of(tmp_path, "llama")
    with torch.no_grad():
        loaded.model.model.layers[0].self_attn.k_proj.weight[3] = math.nan
    assert all(math.isfinite(x) for x in dataclasses.astuple(balance_keys(loaded))[:-1])


def served(loaded: LoadedModel, kv_cache_dtype: str):
    config = EngineConfig(model="x", device="cpu", kv_cache_dtype=kv_cache_dtype, kernel_backend="torch")
    engine = assemble_engine(with_room(config, loaded, 2, 64), loaded)
    engine.add_request(Request("0", tuple(range(2, 40)), SamplingParams(max_tokens=8, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    return engine


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head"])
@pytest.mark.parametrize("margin", [2.0, 0.01])
def test_values_that_fp8_cuts_off_are_counted_and_the_outliers_are_told(tmp_path, monkeypatch, kv_cache_dtype, margin):
    monkeypatch.setattr(executor, "SATURATION_EVERY", 1)
    monkeypatch.setattr(kv_scales, "MARGIN", margin)
    loaded = model_of(tmp_path, "llama")
    engine = served(loaded, kv_cache_dtype)
    stats = engine.stats()
    assert (stats.kv_sampled_values > 0) == kv_cache_dtype.startswith("fp8")
    assert (stats.kv_saturated_values > 0) == (kv_cache_dtype.startswith("fp8") and margin < 1)
    assert stats.kv_saturated_values <= stats.kv_sampled_values
    assert describe_engine(engine)["kv_outliers"] == dataclasses.asdict(getattr(loaded.model, kv_outliers.MEASURED))
