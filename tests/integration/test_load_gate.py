"""Which faults the load gate sees. Which families it accepts and refuses: test_families.py."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

import kvbench_engine.model.attention
from kvbench_engine.config import EngineConfig
from kvbench_engine.model.loader import LoadedModel, load_model
from kvbench_engine.model.spec import ModelInfo
from kvbench_engine.model.support_check import measure_kv
from kvbench_engine.server.tokenizer import load_tokenizer
from tests.support.families import (
    ACCEPTED,
    ALTERNATING,
    EXPERTS,
    WINDOW,
    one_thread,  # noqa: F401
    write_config,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LONG_WINDOW = {"sliding_window": 64}  # longer than the probe


def load(folder, family: str, settings: dict, **options) -> LoadedModel:
    return load_model(EngineConfig(model=write_config(folder, family, settings), device="cpu", **options))


def spoil(monkeypatch, fault: str) -> None:
    """Make our attention wrong in one way, as a family would that sends it something else than it does in eager."""
    right = kvbench_engine.model.attention.AttentionHost.__call__

    def wrong(self, layer, q, k, v, options):
        if fault == "scale":
            options = replace(options, scale=options.scale * 1.1)
        if fault == "neighbour's value":
            v = torch.roll(v, 1, dims=0)
        if fault == "forgotten window":
            options = replace(options, sliding_window=None)
        if fault == "forgotten sinks":
            options = replace(options, sinks=None)
        if fault == "state lost between chunks":
            v = torch.cat([torch.zeros_like(v[:1]), v[1:]])
        if fault == "rotated by one position":
            k = torch.roll(k, 1, dims=-1)
        return right(self, layer, q, k, v, options)

    monkeypatch.setattr(kvbench_engine.model.attention.AttentionHost, "__call__", wrong)


@pytest.mark.parametrize(
    ("fault", "window"),
    [
        ("scale", WINDOW),
        ("neighbour's value", WINDOW),
        ("forgotten window", WINDOW),
        ("forgotten window", LONG_WINDOW),
        ("state lost between chunks", LONG_WINDOW),
        ("rotated by one position", WINDOW),
    ],
)
def test_float32_sees_an_attention_that_is_slightly_wrong(tmp_path, monkeypatch, fault, window):
    load(tmp_path, "mistral", window)
    spoil(monkeypatch, fault)
    with pytest.raises(ValueError, match="check 'logits'"):
        load(tmp_path, "mistral", window)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("family", "seed"), [("phimoe", 0), ("phimoe", 1), ("granitemoeshared", 0), ("gpt_oss", 1)])
def test_rounding_in_half_precision_is_no_fault(tmp_path, family, dtype, seed):
    """Sharp random experts: a rounding tips tokens to other experts, in phimoe a third of them."""
    load(tmp_path, family, ACCEPTED[family], dtype=dtype, seed=seed)


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [("neighbour's value", "float16"), ("forgotten window", "bfloat16"), ("forgotten sinks", "bfloat16")],
)
def test_half_precision_still_sees_a_wrong_attention(tmp_path, monkeypatch, fault, dtype):
    settings = {**EXPERTS, **ALTERNATING, **LONG_WINDOW}
    load(tmp_path, "gpt_oss", settings, dtype=dtype)
    spoil(monkeypatch, fault)
    with pytest.raises(ValueError, match=f"check 'logits'.*limits for {dtype}"):
        load(tmp_path, "gpt_oss", settings, dtype=dtype)


def test_windows_are_as_they_were_after_the_probe(tmp_path):
    model = load(tmp_path, "qwen2", {**ALTERNATING, **LONG_WINDOW, "use_sliding_window": True}).model
    assert model.config.sliding_window == 64
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [64, None]


def test_window_that_cannot_be_tried_out_is_refused(tmp_path, monkeypatch):
    model = load(tmp_path, "qwen2", {**ALTERNATING, **LONG_WINDOW, "use_sliding_window": True}).model
    for layer in model.model.layers:
        del layer.self_attn.sliding_window
    monkeypatch.setattr(Qwen2Attention, "sliding_window", 64, raising=False)
    with pytest.raises(ValueError, match="check 'sliding window': layer 0 has a window of 64 tokens"):
        measure_kv(model, 4)


def test_window_longer_than_any_sequence_does_not_matter(tmp_path):
    """Phi-3.5-MoE has a window of its full context length, and never sends it: nothing can go wrong."""
    load(tmp_path, "phimoe", {**EXPERTS, "sliding_window": 128})


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("t5", {}, "Unrecognized configuration class"),
        ("llama", {"hidden_act": "no_such_activation"}, "no_such_activation"),
        ("granitemoehybrid", {"mamba_n_heads": 3}, "mamba_n_heads must divide"),
        (None, {}, "no_such_family"),
    ],
)
def test_config_that_transformers_cannot_take_is_one_sentence(tmp_path, family, settings, reason):
    path = tmp_path / "config.json"
    if family is None:
        path.write_text('{"model_type": "no_such_family", "max_position_embeddings": 64}')
    model = str(path) if family is None else write_config(tmp_path, family, settings)
    with pytest.raises(ValueError, match=f"transformers cannot load model .*{reason}") as caught:
        load_model(EngineConfig(model=model, device="cpu"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", ["t5", "no_such_family"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_model_s_own_code_is_neither_run_nor_asked_about(tmp_path, monkeypatch, model_type, load_format):
    asked = []
    monkeypatch.setattr("builtins.input", lambda *args: asked.append(args) or "y")
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(own))
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    config = {"model_type": model_type, "max_position_embeddings": 64, "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="needs Python code of its own"):
        load_model(EngineConfig(model=str(tmp_path), device="cpu", load_format=load_format))
    with pytest.raises(ValueError, match="needs Python code of its own"):
        load_tokenizer(EngineConfig(tokenizer=str(tmp_path / "tokenizer")), ModelInfo("m", 64, 64, (), None))
    assert not asked
