"""The fake engine's server, under fire: any request of any endpoint can be answered wrongly, late or not at all.

    python -m tests.support.fire_server [the fake engine's flags]

FIRE in the environment is a JSON list of rules, tried in order, the first that matches strikes:
    path     the endpoint, e.g. "/metrics"; "stream" for completions that stream, "plain" for those that do not
    first    1: the ordinal of the first request of that path which is struck (1)
    count    how many are struck from there on (all)
    from_s   seconds after the first stream began before which the rule does not strike (0)
    do       what happens, see ``Fire.strike``; ``seconds`` and ``status`` belong to some of them
    once_a_launch  a file: the rule belongs to the first server that strikes by it, which writes its pid there
A prompt that is text and begins with "fire:" gets the answer of that name in ``tests.support.fire_wire``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

from tests.support import fake_engine_server as fake
from tests.support.fire_wire import wire

DRIP_S = 0.02
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Fire:
    """The rules, and what is known of the requests so far."""

    def __init__(self, rules: list[dict[str, Any]]) -> None:
        self.rules = rules
        self.seen: dict[str, int] = {}
        self.first_stream: float | None = None
        self.server: asyncio.Server | None = None
        self.address = ("127.0.0.1", 0)

    def rule_for(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The rule that strikes this request, which is counted."""
        if path == "/v1/completions":
            path = "stream" if body.get("stream") else "plain"
        self.seen[path] = number = self.seen.get(path, 0) + 1
        if path == "stream" and self.first_stream is None:
            self.first_stream = time.monotonic()
        for rule in self.rules:
            place = number - rule.get("first", 1)
            if rule["path"] != path or place < 0 or place >= rule.get("count", 1 << 30):
                continue
            if rule.get("from_s") and (
                self.first_stream is None or time.monotonic() < self.first_stream + rule["from_s"]
            ):
                continue
            if once := rule.get("once_a_launch"):
                with contextlib.suppress(FileExistsError), open(once, "x") as file:
                    file.write(str(os.getpid()))
                if Path(once).read_text() != str(os.getpid()):
                    continue
            return rule
        return None

    async def strike(self, rule: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """One of the faults: how a request ends that is not served. The connection is closed afterwards."""
        write = writer.write
        match rule["do"]:
            case "hang":
                await asyncio.sleep(3600)
            case "half_head":
                write(b"HTTP/1.1 200 OK\r\ncontent-le")
                await asyncio.sleep(3600)
            case "drip_head":
                write(b"HTTP/1.1 200 OK\r\nx-drip: ")
                await drip(writer, b"a")
            case "drip_body":
                write(CHUNKED)
                await drip(writer, b"1\r\n:\r\n")
            case "drip_length":
                write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 1000000\r\n\r\n")
                await drip(writer, b"#")
            case "flood":
                write(CHUNKED)
                await drip(writer, b"10000\r\n" + b":" * 65536 + b"\r\n", 0.0)
            case "flood_length":
                write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000000\r\n\r\n")
                await drip(writer, b"#" * 65536, 0.0)
            case "status":
                status = int(rule.get("status", 500))
                body = json.dumps({"error": {"message": f"under fire: {status}"}}).encode()
                head = f"HTTP/1.1 {status} Fire\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
                write(head.encode() + body)
                await writer.drain()
            case "page":
                write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 13\r\n"
                    b"connection: close\r\n\r\n<h1>hello</h1"
                )
                await writer.drain()
            case "garbage":
                write(b"\x16\x03\x01\x00 not HTTP at all \xff\xfe\r\n\r\n")
                await writer.drain()
            case "reset":
                hard_reset(writer)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "refuse":
                await self.refuse(float(rule.get("seconds", 1.0)))
            case other:
                raise ValueError(f"no fault is called {other!r}")

    async def refuse(self, seconds: float) -> None:
        """Nobody listens for a while; connections that stand are kept."""
        assert self.server is not None
        self.server.close()

        async def come_back() -> None:
            await asyncio.sleep(seconds)
            await self.listen(self.handler)

        self.returning = asyncio.get_running_loop().create_task(come_back())

    async def listen(self, handler: Any) -> None:
        self.handler = handler
        self.server = await asyncio.start_server(handler, *self.address)
        self.address = self.server.sockets[0].getsockname()[:2]


async def drip(writer: asyncio.StreamWriter, piece: bytes, pause_s: float = DRIP_S) -> None:
    """``piece`` for ever, until the other side goes away."""
    while not writer.is_closing():
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(pause_s)


def hard_reset(writer: asyncio.StreamWriter) -> None:
    """RST in place of FIN."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def handler(engine: fake.FakeEngine, fire: Fire) -> Any:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while request := await fake.read_request(reader):
                _, path, raw = request
                body = json.loads(raw) if path == "/v1/completions" else {}
                if rule := fire.rule_for(path, body):
                    if rule["do"].startswith("mid_"):
                        await struck_midway(fire, rule, writer)
                    else:
                        await fire.strike(rule, writer)
                    break
                prompt = body.get("prompt")
                if isinstance(prompt, str) and prompt.startswith("fire:"):
                    if not await wire(prompt[5:], body, reader, writer, fire):
                        break
                    continue
                await fake.answer(engine, writer, path, body)
                await writer.drain()
        writer.close()

    return handle


async def struck_midway(fire: Fire, rule: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Two tokens of a stream, then the fault."""
    writer.write(CHUNKED)
    for token in (7, 8):
        event = {"choices": [{"index": 0, "text": " x", "finish_reason": None, "token_ids": [token]}]}
        payload = f"data: {json.dumps(event)}\n\n".encode()
        writer.write(b"%x\r\n%b\r\n" % (len(payload), payload))
        await writer.drain()
        await asyncio.sleep(0.01)
    await fire.strike(rule | {"do": rule["do"].removeprefix("mid_")}, writer)


async def run(flags: argparse.Namespace) -> None:
    engine, fire = fake.FakeEngine(flags), Fire(json.loads(os.environ.get("FIRE", "[]")))
    fire.address = (flags.host, flags.port)
    await fire.listen(handler(engine, fire))
    print(f"ready http://{flags.host}:{fire.address[1]}", flush=True)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()


if __name__ == "__main__":
    sys.exit(fake.main(run))
