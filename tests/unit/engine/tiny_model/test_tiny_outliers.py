"""Outlier channels: the keys get them, and what the model says stays the same."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine.tiny_model.outliers import main, outlier_ratios, scale_key_channels

FOLDER = Path(__file__).resolve().parents[4] / "engine" / "models" / "kvbench-tiny"
IDS = torch.arange(3, 99)[None]


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(2)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=101, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS).logits


def test_the_ratio_grows_by_the_factor(model):
    scale_key_channels(model, 16.0)  # now that pair is the largest in every head
    before = outlier_ratios(model, IDS)
    assert before.shape == (2, 2) and before.min() > 4
    scale_key_channels(model, 4.0)
    torch.testing.assert_close(outlier_ratios(model, IDS), 4 * before)


def test_the_command_changes_the_keys_of_a_folder_and_not_its_predictions(tmp_path, monkeypatch, capsys):
    folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    monkeypatch.setattr(sys, "argv", ["outliers", str(folder), "--factor", "8"])
    main()
    shipped, changed = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for f in (FOLDER, folder))
    assert torch.equal(logits(shipped), logits(changed))
    assert (outlier_ratios(changed, IDS) > 4 * outlier_ratios(shipped, IDS)).all()
    assert outlier_ratios(shipped, IDS).max() > 5
    assert (folder / "model.safetensors").stat().st_size == (FOLDER / "model.safetensors").stat().st_size
    assert "before" in capsys.readouterr().out
