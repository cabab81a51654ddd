"""The requests of a recorded trace: its lengths and times, and prompts that share what its prompts shared."""

from __future__ import annotations

import dataclasses
import functools
import glob
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.requests.draw import draw_lengths, random_tokens
from kvbench.requests.prefix_hits import shared_beginnings
from kvbench.requests.request import RequestSpec, compact
from kvbench.requests.shared_pages import page_prompts
from kvbench.traces.model import UNKNOWN, Trace, known_times, select
from kvbench.traces.read import read_trace
from kvbench.traces.tokenizer import find_file, load_tokenizer, tokenised, written
from kvbench.workload.length import fit_scale, scale_lengths
from kvbench.workload.prompts_section import TracePrompts

Ids = tuple[int, ...]


def draw_trace(
    prompts: TracePrompts,
    count: int | None,
    vocab_size: int,
    max_model_len: int,
    rng: np.random.Generator,
    *,
    count_sessions: bool = False,
) -> tuple[list[RequestSpec], dict[str, Any]]:
    """The requests in the trace's order, and notes for the report. ``arrival_s`` is None where the trace has no time.

    Args:
        count: most requests (or sessions, with ``count_sessions`` and a trace that is replayed in sessions).

    Raises:
        ValueError: a trace that cannot be read or that does not say what the workload needs.
    """
    paths = _paths(prompts.path)
    part = _select(
        prompts, _read(tuple((p, Path(p).stat().st_mtime_ns) for p in paths), prompts.format, prompts.page_size)
    )
    in_sessions = _in_sessions(prompts, part)
    part = _first(part, count, by_session=count_sessions and in_sessions)
    part = _with_outputs(prompts, part, rng)
    if prompts.send_text and part.prompts is None:
        raise ValueError(f"send_text has nothing to send: {paths[0]} (format {part.format}) has no texts; remove it.")
    if prompts.page_size is not None and part.page_ids is None:
        raise ValueError(f"page_size has no meaning: {paths[0]} (format {part.format}) has no page ids; remove it.")
    drawn = _drawn(prompts, part, vocab_size, max_model_len, rng, in_sessions)
    part = drawn.part
    told = {
        "trace": paths[0].split("/")[-1] + (f" and {len(paths) - 1} more" if len(paths) > 1 else ""),
        "trace_format": part.format,
        "trace_requests": len(part),
        "trace_start_s": prompts.start_s,
        "rate_scale": prompts.rate_scale,
        **({"trace_sessions": len(np.unique(part.session))} if in_sessions else {}),
        **({"trace_left_out": part.left_out} if part.left_out else {}),
    }
    return _requests(prompts, drawn, in_sessions), told | drawn.notes


@dataclass(frozen=True)
class _Drawn:
    """Of each request of ``part``: its token ids, how many leading ones others have too, its output length."""

    part: Trace
    ids: list[Ids]
    shared: list[int]
    outputs: np.ndarray
    notes: dict[str, Any]


def _drawn(
    prompts: TracePrompts,
    part: Trace,
    vocab_size: int,
    max_model_len: int,
    rng: np.random.Generator,
    in_sessions: bool,
) -> _Drawn:
    """What is had of a session by itself is not shared."""
    if part.prompts is not None:
        ids, outputs, part, notes = _of_texts(prompts, part, vocab_size, max_model_len, rng)
        owners = part.session.tolist() if in_sessions and part.session is not None else range(len(part))
        return _Drawn(part, ids, shared_beginnings(ids, owners), outputs, notes)
    if part.page_ids is not None:
        ids, shared, outputs, notes = page_prompts(
            part, prompts.length_scale, vocab_size, max_model_len, rng, by_session=in_sessions
        )
        return _Drawn(part, ids, shared, outputs, notes)
    ids, outputs, notes = _of_lengths(prompts, part, vocab_size, max_model_len, rng)
    return _Drawn(part, ids, [0] * len(ids), outputs, notes)


def _requests(prompts: TracePrompts, drawn: _Drawn, in_sessions: bool) -> list[RequestSpec]:
    part = drawn.part
    times = None if part.arrival_s is None else known_times(part)
    return [
        RequestSpec(
            i,
            "trace",
            drawn.ids[i],
            "".join(written(part, i)) if prompts.send_text and _is_text(part, i) else None,
            int(drawn.outputs[i]),
            arrival_s=None if times is None else float(times[i]),
            prefix_tokens=drawn.shared[i],
            **_turn(part, i) if in_sessions else {},
        )
        for i in range(len(part))
    ]


@functools.lru_cache(maxsize=1)
def _read(files: tuple[tuple[str, int], ...], name: str, page_size: int | None) -> Trace:
    """Every repeat of a sweep draws from the same trace; ``files``: each with its time of change."""
    return read_trace([path for path, _ in files], name, page_size)


def _paths(given: str | list[str]) -> list[str]:
    """Files, patterns expanded in alphabetical order. ValueError for a pattern that nothing matches."""
    found: list[str] = []
    for name in [given] if isinstance(given, str) else given:
        path = find_file(name)
        matched = [str(path)] if path is not None else sorted(glob.glob(name))
        if not matched:
            raise ValueError(
                f"the trace {name} does not exist; give its path in load.prompts.path (-o load.prompts.path=PATH). "
                "`kvbench trace describe` says what a trace holds; docs/commands.md says where to get public ones."
            )
        found += matched
    return found


def _select(prompts: TracePrompts, trace: Trace) -> Trace:
    if prompts.turns == "first" and trace.turn is not None:
        trace = trace.take(np.flatnonzero(trace.turn == 0))
    return select(
        trace,
        start_s=prompts.start_s,
        duration_s=prompts.duration_s,
        rate_scale=prompts.rate_scale,
        max_requests=prompts.max_requests,
    )


def _first(trace: Trace, count: int | None, *, by_session: bool) -> Trace:
    if count is None:
        return trace
    if not by_session:
        return trace.take(np.arange(min(count, len(trace))))
    begun = np.unique(trace.session)[:count]
    return trace.take(np.flatnonzero(np.isin(trace.session, begun)))


def _in_sessions(prompts: TracePrompts, trace: Trace) -> bool:
    """Whether turns follow one another, or every request has its own time."""
    gaps = trace.arrival_s is None or bool(np.isnan(trace.arrival_s).any())
    if prompts.sessions is None:
        return trace.session is not None and (gaps or trace.think_s is not None)
    if prompts.sessions and trace.session is None:
        raise ValueError(f"sessions: true, but the trace (format {trace.format}) does not say which requests are one.")
    if not prompts.sessions and trace.arrival_s is not None and gaps:
        raise ValueError(
            "sessions: false, but some turns of the trace have no time of their own; write sessions: true."
        )
    return prompts.sessions


def _with_outputs(prompts: TracePrompts, trace: Trace, rng: np.random.Generator) -> Trace:
    """Output lengths that the trace does not tell are drawn as the workload says; replies tell theirs later."""
    replies = trace.replies or (None,) * len(trace)
    unknown = np.array([n == UNKNOWN and r is None for n, r in zip(trace.output_tokens, replies, strict=True)])
    if not unknown.any():
        return trace
    if prompts.output_tokens is None:
        raise ValueError(
            f"the trace does not tell the output of {int(unknown.sum())} of {len(trace)} requests; say how long it is "
            "with load.prompts.output_tokens."
        )
    outputs = trace.output_tokens.copy()
    outputs[unknown] = draw_lengths(prompts.output_tokens, int(unknown.sum()), rng)
    return dataclasses.replace(trace, output_tokens=outputs)


def _of_lengths(
    prompts: TracePrompts, trace: Trace, vocab_size: int, max_model_len: int, rng: np.random.Generator
) -> tuple[list[Ids], np.ndarray, dict[str, Any]]:
    """Random token ids of the trace's lengths: nothing is shared."""
    longest = int((trace.prompt_tokens + trace.output_tokens).max())
    fixed = prompts.length_scale != "auto"
    scale = float(prompts.length_scale) if fixed else fit_scale(max(longest, 1), max_model_len)
    ids = [random_tokens(int(n), vocab_size, rng) for n in scale_lengths(trace.prompt_tokens, scale)]
    notes = {"contents": "random tokens", "length_scale": scale, "longest_total_tokens_in_trace": longest}
    return ids, scale_lengths(trace.output_tokens, scale), notes


def _of_texts(
    prompts: TracePrompts, trace: Trace, vocab_size: int, max_model_len: int, rng: np.random.Generator
) -> tuple[list[Ids], np.ndarray, Trace, dict[str, Any]]:
    """The trace's own texts as token ids, those that do not fit left out with all later turns of their session.

    Requests of which a trace with texts tells the length only are random tokens.
    """
    if prompts.length_scale not in ("auto", 1.0):
        raise ValueError(
            f"length_scale {prompts.length_scale} would cut texts; remove it (what is too long is left out)."
        )
    known = tokenised(trace, load_tokenizer(prompts.tokenizer, vocab_size))
    outputs = np.maximum(1, known.output_tokens)
    lengths = np.maximum(1, known.prompt_tokens)
    fits = lengths + outputs <= max_model_len
    if trace.session is not None:
        ended: set[int] = set()
        for i, session in enumerate(trace.session.tolist()):
            if not fits[i]:
                ended.add(session)
            fits[i] &= session not in ended
    keep = np.flatnonzero(fits)
    if not keep.size:
        raise ValueError(
            f"none of the trace's {len(trace)} requests fits max_model_len {max_model_len}; the shortest needs "
            f"{int((lengths + outputs).min())} tokens."
        )
    ids = [
        _ids(known.prompts[i], vocab_size) if trace.prompts[i] else random_tokens(int(lengths[i]), vocab_size, rng)  # type: ignore[index]
        for i in keep
    ]
    part = trace.take(keep)
    notes = {
        "contents": "the trace's texts",
        "trace_requests_too_long": len(trace) - len(keep),
        "longest_total_tokens_in_trace": int((lengths + outputs).max()),
    }
    return ids, outputs[keep], part, notes


def _ids(prompt: Any, vocab_size: int) -> Ids:
    assert isinstance(prompt, array)
    if not prompt:
        return (0,)  # an empty text: a model needs something to go on from
    if max(prompt) >= vocab_size:
        raise ValueError(
            f"the trace has the token id {max(prompt)}, but the model's vocabulary ends before {vocab_size}; use the "
            "model that the trace was made for."
        )
    return compact(prompt)


def _is_text(trace: Trace, row: int) -> bool:
    assert trace.prompts is not None
    return isinstance(trace.prompts[row], tuple) and bool(trace.prompts[row])


def _turn(trace: Trace, row: int) -> dict[str, Any]:
    assert trace.session is not None and trace.turn is not None
    turn = int(trace.turn[row])
    think = 0.0 if trace.think_s is None or not turn else float(trace.think_s[row])
    return {"session": int(trace.session[row]), "turn": turn, "think_s": think}
