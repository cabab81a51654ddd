"""The outcome of each request: its row in requests.parquet, and whether a canary was answered rightly."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvbench.common.files import write_atomically, write_text
from kvbench.common.parsing import json_at
from kvbench.load.completion import Completion
from kvbench.metrics.latency import SESSION_BROKEN
from kvbench.requests.canaries import CLASS, WrongAnswer, answers_of, first_difference
from kvbench.requests.request import Notes, RequestSpec, continued

KV_FACTS = (  # what the built-in server tells of an answer; of other servers null
    "request_id", "first_step", "last_step", "pages", "page_size", "cached_tokens", "preemptions", "recomputed_tokens",
    "swapped_pages", "forked",
)  # fmt: skip


def wrong_answers(request: RequestSpec, done: Completion) -> list[tuple[int, WrongAnswer]]:
    """Lists the answers, by number from 0, that differ from the canary's, and how; none for a failed request."""
    if request.canary is None or not done.ok:
        return []
    wanted, text = request.expected_token_ids or (), request.expected or ""
    answers = answers_of(done.token_ids, done.text, request.n, request.max_tokens)
    differences = [(number, first_difference(wanted, text, *answer)) for number, answer in enumerate(answers)]
    return [(number, wrong) for number, wrong in differences if wrong is not None]


def wrong_words(request: RequestSpec, done: Completion) -> str | None:
    """Says how the first wrong answer differs; None for a right one, and for a request that is no canary."""
    return next((wrong.words for _, wrong in wrong_answers(request, done)), None)


def write_wrong_answers(path: Path, answered: Iterable[tuple[RequestSpec, Completion]], notes: Notes) -> None:
    """Writes a line for each wrong answer, no file where all are right. ``notes``: of the requests, with their seed."""
    repeat = {name: json_at(notes, "canaries", name) for name in ("seed", "repeat")}
    rows = [
        _row(request, done, number, wrong) | repeat
        for request, done in sorted(answered, key=lambda pair: pair[0].index)
        for number, wrong in wrong_answers(request, done)
    ]
    if rows:
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _row(request: RequestSpec, done: Completion, number: int, wrong: WrongAnswer) -> dict[str, object]:
    ids, text = list(answers_of(done.token_ids, done.text, request.n, request.max_tokens))[number]
    facts = next((json.loads(fact) for choice, fact in done.kv_facts if choice == number), {})
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
        **{name: json_at(facts, name) for name in KV_FACTS},
    }


FIRST_TIMES = ("first", "first_output", "first_reasoning")  # moments of a Completion, each None where it has none


@dataclass(frozen=True)
class Sample:
    """One request's outcome. ``t0``, ``ts``, ``end`` [s] on the clock of the completion's times.

    ``queued_s``: how long it waited in the client for a place under ``max_concurrency``, part of ``ts - t0``.
    """

    request: RequestSpec
    user: int
    t0: float
    ts: float
    end: float
    completion: Completion
    queued_s: float = 0.0

    @property
    def slip_s(self) -> float:
        """The send's delay behind the intended start [s], without the wait for a place under a limit."""
        return self.ts - self.t0 - self.queued_s

    @property
    def sent(self) -> bool:
        """Tests whether it was sent at all."""
        return self.completion.error_kind != SESSION_BROKEN

    def to_row(self, zero: float) -> dict[str, Any]:
        """The Parquet row, with times in seconds since ``zero``."""
        row = {name: read(self) for name, (_, read) in _COLUMNS.items()}
        for name in ("t0", "ts", *FIRST_TIMES, "last", "end"):
            if row[name] is not None:
                row[name] -= zero
        for name in ("chunk_times", "sent_times"):
            row[name] = row[name] and [moment - zero for moment in row[name]]
        return row


def _prompt_tokens(sample: Sample) -> int:
    """Tokens of the prompt as the server counts them, else as they were sent; 0 where neither is known."""
    counted = sample.completion.prompt_tokens
    return len(sample.request.prompt_token_ids or ()) if counted is None else counted


_WHOLE, _REAL, _TEXT = pa.int64(), pa.float64(), pa.string()
_WHOLES, _REALS = pa.list_(pa.int32()), pa.list_(_REAL)
_COLUMNS: dict[str, tuple[pa.DataType, Callable[[Sample], Any]]] = {
    "index": (_WHOLE, lambda s: s.request.index),
    "class": (_TEXT, lambda s: s.request.cls),
    "priority": (_WHOLE, lambda s: s.request.priority),
    "user": (_WHOLE, lambda s: s.user),
    "session": (_WHOLE, lambda s: s.request.session),
    "turn": (_WHOLE, lambda s: s.request.turn),
    "prompt_tokens": (_WHOLE, _prompt_tokens),
    "output_tokens": (_WHOLE, lambda s: s.completion.output_tokens or 0),
    "reasoning_tokens": (_WHOLE, lambda s: s.completion.reasoning_tokens),
    "unstreamed_tokens": (_WHOLE, lambda s: s.completion.unstreamed_tokens),
    "cached_tokens": (_WHOLE, lambda s: s.completion.cached_tokens),
    "prefix_tokens": (_WHOLE, lambda s: s.request.prefix_tokens),
    "max_tokens": (_WHOLE, lambda s: s.request.max_tokens),
    "t0": (_REAL, lambda s: s.t0),
    "ts": (_REAL, lambda s: s.ts),
    "queued_s": (_REAL, lambda s: s.queued_s),
    "first": (_REAL, lambda s: s.completion.first),
    "first_output": (_REAL, lambda s: s.completion.first_output),
    "first_reasoning": (_REAL, lambda s: s.completion.first_reasoning),
    "last": (_REAL, lambda s: s.completion.chunk_times[-1] if s.completion.chunk_times else None),
    "end": (_REAL, lambda s: s.end),
    "chunk_times": (_REALS, lambda s: s.completion.chunk_times),
    "chunk_tokens": (_WHOLES, lambda s: s.completion.chunk_tokens),
    "chunk_choices": (_WHOLES, lambda s: s.completion.chunk_choices),
    "sent_times": (_REALS, lambda s: s.completion.sent_times or None),
    "output_token_ids": (_WHOLES, lambda s: s.completion.token_ids or None),
    "coalesced": (_WHOLE, lambda s: s.completion.coalesced),
    "ok": (pa.bool_(), lambda s: s.completion.ok),
    "error_kind": (_TEXT, lambda s: s.completion.error_kind),
    "error": (_TEXT, lambda s: s.completion.error),
    "finish_reason": (_TEXT, lambda s: s.completion.finish_reason),
    "http_status": (_WHOLE, lambda s: s.completion.http_status),
    "canary": (_TEXT, lambda s: s.request.canary),
    "canary_wrong": (_TEXT, lambda s: wrong_words(s.request, s.completion)),
    "text": (_TEXT, lambda s: s.completion.text),
}
SCHEMA = pa.schema([(name, kind) for name, (kind, _) in _COLUMNS.items()])


def knows_answer(sample: Sample) -> bool:
    """Tests whether the server returned the ids of its whole answer."""
    return len(sample.completion.token_ids) == (sample.completion.output_tokens or 0)


def with_history(request: RequestSpec, before: RequestSpec, answered: Sample) -> RequestSpec:
    """Puts the conversation as it really went in front of the new tokens of ``request``.

    ``before``: the turn before it as it was drawn; ``answered``: as it was sent, and the server's answer to it. Where
    the server did not return the ids of its whole answer, the one drawn beforehand stays (``unknown_answers`` says so).
    Messages have its text, and the one drawn beforehand where it has none (a tool call, reasoning alone).
    """
    if request.history:
        sent = answered.request
        answer = answered.completion.text or request.history[-1]
        return dataclasses.replace(request, history=(*sent.history, sent.prompt or "", answer))
    answer = tuple(answered.completion.token_ids) if knows_answer(answered) else None
    ids = continued(request, before, answered.request.prompt_token_ids or (), answer)
    return dataclasses.replace(request, prompt_token_ids=ids)


def unknown_answers(samples: Sequence[Sample]) -> dict[str, str]:
    """A note when prompts of later turns hold drawn answers instead of the server's own, as was wanted."""
    complete = {(s.request.session, s.request.turn) for s in samples if knows_answer(s)}
    wanted = [s.request for s in samples if s.request.new_tokens and s.sent and not s.request.history]
    without = sum((r.session, r.turn - 1) not in complete for r in wanted)
    if not without:
        return {}
    return {
        "history": f"history: actual is set, but {without} of {len(wanted)} later turns hold answers drawn "
        "beforehand (history: recorded), because the server did not return the token ids of its own (return_token_ids)."
    }


def write_samples(path: Path, samples: Sequence[Sample], zero: float) -> None:
    """Writes requests.parquet, rows in the order of the requests file; a half-written file is never seen."""
    rows = [s.to_row(zero) for s in sorted(samples, key=lambda s: s.request.index)]
    with write_atomically(path) as scratch:
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), scratch)
