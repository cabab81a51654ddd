"""A small set of canaries of the tests' tiny model: prompts of every length mod page size, most of which share text."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

from kvbench.requests.canaries import Canary, CanarySet, write_canaries
from tests.support.hf_parts import VOCAB, greedy_outputs, loaded

ANSWER = 6
LENGTHS = range(17, 33)


def canary(name: str = "one", prompt=(5, 6, 7), answer=(8, 9), **changes: object) -> Canary:
    """A canary whose texts are its ids in words."""
    texts = {"prompt": " ".join(map(str, prompt)), "answer": " ".join(map(str, answer))}
    known = {"kind": "passkey", "depth": 0.5, "margin": 1.0, **texts, **changes}
    return Canary(name, prompt_token_ids=tuple(prompt), answer_token_ids=tuple(answer), **known)


def tiny_set(folder: str) -> CanarySet:
    """Canaries of the model in ``folder``, with the answers that transformers gives."""
    rng = random.Random(3)
    shared = [rng.randrange(2, VOCAB) for _ in range(max(LENGTHS))]
    prompts = {f"passkey-{n}": shared[: n - 9] + [rng.randrange(2, VOCAB) for _ in range(9)] for n in LENGTHS}
    answers = greedy_outputs(folder, prompts, ANSWER)
    made = tuple(canary(name, prompt, answers[name]) for name, prompt in prompts.items())
    return CanarySet("llama", (loaded(folder).info.weights_fingerprint,), made)


def store(made: CanarySet, path: Path, wrong: str | None = None, at: int = 0) -> Path:
    """Its file; ``wrong``: the canary whose expected token ``at`` is another than the model's."""

    def changed(each: Canary) -> Canary:
        answer = list(each.answer_token_ids)
        answer[at] = 2 + (answer[at] + 1) % (VOCAB - 2)
        return dataclasses.replace(each, answer_token_ids=tuple(answer))

    canaries = [changed(each) if each.canary_id == wrong else each for each in made.canaries]
    write_canaries(path, dataclasses.replace(made, canaries=tuple(canaries)))
    return path
