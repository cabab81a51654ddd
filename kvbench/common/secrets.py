"""The key of a server's API: read from the environment when it is needed, and sent to that server only.

A server may repeat the key in what it answers: ``without_key`` takes it out of messages and of samples, ``hide_keys``
out of every file of text that kvbench writes.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Sequence

_SHORTEST_HIDDEN = 4  # characters; a shorter one is no secret, and is part of many words
_FRAGMENT = 8  # characters of the key that are recognised without the rest
_SHORTEST_STORED = 8  # characters; "EMPTY" and its like are words of files too
_read: set[str] = set()  # variables whose keys this process has read


def api_key(variable: str) -> str:
    """The key that the environment variable holds, without white space around it.

    Raises:
        ValueError: there is none, or it cannot stand in an HTTP header. The message never holds the key.
    """
    if not variable.isidentifier():  # perhaps the key itself, which is not repeated
        raise ValueError("--api-key-env takes the name of the environment variable that holds the key, not the key")
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"--api-key-env {variable}: this variable holds no key; export it")
    if len(key.splitlines()) > 1:
        raise ValueError(f"the key in {variable} has a line break within it; export it as one line")
    if not key.isascii() or not key.isprintable():
        raise ValueError(
            f"the key in {variable} has a character that no HTTP header can hold (a letter beyond ASCII, or a control "
            "character); export it anew"
        )
    _read.add(variable)
    return key


def hide_keys(text: str) -> str:
    """Returns ``text`` without the keys that this process has read: plain, or as JSON or HTML escapes them."""
    for variable in _read:
        key = os.environ.get(variable, "").strip()
        for form in {key, json.dumps(key)[1:-1], html.escape(key)} if len(key) >= _SHORTEST_STORED else ():
            text = text.replace(form, _placeholder(variable))
    return text


def with_key(text: str, variable: str) -> str:
    """Puts the key back where ``hide_keys`` took it out: a model whose name holds the key is requested by that name."""
    return text.replace(_placeholder(variable), api_key(variable))


def _placeholder(variable: str) -> str:
    return f"(the key in {variable})"


def without_value(command: Sequence[str], option: str) -> list[str]:
    """The words of a command line with ``...`` in the place of the option's value."""
    words = [f"{option}=..." if word.startswith(f"{option}=") else word for word in command]
    return ["..." if before == option else word for before, word in zip(["", *words], words, strict=False)]


def without_key(text: str | None, variable: str | None) -> str | None:
    """Returns ``text`` without the key that the environment variable holds, plain or as JSON escapes it.

    Any 8 characters in a row of the key are taken out, since the text may have been cut within it.
    """
    key = os.environ.get(variable, "").strip() if variable else ""
    if not text or len(key) < _SHORTEST_HIDDEN:
        return text
    size = min(len(key), _FRAGMENT)
    fragments = {form[at : at + size] for form in (key, json.dumps(key)[1:-1]) for at in range(len(form) - size + 1)}
    if not any(fragment in text for fragment in fragments):
        return text
    letters = list(text)
    for at in range(len(text) - size + 1):
        if text[at : at + size] in fragments:
            letters[at : at + size] = "\0" * size
    return re.sub("\0+", _placeholder(variable or ""), "".join(letters))
