"""What the README of kvbench-tiny states is measured by counting real answers, and the shipped model gives them."""

from __future__ import annotations

import csv
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from engine.tiny_model.evaluate import answered, curve_svg, passkey
from tests.support.hf_parts import one_thread

FOLDER = Path(__file__).resolve().parents[4] / "engine" / "models" / "kvbench-tiny"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def test_the_shipped_model_finds_the_key_and_does_not_guess_it():
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    filler = tokenizer.encode((FOLDER / "heldout.txt").read_text(encoding="utf-8")).ids
    rng = np.random.default_rng(9)
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        ids, answer = passkey(rng, lambda text: tokenizer.encode(text).ids, filler, 400, depth)
        assert len(ids) == 400
        assert answered(model, ids, answer)
        other, _ = passkey(rng, lambda text: tokenizer.encode(text).ids, filler, 400, depth)
        assert not answered(model, [*other[:-answer], *ids[-answer:]], answer)  # the answer to another key


def test_the_shipped_curve_is_that_of_the_training():
    rows = list(csv.DictReader((FOLDER / "curve.csv").open(newline="")))
    drawn = curve_svg(rows)
    assert (FOLDER / "curve.svg").read_text() == drawn
    lines = ElementTree.fromstring(drawn).findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [len(rows)] * 2
