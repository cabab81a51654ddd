"""The requests of a load one after another, for loads that are too long to be held in memory.

A load is drawn in pieces of ``PIECE`` requests: the first piece is what ``build_requests`` draws for a load of that
length, so that a load of at most ``PIECE`` requests is exactly the one that is sent to a real server. Each piece has
the mix of classes and lengths of the whole, the same shared prefixes, and arrivals that go on where the piece before
ended. A trace's lengths, times and page ids are read beforehand (8 bytes each), and each prompt is made when it is due.

Drawn as a whole are texts, a trace in sessions, and rates that change (ramp, step) or have an end (duration_s).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvbench.requests.arrivals import draw_times, recorded_times
from kvbench.requests.build import build_requests, check_fits, random_streams
from kvbench.requests.draw import Drawing
from kvbench.requests.from_trace import TraceStream, stream_trace
from kvbench.requests.request import Notes, RequestSpec, conversations, distinct_prefixes
from kvbench.workload.load_section import LoadConfig
from kvbench.workload.prompts_section import SyntheticPrompts, TracePrompts

PIECE = 2000  # requests


@dataclass(frozen=True)
class RequestStream:
    """``conversations``: lists of requests that follow one another, in the order of their arrivals; read once.

    ``requests``: how many there will be; None: not known before (turns of conversations).
    ``prefixes``: those that requests share, each once, for a cache that is to be primed; not known of a trace.
    """

    conversations: Iterator[list[RequestSpec]]
    requests: int | None
    notes: Notes
    prefixes: list[tuple[int, ...]] = field(default_factory=list)


def stream_requests(
    load: LoadConfig,
    *,
    vocab_size: int,
    max_model_len: int,
    seed: int,
    repeat: int = 0,
    concurrency: int | None = None,
    rate: float | None = None,
) -> RequestStream:
    """The load's requests, made as they are asked for. Arguments and errors are those of ``build_requests``."""
    how = {"vocab_size": vocab_size, "max_model_len": max_model_len, "seed": seed}
    how |= {"repeat": repeat, "concurrency": concurrency, "rate": rate}
    if isinstance(load.prompts, TracePrompts) and not load.counted_by_time:
        rng, clock = random_streams(load, seed, repeat, concurrency, rate)
        count = load.count_for(rate if load.mode == "open" else concurrency)
        trace = stream_trace(load.prompts, count, Drawing(vocab_size, max_model_len, rng, rng))
        if trace is not None:
            return _of_trace(load, trace, rate, clock, max_model_len)
    count = load.count_for(rate if load.mode == "open" else concurrency)
    changing = load.mode == "open" and (load.counted_by_time or load.arrivals in ("ramp", "step", "trace"))
    turns = 1 if load.sessions is None else load.sessions.turns.high
    piece = max(1, PIECE // turns)  # requests, or conversations
    if count is None or count <= piece or changing or not isinstance(load.prompts, SyntheticPrompts):
        requests = build_requests(load, **how)
        return RequestStream(iter(conversations(requests)), len(requests), requests.notes, distinct_prefixes(requests))
    first = build_requests(_of_length(load, piece), **how)
    pieces = _pieces(load, count, piece, [*first], how)
    if load.sessions is None:
        return RequestStream(pieces, count, first.notes, distinct_prefixes(first))
    return RequestStream(pieces, None, first.notes | {"sessions": count}, distinct_prefixes(first))


def _of_length(load: LoadConfig, count: int) -> LoadConfig:
    """The load with ``count`` requests, or conversations."""
    if load.sessions is None:
        return load.model_copy(update={"num_requests": (count,)})
    return load.model_copy(update={"sessions": load.sessions.model_copy(update={"num_sessions": (count,)})})


def _pieces(
    load: LoadConfig, count: int, piece: int, drawn: list[RequestSpec], how: dict[str, Any]
) -> Iterator[list[RequestSpec]]:
    """All pieces; ``drawn``: the first one."""
    index = session = number = 0
    begin = 0.0  # of the piece: the last arrival of the one before [s]
    while True:
        for turns in conversations(drawn):
            moved = []
            for turn in turns:
                due = None if turn.arrival_s is None else begin + turn.arrival_s
                own = None if turn.session is None else session
                moved.append(dataclasses.replace(turn, index=index, session=own, arrival_s=due))
                index += 1
            session += 1
            yield moved
        begin += max((r.arrival_s or 0.0 for r in drawn), default=0.0)
        number += 1
        left = count - number * piece
        if left <= 0:
            return
        drawn = list(build_requests(_of_length(load, min(piece, left)), **how, piece=number))


def _of_trace(
    load: LoadConfig, trace: TraceStream, rate: float | None, clock: np.random.Generator, max_model_len: int
) -> RequestStream:
    count = int(trace.notes["trace_requests"])
    times, notes = None, dict(trace.notes)
    if load.mode == "open" and load.arrivals == "trace":
        times = recorded_times(load, [None] * count if trace.arrival_s is None else trace.arrival_s, clock)
    else:
        notes.pop("rate_scale", None)  # a speed that nothing is played at
        if load.mode == "open":
            times = draw_times(load, rate, count, clock)

    def one_by_one() -> Iterator[list[RequestSpec]]:
        for i, request in enumerate(trace.requests):
            check_fits(request, max_model_len)
            yield [dataclasses.replace(request, arrival_s=None if times is None else float(times[i]))]

    return RequestStream(one_by_one(), count, notes)
