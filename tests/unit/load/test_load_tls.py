"""The streaming client through TLS: who is trusted, nothing left undecrypted, every phase bounded."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbench.calibration.mock.process import self_signed
from kvbench.requests.request import RequestSpec
from tests.support.loads import LoadRunner, own_mock
from tests.support.raw_server import raw_server, read_request

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl program to make a certificate with")
Exchange = Callable[..., list[list[dict]]]
KEY = "key-that-no-file-may-hold"
WHOLE = (
    b'data: {"choices": [{"text": "a", "token_ids": [1], "finish_reason": "stop"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n\ndata: [DONE]\n\n'
)


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure_url(pems: tuple[Path, Path]) -> Iterator[str]:
    """A mock server that speaks TLS and wants a key."""
    flags = ["--tls-cert", str(pems[0]), "--tls-key", str(pems[1]), "--api-key-env", "MOCK_KEY"]
    with own_mock("--ttft-ms", "5", "--itl-ms", "1", *flags, MOCK_KEY=KEY) as (_, url):
        yield url


def test_a_load_through_tls_with_a_key(
    loads: LoadRunner, secure_url: str, pems: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bursts of 400 chunks, and one prompt, are many TLS records: whatever is pending must be drained."""
    monkeypatch.setenv("KVBENCH_TEST_KEY", KEY)
    loads.url = secure_url
    requests = [RequestSpec(i, "a", (5, i) if i else (5,) * 300_000, None, 900) for i in range(6)]
    model = "mock?events_per_write=400&itl_ms=10"
    fields = {"model": model, "concurrency": 2, "tls_ca_file": str(pems[0])}
    result = loads.run(requests, api_key_env="KVBENCH_TEST_KEY", **fields)
    assert result.code == 0, result.stderr
    samples = result.samples
    assert samples["ok"].all(), samples["error"].tolist()
    assert samples["chunk_tokens"].map(len).tolist() == [900] * 6
    assert result.load["client"]["lag_source"] == "server stamps"
    assert result.load["client"]["reopened_connections"] == 0
    for path in result.folder.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path
    refused = loads.run(requests[:1], name="no key", **fields)
    assert refused.samples["error_kind"].tolist() == ["http_error"]
    assert "401" in refused.samples["error"][0]


def job(url: str, **more: object) -> dict:
    return {"url": url, "model": "mock", "prompt": [1], "max_tokens": 1, **more}


def tls_server(pems: tuple[Path, Path], before_s: float = 0.0, *, alert: bool = True):
    """Serves one close-delimited stream a connection. ``alert``: ends as TLS wants; ``before_s``: handshake waits."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pems)

    def serve(connection) -> None:
        time.sleep(before_s)
        with context.wrap_socket(connection, server_side=True) as secure:
            read_request(secure)
            secure.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + WHOLE)
            if alert:
                with contextlib.suppress(OSError):
                    secure.unwrap()

    return raw_server(serve)


def bad_request(connection: socket.socket) -> None:
    """What a server without TLS says to a TLS handshake."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def test_who_is_trusted_and_which_phase_ran_out(exchange: Exchange, pems: tuple[Path, Path]) -> None:
    trusting = {"verify": True, "ca_file": str(pems[0])}
    slow = {"first_byte": 0.3, "idle": 5, "total": 10}
    with tls_server(pems) as good, tls_server(pems, alert=False) as rude, tls_server(pems, 0.6) as tardy:
        with raw_server(lambda connection: time.sleep(1.2)) as mute, raw_server(bad_request) as plaintext:
            jobs = [
                job(f"https://127.0.0.1:{good}"),
                job(f"https://127.0.0.1:{mute}", tls=trusting, timeouts={"connect": 0.4}),
                job(f"https://127.0.0.1:{plaintext}", tls=trusting),
                job(f"https://127.0.0.1:{rude}", tls=trusting),
                job(f"https://127.0.0.1:{tardy}", tls=trusting, timeouts=slow),
            ]
            unknown, silent, plain, cut, late = (o[0] for o in exchange(jobs))
        jobs = [
            job(f"https://127.0.0.1:{good}", tls=trusting),
            job(f"https://localhost:{good}", tls=trusting),
            job(f"https://127.0.0.1:{good}", tls={"verify": False}),
        ]
        trusted, other_name, unverified = (o[0] for o in exchange(jobs))
    assert (unknown["error_kind"], "--tls-ca-file" in unknown["error"]) == ("tls", True)
    assert silent["error_kind"] == "connect_timeout" and "TLS handshake within 0.4 s" in silent["error"]
    assert silent["end"] - silent["ts"] < 4
    assert plain["error_kind"] == "tls"
    assert cut["error_kind"] == "truncated"  # without TLS's own ending anybody may have cut it off
    assert late["ok"], late["error"]  # a slow handshake is the connection's time, not the first byte's
    assert late["end"] - late["ts"] > 0.6
    assert trusted["ok"], trusted["error"]
    assert other_name["error_kind"] == "tls" and "localhost" in other_name["error"]
    assert unverified["ok"], unverified["error"]
