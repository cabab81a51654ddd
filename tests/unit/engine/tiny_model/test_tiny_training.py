"""The training script, a few steps of a very small model: it learns, and leaves a folder that others load."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.tiny_model import train as training
from tests.support.hf_parts import one_thread

pytestmark = pytest.mark.full
HELD_OUT = Path(__file__).resolve().parents[4] / "engine" / "models" / "kvbench-tiny" / "heldout.txt"
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    texts = HELD_OUT.read_text(encoding="utf-8").split("\n\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "MODEL", training.MODEL | SMALL)
        patch.setattr(training, "PHASES", (training.Phase(64, 8, 20), training.Phase(128, 4, 40)))
        patch.setattr(training, "documents", lambda: (texts[1::2], texts[::2]))
        training.train(folder, seed=1, minutes=5, peak=1e-2)
    return folder


def test_the_loss_falls(trained):
    rows = list(csv.DictReader((trained / "curve.csv").open(newline="")))
    assert [(int(row["length"]), int(row["tokens"])) for row in rows] == [
        (64, 20 * 8 * 65),
        (128, 10400 + 40 * 4 * 129),
    ]
    assert float(rows[1]["held_out_loss"]) < float(rows[0]["held_out_loss"]) < 7.6  # ln of the vocabulary
    assert json.loads((trained / "recipe.json").read_text())["seed"] == 1


def test_the_folder_is_complete(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained)
    text = "def f(x): return 'naïve 4711'\n\n"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == text and tokenizer.eos_token_id == 0
    model = AutoModelForCausalLM.from_pretrained(trained)
    assert model.dtype == torch.bfloat16
    assert model.generate(ids, max_new_tokens=4, min_new_tokens=4).shape[1] == ids.shape[1] + 4
    assert (trained / "heldout.txt").read_text(encoding="utf-8").strip()
