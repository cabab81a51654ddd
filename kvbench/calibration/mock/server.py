"""The mock server: one asyncio process that speaks enough HTTP/1.1 for an OpenAI-compatible completions API.

Routes: POST .../completions, GET /health, /v1/models, /server_info, /metrics and /stamps (every request with its
prompt, receipt, due and send times in seconds of perf_counter, which all processes of a machine share).

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
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.calibration.mock.settings import MockSettings
from kvbench.common.errors import UsageError
from kvbench.common.kernel_timer import DueCalls
from kvbench.common.machine import BOOT_HEADER, boot_id
from kvbench.common.ports import free_port
from kvbench.common.secrets import api_key

KEPT_STAMPS = 20_000  # of the newest requests
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_STAMPED = re.compile(rb"\r\nx-kvbench-stamp:[ \t]*1", re.IGNORECASE)
_KEY = re.compile(rb"\r\nauthorization:[ \t]*bearer[ \t]+([^\r\n]*)", re.IGNORECASE)


class Pacer:
    """Calls functions at exact moments, by a kernel timer; asyncio's own timers are rounded to milliseconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._calls = DueCalls()
        self.at = self._calls.add  # moment [s, perf_counter], function
        loop.add_reader(self._calls.fd, self._calls.on_readable)


class Answer:
    """One stream. ``stamp``: where send times [s, perf_counter] and due times are noted; ``on_end`` is called once.

    ``stamped``: each chunk carries ``"kvbench": {"sent": seconds}``, as the built-in server's do.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        pacer: Pacer,
        settings: MockSettings,
        body: dict[str, Any],
        stamp: dict[str, Any],
        *,
        stamped: bool,
        on_end: Callable[[], None],
    ) -> None:
        self._transport, self._pacer, self._settings, self._stamp = transport, pacer, settings, stamp
        self._fault, self._on_end, self._stamped = settings.fault, on_end, stamped
        self._total = int(body.get("max_tokens") or 16)
        self._chunks = -(-self._total // settings.tokens_per_chunk)
        self._writes = -(-self._chunks // settings.events_per_write)
        self._gaps = settings.gaps_s(self._writes, stamp["number"])
        self._with_ids = bool(body.get("return_token_ids")) and self._fault != "no_ids"
        self._usage = {
            "prompt_tokens": count_tokens(body.get("prompt") or ""),
            "completion_tokens": self._total,
            "prompt_tokens_details": {"cached_tokens": settings.cached_tokens},
        }
        self._streams = bool(body.get("stream"))
        self._due = stamp["received"]
        self._next = 0  # write

    def start(self) -> None:
        """Sends the head and waits for the first chunk's moment; a request without ``stream`` gets all at the end."""
        if self._streams and self._fault != "drop":
            boot = boot_id() if self._stamped else None
            boot_line = "" if boot is None else f"{BOOT_HEADER}: {boot}\r\n"
            head = f"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n{boot_line}\r\n"
            self._transport.write(b"HTTP/1.1 200 OK\r\n" + head.encode())
        self._wait()

    def _wait(self) -> None:
        self._due += next(self._gaps)
        tick = self._settings.itl_ms / 1000
        if self._settings.in_step and tick and not self._next:
            self._due = -(-self._due // tick) * tick
        self._pacer.at(self._due, self._on_due)

    def _on_due(self) -> None:
        """One write of the schedule."""
        if self._transport.is_closing():
            return
        per_write = self._settings.events_per_write
        first = self._next * per_write
        halfway = first >= self._chunks // 2
        if self._fault == "stall" and halfway:
            return  # nothing more comes, and nothing ends
        if self._fault == "drop" or (self._fault == "truncate" and halfway):
            self._end(close=True)
            return
        self._next += 1
        numbers = range(first, min(first + per_write, self._chunks))
        now = time.perf_counter()
        if self._streams:
            self._transport.write(b"".join([self._frame(self._event(k, now)) for k in numbers]))
        self._stamp["sends"].extend([now] * len(numbers))
        self._stamp["due"].extend([self._due] * len(numbers))
        if self._next < self._writes:
            self._wait()
        else:
            self._finish()

    def _event(self, k: int, now: float) -> bytes:
        per_chunk = self._settings.tokens_per_chunk
        begin, end = k * per_chunk, min((k + 1) * per_chunk, self._total)
        finish = '"length"' if end == self._total else "null"
        ids = f',"token_ids":{list(range(begin, end))}' if self._with_ids else ""
        sent = f',"kvbench":{{"sent":{now:.7f}}}' if self._stamped else ""
        text = f" w{k}" * max(0, min(end, self._total - self._settings.textless) - begin)
        return (
            f'{{"id":"mock","object":"text_completion","model":"mock","choices":'
            f'[{{"index":0,"text":"{text}","finish_reason":{finish}{ids}}}]{sent}}}'
        ).encode()

    def _frame(self, data: bytes) -> bytes:
        payload = b"data: " + data + b"\n\n"
        return b"%x\r\n%b\r\n" % (len(payload), payload)

    def _finish(self) -> None:
        if self._streams:
            usage = json.dumps({"id": "mock", "choices": [], "usage": self._usage}).encode()
            self._transport.write(self._frame(usage) + self._frame(b"[DONE]") + b"0\r\n\r\n")
        else:
            text = "".join(f" w{k}" for k in range(self._total))
            choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": None}
            whole = {"id": "mock", "object": "text_completion", "model": "mock", "choices": [choice]}
            self._transport.write(response("200 OK", whole | {"usage": self._usage}))
        self._end(close=self._fault == "close_after")

    def _end(self, close: bool) -> None:
        if close:
            self._transport.close()
        self._stamp["end"] = time.perf_counter()
        self._on_end()


def count_tokens(prompt: str | list[int]) -> int:
    """Tokens of a prompt by the mock's tokenizer, in which a word is a token, as in its answers; or of token ids."""
    return len(prompt.split() if isinstance(prompt, str) else prompt)


def response(status: str, body: Any) -> bytes:
    """A whole response. ``body``: text, or what becomes JSON."""
    kind = "text/plain; version=0.0.4" if isinstance(body, str) else "application/json"
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


@dataclass
class MockState:
    """What all connections share. ``api_key``: requests without it are answered 401; None: none is needed."""

    settings: MockSettings
    api_key: str | None = None
    stamps: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_STAMPS))
    requests: int = 0
    running: int = 0
    tokens: int = 0

    def metrics(self) -> str:
        """Prometheus text, under the names of the built-in server."""
        lines = []
        for name, kind, value in (
            ("num_requests_running", "gauge", self.running),
            ("num_requests_waiting", "gauge", 0),
            ("request_success_total", "counter", self.requests - self.running),
            ("generation_tokens_total", "counter", self.tokens),
        ):
            lines += [f"# TYPE kvbench:{name.removesuffix('_total')} {kind}", f"kvbench:{name} {float(value)}"]
        return "\n".join(lines) + "\n"


class Connection(asyncio.Protocol):
    """One client connection: HTTP/1.1 requests one after the other."""

    def __init__(self, state: MockState, pacer: Pacer) -> None:
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
        if method == b"POST" and path.endswith("/completions"):
            self._complete(head, body, received)
            return
        model = {"id": "mock", "object": "model", "owned_by": "kvbench-mock", "max_model_len": settings.max_model_len}
        answers = {
            "/health": dict,
            "/v1/models": lambda: {"object": "list", "data": [model]},
            "/server_info": lambda: {"model": {"name": "mock", "vocab_size": settings.vocab_size}},
            "/metrics": state.metrics,
            "/reset_prefix_cache": dict,  # there is none: it is always cold
            "/stamps": lambda: list(state.stamps),
        }
        if path in answers:
            self._transport.write(response("200 OK", answers[path]()))
        else:
            self._refuse("404 Not Found", f"there is no {path}")

    def _refuse(self, status: str, message: str) -> None:
        self._transport.write(response(status, {"error": {"message": message, "type": "mock"}}))

    def _complete(self, head: bytes, raw: bytes, received: float) -> None:
        state = self._state
        number = state.requests
        state.requests += 1
        try:
            body = json.loads(raw)
            settings = state.settings.for_request(number, str(body["model"]))
            prompt = body["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            self._refuse("400 Bad Request", f"not a completions request: {error}")
            return
        stamp = {
            "number": number, "prompt": prompt, "received": received, "fault": settings.fault, "sends": [], "due": [],
            "body": body, "end": None,
        }  # fmt: skip
        state.stamps.append(stamp)
        if settings.fault == "silent":
            return
        if settings.fault.startswith("http"):
            self._refuse(f"{settings.fault[4:]} Mock", "a failure was set for this request")
            return
        self._count(1)
        Answer(
            self._transport, self._pacer, settings, body, stamp,
            stamped=_STAMPED.search(head) is not None, on_end=lambda: self._ended(stamp),
        ).start()  # fmt: skip

    def _count(self, change: int) -> None:
        self._running += change
        self._state.running += change

    def _ended(self, stamp: dict[str, Any]) -> None:
        self._state.tokens += len(stamp["sends"])
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
    pacer, stop = Pacer(loop), asyncio.Event()
    server = await loop.create_server(lambda: Connection(state, pacer), host, port, ssl=tls, backlog=4096)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # a full collection would make chunks late
    bound = server.sockets[0].getsockname()[1]
    print(f"ready {'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{bound}", flush=True)
    await stop.wait()
    server.close()
