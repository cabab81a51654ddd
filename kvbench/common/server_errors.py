"""Reads a server's error: the sentence in its answer, and which sentences are the same."""

from __future__ import annotations

import json
import re
from typing import Any

from kvbench.common.text import shorten

SERVER_FAULT = 500  # HTTP statuses from here on are the server's own fault
_MOST_CHARACTERS = 300
_READ_BYTES = 16 * 1024  # of a body: the load client reads it between the chunks of other streams
_TAG = re.compile(r"<(/?)(?:(script|style|head)\b)?[^<>]*>?", re.IGNORECASE)
_NUMBER_OR_ID = re.compile(r"[\w-]*\d[\w-]*(?:[.,:]\d[\w-]*)*")


def error_sentence(body: bytes) -> str:
    """Finds the server's own sentence in the body of an error: one line, at most 300 characters; empty for no body.

    ``{"error": {"message"}}`` (OpenAI, vLLM, llama.cpp, SGLang, TGI in a stream), ``{"error": text}`` (TGI,
    transformers), ``{"message"}`` (older vLLM, SGLang), ``{"detail": text or [{"loc", "msg"}]}`` (FastAPI), else the
    text itself, of a web page (a proxy's) without its tags.
    """
    text = body[:_READ_BYTES].decode("utf-8", "replace")
    try:
        sentence = _message(json.loads(text))
    except (ValueError, RecursionError):
        sentence = None
    if sentence is None:
        sentence = _without_tags(text) if text.lstrip().startswith("<") else text
    return shorten(sentence, _MOST_CHARACTERS)


def is_error(answer: Any) -> bool:
    """Tests whether a server's JSON is an error in place of an answer."""
    if not isinstance(answer, dict):
        return False
    if answer.get("error") or answer.get("object") == "error" or answer.get("type") == "error":
        return True
    return "choices" not in answer and bool(answer.get("detail"))


def in_its_words(sentence: str) -> str:
    """The sentence in quotation marks behind a blank, to be added to a status; empty for none."""
    return f' "{sentence}"' if sentence else ""


def _without_tags(page: str) -> str:
    """Returns the text of a web page; scripts, styles and the head are left out where they have an end."""
    lower = page.lower()
    ends = {name: lower.rfind(f"</{name}") for name in ("script", "style", "head")}
    visible, begin, inside = [], 0, ""
    for tag in _TAG.finditer(page):
        if not inside:
            visible.append(page[begin : tag.start()])
        begin, name = tag.end(), (tag[2] or "").lower()
        if tag[1] and name == inside:
            inside = ""
        elif name and not tag[1] and not inside and tag.start() < ends[name]:
            inside = name
    return " ".join([*visible, page[begin:]])


def _message(answer: Any) -> str | None:
    if isinstance(answer, str):
        return answer
    if isinstance(answer, list):
        return "; ".join(filter(None, map(_message, answer))) or None
    if not isinstance(answer, dict):
        return None
    if isinstance(text := answer.get("msg"), str):  # of one field: pydantic's words
        where = answer.get("loc")
        return f"{'.'.join(map(str, where))}: {text}" if isinstance(where, list) and where else text
    return next((text for key in ("error", "message", "detail") if (text := _message(answer.get(key)))), None)


def without_numbers(sentence: str) -> str:
    """Puts # in the place of each number or id: two sentences that differ in nothing else are one."""
    return _NUMBER_OR_ID.sub("#", sentence)
