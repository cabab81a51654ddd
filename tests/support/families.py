"""Tiny configs of every family that is tried through our attention: those that must agree, those to be refused.

A name is transformers' model type, with a word after it where one type is tried in several shapes. Sliding windows are
six tokens, so that they bite in the first prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

VOCABULARY = 131
COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # tied, random and scaled up, the last token would answer itself
}
WINDOW = {"sliding_window": 6}
ALTERNATING = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FULL = {"layer_types": ["full_attention"] * 2}
EXPERTS = {  # families name the same things differently and ignore each other's names
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {  # multi-head latent attention, sent to the attention function unfolded; value dim differs from key dim
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 10,
}
GPT2_NAMES = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "n_inner": 48}
NO_IMAGES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA3N = {
    **WINDOW,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
}
GEMMA4 = {
    **ALTERNATING,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCABULARY,
    "global_head_dim": 16,  # full layers have longer heads than sliding ones
    "num_kv_shared_layers": 0,
}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    """The settings of rotary positions that are stretched to four times the trained length."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **more}}


_GROUPS: list[tuple[dict[str, Any], str]] = [
    (
        {},
        "apertus arcee biogpt bitnet cohere ernie4_5 gemma glm glm4 gpt_neox granite helium hunyuan_v1_dense "
        "hyperclovax internlm3 iquestcoder jais2 llama ministral3 moshi nanochat nemotron olmo olmo2 "
        "persimmon phi qwen3 seed_oss stablelm",
    ),
    (
        EXPERTS,
        "dots1 flex_olmo glm4_moe granitemoe granitemoeshared hy_v3 minimax_m2 minimax_m3_vl_text olmoe "
        "phimoe qwen3_moe solar_open",
    ),
    (ALTERNATING, "cohere2 cwm exaone4 gemma3_text granite_swa ministral olmo3 vaultgemma"),
    (
        {**EXPERTS, **ALTERNATING},
        "afmoe beam cohere2_moe exaone_moe flint gpt_oss granitemoe_swa kolibri1 laguna mellum mimo_v2_flash",
    ),
    ({**EXPERTS, **LATENT}, "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite"),
    (WINDOW, "mistral phi3 starcoder2"),
]  # settings, and the families that need no others
ACCEPTED: dict[str, dict[str, Any]] = {family: settings for settings, names in _GROUPS for family in names.split()} | {
    "gemma4_unified_text": GEMMA4,
    "gemma4_text": GEMMA4,
    "lfm2": FULL,
    "youtu": LATENT,
    "minicpm3": LATENT,
    "gpt_bigcode": GPT2_NAMES,
    "gpt2": GPT2_NAMES,
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "cohere_compass_text": {
        **ALTERNATING,
        "rope_parameters": {
            layers: {"rope_type": "default", "rope_theta": theta}
            for layers, theta in (("sliding_attention", 10000.0), ("full_attention", 50000.0))
        },
    },
    "ctrl": {**GPT2_NAMES, "dff": 48},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 16, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1},
    "gemma2": {**ALTERNATING, "query_pre_attn_scalar": 12},
    "gemma3": {
        "text_config": {**COMMON, **ALTERNATING},
        "vision_config": {**NO_IMAGES, "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4,
    },
    "gemma3n_text": GEMMA3N,
    "gemma3n_text shared-kv": {**GEMMA3N, "num_kv_shared_layers": 2},
    "gemma4": {
        "text_config": {**COMMON, **GEMMA4},
        "vision_config": {**NO_IMAGES, "head_dim": 8, "global_head_dim": 8},
    },
    "gemma4_text experts-k-is-v": {
        **GEMMA4,
        **EXPERTS,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "top_k_experts": 2,
    },
    "gemma4_text shared-kv": {
        **GEMMA4,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "granitemoehybrid": {**EXPERTS, **FULL, "mamba_n_heads": 4, "mamba_d_head": 16},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": [2, 2], "num_shared_expert": [1, 1]},
    "jetmoe": {**EXPERTS, "kv_channels": 8},
    "lfm2_moe": {**EXPERTS, **FULL, "num_dense_layers": 1},
    "llama linear-rope": rope("linear"),
    "llama llama3-rope": rope("llama3", original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0),
    "llama yarn-rope": rope("yarn", original_max_position_embeddings=32),
    "longcat_flash": {
        **LATENT,
        "head_dim": 4,
        "num_layers": 1,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4,
        "moe_topk": 2,
        "zero_expert_num": 1,
    },
    "ministral3 scaled-queries": rope("yarn", original_max_position_embeddings=16, llama_4_scaling_beta=0.1),
    "mixtral": {**EXPERTS, **WINDOW},
    "modernbert-decoder": {**ALTERNATING, "local_attention": 12},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen2": {**ALTERNATING, "use_sliding_window": True},
    "qwen2_moe": {**EXPERTS, "decoder_sparse_step": 2},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm parallel": {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
}

GPTJ_NAMES = {**GPT2_NAMES, "rotary_dim": 4}
LONG_ROPE = rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=32)

_OTHER_LAYERS = (
    "deepseek_v32 deepseek_v4 falcon_h1 jamba kimi_linear lfm3 mamba minimax nemotron_h qwen3_5_text "
    "qwen3_next recurrent_gemma zaya"
)
# settings, and the name of the check that must refuse them
REFUSED: dict[str, tuple[dict[str, Any], str]] = {family: ({}, "layer types") for family in _OTHER_LAYERS.split()} | {
    "bert": ({}, "logits"),  # bidirectional: only the comparison sees it
    "bloom": ({"n_head": 4}, "attention backend"),
    "codegen": (GPTJ_NAMES, "attention backend"),
    "diffllama": ({}, "one attention call a layer"),
    "doge": ({}, "attention mask"),  # a learned mask, which random weights leave without effect
    "falcon": ({"head_dim": None}, "attention backend"),
    "gpt_neo": (
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        "attention backend",
    ),
    "gptj": (GPTJ_NAMES, "attention backend"),
    "granitemoehybrid": ({**EXPERTS, "mamba_n_heads": 4, "mamba_d_head": 16}, "layer types"),
    "hrm_text": ({}, "one attention call a layer"),  # goes through its layers several times
    "llama dynamic-rope": (rope("dynamic"), "rope type"),
    "llama4_text": ({"num_local_experts": 2, "intermediate_size_mlp": 64}, "layer types"),
    "minimax_m3_vl_text": ({"layer_types": ["minimax_m3_sparse"] * 2}, "layer types"),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2, "head_dim": None}, "attention backend"),
    "phi3 long-rope": (LONG_ROPE, "rope type"),
    # these two keep the window in the eager mask and do not send it: right in short prompts, wrong in long ones
    "phimoe windowed": ({**EXPERTS, "sliding_window": 64}, "logits"),
    "qwen2_moe windowed": ({**EXPERTS, **ALTERNATING, "sliding_window": 64, "use_sliding_window": True}, "logits"),
    "rwkv": ({}, "attention backend"),
    "xglm": ({"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}, "attention backend"),
}


@pytest.fixture(scope="module")
def one_thread():
    """Matrices this small are slower on two threads, and much slower on cores that others use."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write_config(folder: Path, family: str, settings: dict[str, Any]) -> str:
    """Path of a config.json of the family, ``COMMON`` overlaid by ``settings``; None takes a key away.

    Skips the test where the installed transformers does not know the family.
    """
    model_type = family.split()[0]
    if model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no model type {model_type!r}")
    values = {**COMMON, **settings, "model_type": model_type}
    path = folder / f"{family.replace(' ', '-')}.json"
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return str(path)
