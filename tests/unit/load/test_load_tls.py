"""The streaming client through TLS: who is trusted, nothing left undecrypted, every phase bounded."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.calibration.mock.process import self_signed
from kvbench.requests.request import RequestSpec
from tests.support.loads import LoadRunner, own_mock
from tests.support.scripted_http import scripted_server

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


def test_a_load_through_tls_with_a_key(
    loads: LoadRunner, pems: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bursts of 400 chunks, and one prompt, are many TLS records: whatever is pending must be drained."""
    monkeypatch.setenv("KVBENCH_TEST_KEY", KEY)
    requests = [RequestSpec(i, "a", (5, i) if i else (5,) * 50_000, None, 900) for i in range(6)]
    fields = {"model": "mock?events_per_write=400&itl_ms=10", "concurrency": 2, "tls_ca_file": str(pems[0])}
    flags = ("--tls-cert", str(pems[0]), "--tls-key", str(pems[1]), "--api-key-env", "KVBENCH_TEST_KEY")
    with own_mock("--ttft-ms", "5", "--itl-ms", "1", *flags) as (_, loads.url):
        result = loads.run(requests, api_key_env="KVBENCH_TEST_KEY", **fields)
    assert result.code == 0, result.stderr
    samples = result.samples
    assert samples["ok"].all(), samples["error"].tolist()
    assert samples["chunk_tokens"].map(len).tolist() == [900] * 6
    client = result.load["client"]
    assert (client["lag_source"], client["reopened_connections"]) == ("server stamps", 0)
    assert not [path for path in result.folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def job(url: str, **more: object) -> dict:
    return {"url": url, "model": "mock", "prompt": [1], "max_tokens": 1, **more}


def test_who_is_trusted_and_which_phase_ran_out(exchange: Exchange, pems: tuple[Path, Path]) -> None:
    trusting = {"verify": True, "ca_file": str(pems[0])}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pems)
    stream = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + WHOLE
    with (
        scripted_server(lambda *_: stream, tls=context) as good,
        scripted_server(lambda *_: stream, tls=context, says_bye=False) as rude,
        scripted_server(lambda *_: stream, tls=context, begins_after_s=0.6) as tardy,
        scripted_server({}, begins_after_s=1.2) as mute,
        scripted_server({}) as plaintext,  # what it says to a TLS handshake is HTTP
    ):
        outcomes = exchange([
            job(good.url),
            job(mute.url.replace("http:", "https:"), tls=trusting, timeouts={"connect": 0.4}),
            job(plaintext.url.replace("http:", "https:"), tls=trusting),
            job(rude.url, tls=trusting),
            job(tardy.url, tls=trusting, timeouts={"first_byte": 0.3, "idle": 5, "total": 10}),
            job(good.url, tls=trusting),
            job(good.url.replace("127.0.0.1", "localhost"), tls=trusting),
            job(good.url, tls={"verify": False}),
        ])  # fmt: skip
    unknown, silent, plain, cut, late, trusted, other_name, unverified = (own[0] for own in outcomes)
    assert (unknown["error_kind"], "--tls-ca-file" in unknown["error"]) == ("tls", True)
    assert silent["error_kind"] == "connect_timeout" and "TLS handshake within 0.4 s" in silent["error"]
    assert silent["end"] - silent["ts"] < 4
    assert plain["error_kind"] == "tls"
    assert cut["error_kind"] == "truncated"  # without TLS's own ending anybody may have cut it off
    assert late["ok"], late["error"]  # a slow handshake is the connection's time, not the first byte's
    assert late["end"] - late["ts"] > 0.6
    assert trusted["ok"] and unverified["ok"], (trusted["error"], unverified["error"])
    assert other_name["error_kind"] == "tls" and "localhost" in other_name["error"]
