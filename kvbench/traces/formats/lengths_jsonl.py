"""JSONL with lengths, and page ids where there are any: Mooncake, AIPerf's superset, vLLM's timed_trace, Qwen/Bailian,
GuideLLM.

- mooncake: ``timestamp`` [ms], ``input_length, output_length, hash_ids`` (pages of 512, the last one too; Qin et al.,
  FAST 2025). AIPerf's mooncake_trace adds, in place of ``input_length``, one of ``text_input, messages, payload``,
  and ``delay`` [ms], ``session_id, message_mode`` (history; delta: texts or lengths of the new turn only).
- timed_trace: the same fields with times in seconds (vLLM's default); guidellm: without page ids.
- qwen: ``chat_id, parent_chat_id`` (-1: the first), ``timestamp`` [s], ``type, turn`` and the lengths and page ids;
  pages of 16. Its ids name a page's own content and are not chained, so only a leading run is a hit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvbench.traces.formats import csv
from kvbench.traces.formats.chats import message_texts, payload_texts
from kvbench.traces.model import UNKNOWN, Prompt, Trace
from kvbench.traces.rows import PageSize, Rows, Source, TraceFormat, TraceRow, read_rows, seconds, short, text, tokens

_CONTENT: dict[str, Callable[[TraceRow, str], int | Prompt]] = {
    "input_length": tokens,
    "text_input": lambda row, key: (text(row, key),),
    "messages": lambda row, key: message_texts(row[key]),
    "payload": lambda row, key: payload_texts(row[key]),
}
_AIPERF = ("text_input", "messages", "payload", "delay", "message_mode", "session_id")
_MOONCAKE_PAGE = 512


def _is_qwen(source: Source) -> bool:
    return source.has("chat_id", "parent_chat_id", "hash_ids")


def _is_mooncake(source: Source) -> bool:
    """Tests whether it has AIPerf's own keys or page ids, as vLLM's timed_trace may: see ``unit_doubt``."""
    own = {"hash_ids", *_AIPERF}
    return not _is_qwen(source) and _has_lengths(source) and bool(own & source.first.keys())


def _has_lengths(source: Source) -> bool:
    return any(source.has(key) for key in (*_CONTENT, "hash_ids"))


def is_plain(source: Source) -> bool:
    """Tests whether it has lengths and times only, whose unit (AIPerf's ms, vLLM's s) it does not tell."""
    return source.has("input_length") and not _is_qwen(source) and not _is_mooncake(source)


def unit_doubt(source: Source, trace: Trace) -> str | None:
    """Says why a file with page ids that was read as Mooncake's (ms) may have times in seconds; None: no reason.

    vLLM's timed_trace has the same keys; read in the wrong unit, its requests would come 1000 times as fast.
    """
    if trace.page_ids is None or trace.arrival_s is None or any(key in source.first for key in _AIPERF):
        return None
    if trace.page_size != _MOONCAKE_PAGE:
        return f"its pages have {trace.page_size} tokens, Mooncake's {_MOONCAKE_PAGE}"
    ms = trace.arrival_s * 1000.0
    return "its timestamps are not whole numbers, as Mooncake's are" if np.abs(ms - np.round(ms)).max() > 1e-3 else None


def _read(
    name: str, sources: list[Source], page_size: int | None, unit: float = 1.0, usual: int | None = None
) -> Trace:
    """Reads pieces of one trace, in which page ids mean the same. ``unit`` [s] of times, ``usual`` size of pages."""
    history: dict[Any, int | Prompt] = {}
    fit = PageSize(page_size, usual=usual) if "hash_ids" in sources[0].first else None
    trace = read_rows(name, sources, lambda rows, row, where: _add(rows, row, unit, history), fit)
    _require_history(trace, sources[0])
    return trace


def _require_history(trace: Trace, source: Source) -> None:
    """Raises ValueError where no turn holds the turns before it and half of them are shorter than the one before."""
    if trace.session is None or trace.prompts:
        return
    order, ids = np.argsort(trace.session, kind="stable"), trace.page_ids
    goes_on = np.diff(trace.session[order]) == 0
    before, later = order[:-1][goes_on], order[1:][goes_on]
    lengths, lengths_before = trace.prompt_tokens[later], trace.prompt_tokens[before]
    shorter = np.flatnonzero(lengths < lengths_before)
    is_whole = (lengths >= lengths_before + np.maximum(0, trace.output_tokens[before])).any() or any(
        len(ids[i]) and ids[i][:1] == ids[j][:1] for i, j in zip(later, before, strict=True) if ids
    )
    if len(shorter) and 2 * len(shorter) >= len(later) and not is_whole:
        raise ValueError(
            f"the sessions of {source.path} seem to have lengths of the new turn only (input_length "
            f"{lengths[shorter[0]]} follows {lengths_before[shorter[0]]}, and no turn is as long as all before it): if "
            "so, leave hash_ids out and give every row message_mode delta; if requests do not go on from one another, "
            "as with user ids, remove session_id"
        )


def _add(rows: Rows, row: TraceRow, unit: float, history: dict[Any, int | Prompt]) -> None:
    """Adds a request. ``history``: by session, the tokens, texts or token ids that a delta goes on from."""
    given = [key for key in _CONTENT if row[key] is not None]
    content = given[0] if given else "input_length"
    session, mode = row["session_id"], row["message_mode"]
    if rows.page_size is not None and content != "input_length":
        raise ValueError(f"page ids go with input_length, not with {content}: mend or remove the request")
    if len(given) > 1:
        raise ValueError(f"both {given[0]} and {given[1]}, which may not agree: keep one of them")
    if rows.page_size is None and row["hash_ids"] is not None:
        raise ValueError("page ids, which the first request has not: give every request its hash_ids, or none")
    if isinstance(session, list | dict):
        raise ValueError(f"session_id {short(session)} is neither a text nor a number: mend it")
    if mode not in (None, "history", "delta"):
        raise ValueError(f"message_mode {short(mode)} is neither history nor delta: mend it")
    prompt: Any = _CONTENT[content](row, content)
    if mode == "delta" and session in history:
        if rows.page_size is not None:
            raise ValueError("page ids of the new turn only do not tell all of the prompt's: leave hash_ids out")
        if type(prompt) is not type(history[session]):
            raise ValueError(f"{content} cannot go on from turns with another content: give all turns of a session one")
        prompt = history[session] + prompt
    is_length = isinstance(prompt, int)
    if session is not None:
        needed = None if mode == "delta" else 0
        history[session] = prompt + tokens(row, "output_length", needed) if is_length else prompt
    rows.add(
        prompt if is_length else UNKNOWN,
        tokens(row, "output_length", UNKNOWN),
        time_s=seconds(row, "timestamp", unit),
        page_ids=row["hash_ids"],
        session=session,
        think_s=seconds(row, "delay", unit),
        prompt=None if is_length else prompt,
    )


def _read_qwen(sources: list[Source], page_size: int | None) -> Trace:
    sessions: dict[Any, Any] = {}  # chat -> the first chat of its conversation

    def add(rows: Rows, row: TraceRow, where: Any) -> None:
        chat, parent = row["chat_id"], row["parent_chat_id"]
        if type(chat) is not int or type(parent) is not int:
            raise ValueError(f"chat_id {short(chat)} and parent_chat_id {short(parent)} are not whole numbers")
        sessions[chat] = sessions.get(parent, chat)
        rows.add(
            tokens(row, "input_length"),
            tokens(row, "output_length", UNKNOWN),
            time_s=seconds(row, "timestamp"),
            page_ids=row["hash_ids"],
            session=sessions[chat],
        )

    return read_rows("qwen", sources, add, PageSize(page_size, usual=16))


def _read_guidellm(sources: list[Source], page_size: int | None) -> Trace:
    read = csv.read if sources[0].container == "csv" else _read
    return read("guidellm", sources, page_size)


FORMATS = (
    TraceFormat(
        "mooncake", "JSONL: timestamp (ms), input_length, hash_ids",
        _is_mooncake, partial(_read, "mooncake", unit=1e-3, usual=_MOONCAKE_PAGE), _has_lengths,
    ),
    TraceFormat(
        "timed_trace", "JSONL: the same names, timestamp in seconds",
        is_plain, partial(_read, "timed_trace"), _has_lengths,
    ),
    TraceFormat("qwen", "JSONL: chat_id, parent_chat_id, input_length, hash_ids", _is_qwen, _read_qwen),
    TraceFormat(
        "guidellm", "CSV or JSONL: timestamp (s), input_length, output_length",
        lambda source: csv.fits("guidellm")(source) or is_plain(source), _read_guidellm,
    ),
)  # fmt: skip
