"""The configs that ship: their dimensions give the parameter counts and KV sizes that their makers publish."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvbench_engine.model.spec import find_model, shipped_models

# Parameters as counted in the published checkpoints (tied embeddings once); KV bytes a token at 2 bytes a value,
# worked out from layers x KV heads x (128 + 128) x 2; positions the model was trained for.
PUBLISHED = {
    "qwen3-0.6b": (596_049_920, 114_688, 40_960),
    "qwen3-8b": (8_190_735_360, 147_456, 40_960),
    "qwen3-14b": (14_768_307_200, 163_840, 40_960),
    "llama-3.1-8b": (8_030_261_248, 131_072, 131_072),
    "llama-3.1-70b": (70_553_706_496, 327_680, 131_072),
}


def test_every_large_config_that_ships_is_checked_here():
    small = {"deepseek-17m", "gemma3-22m", "llama-20m", "llama-32m", "kvbench-tiny"}
    assert set(shipped_models()) - set(PUBLISHED) == small


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_kv_bytes_are_the_published_ones(name):
    """The module tree is built without memory: counted is what transformers would allocate."""
    parameters, kv_bytes, positions = PUBLISHED[name]
    spec = find_model(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.config), dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert spec.kv_shape("bfloat16").bytes_per_slot == kv_bytes
    assert spec.max_positions == positions
    assert spec.default_dtype == "bfloat16"
    assert model.config.architectures == [type(model).__name__]

    attention = model.model.layers[0].self_attn  # what transformers makes of the config, not what the config says
    assert len(model.model.layers) == spec.config["num_hidden_layers"]
    assert attention.q_proj.out_features == spec.config["num_attention_heads"] * 128
    assert attention.k_proj.out_features == attention.v_proj.out_features == 8 * 128
    assert hasattr(attention, "q_norm") == name.startswith("qwen3")
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == spec.config["tie_word_embeddings"]


@pytest.mark.parametrize("name", shipped_models())
def test_no_key_of_a_config_is_one_that_transformers_does_not_know(name):
    """A misspelt key would be carried along in silence, and the default used in its place."""
    text = json.loads(find_model(name, "dummy").config_path.read_text(encoding="utf-8"))
    known = set(AutoConfig.for_model(text["model_type"]).to_dict()) | {"dtype"}
    assert set(text) <= known
