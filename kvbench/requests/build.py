"""Draws the requests of one load, before the run, from one seed.

The same seed, repeat and load value (concurrency or rate) give the same requests for every configuration, so
that cells are compared on paired inputs. Another repeat or load value gives other token contents and another
order, but the same mix: shares are met exactly (largest remainder) and lengths are the evenly spaced quantiles
of their distribution, so that no repeat happens to be the heavier one.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvbench.requests.arrivals import draw_times, notes_of, recorded_times
from kvbench.requests.canaries import CanarySet, fitting, mix
from kvbench.requests.draw import DrawContext, check_fits, draw_conversations, draw_lengths, draw_requests
from kvbench.requests.request import Notes, RequestList, RequestSpec, conversations, distinct_prefixes
from kvbench.traces.tokenizer import find_path, load_tokenizer
from kvbench.workload.load_section import LoadConfig
from kvbench.workload.prompts_section import SyntheticPrompts, TextPrompts, TracePrompts

if TYPE_CHECKING:
    from kvbench.requests.from_trace import TraceStream

PIECE = 2000  # requests
_ARRIVALS, _CANARIES, _PIECES = 1, 2, 3  # these have streams of random numbers of their own


@dataclass(frozen=True)
class LoadDraw:
    """One load whose requests are drawn: equal fields give equal requests.

    ``vocab_size``: token ids lie in [16, vocab_size); ``max_model_len``: most tokens of a prompt and its output.
    ``concurrency``, ``rate``: the load point. ``canaries``: what is mixed in between the load's own requests, which are
    the same with and without them. ``piece``: of a load that is drawn in pieces (``stream_requests``): others than the
    first have requests of their own, with the same shared prefixes.
    """

    load: LoadConfig
    vocab_size: int
    max_model_len: int
    seed: int
    repeat: int = 0
    concurrency: int | None = None
    rate: float | None = None
    canaries: CanarySet | None = None
    piece: int = 0

    @property
    def is_open(self) -> bool:
        """Tests whether requests arrive at times of their own."""
        return self.load.mode == "open"

    @property
    def count(self) -> int | None:
        """Requests, or conversations; None: as many as the arrivals' times or the trace's slice give."""
        return self.load.count_for(self.rate if self.is_open else self.concurrency)

    @property
    def key(self) -> list[int]:
        """The seed of all random numbers of the first piece."""
        value = self.rate if self.is_open else self.concurrency
        size = 0 if value in (None, math.inf) else round(value * 1_000_000)
        return [self.seed, self.repeat, size, self.is_open]

    def random_streams(self) -> tuple[np.random.Generator, np.random.Generator]:
        """Returns the random numbers that the requests are drawn from, and those of the arrivals."""
        key = self.key + ([_PIECES, self.piece] if self.piece else [])
        return np.random.default_rng(key), np.random.default_rng([*key, _ARRIVALS])

    def of_length(self, count: int, piece: int = 0) -> LoadDraw:
        """Returns a piece of ``count`` requests, or conversations."""
        changes: dict[str, object] = {"num_requests": (count,)}
        if self.load.sessions is not None:
            changes = {"sessions": self.load.sessions.model_copy(update={"num_sessions": (count,)})}
        return dataclasses.replace(self, load=self.load.model_copy(update=changes), piece=piece)


def build_requests(draw: LoadDraw) -> RequestList:
    """Draws the requests of one load; ``.notes`` holds what the report should say (scale, source).

    ValueError when a request cannot fit max_model_len or a file is missing.
    """
    load, count, piece = draw.load, draw.count, draw.piece
    rng, clock = draw.random_streams()
    first_rng = np.random.default_rng(draw.key) if piece else rng  # shared prefixes are those of the first piece
    context = DrawContext(draw.vocab_size, draw.max_model_len, rng, first_rng)
    times = None
    if load.counted_by_time:
        times = draw_times(load, draw.rate, None, clock)
        count = len(times)
    prompts = load.prompts
    if isinstance(prompts, TextPrompts):
        requests, notes = _text(prompts, count or 0, context)
    elif not isinstance(prompts, SyntheticPrompts):
        from kvbench.requests.from_trace import draw_trace

        requests, notes = draw_trace(prompts, count, context, count_sessions=load.counted_by_time)
    elif load.sessions is None:
        requests, notes = draw_requests(prompts, count or 0, context)
    else:
        requests, notes = draw_conversations(prompts, load.sessions, count or 0, context)
    recorded = draw.is_open and load.arrivals == "trace"
    if recorded:
        times = recorded_times(load, [r.arrival_s for r in requests if not r.turn], clock)
    elif draw.is_open and times is None:
        first = bool(piece)  # a further piece begins a gap after the last arrival of the one before
        times = draw_times(load, draw.rate, sum(not r.turn for r in requests) + first, clock)[first:]
    if times is not None:
        notes |= notes_of(load, draw.rate, times)
    if not recorded and not any(r.think_s for r in requests):
        notes.pop("rate_scale", None)  # a speed that nothing was played at
    left = iter(() if times is None else times)  # later turns start when the one before has ended; some may be left
    requests = [
        dataclasses.replace(r, arrival_s=None if times is None or r.turn else float(next(left))) for r in requests
    ]
    for request in requests:
        check_fits(request.cls, len(request.prompt_token_ids or ()), request.max_tokens, draw.max_model_len)
    # A synthetic load that shares prefixes may by its shares have none in a few requests.
    may_share = isinstance(prompts, SyntheticPrompts) and prompts.shared_prefix
    if load.cache_state == "primed" and not may_share and not any(r.prefix_tokens for r in requests):
        raise ValueError(
            f"cache_state primed has nothing to prime: no two of the {len(requests)} prompts begin alike; write "
            "cache_state: cold, or give the prompts something to share (load.prompts.shared_prefix)."
        )
    if draw.canaries is not None and load.canaries is not None:
        chosen = fitting(draw.canaries, draw.vocab_size, draw.max_model_len)
        requests = mix(requests, chosen, load.canaries.share, np.random.default_rng([*draw.key, _CANARIES]))
        notes["canaries"] = {"of": draw.canaries.model, "seed": draw.seed, "repeat": draw.repeat}
    return RequestList(requests, notes)


def _text(prompts: TextPrompts, count: int, context: DrawContext) -> tuple[list[RequestSpec], Notes]:
    lines, rng = _read_lines(prompts.file), context.rng
    tokenizer = load_tokenizer(prompts.tokenizer, context.vocab_size)
    encoded = [tuple(item.ids) for item in tokenizer.encode_batch([line + "\n" for line in lines])]
    if prompts.shared_prefix_lines >= len(lines):
        raise ValueError(
            f"shared_prefix_lines {prompts.shared_prefix_lines} leaves no line of {prompts.file} for the prompts; "
            f"it has {len(lines)} lines, so choose fewer."
        )
    start = int(rng.integers(0, len(lines) - prompts.shared_prefix_lines))
    prefix = sum(encoded[start : start + prompts.shared_prefix_lines], ())
    flags = rng.permutation(np.arange(count) < round(prompts.shared_prefix_share * count))
    lengths = draw_lengths(prompts.prompt_tokens, count, rng)
    outputs = draw_lengths(prompts.output_tokens, count, rng)
    picker = random.Random(int(rng.integers(0, 2**62)))
    requests = []
    for i in range(count):
        own, drawn = prefix if flags[i] else (), list[int]()
        while len(drawn) < lengths[i]:  # whole lines in random order, the last one cut
            drawn += picker.choice(encoded)
        ids = own + tuple(drawn[: lengths[i]])
        text = tokenizer.decode(list(ids), skip_special_tokens=False) if prompts.send_text else None
        requests.append(RequestSpec(i, Path(prompts.file).stem, ids, text, int(outputs[i]), prefix_tokens=len(own)))
    return requests, {"text": Path(prompts.file).name, "shared_prefix_tokens": len(prefix)}


def _read_lines(file: str) -> list[str]:
    path = find_path(file)
    if path is None or not path.is_file():
        raise ValueError(f"the text file {file} does not exist; give a path in load.prompts.file.")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{file} holds no text; at least one line is needed.")
    return lines


@dataclass(frozen=True)
class RequestStream:
    """The requests of a load as they are asked for.

    ``conversations``: lists of requests that follow one another, in the order of their arrivals; read once.

    ``requests``: how many there will be; None: not known before (turns of conversations).
    ``prefixes``: those that requests share, each once, for a cache that is to be primed; not known of a trace.
    """

    conversations: Iterator[list[RequestSpec]]
    requests: int | None
    notes: Notes
    prefixes: list[tuple[int, ...]] = field(default_factory=list)


def stream_requests(draw: LoadDraw) -> RequestStream:
    """Makes the load's requests as they are asked for: for loads that are too long to be held in memory.

    Errors are those of ``build_requests``. The first piece of ``PIECE`` requests is what that draws for a load of that
    length, so that a shorter load is exactly the one that is sent to a real server. Each piece has the mix of classes
    and lengths of the whole, the same shared prefixes, and arrivals that go on where the piece before ended. A trace's
    lengths, times and page ids are read beforehand (8 bytes each), and each prompt is made when it is due. Drawn as a
    whole are texts, a trace in sessions, and rates that change (ramp, step) or have an end (duration_s).
    """
    load, count = draw.load, draw.count
    if isinstance(load.prompts, TracePrompts) and not load.counted_by_time:
        from kvbench.requests.from_trace import stream_trace

        rng, clock = draw.random_streams()
        trace = stream_trace(load.prompts, count, DrawContext(draw.vocab_size, draw.max_model_len, rng, rng))
        if trace is not None:
            return _of_trace(draw, trace, clock)
    changing = draw.is_open and (load.counted_by_time or load.arrivals in ("ramp", "step", "trace"))
    turns = 1 if load.sessions is None else load.sessions.turns.high
    piece = max(1, PIECE // turns)  # requests, or conversations
    if count is None or count <= piece or changing or not isinstance(load.prompts, SyntheticPrompts):
        requests = build_requests(draw)
        return RequestStream(iter(conversations(requests)), len(requests), requests.notes, distinct_prefixes(requests))
    first = build_requests(draw.of_length(piece))
    pieces, prefixes = _pieces(draw, count, piece, [*first]), distinct_prefixes(first)
    if load.sessions is None:
        return RequestStream(pieces, count, first.notes, prefixes)
    return RequestStream(pieces, None, first.notes | {"sessions": count}, prefixes)


def _pieces(draw: LoadDraw, count: int, piece: int, drawn: list[RequestSpec]) -> Iterator[list[RequestSpec]]:
    """Yields the conversations of all pieces; ``drawn``: the requests of the first."""
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
        drawn = build_requests(draw.of_length(min(piece, left), number))


def _of_trace(draw: LoadDraw, trace: TraceStream, clock: np.random.Generator) -> RequestStream:
    count, load = int(trace.notes["trace_requests"]), draw.load
    times, notes = None, dict(trace.notes)
    if draw.is_open and load.arrivals == "trace":
        times = recorded_times(load, [None] * count if trace.arrival_s is None else trace.arrival_s, clock)
    else:
        notes.pop("rate_scale", None)  # a speed that nothing is played at
        if draw.is_open:
            times = draw_times(load, draw.rate, count, clock)

    def one_by_one() -> Iterator[list[RequestSpec]]:
        for i, request in enumerate(trace.requests):
            check_fits(request.cls, len(request.prompt_token_ids or ()), request.max_tokens, draw.max_model_len)
            yield [dataclasses.replace(request, arrival_s=None if times is None else float(times[i]))]

    return RequestStream(one_by_one(), count, notes)
