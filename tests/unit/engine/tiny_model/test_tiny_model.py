"""kvbench-tiny: what it is trained on, that the script trains, what its README states, its outlier channels."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvbench_engine.tiny_model import train as training
from kvbench_engine.tiny_model.data import ANSWER_WEIGHT, TEMPLATES, Corpus, batches, copied, facts
from kvbench_engine.tiny_model.evaluate import answered, curve_svg, passkey
from kvbench_engine.tiny_model.outliers import main, outlier_ratios, scale_key_channels
from tests.support.hf_parts import one_thread

FOLDER = Path(__file__).resolve().parents[4] / "engine" / "models" / "kvbench-tiny"
HELD_OUT = (FOLDER / "heldout.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def shipped(folder: Path = FOLDER) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


# The sequences that it is trained on.


def corpus_of(tokenizer: Tokenizer, seed: int) -> Corpus:
    return Corpus.of(HELD_OUT.split("\n\n"), tokenizer, np.random.default_rng(seed))


@pytest.mark.parametrize(("length", "rows"), [(64, 8), (300, 4), (2048, 2)])
def test_every_batch_has_exactly_its_length_and_is_the_seeds(tokenizer, length, rows):
    def drawn(seed: int) -> np.ndarray:
        found = batches(corpus_of(tokenizer, seed), length, rows)
        pairs = [next(found) for _ in range(10)]
        assert all(ids.shape == weights.shape == (rows, length + 1) for ids, weights in pairs)
        return np.stack([ids for ids, _ in pairs])

    first = drawn(1)
    assert first.min() >= 0 and first.max() < 2048
    assert np.array_equal(first, drawn(1)) and not np.array_equal(first, drawn(2))


def form_of(question: str) -> re.Pattern[str]:
    """A text that ends with this question, whatever name it asks for."""
    form = re.escape(question).replace(r"\{name\}", "(?P<name>[a-z]+)", 1).replace(r"\{name\}", "(?P=name)")
    return re.compile(form + "$")


QUESTIONS = [(fact, form_of(question)) for fact, question in TEMPLATES]


def test_each_answer_is_what_the_text_before_it_says(tokenizer):
    corpus, seen = corpus_of(tokenizer, 5), [0] * len(TEMPLATES)
    for _ in range(15):
        ids, weights = facts(corpus, 1024, 16)
        edges = np.flatnonzero(np.diff(weights == ANSWER_WEIGHT, prepend=False, append=False))
        for start, end in edges.reshape(-1, 2).tolist():  # where each answer begins and ends
            before, answer = tokenizer.decode(ids[:start].tolist()), tokenizer.decode(ids[start:end].tolist())
            asked = [(i, fact, found) for i, (fact, form) in enumerate(QUESTIONS) if (found := form.search(before))]
            ((i, fact, found),) = asked
            seen[i] += 1
            assert re.fullmatch(r" \d{2,8}\.|\d{2,8}\n", answer)
            assert fact.format(name=found["name"], value=answer.strip(" .\n")) in before[: found.start()]
    assert min(seen) > 5


def test_a_copy_repeats_its_passage(tokenizer):
    corpus = corpus_of(tokenizer, 6)
    for _ in range(20):
        ids, weights = copied(corpus, 300)
        size = int((weights == 2.0).sum()) + 1  # that the copy begins cannot be known: its first token counts nothing
        assert size >= 16
        windows = np.lib.stride_tricks.sliding_window_view(ids[:-size], size)
        assert (windows == ids[-size:]).all(axis=1).any()


@pytest.mark.full
def test_a_few_steps_of_a_very_small_model_learn_and_leave_a_folder_that_others_load(tmp_path, monkeypatch):
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
    texts = HELD_OUT.split("\n\n")
    monkeypatch.setattr(training, "MODEL", training.MODEL | small)
    monkeypatch.setattr(training, "PHASES", (training.Phase(64, 8, 20), training.Phase(128, 4, 40)))
    monkeypatch.setattr(training, "documents", lambda: (texts[1::2], texts[::2]))
    training.train(tmp_path, seed=1, minutes=5, peak=1e-2)
    first, second = csv.DictReader((tmp_path / "curve.csv").open(newline=""))
    assert (int(first["length"]), int(first["tokens"])) == (64, 20 * 8 * 65)
    assert (int(second["length"]), int(second["tokens"])) == (128, 10400 + 40 * 4 * 129)
    assert float(second["held_out_loss"]) < float(first["held_out_loss"]) < 7.6  # ln of the vocabulary
    assert json.loads((tmp_path / "recipe.json").read_text())["seed"] == 1
    reader = AutoTokenizer.from_pretrained(tmp_path)
    text = "def f(x): return 'naïve 4711'\n\n"
    ids = reader(text, return_tensors="pt").input_ids
    assert reader.decode(ids[0]) == text and reader.eos_token_id == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert model.generate(ids, max_new_tokens=4, min_new_tokens=4).shape[1] == ids.shape[1] + 4
    assert (tmp_path / "heldout.txt").read_text(encoding="utf-8").strip()


# What its README states is measured by counting real answers, and the shipped model gives them.


@pytest.mark.full
def test_the_shipped_model_finds_the_key_and_does_not_guess_it(tokenizer):
    model, filler, rng = shipped(), tokenizer.encode(HELD_OUT).ids, np.random.default_rng(9)
    for depth in (0.0, 0.5, 1.0):
        (ids, answer), (other, _) = (
            passkey(rng, lambda text: tokenizer.encode(text).ids, filler, 400, depth) for _ in "ab"
        )
        assert len(ids) == 400 and answered(model, ids, answer)
        assert not answered(model, [*other[:-answer], *ids[-answer:]], answer)  # the answer to another key


def test_the_shipped_curve_is_that_of_the_training():
    rows = list(csv.DictReader((FOLDER / "curve.csv").open(newline="")))
    drawn = curve_svg(rows)
    assert (FOLDER / "curve.svg").read_text() == drawn
    lines = ElementTree.fromstring(drawn).findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [len(rows)] * 2


# Outlier channels: the keys get them, and what the model says stays the same to the bit.


@pytest.mark.full
def test_the_command_changes_the_keys_of_a_folder_and_not_its_predictions(tmp_path, monkeypatch, capsys):
    ids = torch.arange(3, 99)[None]
    folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    monkeypatch.setattr(sys, "argv", ["outliers", str(folder), "--factor", "8"])
    main()
    before, after = shipped(), shipped(folder)
    with torch.inference_mode():
        assert torch.equal(before(input_ids=ids).logits, after(input_ids=ids).logits)
    ratios = outlier_ratios(after, ids)
    assert outlier_ratios(before, ids).max() > 5 and (ratios > 4 * outlier_ratios(before, ids)).all()
    assert (folder / "model.safetensors").stat().st_size == (FOLDER / "model.safetensors").stat().st_size
    assert "before" in capsys.readouterr().out
    scale_key_channels(after, 4.0)
    torch.testing.assert_close(outlier_ratios(after, ids), 4 * ratios)  # that pair is the largest in every head
