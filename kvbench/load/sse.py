"""Parsing of a finished stream: HTTP head, chunked body, server-sent events, OpenAI completion chunks.

Pure functions on bytes; nothing here waits or looks at a clock.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass

_BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LINE = re.compile(rb"\r\n|\n|\r")
_SIZE = re.compile(rb"[0-9a-fA-F]{1,16}")
_LENGTH_DIGITS = 18


class MalformedStream(Exception):
    """The bytes are not what HTTP, server-sent events or the OpenAI API say they must be."""


@dataclass(frozen=True)
class Head:
    """Status and framing. ``size``: bytes up to the body; ``length``: Content-Length; ``close``: not reusable."""

    status: int
    size: int
    chunked: bool
    length: int | None
    close: bool


@dataclass(frozen=True)
class Body:
    """A body without its chunk framing. Byte ``starts[i]`` of ``data`` was byte ``offsets[i]`` on the wire."""

    data: bytes
    starts: list[int]
    offsets: list[int]
    complete: bool

    def wire_offset(self, position: int) -> int:
        """Where byte ``position`` of ``data`` lay in the bytes received."""
        i = bisect_right(self.starts, position) - 1
        return self.offsets[i] + position - self.starts[i]


def parse_head(data: bytes) -> Head | None:
    """The response's head, or None while it is not whole. MalformedStream when it is no HTTP/1.x response."""
    if not data.startswith(b"HTTP/1."[: len(data)]):
        raise MalformedStream(f"the answer does not begin with HTTP/1.x but with {data[:20]!r}")
    end = data.find(b"\r\n\r\n")
    if end < 0:
        if len(data) > 65536:
            raise MalformedStream("the response's headers are longer than 64 KiB")
        return None
    lines = data[:end].split(b"\r\n")
    parts = lines[0].split(b" ", 2)
    if len(parts) < 2 or not parts[1].isdigit() or len(parts[1]) != 3:
        raise MalformedStream(f"the status line {lines[0][:60]!r} has no status")
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    length = headers.get(b"content-length")
    if length is not None and not (length.isdigit() and len(length) <= _LENGTH_DIGITS):
        raise MalformedStream(f"Content-Length {length[:40]!r} is not a number of bytes")
    chunked = headers.get(b"transfer-encoding", b"").lower() == b"chunked"
    close = headers.get(b"connection", b"").lower() == b"close" or parts[0] == b"HTTP/1.0"
    if parts[1] in (b"204", b"304"):
        chunked, length = False, b"0"  # these have no body, whatever their headers say
    unframed = not chunked and length is None
    return Head(
        int(parts[1]), end + 4, chunked, None if chunked or length is None else int(length), close or unframed
    )


def dechunk(data: bytes, begin: int) -> Body:
    """The chunked body that starts at ``begin``; ``complete`` when its last chunk is there."""
    pieces, starts, offsets, position, size_so_far = [], [], [], begin, 0
    while True:
        line_end = data.find(b"\r\n", position)
        if line_end < 0:
            return Body(b"".join(pieces), starts, offsets, False)
        text = data[position:line_end].split(b";", 1)[0].strip()
        if not _SIZE.fullmatch(text):  # int() would also take a sign, and go backwards
            raise MalformedStream(f"the chunk size {text[:20]!r} is not hexadecimal")
        size = int(text, 16)
        position = line_end + 2
        if size == 0:
            whole = data.startswith(b"\r\n", position) or data.find(b"\r\n\r\n", position) >= 0
            return Body(b"".join(pieces), starts, offsets, whole)
        piece = data[position : position + size]
        pieces.append(piece)
        starts.append(size_so_far)
        offsets.append(position)
        size_so_far += len(piece)
        if len(piece) < size or len(data) < position + size + 2:
            return Body(b"".join(pieces), starts, offsets, False)
        if data[position + size : position + size + 2] != b"\r\n":
            raise MalformedStream("a chunk is longer than its size says")
        position += size + 2


def body_of(data: bytes, head: Head) -> Body:
    """The body of a response, whatever its framing."""
    if head.chunked:
        return dechunk(data, head.size)
    plain = data[head.size :]
    if head.length is not None:
        return Body(plain[: head.length], [0], [head.size], len(plain) >= head.length)
    return Body(plain, [0], [head.size], True)


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
            raise MalformedStream(f"{line[:60]!r} is not a field of a server-sent event")
        if name == b"data":
            lines.append(value.removeprefix(b" "))
    return b"\n".join(lines) if lines else None
