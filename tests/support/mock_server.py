"""A server with a known schedule and known faults, which stamps when it sends.

    python tests/support/mock_server.py [--port 0]

Prints ``ready http://127.0.0.1:PORT``. What one request gets is written in its model name, as a query string:
``mock?ttft_ms=20&itl_ms=5&fault=truncate``. Faults: truncate, stall, silent, http500, http400, malformed_json,
malformed_sse, bad_chunk, not_http, no_done, no_usage, no_finish, wrong_usage, error_event, close_after (closes a
connection it promised to keep), drip (a few bytes at a time), crlf, role_first (an empty first chunk), no_ids.
``tokens_per_chunk=2`` puts two tokens into one chunk, ``events_per_write=3`` sends three events at once.
GET /stamps: every request with its prompt, receipt and send times (perf_counter, which all processes share).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from urllib.parse import parse_qsl

BREAKING = ("truncate", "stall", "malformed_json", "malformed_sse", "bad_chunk", "error_event")


class Connection(asyncio.Protocol):
    """One client connection: HTTP/1.1 requests one after the other."""

    def __init__(self, stamps: list[dict]) -> None:
        self.stamps = stamps
        self.buffer = b""
        self.tasks: set[asyncio.Task] = set()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        for task in self.tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, blank, rest = self.buffer.partition(b"\r\n\r\n")
        if not blank:
            return
        length = next(
            (int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length")), 0
        )
        if len(rest) < length:
            return
        self.buffer = rest[length:]
        received = time.perf_counter()
        if head.startswith(b"GET /stamps"):
            self.respond("200 OK", json.dumps(self.stamps).encode())
            return
        task = asyncio.get_running_loop().create_task(self.complete(json.loads(rest[:length]), received))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def respond(self, status: str, body: bytes) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    async def complete(self, body: dict, received: float) -> None:
        options = dict(parse_qsl(body["model"].partition("?")[2]))
        fault = options.get("fault", "")
        stamp = {"prompt": body["prompt"], "received": received, "sends": [], "body": body, "end": None}
        self.stamps.append(stamp)
        if fault == "silent":
            return
        if fault.startswith("http"):
            message = {"error": {"message": "the mock was told to fail", "type": "mock"}}
            self.respond(f"{fault[4:]} Mock", json.dumps(message).encode())
            return
        if fault == "not_http":
            self.transport.write(b"SSH-2.0-mock\r\n")
            return
        await Answer(self.transport, body, options, stamp).run()
        stamp["end"] = time.perf_counter()
        if fault == "close_after":
            self.transport.close()


class Answer:
    """The stream that answers one request."""

    def __init__(self, transport: asyncio.Transport, body: dict, options: dict[str, str], stamp: dict) -> None:
        self.transport, self.body, self.stamp = transport, body, stamp
        self.fault = options.get("fault", "")
        self.ttft = float(options.get("ttft_ms", 5)) / 1000
        self.itl = float(options.get("itl_ms", 1)) / 1000
        self.per_chunk = int(options.get("tokens_per_chunk", 1))
        self.per_write = int(options.get("events_per_write", 1))
        self.blank = b"\r\n\r\n" if self.fault == "crlf" else b"\n\n"
        self.ids = body.get("return_token_ids") and self.fault != "no_ids"

    async def run(self) -> None:
        """Head, tokens on schedule, then what an honest or a faulty server sends at the end."""
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        total = int(self.body["max_tokens"])
        chunks = -(-total // self.per_chunk)
        lead = b""
        if self.fault == "role_first":
            lead = self.frame({"choices": [{"index": 0, "text": "", "finish_reason": None}]})
        self.transport.write(head + lead)
        for k in range(0, chunks, self.per_write):
            await self.until(self.stamp["received"] + self.ttft + k * self.itl)
            if self.fault in BREAKING and k >= chunks // 2:
                return self.break_off()
            batch = [self.token_event(i, total) for i in range(k, min(k + self.per_write, chunks))]
            self.stamp["sends"].extend([time.perf_counter()] * len(batch))
            await self.send(b"".join(self.frame(x) for x in batch))
        await self.finish(total)

    async def until(self, when: float) -> None:
        while (left := when - time.perf_counter()) > 0:
            await asyncio.sleep(left)

    def token_event(self, k: int, total: int) -> dict:
        count = min(self.per_chunk, total - k * self.per_chunk)
        last = (k + 1) * self.per_chunk >= total and self.fault != "no_finish"
        choice = {"index": 0, "text": f" w{k}" * count, "finish_reason": "length" if last else None}
        if self.ids:
            choice["token_ids"] = list(range(k * self.per_chunk, k * self.per_chunk + count))
        return {"id": "mock", "object": "text_completion", "model": "mock", "choices": [choice]}

    def frame(self, event: dict | bytes) -> bytes:
        data = event if isinstance(event, bytes) else json.dumps(event).encode()
        payload = b"data: " + data + self.blank
        return b"%x\r\n%b\r\n" % (len(payload), payload)

    async def send(self, data: bytes) -> None:
        if self.fault != "drip":
            self.transport.write(data)
            return
        for i in range(0, len(data), 7):
            self.transport.write(data[i : i + 7])
            await asyncio.sleep(0.0002)

    def break_off(self) -> None:
        """The faults that strike in the middle of a stream."""
        if self.fault == "truncate":
            self.transport.close()
        elif self.fault == "malformed_json":
            self.transport.write(self.frame(b'{"choices": [') + b"0\r\n\r\n")
        elif self.fault == "malformed_sse":
            payload = b"this is no event" + self.blank
            self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(payload), payload))
        elif self.fault == "bad_chunk":
            self.transport.write(b"xyz\r\ndata: {}\n\n\r\n0\r\n\r\n")
        elif self.fault == "error_event":
            self.transport.write(self.frame({"error": {"message": "out of mock"}}) + self.frame(b"[DONE]"))
            self.transport.write(b"0\r\n\r\n")

    async def finish(self, total: int) -> None:
        tail = b""
        if self.fault != "no_usage":
            told = total - 1 if self.fault == "wrong_usage" else total
            usage = {"prompt_tokens": len(self.body["prompt"]), "completion_tokens": told}
            usage["prompt_tokens_details"] = {"cached_tokens": 3}
            tail += self.frame({"id": "mock", "choices": [], "usage": usage})
        if self.fault != "no_done":
            tail += self.frame(b"[DONE]")
        await self.send(tail + b"0\r\n\r\n")


async def serve(port: int) -> None:
    """Serves until the process is told to stop."""
    stamps: list[dict] = []
    server = await asyncio.get_running_loop().create_server(lambda: Connection(stamps), "127.0.0.1", port)
    print(f"ready http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(parser.parse_args().port))
