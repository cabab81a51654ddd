"""The stream that answers one request: chunks on schedule, each stamped as it is sent, and every fault there is."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kvbench.calibration.mock.pacer import Pacer
from kvbench.calibration.mock.settings import MockSettings
from kvbench.common.machine import BOOT_HEADER, boot_id

_BREAKING = ("truncate", "stall", "malformed_json", "malformed_sse", "bad_chunk", "error_event")
_HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>; rel=preload\r\n\r\n"
_DRIP_BYTES, _DRIP_S = 7, 0.0002


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
        self._blank = b"\r\n\r\n" if self._fault == "crlf" else b"\n\n"
        self._with_ids = bool(body.get("return_token_ids")) and self._fault != "no_ids"
        self._raw = self._fault == "close_delimited"  # a body without framing, ended by the connection's end
        self._usage = {
            "prompt_tokens": len(body.get("prompt") or ""),
            "completion_tokens": self._total - (self._fault == "wrong_usage"),
            "prompt_tokens_details": {"cached_tokens": settings.cached_tokens},
        }
        self._streams = bool(body.get("stream"))
        self._due = stamp["received"]
        self._dripped = 0.0  # when the last piece of a dripping stream is due
        self._next = 0  # write

    def start(self) -> None:
        """Sends the head and waits for the first chunk's moment; a request without ``stream`` gets all at the end."""
        if self._streams and self._fault != "drop":
            framing = b"Connection: close\r\n" if self._raw else b"Transfer-Encoding: chunked\r\n"
            hints = _HINTS if self._fault == "early_hints" else b""
            if self._stamped and (boot := boot_id()) is not None:
                framing += f"{BOOT_HEADER}: {boot}\r\n".encode()
            self._transport.write(hints + b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + framing + b"\r\n")
            if self._fault == "role_first":
                self._transport.write(self._frame(b'{"choices":[{"index":0,"text":"","finish_reason":null}]}'))
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
        if self._fault == "drop":  # it worked on the request all that time
            self._transport.close()
            self._end()
            return
        per_write = self._settings.events_per_write
        first = self._next * per_write
        if self._fault in _BREAKING and first >= self._chunks // 2:
            self._break_off()
            return
        self._next += 1
        numbers = range(first, min(first + per_write, self._chunks))
        now = time.perf_counter()
        if self._streams:
            self._send(b"".join([self._frame(self._event(k, now)) for k in numbers]))
        self._stamp["sends"].extend([now] * len(numbers))
        self._stamp["due"].extend([self._due] * len(numbers))
        if self._next < self._writes:
            self._wait()
        else:
            self._finish()

    def _event(self, k: int, now: float) -> bytes:
        per_chunk = self._settings.tokens_per_chunk
        begin, end = k * per_chunk, min((k + 1) * per_chunk, self._total)
        finish = '"length"' if end == self._total and self._fault != "no_finish" else "null"
        ids = f',"token_ids":{list(range(begin, end))}' if self._with_ids else ""
        sent = f',"kvbench":{{"sent":{now:.7f}}}' if self._stamped else ""
        text = f" w{k}" * (end - begin)
        return (
            f'{{"id":"mock","object":"text_completion","model":"mock","choices":'
            f'[{{"index":0,"text":"{text}","finish_reason":{finish}{ids}}}]{sent}}}'
        ).encode()

    def _frame(self, data: bytes) -> bytes:
        payload = b"data: " + data + self._blank
        return payload if self._raw else b"%x\r\n%b\r\n" % (len(payload), payload)

    def _send(self, data: bytes) -> None:
        if self._fault != "drip":
            self._transport.write(data)
            return
        for i in range(0, len(data), _DRIP_BYTES):
            self._dripped = max(self._dripped + _DRIP_S, time.perf_counter())
            self._pacer.at(self._dripped, partial(self._transport.write, data[i : i + _DRIP_BYTES]))

    def _break_off(self) -> None:
        """The faults that strike in the middle of a stream."""
        write = self._transport.write
        if self._fault == "truncate":
            self._transport.close()
        elif self._fault == "malformed_json":
            write(self._frame(b'{"choices": [') + b"0\r\n\r\n")
        elif self._fault == "malformed_sse":
            payload = b"this is no event" + self._blank
            write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(payload), payload))
        elif self._fault == "bad_chunk":
            write(b"xyz\r\ndata: {}\n\n\r\n0\r\n\r\n")
        elif self._fault == "error_event":
            write(self._frame(b'{"error": {"message": "out of mock"}}') + self._frame(b"[DONE]") + b"0\r\n\r\n")
        else:
            return  # stalled: nothing more comes, and nothing ends
        self._end()

    def _finish(self) -> None:
        if not self._streams:
            self._whole()
        else:
            tail = b""
            if self._fault != "no_usage":
                tail += self._frame(json.dumps({"id": "mock", "choices": [], "usage": self._usage}).encode())
            if self._fault != "no_done":
                tail += self._frame(b"[DONE]")
            if self._fault == "trailers":
                self._send(tail + b"0\r\nX-Checksum: 12\r\nX-Served-By: mock\r\n\r\n")
            else:
                self._send(tail if self._raw else tail + b"0\r\n\r\n")
        if self._raw or self._fault == "close_after":
            self._transport.close()
        self._end()

    def _whole(self) -> None:
        text = "".join(f" w{k}" for k in range(self._total))
        choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": None}
        answer = {"id": "mock", "object": "text_completion", "model": "mock", "choices": [choice], "usage": self._usage}
        body = json.dumps(answer).encode()
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )

    def _end(self) -> None:
        self._stamp["end"] = time.perf_counter()
        self._on_end()
