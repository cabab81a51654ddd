"""The results of a load: its samples, load.json with the client's own figures, and why it may not be believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from kvbench.common.errors import storage_sentence
from kvbench.common.parsing import json_at
from kvbench.common.records import write_record
from kvbench.load import validity
from kvbench.load.client_figures import Clocked, tokens_added
from kvbench.load.samples import Sample, unknown_answers, write_samples, write_wrong_answers
from kvbench.load.spec import LoadSpec
from kvbench.metrics.canaries import WRONG_ANSWERS
from kvbench.metrics.model import ClientFigures, LoadOutcome, LocustTotals
from kvbench.metrics.steady_window import steady_state
from kvbench.requests.request import RequestList

MAX_WALL_STEP_S = 0.05


@dataclass(frozen=True)
class DrivenLoad:
    """A load that was driven to its end. Times of ``samples`` and ``zero`` [s, perf_counter of this process].

    ``reasons``: why the load is invalid beside what the samples and ``client`` show.
    """

    samples: Sequence[Sample]
    zero: float
    clocked: Clocked
    client: ClientFigures
    reasons: Sequence[str] = ()
    locust: LocustTotals | None = None


def most_in_flight(starts: Sequence[float], ends: Sequence[float]) -> int:
    """Counts the most requests between send and end at one moment (an end and a start at once: one of them)."""
    moments = [(start, 1) for start in starts] + [(end, -1) for end in ends]
    return int(np.cumsum([step for _, step in sorted(moments)]).max(initial=0)) if moments else 0


def write_outcome(spec: LoadSpec, requests: RequestList, driven: DrivenLoad, ended_well: bool = True) -> LoadOutcome:
    """Writes both files into ``spec.out_dir``, without room there into ``spec.spare_dir``; returns load.json's content.

    Requests that were never finished make the load incomplete, as does ``ended_well`` False.
    """
    outcome = _outcome_of(spec, requests, driven, ended_well)
    folders = [Path(folder) for folder in (spec.out_dir, spec.spare_dir) if folder]
    answered = [(sample.request, sample.completion) for sample in driven.samples]
    for folder in folders:
        try:
            write_samples(folder / "requests.parquet", driven.samples, driven.zero)
            write_wrong_answers(folder / WRONG_ANSWERS, answered, requests.notes)
            write_record(folder / "load.json", outcome)
            break
        except OSError as error:
            if folder == folders[-1] or storage_sentence(error) is None:
                raise
    return outcome


def _outcome_of(spec: LoadSpec, requests: RequestList, driven: DrivenLoad, ended_well: bool) -> LoadOutcome:
    samples, zero, clocked, client = driven.samples, driven.zero, driven.clocked, driven.client
    short, too_short = validity.short_outputs(samples, spec.ignore_eos)
    exact_texts = bool(json_at(requests.notes, "exact_texts"))
    of_server = too_short + validity.other_prompts(samples, spec.dialect, exact_texts=exact_texts)
    of_server += validity.nothing_streamed(samples)
    added = tokens_added(samples) if spec.dialect.usage else []
    missing = len(requests) - sum(s.completion.error_kind != "interrupted" for s in samples)
    most_tokens = sum(s.request.n * s.request.max_tokens for s in samples if s.completion.ok)
    asked = {"short_outputs": short, "asked_output_tokens": most_tokens}
    outcome = LoadOutcome(
        started_at=datetime.fromtimestamp(clocked.started_unix, UTC).isoformat(),
        start_unix=clocked.started_unix,
        duration_s=clocked.wall_s,
        zero_perf_counter=zero,
        wall_clock_step_s=clocked.wall_step_s,
        mode=spec.mode,
        concurrency=spec.concurrency,
        max_concurrency=spec.max_concurrency,
        request_rate=spec.request_rate,
        num_requests=len(requests),
        completed=sum(s.completion.ok for s in samples),
        failed=sum(s.sent and not s.completion.ok for s in samples),
        incomplete=missing > 0 or not ended_well,
        max_in_flight=most_in_flight([s.ts for s in samples], [s.end for s in samples]),
        client=client.model_copy(update=asked),
        prompt_tokens_added=(min(added), float(np.median(added)), max(added)) if added else None,
        invalid_reasons=(*validity.invalid_reasons(client, missing), *driven.reasons, *of_server),
        notes={**requests.notes, **_clock_note(clocked), **unknown_answers(samples)},
        locust=driven.locust,
    )
    window = steady_state(
        [s.t0 - zero for s in samples],
        [s.ts - zero for s in samples],
        [s.end - zero for s in samples],
        outcome,
        [s.request.session for s in samples],
    ).window
    start, end = window or (None, None)
    return outcome.model_copy(update={"target_start_s": start, "target_end_s": end})


def _clock_note(clocked: Clocked) -> Mapping[str, str]:
    """A note when the wall clock was set: no measured time depends on it, but the times of other logs do."""
    if abs(clocked.wall_step_s) <= MAX_WALL_STEP_S:
        return {}
    return {
        "wall_clock": f"the wall clock was set by {clocked.wall_step_s:+.3f} s during the load; times of day of other "
        "logs do not match this load's beyond that, its own times are of a clock that is never set."
    }
