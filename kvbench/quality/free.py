"""Free running: the greedy answers of an engine that schedules the prompts itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.engine import Engine
from engine.sequence import Request, SamplingParams
from kvbench.quality.prompts import Prompt

Answers = Mapping[str, tuple[tuple[int, ...], ...]]
"""Prompt id -> the tokens of its answers, one a turn."""


def answer_all(engine: Engine, prompts: Sequence[Prompt]) -> Answers:
    """The engine's answers to all prompts, asked at once in this order; a later turn follows its own earlier answer."""
    by_id = {each.prompt_id: each for each in prompts}
    answers: dict[str, list[tuple[int, ...]]] = {name: [] for name in by_id}
    growing: dict[str, list[int]] = {}

    def ask(prompt: Prompt) -> None:
        given = answers[prompt.prompt_id]
        said = [part for pair in zip(prompt.turns, given, strict=False) for part in pair]
        ids = tuple(token for part in (*said, prompt.turns[len(given)]) for token in part)
        growing[prompt.prompt_id] = []
        params = SamplingParams(max_tokens=prompt.max_tokens, temperature=0.0, ignore_eos=True)
        engine.add_request(Request(prompt.prompt_id, ids, params))

    for each in prompts:
        ask(each)
    while engine.has_work():
        for output in engine.step():
            name = output.request_id
            growing[name] += output.token_ids
            if output.finish_reason is not None:
                answers[name].append(tuple(growing[name]))
                if len(answers[name]) < len(by_id[name].turns):
                    ask(by_id[name])
    return {name: tuple(given) for name, given in answers.items()}
