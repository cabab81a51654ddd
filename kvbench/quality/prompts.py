"""The prompts of `kvbench quality`: sets of texts in files, read by a model's own tokenizer. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.common.errors import UsageError
from kvbench.common.packages import REPOSITORY

FOLDER = REPOSITORY / "workloads" / "quality"
SETS = ("easy", "average", "long-context", "malformed", "production-like")
"""Files of that folder. A line a prompt: id, turns, max_tokens, answer, depth, as in ``PromptText``."""
OF_TEXT = ("average", "long-context", "production-like")
"""The sets whose own tokens are text, of which a perplexity is worth telling."""
Encode = Callable[[str], Sequence[int]]


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
        """Its line in a file."""
        known = {"id": self.prompt_id, **self.__dict__}
        del known["prompt_id"]
        return json.dumps(known, ensure_ascii=True) + "\n"


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
        return [part for pair in zip(self.turns, answers, strict=True) for part in pair]

    def last_prompt(self, answers: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The tokens before the last answer, with the answers to earlier turns."""
        return tuple(token for part in self.conversation(answers)[:-1] for token in part)

    def is_right(self, text: str) -> bool:
        """Whether ``text``, the last answer, is the right one."""
        told = text.strip()
        return self.answer is not None and told.startswith(self.answer) and not told[len(self.answer) :][:1].isdigit()


def read_set(path: Path) -> list[PromptText]:
    """The prompts of a file. Raises UsageError with the line."""
    found: list[PromptText] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            found.append(PromptText(row.pop("id"), tuple(row.pop("turns")), **row))
    except OSError as error:
        raise UsageError(f"the prompts {path} cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        at = f"line {len(found) + 1} of {path}"
        raise UsageError(f"{at} is not a prompt ({error}): a prompt has id, turns and max_tokens") from None
    return found


def in_tokens(texts: Sequence[PromptText], set_name: str, encode: Encode, begin: Sequence[int] = ()) -> list[Prompt]:
    """The prompts whose every turn has a token, in a model's tokens; ``begin``: what all its prompts start with."""
    found = []
    for each in texts:
        first, *later = (tuple(encode(turn)) for turn in each.turns)
        turns = ((*begin, *first), *later)
        if all(turns):
            name = f"{set_name}/{each.prompt_id}"
            found.append(Prompt(name, set_name, turns, each.max_tokens, each.answer, each.depth))
    return found
