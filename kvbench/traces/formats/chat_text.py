"""Texts in chat form: of messages and of request bodies."""

from __future__ import annotations

from array import array
from typing import Any

from kvbench.traces.source import short

MEDIA = ("image", "images", "audio", "audios", "video", "videos")


def message_texts(messages: Any) -> tuple[str, ...]:
    """The contents of messages, one text each. Raises ValueError."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages {short(messages)} is no list of messages: mend or remove the request")
    return tuple(_content(message) for message in messages)


def _content(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):  # OpenAI's parts
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if content and all(isinstance(part, str) for part in parts):
            return "".join(parts)
    elif isinstance(content, str):
        return content
    elif content is None and isinstance(message, dict) and message.get("tool_calls"):
        return ""
    raise ValueError(f"{short(message)} is no message with a text; kvbench sends text only: mend or remove the request")


def payload_texts(payload: Any) -> tuple[str, ...] | array:
    """The texts or token ids of an OpenAI request body. Raises ValueError."""
    if isinstance(payload, dict) and "messages" in payload:
        return message_texts(payload["messages"])
    if isinstance(payload, dict) and "prompt" in payload:
        return prompt_of(payload["prompt"])
    raise ValueError(f"payload {short(payload)} has neither messages nor a prompt: mend or remove the request")


def prompt_of(value: Any) -> tuple[str, ...] | array:
    """A prompt that is a text or a list of token ids. Raises ValueError."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value and all(type(i) is int and 0 <= i < 2**31 for i in value):
        return array("q", value)
    raise ValueError(f"prompt {short(value)} is neither a text nor token ids: mend or remove the request")


def no_media(row: dict[str, Any]) -> None:
    """Raises ValueError for a request that has more than text."""
    for key in MEDIA:
        if row.get(key):
            raise ValueError(f"{key} {short(row[key])}: kvbench sends text only: remove the request")
