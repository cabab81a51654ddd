"""HTTP and server-sent events of the load client: a call's bytes, a response's framing, TLS certificates.

Framing is followed by httptools (llhttp, a C parser): 0.15 us a chunk, where a loop of ours over the chunks' sizes took
0.87 us (256 chunks of 170 bytes). Nothing in here waits or looks at a clock.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

from kvbench.common.server_errors import error_sentence

_MOST_HEAD_BYTES = 65536
_SURPLUS = "something came after the response's end"
_BOM = b"\xef\xbb\xbf"
_BLANK_LINE = re.compile(rb"\n(?:\n|\r\n?)|\r(?:\r\n?|\n(?:\n|\r\n?))")
_LINE = re.compile(rb"\r\n|\n|\r")
_GZIP = b"\x1f\x8b"
_QUOTED_CHARS = 60


@dataclass(frozen=True)
class Address:
    """The address of the server, and the path prefix below which its API lives."""

    host: str
    port: int
    prefix: str
    tls: bool = False

    @classmethod
    def from_url(cls, url: str) -> Address:
        """ValueError for anything but http[s]://host[:port][/prefix]."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise ValueError(f"the URL {url!r} is neither http:// nor https://; write http://127.0.0.1:8000.")
        if not parts.hostname:
            raise ValueError(f"the URL {url!r} names no host; write http://127.0.0.1:8000.")
        if parts.query or parts.fragment:
            raise ValueError(f"the URL {url!r} has a query, which would not be sent; leave out what follows the path.")
        tls = parts.scheme == "https"
        try:
            port = parts.port or (443 if tls else 80)
        except ValueError as error:
            raise ValueError(f"the URL {url!r} has an impossible port ({error}).") from error
        return cls(parts.hostname, port, parts.path.rstrip("/"), tls)

    @property
    def authority(self) -> str:
        """The address as ``host:port``, for a Host header or a message."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def call_bytes(address: Address, method: str, path: str, head: Sequence[str] = (), payload: bytes = b"") -> bytes:
    """One HTTP request, head and JSON body. Every call asks for an answer that is not compressed."""
    first = f"{method} {address.prefix}{path} HTTP/1.1"
    lines = [first, f"Host: {address.authority}", "Accept-Encoding: identity", *head]
    if payload:
        lines.append("Content-Type: application/json")
    if method == "POST":
        lines.append(f"Content-Length: {len(payload)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + payload


def tls_context(verify: bool = True, ca_file: str | None = None) -> ssl.SSLContext:
    """Makes the context of all connections to one server: the system's certificates, or those of ``ca_file``.

    ValueError when ``ca_file`` holds no certificates.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        why = error.strerror if type(error) is not ssl.SSLError and error.strerror else "it holds no certificate"
        raise ValueError(f"--tls-ca-file {ca_file} cannot be used ({why}); give a PEM file of certificates") from None
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class MalformedStream(Exception):
    """Bytes that contradict HTTP, server-sent events or the OpenAI API.

    ``{}`` in the sentence becomes the beginning of ``quoted``, which was wrong.
    """

    def __init__(self, sentence: str, quoted: bytes | str = "") -> None:
        text = quoted if isinstance(quoted, str) else quoted.decode("utf-8", "replace")
        super().__init__(sentence.replace("{}", repr(text[:_QUOTED_CHARS])))


class ResponseReader:
    """Follows one response through the bytes as they come, to know its end; keeps nothing of its body.

    ``complete``: the response is whole. ``until_close``: it has no length and ends with the connection. ``reusable``:
    the connection may carry another request.
    """

    def __init__(self) -> None:
        self.status = 0
        self.begun = False  # the head is whole
        self.complete = False
        self.until_close = False
        self._framed = self._interim = self._surplus = False
        self._keep_alive = False
        self._head_bytes = 0
        self._parser = httptools.HttpResponseParser(self)

    @property
    def reusable(self) -> bool:
        return self.complete and self._keep_alive

    def feed(self, data: bytes) -> None:
        """Takes the next bytes. MalformedStream when they are not an HTTP/1.x response, or more than one."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self.complete:
                raise MalformedStream(_SURPLUS) from None
            what = error if isinstance(error, httptools.HttpParserError) else "it switches protocols"
            if self._head_bytes:  # what comes later may begin within a word that is to be hidden
                raise MalformedStream(f"the response is not HTTP/1.1 ({what})") from None
            raise MalformedStream(f"the response is not HTTP/1.1 ({what}): {{}}", data) from None
        if self._surplus:
            raise MalformedStream(_SURPLUS)
        if not self.begun:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES:
                raise MalformedStream("the response's headers are longer than 64 KiB")

    def release(self) -> None:
        """Lets go of the parser, which refers to this object: garbage collection is off while a load runs."""
        self._parser = None

    # What httptools calls:

    def on_message_begin(self) -> None:
        self._surplus = self.complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.begun:
            name = name.lower()
            if name == b"content-length" or (name == b"transfer-encoding" and value.lower().endswith(b"chunked")):
                self._framed = True

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        status = self._parser.get_status_code()
        self._interim = 100 <= status < 200
        if self._interim:
            self._framed = False
            return
        self.status, self.begun = status, True
        self.until_close = not self._framed and status not in (204, 304)

    def on_message_complete(self) -> None:
        if not self._interim and not self.complete:
            self.complete = True
            self._keep_alive = self._parser.should_keep_alive()


class Response(ResponseReader):
    """A response read from its pieces. ``ends[i]``: bytes of ``body`` there were after piece i; ``status`` 0: no head.

    ``problem``: what was wrong with the framing; the body is then what came before. ``headers``: by lower-case name.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__()
        self.ends: list[int] = []
        self.problem: str | None = None
        self.headers: dict[str, str] = {}
        body = self._body = bytearray()
        try:
            for piece in pieces:
                self.feed(piece)
                self.ends.append(len(body))
        except MalformedStream as error:
            self.problem = str(error)
            self.ends.append(len(body))
        self.body = bytes(body)
        self.release()

    @property
    def encoding(self) -> str | None:
        """The compression of the body, though no call asks for one; None without."""
        named = self.headers.get("content-encoding", "").strip().lower().replace("identity", "")
        return named or ("gzip" if self.body.startswith(_GZIP) else None)

    @property
    def sentence(self) -> str:
        """The server's own sentence in the body of an error; empty for no body."""
        if self.encoding:
            how = self.encoding[:_QUOTED_CHARS]
            return (
                f"the answer is compressed ({how}), which was not asked for: turn that off in the server or its proxy"
            )
        return error_sentence(self.body)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if not self.begun:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if not self.begun:
            self.headers.clear()  # of an interim response

    def on_body(self, piece: bytes) -> None:
        if not self.complete:
            self._body += piece


class ServerEvent(NamedTuple):
    """A server-sent event. ``end``: its position in the body, just after it; ``name``: of ``event:``, often empty."""

    data: bytes
    end: int
    name: bytes = b""


def events(body: bytes) -> tuple[list[ServerEvent], bytes]:
    """The events that have data, or the name ``error``, and what is left over.

    Follows the WHATWG rules: a byte order mark may lead, lines end in CR, LF or both, comments and other fields are
    skipped, several data lines are joined. A line ``error: JSON``, which llama.cpp sent until September 2025, is an
    event of that name. MalformedStream for a line that is no field at all.
    """
    parsed, begin = [], len(_BOM) if body.startswith(_BOM) else 0
    for blank in _BLANK_LINE.finditer(body, begin):
        block = body[begin : blank.start()]
        begin = blank.end()
        if block.startswith(b"data: ") and b"\n" not in block and b"\r" not in block:
            parsed.append(ServerEvent(block[6:], begin))
        elif (event := _event_of(block, begin)) is not None:
            parsed.append(event)
    left_over = body[begin:]
    return parsed, b"" if all(not line or line.startswith(b":") for line in _LINE.split(left_over)) else left_over


def _event_of(block: bytes, end: int) -> ServerEvent | None:
    lines, event_name = [], b""
    for line in _LINE.split(block):
        name, colon, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not name:
            continue  # a comment
        if name == b"error" and colon:
            return ServerEvent(value, end, name)
        if name not in (b"data", b"event", b"id", b"retry") or (name == b"data" and not colon):
            raise MalformedStream("{} is not a field of a server-sent event", line)
        if name == b"data":
            lines.append(value)
        elif name == b"event":
            event_name = value
    return ServerEvent(b"\n".join(lines), end, event_name) if lines or event_name == b"error" else None
