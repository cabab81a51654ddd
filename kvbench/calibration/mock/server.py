"""The mock server: one asyncio process that speaks enough HTTP/1.1 for the APIs of OpenAI and Anthropic.

Routes: POST to the endpoints (under any prefix) and /tokenize, GET /health, /v1/models, /server_info, /metrics and
/stamps (every request with its prompt, the kinds of its chunks in order, its receipt, due and send times in seconds of
perf_counter, which all processes of a machine share).

asyncio's own loop sends within ``write``, right after the stamp. uvloop, which gathers a turn's writes, gained nothing
when both were measured.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import signal
import ssl
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from kvbench.calibration.mock.formats import FORMATS, AnswerFormat
from kvbench.calibration.mock.settings import MockSettings, Stamp
from kvbench.common.errors import UsageError
from kvbench.common.kernel_timer import DueCalls
from kvbench.common.machine import BOOT_HEADER, boot_id
from kvbench.common.parsing import json_at
from kvbench.common.ports import free_port
from kvbench.common.secrets import api_key
from kvbench.load.endpoints import PATHS

KEPT_STAMPS = 20_000  # of the newest requests
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_STAMPED = re.compile(rb"\r\nx-kvbench-stamp:[ \t]*1", re.IGNORECASE)
_KEY = re.compile(rb"\r\n(?:authorization:[ \t]*bearer[ \t]|x-api-key:)[ \t]*([^\r\n]*)", re.IGNORECASE)
_ROUTES = sorted(((path.removeprefix("/v1"), name) for name, path in PATHS.items()), key=lambda route: -len(route[0]))
"""Ends of paths and their endpoints, the longest first: a chat's path ends as a completion's does."""


class MockAnswer:
    """One stream. ``stamp``: where send times [s, perf_counter] and due times are noted; ``on_end`` is called once.

    ``stamped``: each chunk carries ``"kvbench": {"sent": seconds}``, as the built-in server's do.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        pacer: DueCalls,
        settings: MockSettings,
        form: AnswerFormat,
        stamp: Stamp,
        *,
        stamped: bool,
        on_end: Callable[[], None],
    ) -> None:
        self._transport, self._pacer, self._settings, self._stamp = transport, pacer, settings, stamp
        self._fault, self._on_end, self._stamped, self._format = settings.fault, on_end, stamped, form
        self._chunks, self._deltas, self._event = form.plan.moments, form.plan.deltas(), form.delta
        self._writes = -(-self._chunks // settings.events_per_write)
        self._gaps = settings.gaps_s(self._writes, stamp.number)
        self._streams = bool(json_at(stamp.body, "stream"))
        self._sends, self._dues, self._due = stamp.sends, stamp.due, stamp.received
        self._next = 0  # write

    def start(self) -> None:
        """Sends the head and waits for the first chunk's moment; a request without ``stream`` gets all at the end."""
        if self._streams and self._fault != "drop":
            boot = boot_id() if self._stamped else None
            boot_line = "" if boot is None else f"{BOOT_HEADER}: {boot}\r\n"
            head = f"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n{boot_line}\r\n"
            self._write("HTTP/1.1 200 OK\r\n" + head + "".join(map(chunked, self._format.beginning())))
        self._wait()

    def _wait(self) -> None:
        self._due += next(self._gaps)
        if not self._next and self._settings.in_step and (tick := self._settings.itl_ms / 1000):
            self._due = -(-self._due // tick) * tick
        self._pacer.add(self._due, self._on_due)

    def _on_due(self) -> None:
        if self._transport.is_closing():
            return
        per_write = self._settings.events_per_write
        if self._fault:
            halfway = self._next * per_write >= self._chunks // 2
            if self._fault == "stall" and halfway:
                return  # nothing more comes, and nothing ends
            if self._fault == "drop" or (self._fault == "truncate" and halfway):
                self._end(close=True)
                return
        self._next += 1
        now = time.perf_counter()
        sent = f',"kvbench":{{"sent":{now:.7f}}}' if self._stamped else ""
        text, chunks = "", 0
        for delta in islice(self._deltas, per_write):  # a comprehension would cost a microsecond more
            if delta:
                text += chunked(self._event(*delta, sent))
                chunks += 1
        if text and self._streams:
            now = self._write(text, now)
        self._sends += [now] * chunks
        self._dues += [self._due] * chunks
        if self._next < self._writes:
            self._wait()
        else:
            self._finish()

    def _write(self, text: str, now: float = 0.0) -> float:
        """Sends ASCII, in pieces where ``split`` is set; the last one's moment, ``now`` where there is one only."""
        data = text.encode()
        if size := self._settings.split:
            while len(data) > size:
                self._transport.write(data[:size])
                data, now = data[size:], time.perf_counter()
        self._transport.write(data)
        return now

    def _finish(self) -> None:
        if self._streams:
            self._write("".join(map(chunked, self._format.end())) + "0\r\n\r\n")
        else:
            self._transport.write(response("200 OK", self._format.whole()))
        self._end(close=self._fault == "close_after")

    def _end(self, close: bool) -> None:
        if close:
            self._transport.close()
        self._stamp.end = time.perf_counter()
        self._on_end()


def chunked(event: str) -> str:
    """An event as one chunk of HTTP."""
    return f"{len(event):x}\r\n{event}\r\n"


def prompt_of(content: Any) -> str | list[int]:
    """A text or token ids as they are; of messages and their parts the texts, a line each. TypeError."""
    if isinstance(content, dict):
        return prompt_of(json_at(content, "content") or json_at(content, "text") or "")
    if isinstance(content, list) and not (content and isinstance(content[0], int)):
        return "\n".join([prompt_of(part) for part in content])
    return content


def response(status: str, body: Any) -> bytes:
    """A whole response. ``body``: text, or what becomes JSON."""
    kind = "text/plain; version=0.0.4" if isinstance(body, str) else "application/json"
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


@dataclass
class MockState:
    """The state that all connections share. ``api_key``: requests without it are answered 401; None: none is needed."""

    settings: MockSettings
    api_key: str | None = None
    stamps: deque[Stamp] = field(default_factory=lambda: deque(maxlen=KEPT_STAMPS))
    requests: int = 0
    running: int = 0
    tokens: int = 0

    def metrics(self) -> str:
        """Prometheus text, under the names of the built-in server."""
        rows = (
            ("num_requests_running", "gauge", "", self.running),
            ("num_requests_waiting", "gauge", "", 0),
            ("request_success", "counter", "_total", self.requests - self.running),
            ("generation_tokens", "counter", "_total", self.tokens),
        )
        return "".join(f"# TYPE kvbench:{n} {kind}\nkvbench:{n}{end} {float(value)}\n" for n, kind, end, value in rows)


class MockConnection(asyncio.Protocol):
    """One client connection: HTTP/1.1 requests one after the other."""

    def __init__(self, state: MockState, pacer: DueCalls) -> None:
        self._state, self._pacer = state, pacer
        self._buffer = b""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._running = 0

    def connection_lost(self, error: Exception | None) -> None:
        self._state.running -= self._running
        self._running = 0

    def data_received(self, data: bytes) -> None:
        received = time.perf_counter()
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            match = _LENGTH.search(head)
            length = int(match[1]) if match else 0
            if len(self._buffer) < end + 4 + length:
                return
            body, self._buffer = self._buffer[end + 4 : end + 4 + length], self._buffer[end + 4 + length :]
            self._route(head, body, received)

    def _route(self, head: bytes, body: bytes, received: float) -> None:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
        state, settings = self._state, self._state.settings
        if state.api_key is not None and path != "/health":
            key = _KEY.search(head)
            if key is None or key[1].decode("latin-1").strip() != state.api_key:
                self._refuse("401 Unauthorized", "the API key is missing or wrong")
                return
        endpoint = next((name for suffix, name in _ROUTES if path.endswith(suffix)), "")
        if method == b"POST" and endpoint in settings.endpoints:
            self._complete(FORMATS[endpoint], head, body, received)
            return
        if method == b"POST" and path == "/tokenize":
            self._tokenize(body)
            return
        model = {"id": "mock", "object": "model", "owned_by": "kvbench-mock", "max_model_len": settings.max_model_len}
        answers = {
            "/health": dict,
            "/v1/models": lambda: {"object": "list", "data": [model]},
            "/server_info": lambda: {"model": {"name": "mock", "vocab_size": settings.vocab_size}},
            "/metrics": state.metrics,
            "/reset_prefix_cache": dict,  # there is none: it is always cold
            "/stamps": lambda: list(map(vars, state.stamps)),
        }
        if path in answers:
            self._transport.write(response("200 OK", answers[path]()))
        else:
            self._refuse("404 Not Found", f"there is no {path}")

    def _refuse(self, status: str, message: str) -> None:
        self._transport.write(response(status, {"error": {"message": message, "type": "mock"}}))

    def _tokenize(self, raw: bytes) -> None:
        try:  # as vLLM's route of that name does
            body = json.loads(raw)
            name = "messages" if "messages" in body else "prompt"
            words = prompt_of(body[name]).split()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._refuse("400 Bad Request", f"not a tokenize request: {error}")
            return
        settings = self._state.settings
        ids = [*range(settings.template_tokens if name == "messages" else 0)]
        ids += [zlib.crc32(word.encode()) % settings.vocab_size for word in words]
        answer = {"count": len(ids), "max_model_len": settings.max_model_len, "tokens": ids}
        self._transport.write(response("200 OK", answer))

    def _complete(self, form: type[AnswerFormat], head: bytes, raw: bytes, received: float) -> None:
        state = self._state
        number = state.requests
        state.requests += 1
        try:
            body = json.loads(raw)
            settings = state.settings.for_request(number, str(body["model"]))
            *others, needed = form.prompts
            parts = [*(body[name] for name in others if name in body), body[needed]]
            prompt = prompt_of(parts if len(parts) > 1 else parts[0])
            words = prompt.split() if isinstance(prompt, str) else prompt  # a word is a token, as in answers
            answer = form(settings, body, len(words))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._refuse("400 Bad Request", f"not a request of this endpoint: {error}")
            return
        stamp = Stamp(number, prompt, received, settings.fault, answer.plan.kinds, body)
        state.stamps.append(stamp)
        if settings.fault == "silent":
            return
        if settings.fault.startswith("http"):
            self._refuse(f"{settings.fault[4:]} Mock", "a failure was set for this request")
            return
        self._count(1)
        MockAnswer(
            self._transport, self._pacer, settings, answer, stamp,
            stamped=_STAMPED.search(head) is not None, on_end=lambda: self._ended(stamp),
        ).start()  # fmt: skip

    def _count(self, change: int) -> None:
        self._running += change
        self._state.running += change

    def _ended(self, stamp: Stamp) -> None:
        self._state.tokens += len(stamp.sends)
        if self._running:  # a connection that was lost has given its streams back already
            self._count(-1)


def run(
    *,
    host: str,
    port: int,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    api_key_env: str | None = None,
    **settings: Any,
) -> int:
    """Serves until SIGINT or SIGTERM; returns 0. ``settings``: fields of MockSettings. UsageError."""
    try:
        state = MockState(MockSettings(**settings), api_key(api_key_env) if api_key_env else None)
    except ValueError as error:
        raise UsageError(str(error)) from None
    tls = _tls_context(tls_cert, tls_key)
    free_port(port, host)
    asyncio.run(_serve(state, host, port, tls))
    return 0


def _tls_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if cert is None:
        if key is not None:
            raise UsageError(f"--tls-key {key} needs --tls-cert: give both or neither")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"--tls-cert {cert} cannot be used ({error}): give a PEM certificate and its key") from None
    return context


async def _serve(state: MockState, host: str, port: int, tls: ssl.SSLContext | None) -> None:
    loop = asyncio.get_running_loop()
    pacer, stop = DueCalls(), asyncio.Event()  # asyncio's own timers are rounded to milliseconds
    loop.add_reader(pacer.fd, pacer.on_readable)
    server = await loop.create_server(lambda: MockConnection(state, pacer), host, port, ssl=tls, backlog=4096)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # a full collection would make chunks late
    bound = server.sockets[0].getsockname()[1]
    print(f"ready {'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{bound}", flush=True)
    await stop.wait()
    server.close()
