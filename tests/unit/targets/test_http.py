"""HTTP calls to a server end in time and bytes, and one that fails says why with the way out, and without the key."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from kvbench.calibration.mock.process import self_signed
from kvbench.cli.main import main
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.targets import base
from kvbench.targets.base import Access, ModelFacts, Target
from kvbench.targets.presets import PRESETS
from kvbench.targets.running import OpenAITarget
from tests.support.loads import ROOT, fake_server, free_port, own_mock
from tests.support.raw_server import raw_server, read_request
from tests.support.scripted_http import scripted_server

WORKLOAD = str(ROOT / "workloads" / "mixed.yaml")
NEVER_WHOLE = ["hang", "half_head", "drip_body", "drip_length", "flood", "flood_length"]
CALLS = {
    "/v1/models": lambda target: target.models(),
    "/metrics": lambda target: target.metrics(),
    "/reset_prefix_cache": lambda target: target.reset_prefix_cache(),
    "/server_info": lambda target: target.server_info(),
    "plain": lambda target: target.complete([1, 2], 1, target.http.timeout_s),
}


@pytest.fixture(scope="module")
def fire():
    """Each endpoint answers its 1st request in the first of the ways above, its 2nd in the second, and so on."""
    rules = [
        {"path": path, "do": do, "first": number, "count": 1}
        for path in CALLS
        for number, do in enumerate([*NEVER_WHOLE, "status", "not_http", "reset"], 1)
    ]
    with fake_server(fire=rules) as (_, url):
        yield url


@pytest.mark.parametrize("path", CALLS)
def test_a_call_ends_within_its_time_and_bytes_and_the_next_is_served(fire, path, monkeypatch):
    monkeypatch.setattr(base, "MOST_BYTES", 1 << 20)
    target = Target(fire)
    target.model = ModelFacts("fake", 8192, 1024)

    def call(timeout_s: float):
        target.http.timeout_s = timeout_s
        monkeypatch.setattr(base, "FACTS_TIMEOUT_S", timeout_s)
        return CALLS[path](target)

    for do in NEVER_WHOLE:
        with pytest.raises(MeasurementError, match=r"1 MiB" if "flood" in do else "tim|within"):
            call(60.0 if "flood" in do else 0.15)
    for refused in ("status", "not_http", "reset"):
        if (path, refused) == ("/server_info", "status"):
            assert call(60.0) is None  # a server that has none of it
            continue
        with pytest.raises(MeasurementError):
            call(60.0)
    call(60.0)
    target.stop()


def refusal(url: str, **more: object) -> str:
    """What ``start`` raises as the user's mistake; its URL is in it once."""
    target = OpenAITarget(url, **more)
    with pytest.raises(UsageError) as refused:
        target.start({}, Path())
    target.stop()
    assert str(refused.value).startswith(url) and str(refused.value).count(url) == 1
    return str(refused.value)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("kind", ["models", "health"])
def test_a_server_that_wants_a_key_or_another_one(monkeypatch, status: int, kind: str) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "sk-secret")
    more = {} if kind == "models" else {"preset": PRESETS["transformers"], "model": "m"}
    with scripted_server({"/v1/models": (status, {}), "/health": (status, {})}) as server:
        said = refusal(server.url, **more)
        assert str(status) in said and "--api-key-env NAME" in said
        said = refusal(server.url, access=Access("KEY_OF_TEST"), **more)
        assert str(status) in said and "KEY_OF_TEST" in said and "sk-secret" not in said


def test_a_key_that_only_completions_want() -> None:
    with scripted_server({"/v1/completions": (401, {})}) as server:
        target = Target(server.url)
        target.model = ModelFacts("m", 9, 99)
        with pytest.raises(MeasurementError, match=r"401.*--api-key-env NAME"):
            target.complete([1], 1, 5.0)
        target.stop()


def test_nobody_listens_or_the_host_is_unknown_or_it_is_not_healthy() -> None:
    assert "refused" in refusal(f"http://127.0.0.1:{free_port()}")
    assert "not known" in refusal("http://no-such-host.invalid:8000")
    with scripted_server({"/health": (503, {})}) as server:
        assert "/health answered 503" in refusal(server.url, preset=PRESETS["transformers"], model="m")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl program to make a certificate with")
def test_certificates_that_are_not_trusted_and_the_wrong_one_of_http_and_https(tmp_path) -> None:
    cert, key = self_signed(tmp_path)
    with own_mock("--tls-cert", str(cert), "--tls-key", str(key)) as (_, secure):
        for url, access in (
            (secure, Access()),
            (secure.replace("127.0.0.1", "localhost"), Access(tls_ca_file=str(cert))),  # another name's
        ):
            said = refusal(url, access=access)
            assert "certificate" in said and "--tls-ca-file FILE" in said and "--no-tls-verify" in said
        for access in (Access(tls_ca_file=str(cert)), Access(tls_verify=False)):
            target = OpenAITarget(secure, access=access)
            target.start({}, Path())
            assert target.model.name == "mock"
            target.stop()
        assert "http or https" in refusal(secure.replace("https:", "http:"))
    with scripted_server({}) as server:
        assert "http or https" in refusal(server.url.replace("http:", "https:"))


def test_a_server_that_redirects_or_hangs_up() -> None:
    def redirect(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 301 Moved\r\nLocation: https://elsewhere/v1/models\r\nContent-Length: 0\r\n\r\n")

    with raw_server(redirect) as port:
        assert "https://elsewhere/v1/models: give the URL" in refusal(f"http://127.0.0.1:{port}")
    with raw_server(lambda connection: connection.recv(65536)) as port:
        for scheme in ("http", "https"):
            assert "did not answer" in refusal(f"{scheme}://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("http://127.0.0.1:99999",), "99999"),
        (("http://127.0.0.1:0",), "from 1 to 65535"),
        (("http://user:hush@127.0.0.1:9",), "--api-key-env NAME"),
        (("https://127.0.0.1:9", "--tls-ca-file", str(ROOT / "README.md")), "certificate"),
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
