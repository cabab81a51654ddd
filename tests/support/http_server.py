"""A server in a thread of the test process, over real HTTP on a free port of 127.0.0.1."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvbench_engine.async_engine import AsyncEngine
from kvbench_engine.config import EngineConfig
from kvbench_engine.engine import Engine
from kvbench_engine.model.spec import ModelInfo
from kvbench_engine.server.__main__ import reserve_socket
from kvbench_engine.server.arguments import ServeOptions
from kvbench_engine.server.http import make_server
from kvbench_engine.server.tokenizer import ServerTokenizer, load_tokenizer


@functools.cache
def shipped_tokenizer() -> ServerTokenizer:
    return load_tokenizer(EngineConfig(model="fake"), ModelInfo("fake", 8192, 1024, (0,), None))


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object; fails when the reply is not in OpenAI's error shape."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert "Traceback" not in error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """The JSON of each event of a stream that ended with [DONE]."""
        parts = self.body.decode().split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""], parts[-2:]
        return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


@dataclass(frozen=True)
class ServerClient:
    """Requests to the server at ``port`` of this machine."""

    port: int

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """``body`` is sent as it is when it is bytes, else as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, raw, headers or {})
            response = connection.getresponse()
            return Reply(response.status, response.read(), {k.lower(): v for k, v in response.getheaders()})
        finally:
            connection.close()

    def post(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        return self.request("POST", path, body, headers)

    def get(self, path: str) -> Reply:
        return self.request("GET", path)

    def metrics(self) -> dict[str, float]:
        """Sample name with its labels, without the prefix -> value."""
        found = {}
        for family in text_string_to_metric_families(self.get("/metrics").body.decode()):
            for sample in family.samples:
                labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
                name = sample.name.removeprefix("kvbench:")
                found[f"{name}{{{labels}}}" if labels else name] = sample.value
        return found

    def open_request(self, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
        """A connection on which the request has been sent and nothing read."""
        raw = json.dumps(body).encode()
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        sock.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(raw)) + raw)
        return sock

    def wait_for(self, **wanted: float) -> dict[str, float]:
        """Metrics once they have the ``wanted`` values; fails after 60 s."""
        deadline = time.monotonic() + 60
        while True:
            metrics = self.metrics()
            if all(metrics[name] == value for name, value in wanted.items()):
                return metrics
            assert time.monotonic() < deadline, {name: metrics[name] for name in wanted}
            time.sleep(0.02)


@dataclass(frozen=True)
class RunningServer(ServerClient):
    engine: Engine


def openai_client(server: ServerClient) -> Any:
    """OpenAI's own client of the server, which tries nothing twice."""
    import openai  # half a second that most users of this file need not wait for

    return openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=60)


@contextlib.contextmanager
def running_server(
    engine: Engine, tokenizer: ServerTokenizer | None = None, **server_options: Any
) -> Iterator[RunningServer]:
    """Serves ``engine`` until the block ends, and then stops within the promised 5 seconds."""
    ready = threading.Event()
    options = ServeOptions(port=0, **server_options)
    sock = reserve_socket(options.host, 0)
    server = make_server(AsyncEngine(engine), tokenizer or shipped_tokenizer(), options, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    port = sock.getsockname()[1]
    thread.start()
    try:
        assert ready.wait(20), "the server did not start"
        yield RunningServer(port, engine)
    finally:
        server.stop()
        thread.join(5)
        assert not thread.is_alive(), "the server did not stop within 5 s"
