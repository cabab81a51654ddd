"""Server-sent events in a finished body.

Pure functions on bytes; nothing here waits or looks at a clock.
"""

from __future__ import annotations

import re

_BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LINE = re.compile(rb"\r\n|\n|\r")
_QUOTED_CHARS = 60


class MalformedStream(Exception):
    """The bytes are not what HTTP, server-sent events or the OpenAI API say they must be.

    ``{}`` in the sentence becomes the beginning of ``quoted``, which was wrong.
    """

    def __init__(self, sentence: str, quoted: bytes | str = "") -> None:
        text = quoted if isinstance(quoted, str) else quoted.decode("utf-8", "replace")
        super().__init__(sentence.replace("{}", repr(text[:_QUOTED_CHARS])))


def events(body: bytes) -> tuple[list[tuple[bytes, int]], bytes]:
    """The ``data`` of each server-sent event with the position just after it, and what is left over.

    Follows the WHATWG rules: comments and other fields are skipped, several data lines are joined.
    MalformedStream for a line that is no field at all.
    """
    found, begin = [], 0
    for blank in _BLANK_LINE.finditer(body):
        block = body[begin : blank.start()]
        begin = blank.end()
        if block.startswith(b"data: ") and b"\n" not in block:
            found.append((block[6:], begin))
            continue
        data = _data_lines(block)
        if data is not None:
            found.append((data, begin))
    return found, body[begin:]


def _data_lines(block: bytes) -> bytes | None:
    lines = []
    for line in _LINE.split(block):
        name, colon, value = line.partition(b":")
        if not line or not name:
            continue  # a comment
        if name not in (b"data", b"event", b"id", b"retry") or (name == b"data" and not colon):
            raise MalformedStream("{} is not a field of a server-sent event", line)
        if name == b"data":
            lines.append(value.removeprefix(b" "))
    return b"\n".join(lines) if lines else None
