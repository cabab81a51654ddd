"""A server with the outside of the engine's and little inside: a prefix cache without KV, "tokens" on a timer.

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
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a copy in a built source has no tests, and does no faults

VOCAB_SIZE = 8192
MODEL = "fake"


class FakeEngine:
    """Counters and a fault."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.token_s = float(os.environ.get("FAKE_TOKEN_S", "0.002"))
        self.fault = fault()
        self.running = 0
        self.streams = 0
        self.owned = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = 0
        self.cache: set[tuple[int, ...]] = set()  # beginnings of prompts, in whole pages
        self.hits = 0

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

    def card(self) -> dict[str, Any]:
        return {"id": MODEL, "object": "model", "max_model_len": self.flags.max_model_len}

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


def fault() -> str:
    """The fault this launch has; a fault that shows only once is spent by ``spend``."""
    once = os.environ.get("FAKE_FAULT_ONCE")
    return "" if once and Path(once).exists() else os.environ.get("FAKE_FAULT", "")


def spend() -> None:
    if once := os.environ.get("FAKE_FAULT_ONCE"):
        Path(once).touch()


async def read_request(reader: asyncio.StreamReader) -> tuple[str, str, bytes] | None:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    method, path, _ = lines[0].split(" ")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}
    return method, path, await reader.readexactly(int(headers.get("content-length", 0)))


def respond(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    kind = "text/plain" if isinstance(body, str) else "application/json"
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


async def complete(engine: FakeEngine, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    prompt, count = body["prompt"], int(body["max_tokens"])
    cached = engine.look_up(prompt, keep=engine.fault != "forget" or bool(body.get("stream")))
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": count,
        "total_tokens": len(prompt) + count,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    engine.running += 1
    engine.owned += 1
    engine.streams += bool(body.get("stream"))
    leaks = engine.fault.startswith("leak:") and engine.streams >= int(engine.fault[5:])
    try:
        engine.prompt_tokens += len(prompt)
        if not body.get("stream"):
            await asyncio.sleep(engine.token_s * count)
            choice = {"index": 0, "text": " x" * count, "finish_reason": "length"}
            respond(
                writer,
                200,
                {"id": "c", "object": "text_completion", "model": MODEL, "choices": [choice], "usage": usage},
            )
        else:
            await stream(engine, writer, count, usage, bool(body.get("return_token_ids")))
        engine.generation_tokens += count
        engine.finished += 1
    finally:
        engine.running -= 1
        if not leaks:
            engine.owned -= 1


async def stream(
    engine: FakeEngine, writer: asyncio.StreamWriter, count: int, usage: dict[str, Any], with_ids: bool
) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    def event(data: str) -> None:
        payload = f"data: {data}\n\n".encode()
        writer.write(f"{len(payload):x}\r\n".encode() + payload + b"\r\n")

    number = engine.streams
    for index in range(count):
        await asyncio.sleep(engine.token_s)
        if engine.fault.startswith("die:") and number == int(engine.fault[4:]) and index == count // 2:
            spend()
            print("fake engine: out of memory, dying", flush=True)
            os._exit(9)
        choice: dict[str, Any] = {"index": 0, "text": " x", "finish_reason": "length" if index == count - 1 else None}
        if with_ids:
            choice["token_ids"] = [index % VOCAB_SIZE]
        event(json.dumps({"id": "c", "object": "text_completion", "model": MODEL, "choices": [choice]}))
        await writer.drain()
    event(json.dumps({"id": "c", "object": "text_completion", "model": MODEL, "choices": [], "usage": usage}))
    event("[DONE]")
    writer.write(b"0\r\n\r\n")


async def answer(engine: FakeEngine, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> None:
    """One request of an endpoint, answered as the engine's server answers it."""
    match path:
        case "/health":
            respond(writer, 200, "")
        case "/v1/models":
            respond(writer, 200, {"object": "list", "data": [engine.card()]})
        case "/server_info":
            respond(writer, 200, engine.info())
        case "/metrics":
            muted = engine.fault == "mute" and engine.running
            respond(writer, 503, "busy") if muted else respond(writer, 200, engine.metrics())
        case "/reset_prefix_cache":
            respond(writer, engine.reset(), {})
        case "/v1/completions":
            await asyncio.sleep(float(os.environ.get("FAKE_RESPONSE_S", "0")))
            await complete(engine, writer, body)
        case _:
            respond(writer, 404, {"error": {"message": f"no {path}"}})


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


def serve_connection(engine: FakeEngine, fire: Fire) -> Any:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while request := await read_request(reader):
                _, path, raw = request
                body = json.loads(raw) if path == "/v1/completions" else {}
                if rule := fire.rule_for(path, body):
                    from tests.support.fire_wire import strike

                    if not await strike(rule["do"], writer, rule.get("status", 500)):
                        break
                    continue
                prompt = body.get("prompt")
                if isinstance(prompt, str) and prompt.startswith("fire:"):
                    from tests.support.fire_wire import wire

                    if not await wire(prompt[5:], writer):
                        break
                    continue
                await answer(engine, writer, path, body)
                await writer.drain()
        writer.close()

    return handle


async def run(flags: argparse.Namespace) -> None:
    engine = FakeEngine(flags)
    server = await asyncio.start_server(serve_connection(engine, Fire()), flags.host, flags.port)
    port = server.sockets[0].getsockname()[1]
    if engine.fault == "never_ready":
        print("still loading", flush=True)
    else:
        print(f"ready http://{flags.host}:{port}", flush=True)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


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
