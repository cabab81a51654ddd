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

from array import array
from collections.abc import Callable, Iterator
from typing import Any

from kvbench.traces.model import UNKNOWN
from kvbench.traces.rows import Rows, Source, TraceFormat, TraceRow, read_rows, seconds, short, text, tokens

_USERS = ("human", "user")
_MODELS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")
_SPEAKERS = (*_USERS, *_MODELS, "system")
_MEDIA = ("image", "images", "audio", "audios", "video", "videos")


def message_texts(messages: Any) -> tuple[str, ...]:
    """The contents of messages, one text each. Raises ValueError."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages {short(messages)} is no list of messages: mend or remove the request")
    return tuple(map(_content, messages))


def _content(message: Any) -> str:
    content = message["content"] if isinstance(message, dict) else None
    if isinstance(content, list):  # OpenAI's parts
        parts = [part["text"] if isinstance(part, dict) else None for part in content]
        if content and all(isinstance(part, str) for part in parts):
            return "".join(parts)
    elif isinstance(content, str):
        return content
    elif content is None and isinstance(message, dict) and message["tool_calls"]:
        return ""
    raise ValueError(f"{short(message)} is no message with a text; kvbench sends text only: mend or remove the request")


def payload_texts(payload: Any) -> tuple[str, ...] | array:
    """The texts or token ids of an OpenAI request body. Raises ValueError."""
    if isinstance(payload, dict) and "messages" in payload:
        return message_texts(payload["messages"])
    if isinstance(payload, dict) and "prompt" in payload:
        return _prompt(payload["prompt"])
    raise ValueError(f"payload {short(payload)} has neither messages nor a prompt: mend or remove the request")


def _prompt(value: Any) -> tuple[str, ...] | array:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value and all(type(i) is int and 0 <= i < 2**31 for i in value):
        return array("q", value)
    raise ValueError(f"prompt {short(value)} is neither a text nor token ids: mend or remove the request")


def _texts(value: Any, what: str) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(t, str) for t in value):
        raise ValueError(f"{what} {short(value)} is no list of texts: mend or remove the request")
    return value


def _sharegpt(rows: Rows, row: TraceRow, where: Any) -> None:
    texts: tuple[str, ...] = ()
    waiting = False  # whether the last text was the user's
    for speaker, words in _messages(row):
        if speaker in _MODELS and waiting:
            rows.add(session=where, prompt=texts, reply=words)
        elif speaker in _MODELS and not texts:
            rows.left_out["replies without a question"] += 1
            continue
        waiting = speaker in _USERS
        texts = (*texts, words)
    if waiting:
        rows.left_out["questions without a reply"] += 1


def _messages(row: TraceRow) -> Iterator[tuple[str, str]]:
    messages = row["conversations" if "conversations" in row else "conversation"]
    if not isinstance(messages, list):
        raise ValueError("neither conversations nor conversation is a list: mend or remove it")
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError(f"{short(message)} is no message: mend or remove it")
        speaker = message["from" if "from" in message else "role"]
        if speaker not in _SPEAKERS:
            roles = ", ".join(_SPEAKERS)
            raise ValueError(f"a message from {short(speaker)}, which is no known role ({roles}): mend or remove it")
        yield speaker, text(message, "value" if "value" in message else "content")


def _questions(rows: Rows, row: TraceRow, where: Any) -> None:
    turns = _texts(row["turns"], "turns")
    for index in range(len(turns)):
        rows.add(session=where if len(turns) > 1 else None, prompt=tuple(turns[: index + 1]))


def _custom(rows: Rows, row: TraceRow, where: Any) -> None:
    prompt = _prompt(row["prompt"])
    length = UNKNOWN if isinstance(prompt, tuple) else len(prompt)
    wanted = UNKNOWN if row["output_tokens"] == -1 else tokens(row, "output_tokens", UNKNOWN)  # -1: left to the run
    rows.add(length, wanted, prompt=prompt)


def _lmcache(rows: Rows, row: TraceRow, where: Any) -> None:
    time = seconds(row, "timestamp", 1e-6)
    rows.add(time_s=time, session=text(row, "session_id"), prompt=(text(row, "input"),), reply=text(row, "output"))


def _turn(rows: Rows, row: Any, session: Any, before: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Adds a turn of AIPerf and returns all texts so far, without earlier replies, which the file lacks."""
    if not isinstance(row, dict):
        raise ValueError(f"{short(row)} is not a turn: mend or remove it")
    for key in _MEDIA:
        if row[key]:
            raise ValueError(f"{key} {short(row[key])}: kvbench sends text only: remove the request")
    texts = (*before, *_texts(row["texts"] if row["text"] is None else [row["text"]], "texts"))
    rows.add(
        output_tokens=tokens(row, "output_length", UNKNOWN),
        time_s=seconds(row, "timestamp", 1e-3),
        session=session,
        think_s=seconds(row, "delay", 1e-3),
        prompt=texts,
    )
    return texts


def _multi_turn(rows: Rows, row: TraceRow, where: Any) -> None:
    turns = row["turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"turns {short(turns)} is no list of turns: mend or remove the session")
    texts: tuple[str, ...] = ()
    for turn in turns:
        texts = _turn(rows, turn, where, texts)


def _turns(source: Source) -> list[Any]:
    """The ``turns`` of the file's first row; empty if they are no list."""
    turns = source.first["turns"]
    return turns if isinstance(turns, list) else []


def _format(
    name: str, looks: str, fits: Callable[[Source], bool], add: Callable[[Rows, TraceRow, Any], Any]
) -> TraceFormat:
    return TraceFormat(name, looks, fits, lambda sources, page_size: read_rows(name, sources, add))


FORMATS = (
    _format(
        "sharegpt", "JSON: [{conversations: [...]}]",
        lambda source: source.container in ("array", "jsonl")
        and any(isinstance(source.first[key], list) for key in ("conversations", "conversation")),
        _sharegpt,
    ),
    _format(
        "questions", "JSONL: turns (texts)",
        lambda source: source.has("turns") and all(isinstance(turn, str) for turn in _turns(source) or [0]),
        _questions,
    ),
    _format("custom", "JSONL: prompt, output_tokens", lambda source: source.has("prompt"), _custom),
    _format(
        "lmcache", "JSONL: input, output, session_id",
        lambda source: source.has("input", "output", "session_id"), _lmcache,
    ),
    _format(
        "single_turn", "JSONL: text or texts",
        lambda source: (source.has("text") or source.has("texts")) and "turns" not in source.first,
        lambda rows, row, where: _turn(rows, row, row["session_id"]),
    ),
    _format(
        "multi_turn", "JSONL: session_id, turns: [...]",
        lambda source: source.has("turns") and any(isinstance(turn, dict) for turn in _turns(source)),
        _multi_turn,
    ),
)  # fmt: skip
