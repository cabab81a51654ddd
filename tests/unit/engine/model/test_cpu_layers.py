"""Fused layers leave a model's logits as they were, with our attention and with transformers' own."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvbench_engine.config import EngineConfig
from kvbench_engine.describe import describe_engine
from kvbench_engine.model import fused_layers
from kvbench_engine.model.attention import FUSION, AttentionHost, StepTensors, install
from kvbench_engine.model.cpu_layers import use_cpu_layers
from kvbench_engine.model.loader import load_model, serve_another
from kvbench_engine.model.support_check import measure_kv
from kvbench_kernels import get_backend
from kvbench_kernels.layers_cpu import PackedLinear
from kvbench_kernels.numba_bf16 import has_bf16
from tests.support.hf_parts import loaded, make_engine, model_folder

SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 160, "max_position_embeddings": 64, "pad_token_id": 0,
    "initializer_range": 0.3,
}  # fmt: skip
LAYERS = 2
BACKEND = get_backend("numba")
MINISTRAL_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
# (attention modules, MLPs, norms, whole layers) that are fused in two layers; what is left alone, and why.
EXPECTED = {
    "llama": (2, 2, 5, 2),
    "qwen2": (2, 2, 5, 2),  # Q, K and V with bias
    "qwen3": (2, 2, 9, 2),  # a norm on each head of Q and K
    "mistral": (2, 2, 5, 2),  # a sliding window
    "granite": (2, 2, 5, 0),  # multiplies what it adds to the residual
    "phi3": (2, 2, 5, 2),  # Q, K and V in one matrix, gate and up in another
    "gemma2": (2, 2, 9, 2),  # gelu; norms that add 1 to the weight, after attention and MLP too
    "gemma3_text": (2, 2, 13, 2),
    "olmo": (0, 2, 0, 0),  # clips Q, K and V; layer norms
    "ministral3": (0, 2, 5, 2),  # scales Q by the position, from a position on that no short prompt reaches
    "glm": (0, 2, 5, 2),  # rotates pairs of neighbours
}


def make_model(model_type: str, **settings: int) -> PreTrainedModel:
    torch.manual_seed(3)
    extra = {
        "mistral": {"sliding_window": 5},
        "granite": {"residual_multiplier": 0.5},
        "gemma2": {"sliding_window": 5},
        "gemma3_text": {"sliding_window": 5},
        "phi3": {"intermediate_size": 128},  # of whole panels
        "glm": {"intermediate_size": 128},
        "olmo": {"clip_qkv": 40.0},  # of values around 3
        "ministral3": {"rope_parameters": MINISTRAL_ROPE},
    }.get(model_type, {})
    config = AutoConfig.for_model(**{**SHAPE, **extra, **settings}, model_type=model_type)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():  # norms of ones and zeros would hide what they do
        if parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.3, mean=1.0 if name.endswith("weight") else 0.0)
    return model.requires_grad_(False)


def use_layers(model: PreTrainedModel) -> tuple[int, ...]:
    """Attention modules, MLPs, norms and whole layers that were fused."""
    kv_shape, query_heads = measure_kv(model, model.dtype.itemsize)
    use_cpu_layers(model, BACKEND, kv_shape, query_heads)
    fused = getattr(model, FUSION).fused
    assert "Error" not in str(getattr(model, FUSION))
    return tuple(fused[kind] for kind in ("attention", "MLPs", "norms", "layers"))


def paged_logits(model: PreTrainedModel, ids: torch.Tensor, keep: torch.Tensor | int = 0) -> torch.Tensor:
    """One prompt in one step through our attention, pages out of order; the logits of the tokens ``keep`` (0: all)."""
    kv_shape, _ = measure_kv(model, model.dtype.itemsize)
    size, page = ids.shape[1], 4
    starts = torch.tensor([[8, 0, 4, 12]])
    host = AttentionHost(BACKEND, kv_shape, 16, (page,), next(model.parameters()), fused_layers=True)
    install(model, host)
    at = torch.arange(size)
    host.begin(StepTensors.of_prompt(starts[0, at // page] + at % page, starts))
    with getattr(model, FUSION).for_tokens(keep, size):
        return model(input_ids=ids, position_ids=at[None], use_cache=False, logits_to_keep=keep).logits


def ring(model_types: Iterable[str], main: set[str]) -> list[Any]:
    return [name if name in main else pytest.param(name, marks=pytest.mark.full) for name in model_types]


@torch.inference_mode()
@pytest.mark.parametrize("model_type", ring(EXPECTED, {"llama", "qwen3", "phi3", "gemma2", "olmo", "glm"}))
def test_logits_stay_what_they_were(model_type):
    model, ids = make_model(model_type), torch.arange(14)[None] * 11 % SHAPE["vocab_size"]
    expected = model(input_ids=ids, use_cache=False).logits
    assert use_layers(model) == EXPECTED[model_type], getattr(model, FUSION)
    paged = paged_logits(model, ids)
    few = torch.tensor([3, 13, 3])  # as a captured step pads them
    torch.testing.assert_close(paged_logits(model, ids, few), expected[:, few], atol=2e-4, rtol=1e-4)
    model.set_attn_implementation("eager")
    for logits in (paged, model(input_ids=ids, use_cache=False).logits, model(input_ids=ids, use_cache=True).logits):
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    left = [module for module in model.modules() if type(module) is nn.Linear]
    embedding = model.get_input_embeddings().weight
    assert all(module.weight is embedding for module in left), "all linear layers are packed but a tied head"


@torch.inference_mode()
@pytest.mark.parametrize(
    "model_type", ring(["llama", "qwen2", "qwen3", "phi3", "gemma2", "olmo", "ministral3"], {"llama", "gemma2"})
)
def test_logits_in_bfloat16_are_as_near_to_float64_as_transformers_own(model_type):
    """And what is fused is what is fused in float32, where the CPU multiplies bfloat16."""
    model, ids = make_model(model_type).bfloat16(), torch.arange(14)[None] * 11 % SHAPE["vocab_size"]
    own = model(input_ids=ids, use_cache=False).logits
    exact = copy.deepcopy(model).double()(input_ids=ids, use_cache=False).logits
    fused = use_layers(model)
    error, allowed = (
        ((logits - exact).square().mean() / exact.square().mean()).sqrt() for logits in (paged_logits(model, ids), own)
    )
    assert error <= 1.3 * allowed
    if has_bf16():
        assert fused == EXPECTED[model_type], getattr(model, FUSION)


@torch.inference_mode()
def test_a_module_that_computes_something_else_stays():
    """Names and children as they should be, but other arithmetic: each keeps its own forward, and the rest is fused."""
    model = make_model("llama", num_hidden_layers=4)
    first, second, third, fourth = model.model.layers
    first.mlp.forward = lambda x: first.mlp.down_proj(first.mlp.act_fn(first.mlp.up_proj(x)) * first.mlp.gate_proj(x))
    norm = second.input_layernorm
    norm.forward = lambda x: nn.functional.layer_norm(x, norm.weight.shape, norm.weight)
    attend = third.self_attn.forward
    third.self_attn.forward = lambda hidden_states, **more: attend(hidden_states=hidden_states.clamp(-40, 40), **more)
    whole = fourth.forward
    fourth.forward = lambda hidden_states, **more: whole(hidden_states, **more) * 1.01
    ids = torch.arange(14)[None]
    expected = model(input_ids=ids, use_cache=False).logits
    assert use_layers(model) == (3, 3, 8, 2)
    assert getattr(model, FUSION).left == {
        ("MLPs", "other numbers"): 1, ("norms", "other numbers"): 1, ("attention", "other numbers"): 1,
        ("layers", "norms that are not fused"): 1, ("layers", "other numbers"): 1,
    }  # fmt: skip
    torch.testing.assert_close(paged_logits(model, ids), expected, atol=2e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("mixes", [False, True])
def test_the_last_layer_computes_the_wanted_tokens_alone_unless_something_reads_the_others(monkeypatch, mixes):
    model, ids, rows = make_model("llama"), torch.arange(14)[None], []
    if mixes:
        norm = model.model.norm.forward
        model.model.norm.forward = lambda x: norm(x + x.mean(1, keepdim=True))
    expected = model(input_ids=ids, use_cache=False).logits
    assert use_layers(model)[-1] == LAYERS
    add_to = fused_layers.FusedMLP.add_to
    monkeypatch.setattr(fused_layers.FusedMLP, "add_to", lambda *args: rows.append(len(args[2])) or add_to(*args))
    for keep, computed in ((torch.tensor([0, 13]), 2), (torch.arange(7), 7), (torch.arange(8), 14), (0, 14)):
        got = paged_logits(model, ids, keep)
        torch.testing.assert_close(got, expected if isinstance(keep, int) else expected[:, keep], atol=2e-4, rtol=1e-4)
        assert rows == [14, 14 if mixes else computed]
        rows.clear()


@torch.inference_mode()
def test_a_model_whose_logits_change_is_given_back(monkeypatch):
    """The last check, of what no try-out of a single module sees."""
    model, ids = make_model("llama"), torch.arange(14)[None]
    monkeypatch.setattr(fused_layers, "logits_differ", lambda expected, got, dtype: "by 1 of their spread")
    expected = model(input_ids=ids, use_cache=False).logits
    assert use_layers(model) == (0, 0, 0, 0)
    assert ("layers", "the logits differ by 1 of their spread") in getattr(model, FUSION).left
    torch.testing.assert_close(paged_logits(model, ids), expected, atol=2e-4, rtol=1e-4)


def test_weights_are_held_once():
    model = make_model("llama")
    matrices = sum(m.weight.numel() for m in model.modules() if type(m) is nn.Linear)
    use_layers(model)
    left = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert left == model.get_input_embeddings().weight.numel(), "of the original matrices only the embedding is left"
    held, ends = 0, 0  # bytes of memory under all packed weights, those of parts counted once
    for start, size in sorted(
        (m.packed.data_ptr(), m.packed.nbytes) for m in model.modules() if type(m) is PackedLinear
    ):
        held += max(0, start + size - max(start, ends))
        ends = max(ends, start + size)
    # with AVX-512 the 96 and 160 outputs are packed as multiples of 64, on other CPUs without padding
    padding = 4 * LAYERS * 2 * 32 * SHAPE["hidden_size"] + 4 * 32 * SHAPE["hidden_size"]
    assert 4 * matrices <= held <= 4 * matrices + padding


def test_the_torch_backend_keeps_the_models_own_modules(tmp_path):
    for backend, fused in (("torch", False), ("auto", True)):
        model = loaded(model_folder(str(tmp_path), "llama-wide"), backend)
        engine = make_engine(model, "", slots=64, max_model_len=64, max_num_seqs=2)
        assert hasattr(engine.executor.model, FUSION) == fused == engine.executor.host.fused_layers
        told = describe_engine(engine)["resolved"]
        assert told["fused_layers"] == fused and ("torch has no kernels" in told["fused_layers_reason"]) != fused
    without = make_engine(model, "", slots=64, max_model_len=64, max_num_seqs=2, fused_layers=False)
    assert not without.executor.host.fused_layers


def test_the_threads_are_those_of_the_thread_that_computes(tmp_path):
    model, before = loaded(model_folder(str(tmp_path), "llama-wide"), "auto"), torch.get_num_threads()
    engine = make_engine(model, "", slots=64, max_model_len=64, max_num_seqs=2, num_threads=1)
    try:
        torch.set_num_threads(3)  # as in the HTTP thread of a forked server
        assert describe_engine(engine)["resolved"]["num_threads"] == 1
    finally:
        torch.set_num_threads(before)


def test_layers_that_are_not_wanted_are_not_tried_out(tmp_path):
    folder = model_folder(str(tmp_path), "llama-wide")
    model = load_model(EngineConfig(model=folder, device="cpu"))
    settings = {"slots": 64, "max_model_len": 64, "max_num_seqs": 2}
    engine = make_engine(model, folder, fused_layers=False, **settings)
    assert not hasattr(engine.executor.model, FUSION)
    assert any(type(module) is PackedLinear for module in engine.executor.model.modules())
    told = describe_engine(engine)["resolved"]
    assert (told["fused_layers"], told["fused_layers_reason"]) == (False, "turned off")
    wanted = EngineConfig(model=folder, device="cpu")
    assert serve_another(model, EngineConfig(model=folder, device="cpu", fused_layers=False)) is model
    assert serve_another(model, wanted) is None  # its layers are packed: too late to fuse them
    fused = load_model(wanted)
    told = describe_engine(make_engine(fused, folder, **settings))["resolved"]
    assert told["fused_layers"] is True
    assert told["fused_layers_reason"].startswith("fused 2 MLPs")
    assert serve_another(fused, EngineConfig(model=folder, device="cpu", fused_layers=False)) is fused
