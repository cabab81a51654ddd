"""Which families may run through our attention: the gate accepts and refuses by trying, and names the failed check."""

from __future__ import annotations

import json

import pytest
import torch

import engine.attention
from engine.config import EngineConfig
from engine.kv_budget import LayerKV
from engine.model_loader import load_model

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 211,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
ACCEPTED = {
    "mistral": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma": {},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "phi3": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},  # attention sinks and sliding windows
    "nemotron": {},  # drops unknown kwargs on the way to attention
    "deepseek_v3": {  # value dim differs from key dim
        "head_dim": None,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 20,
        "first_k_dense_replace": 1,
    },
}
REFUSED = {
    "bloom": ({"n_head": 4}, "attention backend"),
    "diffllama": ({}, "one attention call a layer"),
    "llama4_text": ({"num_local_experts": 2, "intermediate_size_mlp": 64}, "layer types"),
    "recurrent_gemma": ({}, "layer types"),
    "bert": ({}, "logits"),  # bidirectional: only the comparison of logits sees it
}


def write_config(folder, model_type: str, settings: dict) -> str:
    values = {**COMMON, **settings, "model_type": model_type}
    path = folder / f"{model_type}.json"
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return str(path)


@pytest.mark.parametrize("model_type", ACCEPTED)
def test_family_is_accepted(tmp_path, model_type):
    loaded = load_model(EngineConfig(model=write_config(tmp_path, model_type, ACCEPTED[model_type]), device="cpu"))
    assert len(loaded.kv_shape.layers) == 2
    if model_type == "deepseek_v3":
        assert loaded.kv_shape.layers[0] == LayerKV(4, 24, 20)


@pytest.mark.parametrize("model_type", REFUSED)
def test_family_is_refused_by_the_name_of_the_check(tmp_path, model_type):
    settings, check = REFUSED[model_type]
    with pytest.raises(ValueError, match=f"model type '{model_type}' is refused by the load gate, check '{check}'"):
        load_model(EngineConfig(model=write_config(tmp_path, model_type, settings), device="cpu"))


def test_rope_that_depends_on_the_batch_is_refused(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match="check 'rope type'"):
        load_model(EngineConfig(model=write_config(tmp_path, "llama", {"rope_parameters": rope}), device="cpu"))


@pytest.mark.parametrize("fault", ["scale", "position", "window"])
def test_logits_check_sees_an_attention_that_is_slightly_wrong(tmp_path, monkeypatch, fault):
    """Mutation of what the gate guards: a wrong scale, V of a neighbour, a forgotten sliding window."""
    right = engine.attention.AttentionHost.__call__

    def wrong(self, layer, q, k, v, **options):
        if fault == "scale":
            options["scale"] *= 1.1
        if fault == "position":
            v = torch.roll(v, 1, dims=0)
        if fault == "window":
            options["sliding_window"] = None
        return right(self, layer, q, k, v, **options)

    path = write_config(tmp_path, "mistral", {"sliding_window": 6})
    load_model(EngineConfig(model=path, device="cpu"))
    monkeypatch.setattr(engine.attention.AttentionHost, "__call__", wrong)
    with pytest.raises(ValueError, match="check 'logits'"):
        load_model(EngineConfig(model=path, device="cpu"))


def test_config_that_transformers_cannot_take_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="transformers cannot load model"):
        load_model(EngineConfig(model=write_config(tmp_path, "t5", {}), device="cpu"))
    with pytest.raises(ValueError, match="transformers cannot load model"):
        load_model(EngineConfig(model=write_config(tmp_path, "no_such_family", {}), device="cpu"))
