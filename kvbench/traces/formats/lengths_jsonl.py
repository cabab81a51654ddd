"""JSONL with lengths, and page ids where there are any: Mooncake, AIPerf's superset, vLLM's timed_trace, Qwen/Bailian,
GuideLLM.

- mooncake: ``timestamp`` [ms], ``input_length, output_length, hash_ids`` (pages of 512, the last one too; Qin et al.,
  FAST 2025). AIPerf's mooncake_trace adds, in place of ``input_length``, one of ``text_input, messages, payload``,
  and ``delay`` [ms], ``session_id, message_mode`` (history or delta).
- timed_trace: the same fields with times in seconds (vLLM's default); guidellm: without page ids.
- qwen: ``chat_id, parent_chat_id`` (-1: the first), ``timestamp`` [s], ``type, turn`` and the lengths and page ids;
  pages of 16. Its ids name a page's own content and are not chained, so only a leading run is a hit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvbench.traces.formats.chat_text import message_texts, payload_texts
from kvbench.traces.model import UNKNOWN, Prompt, Trace
from kvbench.traces.page_size import PageSize
from kvbench.traces.rows import Rows
from kvbench.traces.source import Row, Source, seconds, short, text, tokens

_CONTENT = ("input_length", "text_input", "messages", "payload")
_AIPERF = ("text_input", "messages", "payload", "delay", "message_mode", "session_id")
_MOONCAKE_PAGE = 512


def is_qwen(source: Source) -> bool:
    return source.container == "jsonl" and {"chat_id", "parent_chat_id", "hash_ids"} <= source.first.keys()


def is_mooncake(source: Source) -> bool:
    """By what others of these names seldom have: AIPerf's own keys, or page ids (then ``unit_doubt`` has a say)."""
    own = {"hash_ids", *_AIPERF}
    return not is_qwen(source) and is_lengths(source) and bool(own & source.first.keys())


def is_lengths(source: Source) -> bool:
    """Whether its rows may be Mooncake's or AIPerf's."""
    return source.container == "jsonl" and any(key in source.first for key in (*_CONTENT, "hash_ids"))


def is_plain(source: Source) -> bool:
    """Lengths and times only: in ms for AIPerf, in seconds for vLLM and GuideLLM. Nobody can tell from the file."""
    row = source.first
    return source.container == "jsonl" and "input_length" in row and not is_qwen(source) and not is_mooncake(source)


def read_mooncake(sources: list[Source], page_size: int | None) -> Trace:
    """Raises ValueError."""
    return _read(sources, page_size, "mooncake", 1e-3, _MOONCAKE_PAGE)


def unit_doubt(source: Source, trace: Trace) -> str | None:
    """Why a file with page ids that was read as Mooncake's may have its times in seconds; None when it has not.

    vLLM's timed_trace has the very same keys: read in the wrong unit, it would come 1000 times as fast.
    """
    if trace.page_ids is None or trace.arrival_s is None or any(key in source.first for key in _AIPERF):
        return None
    if trace.page_size != _MOONCAKE_PAGE:
        return f"its pages have {trace.page_size} tokens, Mooncake's {_MOONCAKE_PAGE}"
    ms = trace.arrival_s * 1000.0
    return "its timestamps are not whole numbers, as Mooncake's are" if np.abs(ms - np.round(ms)).max() > 1e-3 else None


def read_timed_trace(sources: list[Source], page_size: int | None) -> Trace:
    """Raises ValueError."""
    return _read(sources, page_size, "timed_trace", 1.0, None)


def read_guidellm(sources: list[Source], page_size: int | None) -> Trace:
    """Raises ValueError."""
    return _read(sources, page_size, "guidellm", 1.0, None)


def _read(sources: list[Source], page_size: int | None, name: str, unit: float, usual: int | None) -> Trace:
    with_ids = "hash_ids" in sources[0].first
    rows = Rows(PageSize(page_size, usual=usual) if with_ids else None)
    history: dict[Any, tuple[str, ...]] = {}
    for source in sources:  # pieces of one trace: page ids mean the same in all
        for where, row in source.rows():
            try:
                _add(rows, row, unit, history)
            except ValueError as error:
                raise source.error(where, error) from None
    return rows.trace(name, _name(sources))


def _add(rows: Rows, row: Row, unit: float, history: dict[Any, tuple[str, ...]]) -> None:
    given = [key for key in _CONTENT if row.get(key) is not None]
    if rows.fit is not None and given not in ([], ["input_length"]):
        raise ValueError(f"page ids go with input_length, not with {given[0]}: mend or remove the request")
    if len(given) > 1:
        raise ValueError(f"both {given[0]} and {given[1]}, which may not agree: keep one of them")
    if rows.fit is None and row.get("hash_ids") is not None:
        raise ValueError("page ids, which the first request has not: give every request its hash_ids, or none")
    session = row.get("session_id")
    prompt = None if given in ([], ["input_length"]) else _prompt(row, given[0], session, history)
    rows.add(
        tokens(row, "input_length") if prompt is None else UNKNOWN,
        tokens(row, "output_length", UNKNOWN),
        time_s=seconds(row, "timestamp", unit),
        page_ids=row.get("hash_ids"),
        session=session,
        think_s=seconds(row, "delay", unit),
        prompt=prompt,
    )


def _prompt(row: Row, key: str, session: Any, history: dict[Any, tuple[str, ...]]) -> Prompt:
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


def read_qwen(sources: list[Source], page_size: int | None) -> Trace:
    """Raises ValueError."""
    rows = Rows(PageSize(page_size, usual=16))
    sessions: dict[Any, Any] = {}  # chat -> the first chat of its conversation
    for source in sources:
        for where, row in source.rows():
            try:
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
            except ValueError as error:
                raise source.error(where, error) from None
    return rows.trace("qwen", _name(sources))


def _name(sources: list[Source]) -> str:
    return str(sources[0].path) if len(sources) == 1 else f"{sources[0].path} and {len(sources) - 1} more"
