"""The prompts of `kvbench quality`: sets of texts in files, and passkeys of exact lengths made of a model's own tokens.

A passkey is hidden in text and asked for at the end. Page bugs depend on where a prompt ends within its last page, so
the lengths of the passkeys have every remainder by 64 once. Pure.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvbench.common.errors import UsageError
from kvbench.common.packages import ENGINE, WORKLOADS
from kvbench_engine.tiny_model.data import TEMPLATES, fact_tokens, random_digits

Say = Callable[[str], None]
BESIDE = "kvbench-tiny"  # measures for models of random weights, whose answers mean nothing
FOLDER = WORKLOADS / "quality"
SETS = ("easy", "average", "long-context", "malformed", "production-like")
"""Files of that folder. A line a prompt: id, turns, max_tokens, answer, depth, as in ``PromptText``."""
OF_TEXT = ("average", "long-context", "production-like")
"""The sets whose own tokens are text, of which a perplexity is worth telling."""
Encode = Callable[[str], Sequence[int]]
Answers = Mapping[str, tuple[tuple[int, ...], ...]]
"""Prompt id -> the tokens of its answers, one a turn."""
FILLER = ENGINE / "models" / "kvbench-tiny" / "heldout.txt"
RESIDUES = 64  # lengths have every remainder by so many once; page sizes up to it divide it
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LONGEST = 2048  # tokens, whatever the model's context is: the time grows with it
_SHORTEST = 100
_SHARING = 4  # so many share the text before their keys, and prefix caching must tell them apart
DIGITS = 5


@dataclass(frozen=True)
class PromptText:
    """A prompt of a file.

    ``turns``: texts; with several, each later one follows the answer to those before it.
    ``max_tokens``: of each answer, which is never cut short at an end-of-text token.
    ``answer``: what the last answer begins with, spaces around it left aside; None: there is no right one.
    ``depth``: where the answer stands in the prompt, 0 its first token and 1 its last; None: no passkey.
    """

    prompt_id: str
    turns: tuple[str, ...]
    max_tokens: int
    answer: str | None = None
    depth: float | None = None

    @property
    def row(self) -> str:
        """The prompt as a line in a file."""
        others = {name: value for name, value in vars(self).items() if name != "prompt_id"}
        return json.dumps({"id": self.prompt_id, **others}, ensure_ascii=True) + "\n"


@dataclass(frozen=True)
class Prompt:
    """A prompt in one model's tokens; the rest as in ``PromptText``. ``prompt_id`` holds the name of its set."""

    prompt_id: str
    set_name: str
    turns: tuple[tuple[int, ...], ...]
    max_tokens: int
    answer: str | None = None
    depth: float | None = None

    @property
    def length(self) -> int:
        """Tokens of its turns and of all answers but the last, that is before the last answer."""
        return sum(map(len, self.turns)) + (len(self.turns) - 1) * self.max_tokens

    @property
    def longest(self) -> int:
        """Tokens with all answers."""
        return self.length + self.max_tokens

    def conversation(self, answers: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Each turn, and after it the answer to it."""
        return list(itertools.chain(*zip(self.turns, answers, strict=True)))

    def last_prompt(self, answers: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The tokens before the last answer, with the answers to earlier turns."""
        return tuple(itertools.chain(*self.conversation(answers)[:-1]))

    def is_right(self, text: str) -> bool:
        """Tests whether ``text``, the last answer, is the right one."""
        given = text.strip()
        return self.answer is not None and given.startswith(self.answer) and not given[len(self.answer) :][:1].isdigit()


def read_set(path: Path) -> list[PromptText]:
    """The prompts of a file. Raises UsageError with the line."""
    prompts: list[PromptText] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            prompts.append(PromptText(row.pop("id"), tuple(row.pop("turns")), **row))
    except OSError as error:
        raise UsageError(f"the prompts {path} cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        at = f"line {len(prompts) + 1} of {path}"
        raise UsageError(f"{at} is not a prompt ({error}): a prompt has id, turns and max_tokens") from None
    return prompts


def in_tokens(texts: Sequence[PromptText], set_name: str, encode: Encode, begin: Sequence[int] = ()) -> list[Prompt]:
    """The prompts whose every turn has a token, in a model's tokens; ``begin``: what all its prompts start with."""
    prompts = []
    for text in texts:
        first, *later = (tuple(encode(turn)) for turn in text.turns)
        turns = ((*begin, *first), *later)
        if all(turns):
            name = f"{set_name}/{text.prompt_id}"
            prompts.append(Prompt(name, set_name, turns, text.max_tokens, text.answer, text.depth))
    return prompts


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
        """Makes ``length`` tokens: ``before`` of the filler, the fact, more filler and the question."""
        after = length - before - len(self.fact) - len(self.question)
        return (*filler[:before], *self.fact, *filler[before : before + after], *self.question)


def spread_lengths(shortest: int, longest: int, count: int, rng: np.random.Generator) -> list[int]:
    """Draws ``count`` lengths in order, most of them short, since the time grows with them.

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
    room = len(PasskeyParts.of("0" * DIGITS, encode).answer) + 1
    prompts = []
    start = 0
    for index, length in enumerate(spread_lengths(_SHORTEST, min(longest, LONGEST) - room, RESIDUES, rng)):
        parts = PasskeyParts.of(random_digits(rng, DIGITS), encode)
        if index % _SHARING == 0:
            start = int(rng.integers(0, len(filler)))
        text = np.take(filler, np.arange(start, start + length), mode="wrap").tolist()
        own, depth = length - len(begin), DEPTHS[index % len(DEPTHS)]
        if (free := own - len(parts.fact) - len(parts.question)) < 0:
            continue
        prompt = (*begin, *parts.prompt(text, own, round(depth * free)))
        prompts.append(Prompt(f"passkey-{length}", "passkey", (prompt,), len(parts.answer), parts.value, depth))
    return prompts
