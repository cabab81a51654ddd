"""HTTP and server-sent events of the load client: a request's bytes, a response's framing, TLS certificates.

Framing is followed by httptools (llhttp, a C parser): 0.15 us a chunk, where a loop of ours over the chunks' sizes took
0.87 us (256 chunks of 170 bytes). Nothing in here waits or looks at a clock.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import httptools
from pydantic import Field, field_validator

from kvbench.common.schema import StrictModel
from kvbench.common.secrets import api_key
from kvbench.common.server_errors import error_sentence
from kvbench.requests.request import ANSWERS, RequestSpec

if TYPE_CHECKING:
    from kvbench.load.spec import LoadSpec

_OURS = ("model", "prompt", "max_tokens", "stream")
_FINISHED = ("length", "stop", "eos", "eos_token", "stop_sequence", "tool_calls", "function_call")
_MOST_HEAD_BYTES = 65536
_SURPLUS = "something came after the response's end"
_BOM = b"\xef\xbb\xbf"
_BLANK_LINE = re.compile(rb"\n(?:\n|\r\n?)|\r(?:\r\n?|\n(?:\n|\r\n?))")
_LINE = re.compile(rb"\r\n|\n|\r")
_GZIP = b"\x1f\x8b"
_QUOTED_CHARS = 60


@dataclass(frozen=True)
class Address:
    """Where the server is, and the path prefix below which its API lives."""

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
        tls = parts.scheme == "https"
        try:
            port = parts.port or (443 if tls else 80)
        except ValueError as error:
            raise ValueError(f"the URL {url!r} has an impossible port ({error}).") from error
        return cls(parts.hostname, port, parts.path.rstrip("/"), tls)

    @property
    def authority(self) -> str:
        """``host:port`` for a Host header or a message."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Dialect(StrictModel):
    """The defaults are the API of vLLM and of the built-in server.

    ``done_marker``: streams end with ``data: [DONE]``. ``stream_options``: ``stream_options.include_usage`` is sent.
    ``usage``: the server reports usage (without it, output tokens are the streamed ids, else the chunks with
    content). ``token_id_prompts``: a prompt may be a list of token ids (else its text is sent). ``ignore_eos``: the
    field of that name is understood and sent. ``return_token_ids``: likewise. ``extra_body``: merged into
    each request's JSON. ``endpoint``: path of the completions.
    ``answers``: those of n, best_of and beam_width that a request may have. ``returns_all_beams``: n must be that
    width.
    ``keep_alive``: a connection may carry several requests; False for a server that closes it without saying so.
    ``finish_reasons``: those of a stream that came to its end; any other (abort, error, timeout) is a failure.
    """

    done_marker: bool = True
    stream_options: bool = True
    usage: bool = True
    token_id_prompts: bool = True
    ignore_eos: bool = True
    return_token_ids: bool = True
    answers: list[str] = Field(default_factory=lambda: [*ANSWERS])
    returns_all_beams: bool = False
    keep_alive: bool = True
    finish_reasons: list[str] = Field(default_factory=lambda: [*_FINISHED])
    extra_body: dict[str, Any] = Field(default_factory=dict)
    endpoint: str = "/v1/completions"

    def refusal(self, answers: Mapping[str, int | None]) -> str | None:
        """Why the server cannot be asked for ``answers`` (n, best_of and beam_width); None if it can."""
        wanted = {name: value for name, value in answers.items() if value and (value > 1 or name == "beam_width")}
        if unknown := [name for name in wanted if name not in self.answers]:
            return f"it has no {' and no '.join(unknown)}"
        beams = wanted.get("beam_width", 1)
        if self.returns_all_beams and beams > wanted.get("n", 1):
            return f"it returns all {beams} beams, so n must be {beams}"
        return None

    @field_validator("endpoint")
    @classmethod
    def _path(cls, value: str) -> str:
        if not value.startswith("/"):
            raise ValueError(f"endpoint {value!r} is no path; write for example /v1/completions.")
        return value

    @field_validator("extra_body")
    @classmethod
    def _not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            if key in _OURS:
                raise ValueError(f"extra_body cannot set {key!r}: the load sets it; remove it.")
        return value


OPENAI = Dialect()


def http_request(spec: LoadSpec, address: Address, request: RequestSpec) -> bytes:
    """The whole request, head and body, in the dialect of the load's server.

    ValueError for a prompt that the server cannot be sent, or a key that is not where the spec says.
    """
    dialect, known = spec.dialect, request.canary is not None  # what a greedy answer of that length is
    body: dict[str, Any] = {
        "model": spec.model,
        "prompt": _prompt(spec, request),
        "max_tokens": request.max_tokens,
        "temperature": 0.0 if known else spec.temperature,
        "stream": True,
        **_answers(request),
    }
    if dialect.ignore_eos:
        body["ignore_eos"] = spec.ignore_eos or known
    if dialect.stream_options:
        body["stream_options"] = {"include_usage": True}
    if dialect.return_token_ids:
        body["return_token_ids"] = True
    if spec.send_priority and request.priority:  # 0 is what a server takes where nothing is said
        body["priority"] = request.priority
    payload = json.dumps(body | dialect.extra_body, separators=(",", ":")).encode()
    head = [
        "Accept: text/event-stream",
        "x-kvbench-stamp: 1",  # the built-in server then says when it sent each chunk; others ignore it
        *(["x-kvbench-kv-facts: 1"] if known else []),  # and where the answer's KV was
        *([] if dialect.keep_alive else ["Connection: close"]),
        *([f"Authorization: Bearer {api_key(spec.api_key_env)}"] if spec.api_key_env else []),
    ]
    return call_bytes(address, "POST", dialect.endpoint, head, payload)


def call_bytes(address: Address, method: str, path: str, head: Sequence[str] = (), payload: bytes = b"") -> bytes:
    """One HTTP request, head and JSON body. Every call asks for an answer that is not compressed."""
    lines = [
        f"{method} {address.prefix}{path} HTTP/1.1",
        f"Host: {address.authority}",
        "Accept-Encoding: identity",
        *head,
    ]
    if payload:
        lines.append("Content-Type: application/json")
    if method == "POST":
        lines.append(f"Content-Length: {len(payload)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + payload


def _answers(request: RequestSpec) -> dict[str, Any]:
    """How many sequences are drawn and returned, in vLLM's names: ``best_of`` is also how many beams there are."""
    fields: dict[str, Any] = {"n": request.n} if request.n > 1 else {}
    if request.beam_width is not None:
        fields |= {"use_beam_search": True, "temperature": 0.0}  # which samples nothing
    if request.width > request.n:
        fields["best_of"] = request.width
    return fields


def _prompt(spec: LoadSpec, request: RequestSpec) -> str | list[int]:
    if request.prompt is not None:
        return request.prompt
    if not spec.dialect.token_id_prompts:
        raise ValueError(
            f"request {request.index} is a prompt of token ids, which this server does not take; give it text: prompts "
            "of kind text with send_text: true."
        )
    return list(request.prompt_token_ids or ())


def tls_context(verify: bool = True, ca_file: str | None = None) -> ssl.SSLContext:
    """For all connections to one server: the system's certificates, or those of ``ca_file``.

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
    """The bytes are not what HTTP, server-sent events or the OpenAI API say they must be.

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
    found, begin = [], len(_BOM) if body.startswith(_BOM) else 0
    for blank in _BLANK_LINE.finditer(body, begin):
        block = body[begin : blank.start()]
        begin = blank.end()
        if block.startswith(b"data: ") and b"\n" not in block and b"\r" not in block:
            found.append(ServerEvent(block[6:], begin))
        elif (event := _event_of(block, begin)) is not None:
            found.append(event)
    left_over = body[begin:]
    return found, b"" if all(not line or line.startswith(b":") for line in _LINE.split(left_over)) else left_over


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
