"""Real texts: ShareGPT, mt_bench and spec_bench, vLLM's custom data set, LMCache's agents, AIPerf's turns.

- sharegpt: a JSON array of ``{conversations: [{from, value}]}`` or ``{conversation: [{role, content}]}``. Each turn of
  the user is a request behind all that was said before; the reply gives the output.
- questions (mt_bench, spec_bench): JSONL, ``question_id, turns`` (texts, without replies).
- custom (vLLM): JSONL, ``prompt`` (a text or token ids), ``output_tokens``.
- lmcache: JSONL, ``timestamp`` [us], ``input, output, session_id``.
- single_turn, multi_turn (AIPerf): JSONL, ``text`` or ``texts``, ``timestamp, delay`` [ms], ``output_length``; or
  ``session_id, turns: [...]`` of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvbench.traces.formats.chat_text import no_media, prompt_of
from kvbench.traces.model import UNKNOWN, Trace
from kvbench.traces.rows import Rows
from kvbench.traces.source import Row, Source, seconds, short, text, tokens

_USERS = ("human", "user")
_MODELS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")
_SYSTEM = ("system",)


def is_sharegpt(source: Source) -> bool:
    return source.container in ("array", "jsonl") and any(
        isinstance(source.first.get(key), list) for key in ("conversations", "conversation")
    )


def is_questions(source: Source) -> bool:
    turns = source.first.get("turns")
    return source.container == "jsonl" and isinstance(turns, list) and all(isinstance(t, str) for t in turns)


def is_custom(source: Source) -> bool:
    return source.container == "jsonl" and "prompt" in source.first


def is_lmcache(source: Source) -> bool:
    return source.container == "jsonl" and {"input", "output", "session_id"} <= source.first.keys()


def is_single_turn(source: Source) -> bool:
    row = source.first
    return source.container == "jsonl" and ("text" in row or "texts" in row) and "turns" not in row


def is_multi_turn(source: Source) -> bool:
    turns = source.first.get("turns")
    return source.container == "jsonl" and isinstance(turns, list) and any(isinstance(t, dict) for t in turns)


def _read(sources: list[Source], name: str, add: Any) -> Trace:
    rows = Rows()
    for number, source in enumerate(sources):
        for where, row in source.rows():
            try:
                add(rows, row, (number, where))
            except ValueError as error:
                raise source.error(where, error) from None
    return rows.trace(name, sources[0].path)


def read_sharegpt(sources: list[Source], page_size: int | None) -> Trace:
    """Raises ValueError."""
    return _read(sources, "sharegpt", _sharegpt)


def read_questions(sources: list[Source], page_size: int | None) -> Trace:
    """Raises ValueError."""
    return _read(sources, "questions", _questions)


def read_custom(sources: list[Source], page_size: int | None) -> Trace:
    """Raises ValueError."""
    return _read(sources, "custom", _custom)


def read_lmcache(sources: list[Source], page_size: int | None) -> Trace:
    """Raises ValueError."""
    return _read(sources, "lmcache", _lmcache)


def read_single_turn(sources: list[Source], page_size: int | None) -> Trace:
    """Raises ValueError."""
    return _read(sources, "single_turn", lambda rows, row, where: _turn(rows, row, None, ()))


def read_multi_turn(sources: list[Source], page_size: int | None) -> Trace:
    """Raises ValueError."""
    return _read(sources, "multi_turn", _multi_turn)


def _sharegpt(rows: Rows, row: Row, where: Any) -> None:
    said: tuple[str, ...] = ()
    waiting = False  # the last text was the user's
    for speaker, words in _messages(row):
        if speaker in _MODELS and waiting:
            rows.add(session=where, prompt=said, reply=words)
        elif speaker in _MODELS and not said:
            rows.left_out["replies without a question"] += 1
            continue
        waiting = speaker in _USERS
        said = (*said, words)
    rows.left_out += {"questions without a reply": 1} if waiting else {}


def _messages(row: Row) -> Iterator[tuple[str, str]]:
    messages = row.get("conversations", row.get("conversation"))
    if not isinstance(messages, list):
        raise ValueError("neither conversations nor conversation is a list: mend or remove it")
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError(f"{short(message)} is no message: mend or remove it")
        speaker = message.get("from", message.get("role"))
        if speaker not in (*_USERS, *_MODELS, *_SYSTEM):
            known = ", ".join((*_USERS, *_MODELS, *_SYSTEM))
            raise ValueError(f"a message from {short(speaker)}, who is not known ({known}): mend or remove it")
        yield speaker, text(message, "value" if "value" in message else "content")


def _questions(rows: Rows, row: Row, where: Any) -> None:
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise ValueError(f"turns {short(turns)} is no list of texts: mend or remove the request")
    for index in range(len(turns)):
        rows.add(session=where if len(turns) > 1 else None, prompt=tuple(turns[: index + 1]))


def _custom(rows: Rows, row: Row, where: Any) -> None:
    prompt = prompt_of(row.get("prompt"))
    length = UNKNOWN if isinstance(prompt, tuple) else len(prompt)
    wanted = -1 if row.get("output_tokens") == -1 else tokens(row, "output_tokens", UNKNOWN)  # -1: left to the run
    rows.add(length, wanted, prompt=prompt)


def _lmcache(rows: Rows, row: Row, where: Any) -> None:
    time = seconds(row, "timestamp", 1e-6)
    rows.add(time_s=time, session=text(row, "session_id"), prompt=(text(row, "input"),), reply=text(row, "output"))


def _turn(rows: Rows, row: Any, session: Any, before: tuple[str, ...]) -> tuple[str, ...]:
    """Adds a turn of AIPerf; everything said so far. Earlier replies are not in the file, and so not in the prompt."""
    if not isinstance(row, dict):
        raise ValueError(f"{short(row)} is not a turn: mend or remove it")
    no_media(row)
    texts = row.get("texts") if row.get("text") is None else [row["text"]]
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise ValueError(f"text {short(row.get('text'))} and texts {short(row.get('texts'))}: no text: mend it")
    said = (*before, *texts)
    rows.add(
        output_tokens=tokens(row, "output_length", UNKNOWN),
        time_s=seconds(row, "timestamp", 1e-3),
        session=row.get("session_id") if session is None else session,
        think_s=seconds(row, "delay", 1e-3),
        prompt=said,
    )
    return said


def _multi_turn(rows: Rows, row: Row, where: Any) -> None:
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"turns {short(turns)} is no list of turns: mend or remove the session")
    said: tuple[str, ...] = ()
    for turn in turns:
        said = _turn(rows, turn, where, said)
