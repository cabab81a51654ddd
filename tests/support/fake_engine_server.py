"""The tests' one HTTP server, whose answers are a script, and one with the outside of the engine's and little inside.

``ScriptedServer`` runs in a thread of the test (``tests.support.scripted_http``) or, with ``FakeEngine`` as its script,
in a process: a prefix cache without KV, "tokens" on a timer.

    python tests/support/fake_engine_server.py --port 0 [any of the engine's flags]

Prints ``ready URL``. What it should do wrong comes from the environment, so that a sweep can launch it unchanged:
    FAKE_TOKEN_S      seconds between tokens (0.002)
    FAKE_RESPONSE_S   seconds before each answer to a completion, outside of its "engine" (0)
    FAKE_WEIGHTS      fingerprint of its weights (f00d)
    FAKE_LAUNCHES     a file to which each launch adds a line with its flags
    FAKE_FAULT        never_ready | exit_at_start | refuse | leak:N (from the Nth stream on) |
                      die:N (in the Nth stream; a warm-up has as many as the load has users) |
                      keep (/reset_prefix_cache says 200 and empties nothing) |
                      forget (only streams' prompts get into the cache) | mute (/metrics: 503 while a stream runs)
    FAKE_FAULT_ONCE   a file: the fault shows only while it does not exist yet; it is made when the fault shows
    FIRE              rules by which any request can be answered wrongly, late or not at all: a JSON list, tried in
                      order, of which the first that matches strikes:
        path            the endpoint, e.g. "/metrics"; "stream" for completions that stream, "plain" for the others
        first, count    the ordinal of the first request of that path which is struck (1), and how many are (all)
        from_s          seconds after the first stream began before which the rule does not strike (0)
        do              a fault of ``tests.support.fire_wire``, a signal, or ``status`` with the number of one;
                        "mid_" before it: after two tokens of a stream
        once_a_launch   a file: the rule belongs to the first server that strikes by it, which writes its pid there

A prompt that is text and begins with "fire:" gets the answer of that name in ``tests.support.fire_wire``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a copy in a built source has no tests, and does no faults

VOCAB_SIZE = 8192
MODEL = "fake"
RESET = "reset"  # a piece that ends the connection by RST in place of FIN
NO_LINGER = (socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
Script = Mapping[str, Any] | Callable[[str, Any], Any]


@dataclass(frozen=True)
class Wire:
    """An answer as it goes over the wire: bytes, seconds to wait, ``RESET``. ``keep``: the connection stays."""

    pieces: Iterable[bytes | float | str]
    keep: bool = False


def response(status: int, body: Any) -> bytes:
    """A response with a length. ``body``: text or bytes as they are, else JSON."""
    data = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
    kind = "text/plain" if isinstance(body, str) else "application/json"
    return b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (
        status, kind.encode(), len(data), data
    )  # fmt: skip


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class ScriptedServer:
    """``script``: the answer to each path, else 404; or a function of path and JSON body (None: no body).

    An answer is (status, body), bytes or a ``Wire``, None (nothing, ever), or a function of the body that returns one.
    Bytes end the connection. ``asked``: method, path, headers and body of each request so far. ``begins_after_s``: how
    long a new connection is left alone; ``says_bye``: TLS's own ending comes before the connection's.
    """

    def __init__(
        self, script: Script, *, tls: ssl.SSLContext | None = None, begins_after_s: float = 0, says_bye: bool = True
    ) -> None:
        self.script, self.tls, self.begins_after_s, self.says_bye = script, tls, begins_after_s, says_bye
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        self.url = ""
        self.stopping = asyncio.Event()

    async def run(self, ready: Callable[[], None], host: str = "127.0.0.1", port: int = 0) -> None:
        """Serves until ``stopping``. ``ready`` is called when ``url`` is known."""
        with socket.create_server((host, port), backlog=512) as listening:
            listening.setblocking(False)
            self.url = f"http{'s' * bool(self.tls)}://{host}:{listening.getsockname()[1]}"
            accepting = asyncio.create_task(self._accept(listening))
            ready()
            await self.stopping.wait()
            accepting.cancel()

    async def _accept(self, listening: socket.socket) -> None:
        tasks = set()
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(listening)
            tasks.add(asyncio.create_task(self._begin(connection)))

    async def _begin(self, connection: socket.socket) -> None:
        await asyncio.sleep(self.begins_after_s)
        protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._connected)
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection, ssl=self.tls)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while await self._answer(reader, writer):
                pass
        writer.close() if self.says_bye else writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Reads and answers one request; whether the connection stays."""
        first = await reader.readexactly(1)
        if not first.isalpha():  # a TLS handshake
            writer.write(response(400, "Bad Request"))
            return False
        head = (first + await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name: value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        length = next((value for name, value in headers.items() if name.lower() == "content-length"), 0)
        raw = await reader.readexactly(int(length))
        body = json.loads(raw) if raw else None
        self.asked.append((method, path, headers, body))
        told = self.script(path, body) if callable(self.script) else self.script.get(path, (404, "not found"))
        told = told(body) if callable(told) else told
        if told is None:
            await asyncio.Event().wait()
        if not hasattr(told, "pieces"):  # a Wire, of this file or of the module that is the same file
            told = Wire([told]) if isinstance(told, bytes) else Wire([response(*told)], keep=True)
        with contextlib.closing(told.pieces) if isinstance(told.pieces, Generator) else contextlib.nullcontext():
            for piece in told.pieces:
                if piece is RESET:
                    writer.get_extra_info("socket").setsockopt(*NO_LINGER)
                    writer.transport.abort()
                elif isinstance(piece, bytes):
                    writer.write(piece)
                    await writer.drain()
                else:
                    await asyncio.sleep(piece)
        return told.keep


class FakeEngine:
    """A script: counters and a fault."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.token_s = float(os.environ.get("FAKE_TOKEN_S", "0.002"))
        self.fault, self.fire = fault(), Fire()
        self.running = self.streams = self.owned = self.finished = self.hits = 0
        self.prompt_tokens = self.generation_tokens = 0
        self.cache: set[tuple[int, ...]] = set()  # beginnings of prompts, in whole pages

    def __call__(self, path: str, body: Any) -> Any:
        if rule := self.fire.rule_for(path, body):
            from tests.support.fire_wire import strike

            return strike(rule["do"], rule.get("status", 500))
        match path:
            case "/health":
                return 200, ""
            case "/v1/models":
                card = {"id": MODEL, "object": "model", "max_model_len": self.flags.max_model_len}
                return 200, {"object": "list", "data": [card]}
            case "/server_info":
                return 200, self.info()
            case "/metrics":
                return (503, "busy") if self.fault == "mute" and self.running else (200, self.metrics())
            case "/reset_prefix_cache":
                return self.reset(), {}
            case "/v1/completions":
                prompt = body["prompt"]
                if isinstance(prompt, str) and prompt.startswith("fire:"):
                    from tests.support.fire_wire import wire

                    return wire(prompt[5:])
                return Wire(self.complete(body), keep=True)
        return 404, {"error": {"message": f"no {path}"}}

    def look_up(self, prompt: Any, *, keep: bool) -> int:
        """Tokens of the prompt that the cache holds; then puts its full pages there, as an endless cache would."""
        if not self.flags.enable_prefix_caching or not isinstance(prompt, list):
            return 0
        size, found = self.flags.page_size, 0
        while found < (len(prompt) - 1) // size and tuple(prompt[: (found + 1) * size]) in self.cache:
            found += 1
        if keep:
            self.cache |= {tuple(prompt[: (i + 1) * size]) for i in range(len(prompt) // size)}
        self.hits += found * size
        return found * size

    def reset(self) -> int:
        """The HTTP status."""
        if self.running:
            return 409
        if self.fault != "keep":
            self.cache.clear()
        return 200

    def metrics(self) -> str:
        gauges = {
            "num_requests_running": self.running,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": self.owned / 1000,
            "kv_pages_total": 1000,
            "kv_pages_free": 1000 - self.owned,
            "kv_pages_owned": self.owned,
            "kv_pages_cached": 0 if self.fault == "keep" else len(self.cache),
            "kv_slots_total": 16000,
            "kv_slots_reserved": 16 * self.owned,
            "kv_slots_used": 12 * self.owned,
            "kv_waste_slots": 4 * self.owned,
            "page_table_bytes": 4096,
        }
        counters = {
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generation_tokens,
            "num_preemptions_total": 0,
            "prefix_cache_hits_total": self.hits,
            "prefix_cache_queries_total": self.prompt_tokens,
            'request_success_total{finished_reason="length"}': self.finished,
        }
        lines = [f"# TYPE kvbench:{n} gauge\nkvbench:{n} {v}" for n, v in gauges.items()]
        lines += [f"# TYPE kvbench:{n.split('{')[0]} counter\nkvbench:{n} {v}" for n, v in counters.items()]
        return "\n".join(lines) + "\n"

    def info(self) -> dict[str, Any]:
        return {
            "engine": vars(self.flags),
            "resolved": {"device": "cpu", "device_name": None, "dtype": "float32", "kernel_backend": "fake"},
            "model": {
                "name": MODEL,
                "vocab_size": VOCAB_SIZE,
                "max_model_len": self.flags.max_model_len,
                "weights_fingerprint": os.environ.get("FAKE_WEIGHTS", "f00d"),
            },
            "pid": os.getpid(),
        }

    def complete(self, body: dict[str, Any]) -> Iterator[bytes | float]:
        """An answer, streamed or whole."""
        yield float(os.environ.get("FAKE_RESPONSE_S", "0"))
        prompt, count, streams = body["prompt"], int(body["max_tokens"]), bool(body.get("stream"))
        cached = self.look_up(prompt, keep=self.fault != "forget" or streams)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "total_tokens": len(prompt) + count,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        self.running += 1
        self.owned += 1
        self.streams += streams
        number, leaks = self.streams, self.fault.startswith("leak:") and self.streams >= int(self.fault[5:])
        try:
            self.prompt_tokens += len(prompt)
            if not streams:
                yield self.token_s * count
                choice = {"index": 0, "text": " x" * count, "finish_reason": "length"}
                yield response(200, {"id": "c", "model": MODEL, "choices": [choice], "usage": usage})
            else:
                yield STREAM_HEAD
                for index in range(count):
                    yield self.token_s
                    if self.fault == f"die:{number}" and index == count // 2:
                        spend()
                        print("fake engine: out of memory, dying", flush=True)
                        os._exit(9)
                    choice = {"index": 0, "text": " x", "finish_reason": "length" if index == count - 1 else None}
                    choice |= {"token_ids": [index % VOCAB_SIZE]} if body.get("return_token_ids") else {}
                    yield event({"id": "c", "model": MODEL, "choices": [choice]})
                yield event({"id": "c", "model": MODEL, "choices": [], "usage": usage})
                yield chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
            self.generation_tokens += count
            self.finished += 1
        finally:
            self.running -= 1
            self.owned -= not leaks


def event(body: Any) -> bytes:
    return chunk(b"data: %b\n\n" % json.dumps(body).encode())


def fault() -> str:
    """The fault this launch has; a fault that shows only once is spent by ``spend``."""
    once = os.environ.get("FAKE_FAULT_ONCE")
    return "" if once and Path(once).exists() else os.environ.get("FAKE_FAULT", "")


def spend() -> None:
    if once := os.environ.get("FAKE_FAULT_ONCE"):
        Path(once).touch()


class Fire:
    """The rules, and what is known of the requests so far."""

    def __init__(self) -> None:
        self.rules: list[dict[str, Any]] = json.loads(os.environ.get("FIRE", "[]"))
        self.seen: dict[str, int] = {}
        self.first_stream = math.inf

    def rule_for(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The rule that strikes this request, which is counted."""
        if path == "/v1/completions":
            path = "stream" if body.get("stream") else "plain"
        self.seen[path] = number = self.seen.get(path, 0) + 1
        now = time.monotonic()
        if path == "stream":
            self.first_stream = min(self.first_stream, now)
        return next((rule for rule in self.rules if self._strikes(rule, path, number, now)), None)

    def _strikes(self, rule: dict[str, Any], path: str, number: int, now: float) -> bool:
        since = number - rule.get("first", 1)
        if rule["path"] != path or not 0 <= since < rule.get("count", math.inf):
            return False
        if rule.get("from_s") and now < self.first_stream + rule["from_s"]:
            return False
        if once := rule.get("once_a_launch"):
            with contextlib.suppress(FileExistsError), open(once, "x") as file:
                file.write(str(os.getpid()))
            return Path(once).read_text() == str(os.getpid())
        return True


async def run(flags: argparse.Namespace) -> None:
    engine = FakeEngine(flags)
    server = ScriptedServer(engine)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stopping.set)

    def ready() -> None:
        print("still loading" if engine.fault == "never_ready" else f"ready {server.url}", flush=True)

    await server.run(ready, flags.host, flags.port)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=False)
    flags, _ = parser.parse_known_args()
    if path := os.environ.get("FAKE_LAUNCHES"):
        with open(path, "a") as file:
            file.write(json.dumps({"time": time.time(), "pid": os.getpid(), "flags": sys.argv[1:]}) + "\n")
    if fault() == "exit_at_start":
        spend()
        print("fake engine: a library is missing", file=sys.stderr)
        return 1
    if fault() == "refuse":
        print("error: kv_budget 1 is too small for this fake engine: raise kv_budget", file=sys.stderr)
        return 2
    asyncio.run(run(flags))
    return 0


if __name__ == "__main__":
    sys.exit(main())
