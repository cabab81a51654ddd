"""The key of a server's API: read from the environment when it is needed, and told to nobody but its server.

What that server says may repeat the key: it is taken out of every message and of all that is stored.
"""

from __future__ import annotations

import json
import os
from typing import overload

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


@overload
def without_key(text: str, variable: str | None) -> str: ...
@overload
def without_key(text: None, variable: str | None) -> None: ...
def without_key(text: str | None, variable: str | None) -> str | None:
    """``text``, in which a server may have repeated the key it was sent, without it, plain or as JSON writes it.

    To be cut only afterwards: the end of a cut text may be a part of the key.
    """
    key = os.environ.get(variable, "").strip() if variable else ""
    if text is None or len(key) < _SHORTEST_HIDDEN:
        return text
    for form in (key, json.dumps(key)[1:-1]):
        text = text.replace(form, f"(the key in {variable})")
    return text
