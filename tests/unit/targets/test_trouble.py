"""A server that was named and does not serve: one sentence with the way out, and its URL once."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvbench.cli.main import main
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.targets import unreachable as troubles
from kvbench.targets.access import Access
from kvbench.targets.base import HttpTarget, ModelFacts
from kvbench.targets.presets import PRESETS
from kvbench.targets.running import OpenAITarget
from kvbench.targets.unreachable import connection_trouble
from tests.support.loads import ROOT, free_port, own_mock
from tests.support.raw_server import certificate, raw_server, read_request
from tests.support.scripted_http import scripted_server

WORKLOAD = str(ROOT / "workloads" / "mixed.yaml")
openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl program to make a certificate with")


def trouble(url: str, **more: object) -> str:
    """What ``start`` says, which is the user's mistake."""
    target = OpenAITarget(url, **more)
    try:
        with pytest.raises(UsageError) as refused:
            target.start({}, Path())
    finally:
        target.stop()
    return str(refused.value)


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure(pems: tuple[Path, Path]) -> Iterator[str]:
    """A mock server that speaks TLS."""
    with own_mock("--tls-cert", str(pems[0]), "--tls-key", str(pems[1])) as (_, url):
        yield url


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("kind", ["models", "health"])
def test_a_server_that_wants_a_key_or_another_one(monkeypatch, status: int, kind: str) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "sk-secret")
    more = {} if kind == "models" else {"preset": PRESETS["transformers"], "model": "m"}
    with scripted_server({"/v1/models": (status, {}), "/health": (status, {})}) as server:
        said = trouble(server.url, **more)
        assert said.startswith(f"{server.url} wants an API key") and "--api-key-env NAME" in said
        said = trouble(server.url, access=Access("KEY_OF_TEST"), **more)
        assert "refused the key in KEY_OF_TEST" in said and "sk-secret" not in said
        assert str(status) in said and said.count(server.url) == 1


def test_a_key_that_only_completions_want() -> None:
    with scripted_server({"/v1/completions": (401, {})}) as server:
        target = HttpTarget(server.url)
        target.model = ModelFacts("m", 9, 99)
        with pytest.raises(MeasurementError, match=r"wants an API key \(it answered 401\): .* --api-key-env NAME"):
            target.complete([1], 1, 5.0)
        target.close()


def test_nobody_listens_or_the_host_is_unknown() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    said = trouble(url)
    assert said.startswith(f"{url} does not serve: the connection was refused") and said.count(url) == 1
    assert "its host is not known" in trouble("http://no-such-host.invalid:8000")
    with scripted_server({"/health": (503, {})}) as server:
        said = trouble(server.url, preset=PRESETS["transformers"], model="m")
        assert said == f"{server.url} does not serve: /health answered 503"


@openssl
def test_a_certificate_that_is_not_trusted(secure: str, pems: tuple[Path, Path]) -> None:
    said = trouble(secure)
    assert said.startswith(f"{secure} does not serve: its certificate is not trusted") and "_ssl.c" not in said
    assert "--tls-ca-file FILE" in said and "--no-tls-verify" in said and said.count(secure) == 1
    other_name = secure.replace("127.0.0.1", "localhost")
    said = trouble(other_name, access=Access(tls_ca_file=str(pems[0])))
    assert "its certificate is another name's" in said and "--no-tls-verify" in said
    for access in (Access(tls_ca_file=str(pems[0])), Access(tls_verify=False)):
        target = OpenAITarget(secure, access=access)
        target.start({}, Path())
        assert target.model.name == "mock"
        target.stop()


@openssl
def test_http_where_tls_is_spoken(secure: str, pems: tuple[Path, Path]) -> None:
    """By one that hangs up, and by one that answers 400 as many servers do."""
    plain = secure.replace("https:", "http:")
    assert trouble(plain) == f"{plain} speaks TLS: write {secure}"

    def serve(connection: socket.socket) -> None:
        if connection.recv(1, socket.MSG_PEEK) == b"G":
            read_request(connection)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*pems)
        with context.wrap_socket(connection, server_side=True) as wrapped:
            read_request(wrapped)
            wrapped.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    with raw_server(serve) as port:
        assert (
            trouble(f"http://127.0.0.1:{port}") == f"http://127.0.0.1:{port} speaks TLS: write https://127.0.0.1:{port}"
        )
        # It does speak TLS: what it says to plain HTTP is no reason to advise that.
        said = trouble(f"https://127.0.0.1:{port}", access=Access(tls_ca_file=str(pems[0])))
        assert "wants an API key" in said


def test_tls_where_none_is_spoken_and_without_the_key(monkeypatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "sk-secret")
    with scripted_server({}) as server:
        url = server.url.replace("http:", "https:")
        assert trouble(url, access=Access("KEY_OF_TEST")) == f"{url} speaks no TLS: write {server.url}"
        asked = [headers for _, path, headers, _ in server.asked if path == "/"]
        assert asked and not any("Authorization" in headers for headers in asked)


def test_an_address_that_the_certificate_is_not_for() -> None:
    refused = ssl.SSLCertVerificationError(1, "certificate verify failed")
    refused.verify_code, refused.verify_message = 64, "IP address mismatch, certificate is not valid for '10.0.0.1'."
    error = httpx.ConnectError("")
    error.__cause__ = refused
    said = connection_trouble(error, "https://10.0.0.1")
    assert "another name's (IP address mismatch" in said and "--tls-ca-file" not in said


def test_400_over_http_is_no_reason_to_leave_tls() -> None:
    """Whatever is wrong with its TLS: many servers say 400 to HTTP where they speak TLS."""

    def serve(connection: socket.socket) -> None:
        if connection.recv(1, socket.MSG_PEEK) == b"G":
            read_request(connection)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with raw_server(serve) as port:
        said = trouble(f"https://127.0.0.1:{port}")
        assert said.startswith(f"https://127.0.0.1:{port} does not serve: ") and "write http" not in said


def test_a_server_that_sends_on_to_another_url() -> None:
    head = b"HTTP/1.1 301 Moved\r\nLocation: https://elsewhere/v1/models\r\nContent-Length: 0\r\n\r\n"

    def serve(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(head)

    with raw_server(serve) as port:
        assert "sends on to https://elsewhere/v1/models: give the URL" in trouble(f"http://127.0.0.1:{port}")


def test_a_server_that_says_nothing_either_way_is_told_as_it_is() -> None:
    def hang_up(connection: socket.socket) -> None:
        connection.recv(65536)

    with raw_server(hang_up) as port:
        for scheme in ("http", "https"):
            said = trouble(f"{scheme}://127.0.0.1:{port}")
            assert said.startswith(f"{scheme}://127.0.0.1:{port} does not serve: ") and "write" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("http://127.0.0.1:99999",), "its port is not a number from 1 to 65535"),
        (("http://127.0.0.1:0",), "its port is not a number from 1 to 65535"),
        (("http://user:hush@127.0.0.1:9",), "--api-key-env NAME"),
        (("https://127.0.0.1:9", "--tls-ca-file", str(ROOT / "README.md")), "it holds no certificate"),
        (("https://127.0.0.1:9", "--tls-ca-file", str(ROOT)), "Is a directory"),
    ],
)
@pytest.mark.parametrize("command", [("load", WORKLOAD, "--url"), ("sweep", WORKLOAD, "--dry-run", "--target")])
def test_what_cannot_be_asked_at_all_is_refused_at_once(capsys, command, words, said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, *words])
    told = "".join(capsys.readouterr())
    assert ended.value.code == 2 and said in told and told.startswith("error: ") and told.count("\n") == 1
    assert "hush" not in told


@pytest.mark.parametrize("head", [True, False])
def test_the_other_scheme_is_tried_for_a_bounded_time(monkeypatch, head: bool) -> None:
    """A server that drips: with a status at once, or without ever ending its head."""
    monkeypatch.setattr(troubles, "_ASK_S", 0.5)
    ended = threading.Event()

    def drip(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n" + (b"\r\n" if head else b"X-Drip: "))
        while not ended.wait(0.1):
            connection.sendall(b"x")

    with raw_server(drip) as port:
        asked = time.monotonic()
        said = troubles.scheme_trouble(f"https://127.0.0.1:{port}")
        seconds = time.monotonic() - asked
        ended.set()
    assert said == (f"speaks no TLS: write http://127.0.0.1:{port}" if head else None)
    assert seconds < 9  # 0.5, and what the test machine takes
