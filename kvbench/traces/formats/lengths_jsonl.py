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
from typing import Any

import numpy as np

from kvbench.traces.formats import csv
from kvbench.traces.formats.chats import message_texts, payload_texts
from kvbench.traces.model import UNKNOWN, Prompt, Trace
from kvbench.traces.rows import Format, PageSize, Row, Rows, Source, read_rows, seconds, short, text, tokens

_CONTENT = ("input_length", "text_input", "messages", "payload")
_AIPERF = ("text_input", "messages", "payload", "delay", "message_mode", "session_id")
_MOONCAKE_PAGE = 512


def _is_qwen(source: Source) -> bool:
    return source.has("chat_id", "parent_chat_id", "hash_ids")


def _is_mooncake(source: Source) -> bool:
    """Whether it has AIPerf's own keys or page ids. vLLM's timed_trace may have page ids too: see ``unit_doubt``."""
    own = {"hash_ids", *_AIPERF}
    return not _is_qwen(source) and _has_lengths(source) and bool(own & source.first.keys())


def _has_lengths(source: Source) -> bool:
    """Whether its rows may be Mooncake's or AIPerf's."""
    return any(source.has(key) for key in (*_CONTENT, "hash_ids"))


def is_plain(source: Source) -> bool:
    """Whether it has lengths and times only. AIPerf's are in ms, vLLM's and GuideLLM's in seconds; it does not tell."""
    return source.has("input_length") and not _is_qwen(source) and not _is_mooncake(source)


def unit_doubt(source: Source, trace: Trace) -> str | None:
    """Why a file with page ids that was read as Mooncake's (ms) may have times in seconds; None: no reason.

    vLLM's timed_trace has the same keys; read in the wrong unit, its requests would come 1000 times as fast.
    """
    if trace.page_ids is None or trace.arrival_s is None or any(key in source.first for key in _AIPERF):
        return None
    if trace.page_size != _MOONCAKE_PAGE:
        return f"its pages have {trace.page_size} tokens, Mooncake's {_MOONCAKE_PAGE}"
    ms = trace.arrival_s * 1000.0
    return "its timestamps are not whole numbers, as Mooncake's are" if np.abs(ms - np.round(ms)).max() > 1e-3 else None


def _reader(name: str, unit: float = 1.0, usual: int | None = None) -> Callable[[list[Source], int | None], Trace]:
    """``unit`` [s] of its times, ``usual`` size of its pages."""

    def read(sources: list[Source], page_size: int | None) -> Trace:
        history: dict[Any, Any] = {}
        fit = PageSize(page_size, usual=usual) if "hash_ids" in sources[0].first else None
        # Files are pieces of one trace: page ids mean the same in all.
        trace = read_rows(name, sources, lambda rows, row, where: _add(rows, row, unit, history), fit)
        _require_history(trace, sources[0])
        return trace

    return read


def _require_history(trace: Trace, source: Source) -> None:
    """Raises ValueError where no turn holds the turns before it, so that all lengths must be of the new turn only."""
    last: dict[int, int] = {}
    shorter = None
    for i, session in enumerate([] if trace.session is None or trace.prompts else trace.session.tolist()):
        if (before := last.get(session)) is not None:
            ids = trace.page_ids or ()
            same_start = bool(ids and ids[i] and ids[before]) and ids[i][0] == ids[before][0]
            ended = trace.prompt_tokens[before] + max(0, trace.output_tokens[before])
            if same_start or trace.prompt_tokens[i] >= ended:
                return
            if trace.prompt_tokens[i] < trace.prompt_tokens[before]:
                shorter = shorter or (trace.prompt_tokens[i], trace.prompt_tokens[before])
        last[session] = i
    if shorter:
        raise ValueError(
            f"the sessions of {source.path} have lengths of the new turn only (input_length {shorter[0]} follows "
            f"{shorter[1]}): give lengths with all turns before, or leave hash_ids out and give every row "
            "message_mode delta"
        )


def _add(rows: Rows, row: Row, unit: float, history: dict[Any, Any]) -> None:
    given = [key for key in _CONTENT if row.get(key) is not None]
    if rows.page_size is not None and given not in ([], ["input_length"]):
        raise ValueError(f"page ids go with input_length, not with {given[0]}: mend or remove the request")
    if len(given) > 1:
        raise ValueError(f"both {given[0]} and {given[1]}, which may not agree: keep one of them")
    if rows.page_size is None and row.get("hash_ids") is not None:
        raise ValueError("page ids, which the first request has not: give every request its hash_ids, or none")
    session = row.get("session_id")
    prompt = None if given in ([], ["input_length"]) else _prompt(row, given[0], session, history)
    length, output = UNKNOWN, tokens(row, "output_length", UNKNOWN)
    if prompt is None:
        length = tokens(row, "input_length")
        if session is not None and row.get("message_mode") == "delta":
            if rows.page_size is not None and session in history:
                raise ValueError("page ids of the new turn only do not tell all of the prompt's: leave hash_ids out")
            length += history.get(session, 0)
            history[session] = length + tokens(row, "output_length")
    rows.add(
        length,
        output,
        time_s=seconds(row, "timestamp", unit),
        page_ids=row.get("hash_ids"),
        session=session,
        think_s=seconds(row, "delay", unit),
        prompt=prompt,
    )


def _prompt(row: Row, key: str, session: Any, history: dict[Any, Any]) -> Prompt:
    """The texts of a row; ``message_mode: delta`` goes on from the session's previous ones."""
    texts: Prompt
    if key == "text_input":
        texts = (text(row, key),)
    else:
        texts = message_texts(row[key]) if key == "messages" else payload_texts(row[key])
    mode = row.get("message_mode")
    if mode not in (None, "history", "delta"):
        raise ValueError(f"message_mode {short(mode)} is neither history nor delta: mend it")
    if session is not None and isinstance(texts, tuple):
        texts = (*history.get(session, ()), *texts) if mode == "delta" else texts
        history[session] = texts
    return texts


def _read_qwen(sources: list[Source], page_size: int | None) -> Trace:
    sessions: dict[Any, Any] = {}  # chat -> the first chat of its conversation

    def add(rows: Rows, row: Row, where: Any) -> None:
        chat, parent = row.get("chat_id"), row.get("parent_chat_id")
        if type(chat) is not int or type(parent) is not int:
            raise ValueError(f"chat_id {short(chat)} and parent_chat_id {short(parent)} are not whole numbers")
        sessions[chat] = sessions.get(parent, chat)
        rows.add(
            tokens(row, "input_length"),
            tokens(row, "output_length", UNKNOWN),
            time_s=seconds(row, "timestamp"),
            page_ids=row.get("hash_ids"),
            session=sessions[chat],
        )

    return read_rows("qwen", sources, add, PageSize(page_size, usual=16))


def _read_guidellm(sources: list[Source], page_size: int | None) -> Trace:
    read = csv.reader("guidellm") if sources[0].container == "csv" else _reader("guidellm")
    return read(sources, page_size)


FORMATS = (
    Format(
        "mooncake",
        "JSONL: timestamp (ms), input_length, hash_ids",
        _is_mooncake,
        _reader("mooncake", 1e-3, _MOONCAKE_PAGE),
        _has_lengths,
    ),
    Format(
        "timed_trace",
        "JSONL: the same names, timestamp in seconds",
        is_plain,
        _reader("timed_trace"),
        _has_lengths,
    ),
    Format("qwen", "JSONL: chat_id, parent_chat_id, input_length, hash_ids", _is_qwen, _read_qwen),
    Format(
        "guidellm",
        "CSV or JSONL: timestamp (s), input_length, output_length",
        lambda source: csv.fits("guidellm")(source) or is_plain(source),
        _read_guidellm,
    ),
)
