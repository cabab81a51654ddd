"""Streams server-sent events, one for each token of each choice.

An event is joined from strings that are made once per stream and its text, token ids and time, which is cheap. Tokens
of different steps are never merged into one event or one write: clients measure the gaps.
"""

from __future__ import annotations

import json
import time
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvbench_engine.boot import BOOT_HEADER, boot_id
from kvbench_engine.server.choices import EngineFailure, Piece
from kvbench_engine.server.errors import CLIENT_LEFT
from kvbench_engine.server.generation import ClientGone, Generation, error_of

DONE = b"data: [DONE]\n\n"
DIRECT = "kvbench.direct"  # the ASGI extension with ``ready`` and ``write``: see http.py
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_compact = json.JSONEncoder(separators=(",", ":")).encode


class EventFormat:
    """The JSON of one stream's events. ``head`` holds id, object, created and model; ``chat``: deltas, not texts.

    ``split``: pieces have deltas of their own.
    """

    def __init__(
        self,
        head: dict[str, Any],
        chat: bool,
        *,
        split: bool = False,
        token_ids: bool = False,
        stamp: bool = False,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ):
        self._head = "data: " + _compact(head)[:-1] + ',"choices":['
        content = "" if split else '"content":'
        self._before = f'"delta":{{{content}' if chat else '"text":'
        self._before_first = f'"delta":{{"role":"assistant",{content}' if chat else '"text":'
        self._after = ("}" if chat else "") + ',"logprobs":null,"finish_reason":'
        self._going_on = self._after + "null"
        self._token_ids = token_ids
        self.stamp = stamp
        self._continuous_usage = continuous_usage
        self._no_usage = ',"usage":null' if include_usage else ""
        self._starts: dict[int, str] = {}  # of a choice's events, all but its first

    def event(self, piece: Piece, generation: Generation) -> bytes:
        """One piece as ``data: {...}`` with its blank line."""
        choice = piece.choice
        start = self._starts.get(choice.index)
        if start is None:
            opening = f'{self._head}{{"index":{choice.index},'
            self._starts[choice.index] = opening + self._before
            start = opening + self._before_first
        text = quote(piece.text) if piece.delta is None else _compact(piece.delta)[1:-1]
        end = self._going_on if piece.finish_reason is None else self._after + self._last(piece)
        ids = f',"token_ids":[{",".join(map(str, piece.token_ids))}]' if self._token_ids else ""
        usage = f',"usage":{_compact(generation.usage())}' if self._continuous_usage else self._no_usage
        return f"{start}{text}{end}{ids}}}]{usage}{self._end()}".encode("ascii")

    def _last(self, piece: Piece) -> str:
        """Write the fields of a choice's last event that say how it ended."""
        facts = piece.choice.kv_facts
        ledger = "" if facts is None else f',"kv_facts":{_compact(facts)}'
        return f'{quote(piece.finish_reason)},"stop_reason":{json.dumps(piece.choice.stop_reason)}{ledger}'

    def usage_event(self, generation: Generation) -> bytes:
        """The last event before [DONE]: no choices, the usage."""
        return f'{self._head}],"usage":{_compact(generation.usage())}{self._end()}'.encode("ascii")

    def _end(self) -> str:
        if self.stamp:
            return f',"kvbench":{{"sent":{time.monotonic():.7f}}}}}\n\n'
        return "}\n\n"


class EventStream(Response):
    """Sends the pieces of ``generation`` as they come, at once where the server can, else by ASGI's ``send``.

    An engine failure after the stream has begun becomes an ``error`` event, and the stream then ends without [DONE],
    so that no client takes it for complete.
    """

    def __init__(self, generation: Generation, form: EventFormat, include_usage: bool, echoes: list[str] | None = None):
        super().__init__()
        self._generation = generation
        self._form = form
        self._include_usage = include_usage
        self._echoes = echoes  # by choice: the prompt's text, for its first event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics, status = self._generation.state.metrics, 200
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers()})
            if (direct := scope.get("extensions", {}).get(DIRECT)) and self._echoes is None:
                form, generation = self._form, self._generation
                generation.send_at_once(direct.ready, lambda piece: direct.write(form.event(piece, generation)))
            await self._send_pieces(receive, send)
            last = (self._form.usage_event(self._generation) if self._include_usage else b"") + DONE
        except ClientGone:
            status = CLIENT_LEFT
            return
        except EngineFailure as failure:
            error = error_of(failure)
            status = error.status
            last = b"data: " + json.dumps(error.body()).encode() + b"\n\n"
        except Exception:
            status = 500
            raise
        finally:
            self._generation.close()
            metrics.answered(status)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _headers(self) -> list[tuple[bytes, bytes]]:
        boot = boot_id() if self._form.stamp else None
        return _HEADERS if boot is None else [*_HEADERS, (BOOT_HEADER.encode(), boot.encode())]

    async def _send_pieces(self, receive: Receive, send: Send) -> None:
        generation, event = self._generation, self._form.event
        pieces = generation.pieces(receive)
        try:
            async for piece in pieces:
                if self._echoes is not None:
                    piece = self._with_echo(piece)
                await send({"type": "http.response.body", "body": event(piece, generation), "more_body": True})
        finally:
            await pieces.aclose()

    def _with_echo(self, piece: Piece) -> Piece:
        assert self._echoes is not None
        index = piece.choice.index
        echo, self._echoes[index] = self._echoes[index], ""
        return Piece(piece.choice, echo + piece.text, piece.token_ids, piece.finish_reason) if echo else piece
