"""The text and the tasks that kvbench-tiny is trained on.

Text: docstrings and language reference of the Python installation (PSF licence) and Shakespeare's sonnets (public
domain). Every 40th document is held out; kvbench-tiny/heldout.txt keeps those of the machine that trained the model.
Tasks: facts hidden in that text (a pass key, named keys, assignments), each asked for later, and copies. A task is
made of token ids, so that every sequence has exactly the length that is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbench_engine.tokenizer.train import SONNETS, reference_topics, stdlib_docstrings

HELD_OUT_EVERY = 40
ANSWER_WEIGHT = 4.0
_IGNORED = 0.0
Encode = Callable[[str], Sequence[int]]

# A fact, and the question that comes later; the answer follows the question.
TEMPLATES = (
    (
        " The {name} key is {value}. Remember it: {value} is the {name} key.",
        " What is the {name} key? The {name} key is",
    ),
    ("\nThe {name} of this text is {value}.\n", "\nThe {name} of this text is"),
    ("\n{name} = {value}\n", "\n>>> print({name})\n"),
)


def fact_tokens(
    template: tuple[str, str], name: str, value: str, encode: Encode
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Tokens of a statement, its question and its answer, as tokenised after the question, with its end."""
    fact, question = (part.format(name=name, value=value) for part in template)
    lead, end = ("", "\n") if question.endswith("\n") else (" ", ".")
    asked = encode(question)
    return encode(fact), asked, encode(f"{question}{lead}{value}{end}")[len(asked) :]


def random_digits(rng: np.random.Generator, count: int) -> str:
    return "".join(map(str, rng.integers(0, 10, count)))


def documents() -> tuple[list[str], list[str]]:
    """Load training and held-out documents."""
    sonnets = SONNETS.read_text(encoding="utf-8").split("\n\n")
    every = [text for text in (*reference_topics(), *stdlib_docstrings(), *sonnets) if len(text) > 40]
    return [d for i, d in enumerate(every) if i % HELD_OUT_EVERY], every[::HELD_OUT_EVERY]


@dataclass
class Corpus:
    """The training text as tokens.

    ``ids``: all of it, documents separated by ``end``. ``words``: names of facts, one to three tokens.
    """

    ids: np.ndarray
    words: list[str]
    encode: Encode
    vocab_size: int
    rng: np.random.Generator

    @classmethod
    def of(cls, texts: Sequence[str], tokenizer: Any, rng: np.random.Generator) -> Corpus:
        end = tokenizer.token_to_id("<|endoftext|>")
        encoded = tokenizer.encode_batch(list(texts))
        ids = np.array([token for item in encoded for token in (*item.ids, end)], dtype=np.int64)
        counts: dict[str, int] = {}
        for text in texts:
            for word in text.split():
                if word.isascii() and word.isalpha() and word.islower() and 3 <= len(word) <= 9:
                    counts[word] = counts.get(word, 0) + 1
        words = sorted(counts, key=lambda word: (-counts[word], word))[:2000]
        return cls(ids, words, lambda text: tokenizer.encode(text).ids, tokenizer.get_vocab_size(), rng)

    def text(self, length: int) -> np.ndarray:
        """Take ``length`` tokens of running text from a random place."""
        start = int(self.rng.integers(0, len(self.ids) - length))
        return self.ids[start : start + length]

    def value(self) -> str:
        """A random value for a fact: mostly five digits."""
        digits = 5 if self.rng.random() < 0.7 else int(self.rng.integers(2, 9))
        return random_digits(self.rng, digits)


Weighed = tuple[np.ndarray, np.ndarray]  # token ids [length], weights of their losses [length]


def plain_text(corpus: Corpus, length: int) -> Weighed:
    return corpus.text(length), np.ones(length)


def copied(corpus: Corpus, length: int) -> Weighed:
    """Make a passage, some text, and the passage again; half of the passages are random tokens."""
    most = (length - 2) // 2
    size = int(corpus.rng.integers(min(16, most), min(256, most) + 1))
    is_random = corpus.rng.random() < 0.5
    passage = corpus.rng.integers(16, corpus.vocab_size, size) if is_random else corpus.text(size)
    gap = length - 2 * size
    before = int(corpus.rng.integers(0, gap + 1))
    ids = np.concatenate([corpus.text(before), passage, corpus.text(gap - before), passage])
    weights = np.ones(length)
    weights[before : before + size] = _IGNORED if is_random else 1.0
    weights[length - size + 1 :] = 2.0
    weights[length - size] = _IGNORED  # nobody can know that the copy begins
    return ids, weights


def facts(corpus: Corpus, length: int, most: int) -> Weighed:
    """Make 1 to ``most`` facts at random places, each asked for at a random place after it, some twice."""
    rng = corpus.rng
    names = ["pass", *rng.choice(corpus.words, size=most, replace=False)][int(rng.random() < 0.5) :][:most]
    events: list[tuple[float, Sequence[int], Sequence[int]]] = []  # place, ids, answer
    used, count = 0, int(rng.integers(1, most + 1))
    for name in names[:count]:
        template = TEMPLATES[0 if name == "pass" else int(rng.integers(0, len(TEMPLATES)))]
        value, place = corpus.value(), float(rng.random())
        stated, asked, answer = fact_tokens(template, name, value, corpus.encode)
        times = 1 + int(rng.random() < 0.3)
        if used + len(stated) + times * (len(asked) + len(answer)) > length:
            break
        used += len(stated) + times * (len(asked) + len(answer))
        events.append((place, stated, []))
        for turn in range(times):
            at_end = turn == 0 and rng.random() < 0.3
            events.append((1.0 if at_end else place + (1 - place) * float(rng.random()), asked, answer))
    events.sort(key=lambda event: event[0])
    bounds = np.sort(rng.integers(0, length - used + 1, len(events)))
    if rng.random() < 0.3 and len(bounds):
        bounds[-1] = length - used  # the last question ends the sequence
    filler = np.diff(bounds, prepend=0)
    parts, weights = [], []
    text = corpus.text(length)  # one running text that the events interrupt
    taken = 0
    for gap, (_, ids, answer) in zip(filler, events, strict=True):
        parts += [text[taken : taken + gap], ids, answer]
        weights += [np.ones(gap + len(ids)), np.full(len(answer), ANSWER_WEIGHT)]
        taken += gap
    parts.append(text[taken : length - used])
    weights.append(np.ones(length - used - taken))
    return np.concatenate(parts).astype(np.int64)[:length], np.concatenate(weights)[:length]


def batches(corpus: Corpus, length: int, rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless batches ``[rows, length + 1]`` of ids and loss weights: a third text, half facts, the rest copies."""
    while True:
        drawn = []
        for _ in range(rows):
            kind = corpus.rng.random()
            if kind < 0.33:
                drawn.append(plain_text(corpus, length + 1))
            elif kind < 0.83:
                drawn.append(facts(corpus, length + 1, max(1, min(16, length // 64))))
            else:
                drawn.append(copied(corpus, length + 1))
        yield np.stack([ids for ids, _ in drawn]), np.stack([weights for _, weights in drawn])
