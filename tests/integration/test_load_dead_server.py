"""``kvbench load`` on a server that is dead, hangs, or dies amid the load: one sentence, the server's own, and soon."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from kvbench.cli.main import cli
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.measure import single_request, warm_up
from kvbench.targets import base
from tests.support.scripted_http import scripted_server
from tests.support.sweep_parts import TINY

MODEL = {"object": "list", "data": [{"id": "m", "max_model_len": 256}]}
WHY = "the engine stopped: a worker was lost"
DEAD = (503, {"error": {"message": WHY, "code": "engine_unhealthy"}})
WELL = (200, {})
EVENTS = [
    {"choices": [{"index": 0, "text": " a", "token_ids": [1], "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 1}},
]
STREAM = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in EVENTS) + b"data: [DONE]\n\n"


class Sick:
    """A script of ``served`` completions, then ``after`` to each further one (None: nothing, ever).

    ``health``: of GET /health once the completions have ended; ``asked``: paths so far.
    """

    def __init__(self, served: int = 0, after: tuple | None = None, health: tuple | None = WELL, models=(200, MODEL)):
        self.served, self.after, self.health, self.models = served, after, health, models
        self.completions, self.asked = 0, []

    def __call__(self, path: str, body: Any) -> tuple[int, Any] | None:
        self.asked.append(path)
        if path == "/v1/models":
            return self.models
        if path == "/server_info":
            return (200, {"model": {"vocab_size": 512}, "engine": {"enable_prefix_caching": False}})
        if path == "/health":
            return WELL if self.completions < self.served else self.health
        if path != "/v1/completions":
            return (404, {"detail": "Not Found"}) if path == "/metrics" else None
        if body.get("stream") and body["max_tokens"] == 1:  # it asks what the server takes
            return 200, STREAM
        self.completions += 1
        if self.completions > self.served:
            return self.after
        return 200, STREAM if body.get("stream") else {"choices": [{"text": " a"}]}


@pytest.fixture
def load(tmp_path, monkeypatch) -> Callable[..., Exception]:
    """Runs the command on a server; the error that it ends with."""
    monkeypatch.setattr(warm_up, "_LOOK_S", 0.05)
    monkeypatch.setattr(warm_up, "_SILENT_S", 0.2)
    monkeypatch.setattr(single_request, "_PAUSE_S", 0.01)
    monkeypatch.setattr(base, "_HEALTH_TIMEOUT_S", 0.2)
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, "sweep": {}}))

    def run(server: Sick, *words: object) -> Exception:
        command = ["load", str(path), "--no-calibration", "-o", "load.cache_state=cold", *map(str, words)]
        command += ["--output-dir", str(tmp_path / "out"), "--url"]
        with scripted_server(server) as served, pytest.raises((MeasurementError, UsageError)) as ended:
            cli.main([*command, served.url], standalone_mode=False)
        return ended.value

    return run


def test_a_server_that_says_it_is_dead_is_no_server(load):
    error = load(Sick(models=DEAD))
    assert error.exit_code == 2 and WHY in str(error) and "is this its URL" not in str(error)


def test_a_permanent_503_is_asked_three_times_and_told_in_the_servers_words(load, capsys):
    server = Sick(after=DEAD)
    error = load(server)
    assert error.exit_code == 4 and server.completions == 3
    assert str(error).endswith(f'/v1/completions answered 503 "{WHY}"')
    told = capsys.readouterr().err
    assert "what was measured is kept" not in told and "--resume" in told


@pytest.mark.parametrize(("health", "said"), [(DEAD, WHY), (None, "did not answer within")])
def test_a_hanging_server_is_not_waited_for(load, health, said):
    """Its time-out is 20 s for each request; its /health tells at once, or does not answer either."""
    server = Sick(health=health)
    began = time.monotonic()
    error = load(server)
    assert error.exit_code == 4 and said in str(error) and server.completions == 1
    assert "is this its URL" not in str(error) and "?;" not in str(error)
    assert time.monotonic() - began < 15  # of 20


def test_a_server_that_hangs_and_says_it_is_well_is_waited_for_as_long_as_a_request(load):
    error = load(Sick(), "-o", "load.timeout_s=0.5")
    assert error.exit_code == 4 and "did not answer within 0.5 s" in str(error) and "URL" not in str(error)


@pytest.mark.parametrize(("warm_up", "words"), [(6, ()), (64, ("--request-rate", "1000"))])
def test_a_server_that_dies_amid_the_load_ends_it_with_what_its_health_says(load, warm_up, words):
    """Closed and open loop; every request is answered 503 at once from the fifth of the load on."""
    server = Sick(served=warm_up + 4, after=DEAD, health=DEAD)
    error = load(server, "--num-prompts", 60, *words)
    assert error.exit_code == 4 and WHY in str(error) and re.search(r"after \d+ of 60 requests", str(error))
    assert "/reset_prefix_cache" not in server.asked  # it has none, as it says


def test_an_open_load_on_a_hung_server_ends_when_its_health_says_503(load):
    server = Sick(served=4 + 40 + 6, health=DEAD)  # 44 of them in the warm-up
    error = load(server, "--request-rate", 50, "--num-prompts", 40, "-o", "load.timeout_s=0.5")
    assert error.exit_code == 4 and WHY in str(error)
