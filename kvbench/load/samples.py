"""One row a request in requests.parquet: what was sent, when, and how it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from kvbench.common.files import write_atomically
from kvbench.load.canaries import wrong_words
from kvbench.load.completion import Completion
from kvbench.metrics.latency import SESSION_BROKEN
from kvbench.requests.request import RequestSpec, continued

FIRST_TIMES = ("first", "first_output", "first_reasoning")  # moments of a Completion, each None where it has none


SCHEMA = pa.schema(
    [
        ("index", pa.int64()),
        ("class", pa.string()),
        ("priority", pa.int64()),
        ("user", pa.int64()),
        ("session", pa.int64()),
        ("turn", pa.int64()),
        ("prompt_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("reasoning_tokens", pa.int64()),
        ("unstreamed_tokens", pa.int64()),
        ("cached_tokens", pa.int64()),
        ("prefix_tokens", pa.int64()),
        ("max_tokens", pa.int64()),
        ("t0", pa.float64()),
        ("ts", pa.float64()),
        ("queued_s", pa.float64()),
        ("first", pa.float64()),
        ("first_output", pa.float64()),
        ("first_reasoning", pa.float64()),
        ("last", pa.float64()),
        ("end", pa.float64()),
        ("chunk_times", pa.list_(pa.float64())),
        ("chunk_tokens", pa.list_(pa.int32())),
        ("chunk_choices", pa.list_(pa.int32())),
        ("sent_times", pa.list_(pa.float64())),
        ("output_token_ids", pa.list_(pa.int32())),
        ("coalesced", pa.int64()),
        ("ok", pa.bool_()),
        ("error_kind", pa.string()),
        ("error", pa.string()),
        ("finish_reason", pa.string()),
        ("http_status", pa.int64()),
        ("canary", pa.string()),
        ("canary_wrong", pa.string()),
        ("text", pa.string()),
    ]
)


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
        """How much later than intended it was sent [s], without the time it was made to wait for a place."""
        return self.ts - self.t0 - self.queued_s

    @property
    def sent(self) -> bool:
        """Whether it was sent at all."""
        return self.completion.error_kind != SESSION_BROKEN

    def to_row(self, zero: float) -> dict[str, object]:
        """The Parquet row, with times in seconds since ``zero``."""
        done, request = self.completion, self.request
        times = [t - zero for t in done.chunk_times]
        sent = len(request.prompt_token_ids) if request.prompt_token_ids is not None else 0
        return {
            "index": request.index,
            "class": request.cls,
            "priority": request.priority,
            "user": self.user,
            "session": request.session,
            "turn": request.turn,
            "prompt_tokens": sent if done.prompt_tokens is None else done.prompt_tokens,
            "output_tokens": done.output_tokens or 0,
            "reasoning_tokens": done.reasoning_tokens,
            "unstreamed_tokens": done.unstreamed_tokens,
            "cached_tokens": done.cached_tokens,
            "prefix_tokens": request.prefix_tokens,
            "max_tokens": request.max_tokens,
            "t0": self.t0 - zero,
            "ts": self.ts - zero,
            "queued_s": self.queued_s,
            **{name: None if (at := getattr(done, name)) is None else at - zero for name in FIRST_TIMES},
            "last": times[-1] if times else None,
            "end": self.end - zero,
            "chunk_times": times,
            "chunk_tokens": done.chunk_tokens,
            "chunk_choices": done.chunk_choices,
            "sent_times": [t - zero for t in done.sent_times] or None,
            "output_token_ids": done.token_ids or None,
            "coalesced": done.coalesced,
            "ok": done.ok,
            "error_kind": done.error_kind,
            "error": done.error,
            "finish_reason": done.finish_reason,
            "http_status": done.http_status,
            "canary": request.canary,
            "canary_wrong": wrong_words(request, done),
            "text": done.text,
        }


def knows_answer(sample: Sample) -> bool:
    """Whether the server returned the ids of its whole answer."""
    return len(sample.completion.token_ids) == (sample.completion.output_tokens or 0)


def with_history(request: RequestSpec, before: RequestSpec, answered: Sample) -> RequestSpec:
    """``request`` with the conversation as it really went in front of its new tokens.

    ``before``: the turn before it as it was drawn; ``answered``: as it was sent, and the server's answer to it. Where
    the server did not return the ids of its whole answer, the one drawn beforehand stays (``unknown_answers`` says so).
    Messages have its text, and the one drawn beforehand where it has none (a tool call, reasoning alone).
    """
    if request.history:
        sent = answered.request
        said = answered.completion.text or request.history[-1]
        return dataclasses.replace(request, history=(*sent.history, sent.prompt or "", said))
    answer = tuple(answered.completion.token_ids) if knows_answer(answered) else None
    ids = continued(request, before, answered.request.prompt_token_ids or (), answer)
    return dataclasses.replace(request, prompt_token_ids=ids)


def unknown_answers(samples: Sequence[Sample]) -> dict[str, str]:
    """A note when prompts of later turns hold drawn answers instead of the server's own, as was wanted."""
    known = {(s.request.session, s.request.turn): knows_answer(s) for s in samples}
    wanted = [s.request for s in samples if s.request.new_tokens and s.sent and not s.request.history]
    without = sum(not known.get((r.session, r.turn - 1), False) for r in wanted)
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
