"""The sequences that kvbench-tiny is trained on: of exact length, solvable, and the same for the same seed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.tiny_model.data import ANSWER_WEIGHT, TEMPLATES, Corpus, batches, copied, facts

FOLDER = Path(__file__).resolve().parents[4] / "engine" / "models" / "kvbench-tiny"
NAME, SAME_NAME = "(?P<name>[a-z]+)", "(?P=name)"


def form_of(question: str) -> re.Pattern[str]:
    """A text that ends with this question, whatever name it asks for."""
    return re.compile(re.escape(question).replace(r"\{name\}", NAME, 1).replace(r"\{name\}", SAME_NAME) + "$")


QUESTIONS = [(fact, form_of(question)) for fact, question in TEMPLATES]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def corpus_of(tokenizer: Tokenizer, seed: int) -> Corpus:
    texts = (FOLDER / "heldout.txt").read_text(encoding="utf-8").split("\n\n")
    return Corpus.of(texts, tokenizer, np.random.default_rng(seed))


@pytest.mark.parametrize(("length", "rows"), [(64, 8), (300, 4), (2048, 2)])
def test_every_batch_has_exactly_its_length(tokenizer, length, rows):
    drawn = batches(corpus_of(tokenizer, 1), length, rows)
    for _ in range(15):
        ids, weights = next(drawn)
        assert ids.shape == weights.shape == (rows, length + 1)
        assert ids.min() >= 0 and ids.max() < 2048
    again, other = (next(batches(corpus_of(tokenizer, seed), length, rows))[0] for seed in (1, 2))
    first = next(batches(corpus_of(tokenizer, 1), length, rows))[0]
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def answers(weights: np.ndarray) -> list[tuple[int, int]]:
    """Where each answer begins and ends."""
    edges = np.flatnonzero(np.diff(weights == ANSWER_WEIGHT, prepend=False, append=False))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def test_each_answer_is_what_the_text_before_it_says(tokenizer):
    corpus, seen = corpus_of(tokenizer, 5), [0] * len(TEMPLATES)
    for _ in range(15):
        ids, weights = facts(corpus, 1024, 16)
        for start, end in answers(weights):
            before, answer = tokenizer.decode(ids[:start].tolist()), tokenizer.decode(ids[start:end].tolist())
            asked = [(i, fact, found) for i, (fact, form) in enumerate(QUESTIONS) if (found := form.search(before))]
            ((i, fact, found),) = asked
            seen[i] += 1
            assert re.fullmatch(r" \d{2,8}\.|\d{2,8}\n", answer)
            said = fact.format(name=found["name"], value=answer.strip(" .\n"))
            assert said in before[: found.start()]
    assert min(seen) > 5


def test_a_copy_repeats_its_passage(tokenizer):
    corpus = corpus_of(tokenizer, 6)
    for _ in range(20):
        ids, weights = copied(corpus, 300)
        size = int((weights == 2.0).sum()) + 1  # that the copy begins cannot be known: its first token counts nothing
        assert size >= 16
        windows = np.lib.stride_tricks.sliding_window_view(ids[:-size], size)
        assert (windows == ids[-size:]).all(axis=1).any()
