"""Passkeys of exact lengths: a key hidden in text and asked for at the end, made of a model's own tokens. Pure.

Page bugs depend on where a prompt ends within its last page, so the lengths have every remainder by 64 once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.tiny_model.data import TEMPLATES, fact_tokens, random_digits
from kvbench.common.packages import REPOSITORY
from kvbench.quality.prompts import Encode, Prompt

FILLER = REPOSITORY / "engine" / "models" / "kvbench-tiny" / "heldout.txt"
RESIDUES = 64  # lengths have every remainder by so many once; page sizes up to it divide it
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LONGEST = 2048  # tokens, whatever the model's context is: the time grows with it
_SHORTEST = 100
_SHARING = 4  # so many share the text before their keys, and prefix caching must tell them apart
_DIGITS = 5


@dataclass(frozen=True)
class PasskeyParts:
    """The tokens of one passkey: what states it, what asks for it, and the right answer."""

    fact: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]
    value: str

    @classmethod
    def of(cls, value: str, encode: Encode) -> PasskeyParts:
        fact, question, answer = map(tuple, fact_tokens(TEMPLATES[0], "pass", value, encode))
        return cls(fact, question, answer, value)

    def prompt(self, filler: Sequence[int], length: int, before: int) -> tuple[int, ...]:
        """``length`` tokens: ``before`` of the filler, the fact, more filler and the question."""
        after = length - before - len(self.fact) - len(self.question)
        return (*filler[:before], *self.fact, *filler[before : before + after], *self.question)


def random_value(rng: np.random.Generator) -> str:
    return random_digits(rng, _DIGITS)


def spread_lengths(shortest: int, longest: int, count: int, rng: np.random.Generator) -> list[int]:
    """``count`` lengths from ``shortest`` to ``longest`` in order, most of them short, since the time grows with them.

    Each remainder by RESIDUES occurs equally often; none if ``longest`` leaves no room for them.
    """
    if longest < shortest + RESIDUES:
        return []
    low = shortest + RESIDUES - 1
    targets = (low + (longest - low) * np.linspace(0, 1, count) ** 4).astype(int)
    residues = np.concatenate([rng.permutation(RESIDUES) for _ in range(-(-count // RESIDUES))])[:count]
    return sorted((targets - (targets - residues) % RESIDUES).tolist())


def make_passkeys(
    encode: Encode, filler: Sequence[int], longest: int, begin: Sequence[int] = (), seed: int = 0
) -> list[Prompt]:
    """A passkey of each remainder, with depths that every part of the lengths has equally often.

    ``longest``: tokens of prompt and answer at most; none where not even the short ones fit. ``begin``: what all
    prompts start with.
    """
    rng = np.random.default_rng(seed)
    room = len(PasskeyParts.of("0" * _DIGITS, encode).answer) + 1
    found = []
    start = 0
    for index, length in enumerate(spread_lengths(_SHORTEST, min(longest, LONGEST) - room, RESIDUES, rng)):
        parts = PasskeyParts.of(random_value(rng), encode)
        if index % _SHARING == 0:
            start = int(rng.integers(0, len(filler)))
        text = np.take(filler, np.arange(start, start + length), mode="wrap").tolist()
        own = length - len(begin)
        free = own - len(parts.fact) - len(parts.question)
        depth = DEPTHS[index % len(DEPTHS)]
        if free < 0:
            continue
        prompt = (*begin, *parts.prompt(text, own, round(depth * free)))
        found.append(Prompt(f"passkey-{length}", "passkey", (prompt,), len(parts.answer), parts.value, depth))
    return found
