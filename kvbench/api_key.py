"""The key of a server's API: read from the environment when it is needed, and kept out of every message and file."""

from __future__ import annotations

import os

_SHORTEST_HIDDEN = 4  # characters; a shorter one is no secret, and is part of many words


def api_key(variable: str) -> str:
    """The key that the environment variable holds, without white space around it.

    Raises:
        ValueError: there is none, or it cannot stand in an HTTP header. The message never holds the key.
    """
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
    return key


def without_key(text: str | None, variable: str | None) -> str | None:
    """``text``, in which a server may have repeated the key it was sent, without it."""
    if text is None:
        return None
    key = os.environ.get(variable, "").strip() if variable else ""
    return text.replace(key, f"(the key in {variable})") if len(key) >= _SHORTEST_HIDDEN else text
