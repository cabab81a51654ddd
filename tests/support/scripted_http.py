"""An HTTP server with given answers, that keeps what it was asked: for the calls around a load."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answers = dict[str, Any]  # path -> (status, JSON or text), or a function of the request's body that returns it


@dataclass
class Scripted:
    """``asked``: (method, path, headers, JSON body or None) of each request so far."""

    url: str
    asked: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)


@contextlib.contextmanager
def scripted_server(answers: Answers) -> Iterator[Scripted]:
    """Serves ``answers``; anything else is a 404."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            scripted.asked.append((self.command, self.path, dict(self.headers), body))
            answer = answers.get(self.path, (404, "not found"))
            status, told = answer(body) if callable(answer) else answer
            data = (told if isinstance(told, str) else json.dumps(told)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _answer

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    scripted = Scripted(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield scripted
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
