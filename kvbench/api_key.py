"""The key of a server's API: read from the environment when it is needed, and kept out of every message and file."""

from __future__ import annotations

import os
from collections.abc import Sequence

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
    """``text``, in which a server may have repeated the key it was sent, without it. To be cut only afterwards."""
    key = _hidden(variable)
    return text if text is None or not key else text.replace(key, f"(the key in {variable})")


def overwritten(pieces: Sequence[bytes], variable: str | None) -> Sequence[bytes]:
    """The bytes of an answer with asterisks over the key where a server repeated it, also from piece to piece.

    Each piece keeps its length, and with it what HTTP says of lengths.
    """
    key, whole = _hidden(variable).encode(), b"".join(pieces)
    if not key or key not in whole:
        return pieces
    whole, found, at = whole.replace(key, b"*" * len(key)), [], 0
    for piece in pieces:
        found.append(whole[at : at + len(piece)])
        at += len(piece)
    return found


def _hidden(variable: str | None) -> str:
    """The key that must not be told; empty where there is none."""
    key = os.environ.get(variable, "").strip() if variable else ""
    return key if len(key) >= _SHORTEST_HIDDEN else ""
