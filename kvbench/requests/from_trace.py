"""The requests of a recorded trace: its lengths and times, and prompts that share what its prompts shared."""

from __future__ import annotations

import dataclasses
import functools
import glob
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvbench.requests.draw import LOWEST_TOKEN, DrawContext, draw_lengths, random_tokens
from kvbench.requests.prefix_hits import shared_beginnings
from kvbench.requests.request import Notes, RequestSpec, compact
from kvbench.traces.model import UNKNOWN, Trace, file_names, known_times, select
from kvbench.traces.read import read_trace
from kvbench.traces.tokenizer import find_path, load_tokenizer, texts_sent, tokenised
from kvbench.workload.prompts_section import TracePrompts, fit_scale, scale_lengths

Ids = tuple[int, ...]
_KEPT_TOKENS = 4_000_000  # of pages that were made: 32 MB; others are made again


def draw_trace(
    prompts: TracePrompts, count: int | None, context: DrawContext, *, count_sessions: bool = False
) -> tuple[list[RequestSpec], Notes]:
    """The requests in the trace's order, and notes for the report. ``arrival_s`` is None where the trace has no time.

    Args:
        count: most requests (or sessions, with ``count_sessions`` and a trace that is replayed in sessions).

    Raises:
        ValueError: a trace that cannot be read or that does not say what the workload needs.
    """
    part, paths, in_sessions = _chosen(prompts, count, context.rng, count_sessions)
    part, ids, outputs, notes = _contents(prompts, part, context)
    ids = list(ids)
    owners = part.session.tolist() if in_sessions and part.session is not None else range(len(part))
    if part.prompts is not None:  # what only turns of one session have is not shared
        shared = shared_beginnings(ids, owners)
    elif part.page_ids is not None:
        shared = shared_pages(part, owners, notes["page_size_of_prompts"])
    else:
        shared = [0] * len(ids)
    requests = _requests(prompts, part, ids, outputs, in_sessions)
    requests = [dataclasses.replace(r, prefix_tokens=own) for r, own in zip(requests, shared, strict=True)]
    return requests, _about(prompts, part, paths, in_sessions) | notes


@dataclass(frozen=True)
class TraceStream:
    """A trace whose requests do not wait for one another. ``arrival_s``: of each [s]; None: it has no times.

    ``requests`` makes each prompt when it is asked for; they are those of ``draw_trace``, without ``prefix_tokens``.
    """

    requests: Iterator[RequestSpec]
    arrival_s: np.ndarray | None
    notes: Notes


def stream_trace(prompts: TracePrompts, count: int | None, context: DrawContext) -> TraceStream | None:
    """The trace as a stream; None where it is replayed in sessions. Raises ValueError as ``draw_trace`` does."""
    part, paths, in_sessions = _chosen(prompts, count, context.rng, False)
    if in_sessions:
        return None
    part, ids, outputs, notes = _contents(prompts, part, context)
    times = None if part.arrival_s is None else known_times(part)
    requests = _requests(prompts, part, ids, outputs, in_sessions)
    return TraceStream(requests, times, _about(prompts, part, paths, in_sessions) | notes)


def _chosen(
    prompts: TracePrompts, count: int | None, rng: np.random.Generator, count_sessions: bool
) -> tuple[Trace, list[str], bool]:
    """The part of the trace that is played, its files, and whether it is played in sessions."""
    paths = _paths(prompts.path)
    part = _read(tuple((p, Path(p).stat().st_mtime_ns) for p in paths), prompts.format, prompts.page_size)
    if prompts.turns == "first" and part.turn is not None:
        part = part.take(np.flatnonzero(part.turn == 0))
    part = select(
        part,
        start_s=prompts.start_s,
        duration_s=prompts.duration_s,
        rate_scale=prompts.rate_scale,
        max_requests=prompts.max_requests,
    )
    in_sessions = _in_sessions(prompts, part)
    if count is not None and count_sessions and in_sessions:
        part = part.take(np.flatnonzero(np.isin(part.session, np.unique(part.session)[:count])))
    elif count is not None:
        part = part.take(np.arange(min(count, len(part))))
    part = _with_outputs(prompts, part, rng)
    for key, what, there in (("send_text", "texts", part.prompts), ("page_size", "page ids", part.page_ids)):
        if getattr(prompts, key) and there is None:
            raise ValueError(f"{key} has no meaning: {paths[0]} (format {part.format}) has no {what}; remove it.")
    return part, paths, in_sessions


def _contents(
    prompts: TracePrompts, part: Trace, context: DrawContext
) -> tuple[Trace, Iterable[Ids], np.ndarray, Notes]:
    """The requests that can be sent, their prompts' token ids in this order, their outputs, and notes."""
    if part.prompts is not None:
        return _of_texts(prompts, part, context)
    if part.page_ids is not None:
        return part, *page_prompts(part, prompts.length_scale, context)
    return part, *_of_lengths(prompts, part, context)


def _requests(
    prompts: TracePrompts, part: Trace, ids: Iterable[Ids], outputs: np.ndarray, in_sessions: bool
) -> Iterator[RequestSpec]:
    times = None if part.arrival_s is None else known_times(part)
    for i, own in enumerate(ids):
        yield RequestSpec(
            i,
            "trace",
            own,
            "".join(texts) if prompts.send_text and (texts := texts_sent(part, i)) else None,
            int(outputs[i]),
            arrival_s=None if times is None else float(times[i]),
            **_session_fields(part, i) if in_sessions else {},
        )


def _about(prompts: TracePrompts, part: Trace, paths: Sequence[str], in_sessions: bool) -> Notes:
    return {
        "trace": file_names(paths),
        "trace_format": part.format,
        "trace_requests": len(part),
        "trace_start_s": prompts.start_s,
        "rate_scale": prompts.rate_scale,
        **({"trace_sessions": len(np.unique(part.session))} if in_sessions else {}),
        **({"trace_left_out": part.left_out} if part.left_out else {}),
    }


@functools.lru_cache(maxsize=1)
def _read(files: tuple[tuple[str, int], ...], name: str, page_size: int | None) -> Trace:
    """Reads a trace, and keeps it for the next repeat of a sweep. ``files``: paths and when they changed."""
    return read_trace([path for path, _ in files], name, page_size)


def _paths(given: Sequence[str]) -> list[str]:
    """Files, patterns expanded in alphabetical order. ValueError for a pattern that nothing matches."""
    paths: list[str] = []
    for name in given:
        path = find_path(name)
        matched = [str(path)] if path is not None else sorted(glob.glob(name))
        if not matched:
            raise ValueError(
                f"the trace {name} does not exist; give its path in load.prompts.path (-o load.prompts.path=PATH). "
                "`kvbench trace describe` says what a trace holds; docs/commands.md says where to get public ones."
            )
        paths += matched
    return paths


def _in_sessions(prompts: TracePrompts, trace: Trace) -> bool:
    """Tests whether each turn waits for the one before it; otherwise every request starts at its own time."""
    gaps = trace.arrival_s is None or bool(np.isnan(trace.arrival_s).any())
    if prompts.sessions is None:
        return trace.session is not None and (gaps or trace.think_s is not None)
    if prompts.sessions and trace.session is None:
        raise ValueError(f"sessions: true, but the trace (format {trace.format}) has no sessions; remove it.")
    if not prompts.sessions and trace.arrival_s is not None and gaps:
        raise ValueError(
            "sessions: false, but some turns of the trace have no time of their own; write sessions: true."
        )
    return prompts.sessions


def _session_fields(trace: Trace, row: int) -> Notes:
    turn = int(trace.turn[row])
    think = 0.0 if trace.think_s is None or not turn else float(trace.think_s[row])
    return {"session": int(trace.session[row]), "turn": turn, "think_s": think}


def _with_outputs(prompts: TracePrompts, trace: Trace, rng: np.random.Generator) -> Trace:
    """The trace with drawn output lengths where it tells neither a length nor a reply."""
    unknown = trace.output_tokens == UNKNOWN
    if trace.replies is not None:
        unknown &= np.array([reply is None for reply in trace.replies])
    if not unknown.any():
        return trace
    if prompts.output_tokens is None:
        raise ValueError(
            f"the trace has no output length for {int(unknown.sum())} of {len(trace)} requests; set it with "
            "load.prompts.output_tokens."
        )
    outputs = trace.output_tokens.copy()
    outputs[unknown] = draw_lengths(prompts.output_tokens, int(unknown.sum()), rng)
    return dataclasses.replace(trace, output_tokens=outputs)


def _of_lengths(prompts: TracePrompts, trace: Trace, context: DrawContext) -> tuple[Iterator[Ids], np.ndarray, Notes]:
    """Random token ids of the trace's lengths, drawn when they are needed; prompts share nothing."""
    longest = int((trace.prompt_tokens + trace.output_tokens).max())
    fixed = prompts.length_scale != "auto"
    scale = float(prompts.length_scale) if fixed else fit_scale(max(longest, 1), context.max_model_len)
    ids = (context.tokens(int(n)) for n in scale_lengths(trace.prompt_tokens, scale))
    notes = {"contents": "random tokens", "length_scale": scale, "longest_total_tokens_in_trace": longest}
    return ids, scale_lengths(trace.output_tokens, scale), notes


def _of_texts(prompts: TracePrompts, trace: Trace, context: DrawContext) -> tuple[Trace, list[Ids], np.ndarray, Notes]:
    """The requests that fit, their texts as token ids, and their outputs.

    What does not fit is left out with all later turns of its session. Where a trace with texts has the
    length only, the prompt is random tokens.
    """
    if prompts.length_scale not in ("auto", 1.0):
        raise ValueError(
            f"length_scale {prompts.length_scale} would cut texts; remove it (texts that are too long are left out)."
        )
    vocab_size, max_model_len = context.vocab_size, context.max_model_len
    with_ids = tokenised(trace, load_tokenizer(prompts.tokenizer, vocab_size))
    outputs = np.maximum(1, with_ids.output_tokens)
    lengths = np.maximum(1, with_ids.prompt_tokens)
    fits = lengths + outputs <= max_model_len
    ended: set[int] = set()
    for i, session in enumerate(() if trace.session is None else trace.session.tolist()):
        fits[i] &= session not in ended
        if not fits[i]:
            ended.add(session)
    keep = np.flatnonzero(fits)
    if not keep.size:
        raise ValueError(
            f"none of the trace's {len(trace)} requests fits max_model_len {max_model_len}; the shortest needs "
            f"{int((lengths + outputs).min())} tokens."
        )
    assert trace.prompts is not None and with_ids.prompts is not None
    ids: list[Ids] = []
    for i in keep:
        if not trace.prompts[i]:
            ids.append(context.tokens(int(lengths[i])))
            continue
        prompt = with_ids.prompts[i] or (0,)  # an empty text: a model needs something to go on from
        if max(prompt) >= vocab_size:
            raise ValueError(
                f"the trace has the token id {max(prompt)}, but the model's vocabulary ends before {vocab_size}; use "
                "the model that the trace was made for."
            )
        ids.append(compact(prompt))  # type: ignore[arg-type]
    notes = {
        "contents": "the trace's texts",
        "trace_requests_too_long": len(trace) - len(keep),
        "longest_total_tokens_in_trace": int((lengths + outputs).max()),
    }
    return trace.take(keep), ids, outputs[keep], notes


def page_prompts(
    trace: Trace, length_scale: float | str, context: DrawContext
) -> tuple[Iterator[Ids], np.ndarray, Notes]:
    """Token ids of each request, made when they are asked for, output lengths, and notes for the report.

    A page id becomes a page of tokens that depends on the id and the seed only; pages of different ids differ in their
    first few tokens. Tokens beyond a request's last page id are its own. To shrink lengths, the page shrinks to a whole
    number of tokens, ``round(page_size x length_scale)`` (``auto``: the largest with which every request fits), and a
    partly filled last page in proportion. So every request has as many full pages as in the trace. Pages of one token
    cannot be filled in part: they are refused where the trace has partly filled pages.

    Raises:
        ValueError: lengths that fit at no page size, or pages so short that there are not enough different ones.
    """
    assert trace.page_ids is not None and trace.page_size is not None
    size = _scaled_page(trace, length_scale, context.max_model_len)
    distinct = 1 + max((max(ids) for ids in trace.page_ids if ids), default=0)
    pages = _Pages(size, context.vocab_size, distinct + len(trace), int(context.rng.integers(2**63)))
    full, rest, outputs = _lengths(trace, size)
    notes = {
        "contents": "random tokens that share the pages of the trace's page ids",
        "length_scale": size / trace.page_size,
        "trace_page_size": trace.page_size,
        "page_size_of_prompts": size,
        "longest_total_tokens_in_trace": int((trace.prompt_tokens + trace.output_tokens).max()),
    }
    return _prompts(trace.page_ids, pages, full, rest, distinct), outputs, notes


def _prompts(
    page_ids: Sequence[Sequence[int]], pages: _Pages, full: np.ndarray, rest: np.ndarray, distinct: int
) -> Iterator[Ids]:
    for row, numbers in enumerate(page_ids):
        count = int(full[row])
        prompt = tuple(token for number in numbers[:count] for token in pages.of(number))
        last = numbers[count] if len(numbers) > count else distinct + row  # its own number: nobody else's page
        yield prompt + pages.of(last)[: int(rest[row])]


def shared_pages(trace: Trace, owners: Sequence[int], size: int) -> list[int]:
    """The leading tokens, in full pages of ``size``, that each prompt shares with one of another owner. [requests]"""
    assert trace.page_ids is not None
    full, _, _ = _lengths(trace, size)
    whole = [tuple(numbers[:count]) for numbers, count in zip(trace.page_ids, full.tolist(), strict=True)]
    return [size * shared for shared in shared_beginnings(whole, owners)]


def _lengths(trace: Trace, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The full pages, the tokens in the partly filled last one, and the output. int64 [requests] each"""
    full, rest = np.divmod(trace.prompt_tokens, trace.page_size)
    scaled = np.maximum(1, rest * size // trace.page_size)
    rest = np.where(rest > 0, scaled, (full == 0).astype(np.int64))  # at least one token: an empty prompt is none
    return full, rest, np.maximum(1, trace.output_tokens * size // trace.page_size)


def _longest(trace: Trace, size: int) -> int:
    full, rest, output = _lengths(trace, size)
    return int((full * size + rest + output).max())


def _scaled_page(trace: Trace, length_scale: float | str, max_model_len: int) -> int:
    assert trace.page_size is not None
    least = 2 if (trace.prompt_tokens % trace.page_size).any() else 1
    if length_scale != "auto":
        size = max(1, round(trace.page_size * float(length_scale)))
        if size < least:
            raise ValueError(
                f"length_scale {float(length_scale):g} shrinks pages of {trace.page_size} tokens to 1 token, but some "
                f"prompts fill only a part of their last page: choose at least {least / trace.page_size:g}, or auto."
            )
        return size
    low, high = least - 1, trace.page_size  # the longest request grows with the page
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _longest(trace, middle) <= max_model_len else (low, middle - 1)
    if low < least:
        raise ValueError(
            f"the longest request has {int(trace.pages.max())} pages: even with pages of {least} tokens it would need "
            f"{_longest(trace, least)} tokens, more than max_model_len {max_model_len}; choose a part of the trace "
            "with shorter requests (start_s, duration_s, max_requests) or a larger max_model_len."
        )
    return low


class _Pages:
    """Pages of ``size`` tokens by number, all different: the first tokens spell the number, permuted by the salt."""

    def __init__(self, size: int, vocab_size: int, count: int, salt: int):
        self._low = LOWEST_TOKEN if vocab_size > 2 * LOWEST_TOKEN else 0
        self._base = vocab_size - self._low
        self._size, self._vocab_size, self._salt = size, vocab_size, salt
        self._digits = max(1, math.ceil(math.log(max(count, 2)) / math.log(max(self._base, 2)) - 1e-12))
        if self._digits > size:
            raise ValueError(
                f"pages of {size} tokens are too short to tell {count} pages apart with {self._base} token ids: "
                f"they need {self._digits} tokens; choose a larger length_scale or max_model_len, or a shorter part of "
                "the trace."
            )
        self._space = self._base**self._digits
        space = range(salt % self._space or 1, 2 * self._space + 2)
        self._factor = next(f for f in space if math.gcd(f, self._space) == 1)
        self.of = functools.lru_cache(max(1, _KEPT_TOKENS // size))(self._make)

    def _make(self, number: int) -> Ids:
        spelt, left = [], (number * self._factor + self._salt) % self._space
        for _ in range(self._digits):
            left, digit = divmod(left, self._base)
            spelt.append(self._low + digit)
        rng = np.random.default_rng([self._salt, number])
        return (*spelt, *random_tokens(self._size - self._digits, self._vocab_size, rng))
