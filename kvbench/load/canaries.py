"""Whether canaries were answered rightly, and all that is needed to send one that was not once more."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvbench.common.files import write_text
from kvbench.load.completion import Completion
from kvbench.requests.canaries import CLASS, WrongAnswer, answers_of, first_difference
from kvbench.requests.request import RequestSpec

KV_FACTS = (  # what the built-in server tells of an answer; of other servers null
    "request_id", "first_step", "last_step", "pages", "page_size", "cached_tokens", "preemptions", "recomputed_tokens",
    "swapped_pages", "forked",
)  # fmt: skip


def wrong_answers(request: RequestSpec, done: Completion) -> list[tuple[int, WrongAnswer]]:
    """The number of each answer, from 0, that differs from the canary's, and how; none of a request that failed."""
    if request.canary is None or not done.ok:
        return []
    wanted, text = request.expected_token_ids or (), request.expected or ""
    answers = answers_of(done.token_ids, done.text, request.n, request.max_tokens)
    differences = [(number, first_difference(wanted, text, *answer)) for number, answer in enumerate(answers)]
    return [(number, wrong) for number, wrong in differences if wrong is not None]


def wrong_words(request: RequestSpec, done: Completion) -> str | None:
    """How the first wrong answer differs, in words; None for a right one, and for a request that is no canary."""
    return next((wrong.words for _, wrong in wrong_answers(request, done)), None)


def write_wrong_answers(
    path: Path, answered: Iterable[tuple[RequestSpec, Completion]], notes: Mapping[str, Any]
) -> None:
    """Writes a line for each wrong answer, no file where all are right. ``notes``: of the requests, with their seed."""
    drawn = notes.get("canaries") or {}
    repeat = {name: drawn.get(name) for name in ("seed", "repeat")}
    rows = [
        _row(request, done, number, wrong) | repeat
        for request, done in sorted(answered, key=lambda pair: pair[0].index)
        for number, wrong in wrong_answers(request, done)
    ]
    if rows:
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _row(request: RequestSpec, done: Completion, number: int, wrong: WrongAnswer) -> dict[str, object]:
    ids, text = list(answers_of(done.token_ids, done.text, request.n, request.max_tokens))[number]
    facts = next((json.loads(told) for choice, told in done.kv_facts if choice == number), {})
    return {
        "canary": request.canary,
        "kind": request.cls.removeprefix(CLASS),
        "index": request.index,
        "answer": number,
        "prompt_tokens": len(request.prompt_token_ids or ()),
        "position": wrong.position,
        "by": wrong.by,
        "expected_token_ids": list(request.expected_token_ids or ()),
        "got_token_ids": None if ids is None else list(ids),
        "expected": request.expected,
        "got": text or done.text,
        **{name: facts.get(name) for name in KV_FACTS},
    }
