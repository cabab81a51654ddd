"""The prompts that every side of ``kvbench dev bench-engine`` answers."""

from __future__ import annotations

import random
from dataclasses import dataclass

PROMPT_TOKENS = (32, 64, 128, 512)

Outputs = list[list[int]]  # output token ids by prompt


@dataclass(frozen=True)
class PromptBatch:
    """Prompts (token ids), and the number of output tokens of each."""

    prompts: tuple[tuple[int, ...], ...]
    output_tokens: int

    @property
    def total_output(self) -> int:
        """Output tokens of all prompts."""
        return len(self.prompts) * self.output_tokens

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return max(map(len, self.prompts)) + self.output_tokens


def make_case(num_requests: int, output_tokens: int, vocab_size: int, seed: int) -> PromptBatch:
    """Make ``num_requests`` prompts of random tokens, with lengths drawn from ``PROMPT_TOKENS``."""
    rng = random.Random(seed)
    lengths = [rng.choice(PROMPT_TOKENS) for _ in range(num_requests)]
    return PromptBatch(tuple(tuple(rng.randrange(1, vocab_size) for _ in range(n)) for n in lengths), output_tokens)


def speed_of(case: PromptBatch, outputs: Outputs, seconds: float) -> float:
    """Output tokens/s of a run.

    Raises:
        ValueError: the number of answers or of their tokens is not what the case asks for.
    """
    wrong = [len(tokens) for tokens in outputs if len(tokens) != case.output_tokens]
    if wrong or len(outputs) != len(case.prompts):
        raise ValueError(
            f"it gave {len(outputs)} answers to {len(case.prompts)} prompts, {len(wrong)} of them not of "
            f"{case.output_tokens} tokens"
        )
    return case.total_output / seconds
