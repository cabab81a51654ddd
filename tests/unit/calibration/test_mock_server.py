"""The mock server: its schedule, its stamps, its faults by rate."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter

import numpy as np
import pytest

from kvbench.calibration.calibrate import CalibrationSettings
from kvbench.calibration.mock.server import KEPT_STAMPS
from kvbench.calibration.mock.settings import MockSettings
from kvbench.cli.calibrate_client import calibrate_client
from kvbench.cli.main import main
from tests.support.loads import own_mock, stamps_of

TOKENS = 12


def complete(url: str, prompt: list[int] | str, model: str = "mock", stamped: bool = True, **fields: object) -> bytes:
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "stream": True, "return_token_ids": True, **fields}
    headers = {"content-type": "application/json"} | ({"x-kvbench-stamp": "1"} if stamped else {})
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read()


def events(stream: bytes) -> list[dict]:
    return [json.loads(x[6:]) for x in stream.decode().split("\n\n") if x and not x.endswith("[DONE]")]


def test_chunks_go_out_on_schedule_and_carry_the_moment_of_their_sending(mock_url: str) -> None:
    stream = events(complete(mock_url, [900, 1], "mock?ttft_ms=40&itl_ms=10"))
    stamp = stamps_of(mock_url)[900, 1]
    told = [event["kvbench"]["sent"] for event in stream[:-1]]
    assert told == pytest.approx(stamp["sends"], abs=1e-6)
    due = stamp["received"] + 0.040 + 0.010 * np.arange(TOKENS)
    assert stamp["due"] == pytest.approx(due, abs=1e-6)
    late = np.array(stamp["sends"]) - due
    assert late.min() >= 0
    assert [event["choices"][0]["token_ids"] for event in stream[:-1]] == [[k] for k in range(TOKENS)]
    assert stream[-1]["usage"]["completion_tokens"] == TOKENS
    assert "kvbench" not in complete(mock_url, [900, 2], stamped=False).decode()


def test_in_step_all_streams_fall_on_the_same_ticks(mock_url: str) -> None:
    for i in range(3):
        complete(mock_url, [901, i], "mock?in_step=1&itl_ms=8")
    due = np.concatenate([stamps_of(mock_url)[901, i]["due"] for i in range(3)])
    assert np.abs(due / 0.008 - np.round(due / 0.008)).max() < 1e-4


def test_jitter_keeps_the_mean_and_has_the_spread_that_was_asked_for() -> None:
    settings = MockSettings(ttft_ms=100.0, itl_ms=20.0, jitter=0.5)
    gaps = np.array([list(settings.gaps_s(40, number)) for number in range(300)])
    assert gaps[:, 0].mean() == pytest.approx(0.100, rel=0.12)
    assert gaps[:, 1:].mean() == pytest.approx(0.020, rel=0.03)
    assert gaps[:, 1:].std() / gaps[:, 1:].mean() == pytest.approx(0.5, rel=0.05)
    assert gaps.min() > 0
    assert list(settings.gaps_s(40, 7)) == list(gaps[7])  # drawn from seed and number alone
    assert list(MockSettings(seed=1, jitter=0.5).gaps_s(5, 0)) != list(MockSettings(jitter=0.5).gaps_s(5, 0))


@pytest.mark.parametrize("seed", range(4))
def test_faults_by_rate_are_exact_in_every_stretch(seed: int) -> None:
    settings = MockSettings(fail_rate=0.05, truncate_rate=0.1, seed=seed)
    faults = [settings.for_request(number, "mock").fault for number in range(1000)]
    assert Counter(faults)["http500"] == 50
    for start in range(0, 1000, 20):
        assert faults[start : start + 20].count("http500") == 1
    assert 90 <= Counter(faults)["truncate"] <= 100  # a request that was due for both is refused


def test_shares_of_faults_may_be_all_requests_and_no_more() -> None:
    kinds = {
        MockSettings(fail_rate=0.7, truncate_rate=0.2, drop_rate=0.1).for_request(n, "mock").fault for n in range(99)
    }
    assert {"http500", "drop"} <= kinds
    MockSettings(fail_rate=0.33, truncate_rate=0.56, drop_rate=0.11)  # as floats they are more than 1 together
    with pytest.raises(ValueError, match=r"fail rate 0\.7, truncate rate 0\.2, drop rate 0\.2: together"):
        MockSettings(fail_rate=0.7, truncate_rate=0.2, drop_rate=0.2)


def test_a_requests_own_query_wins_and_mistakes_in_it_are_said() -> None:
    settings = MockSettings(truncate_rate=1.0).for_request(0, "mock?fault=stall&itl_ms=2.5&tokens_per_chunk=3")
    assert (settings.fault, settings.itl_ms, settings.tokens_per_chunk) == ("stall", 2.5, 3)
    for query, words in (
        ("colour=blue", "cannot set 'colour'"),
        ("itl_ms=soon", "is not a number"),
        ("fault=unheard_of", "no fault 'unheard_of'"),
        ("tokens_per_chunk=0", "too small"),
        ("itl_ms=-1", "too small"),
        ("itl_ms=nan", "not a finite number"),
        ("ttft_ms=inf", "not a finite number"),
    ):
        with pytest.raises(ValueError, match=words):
            MockSettings().for_request(0, f"mock?{query}")


def test_what_else_it_serves(mock_url: str) -> None:
    def get(path: str) -> bytes:
        with urllib.request.urlopen(mock_url + path, timeout=5) as answer:
            return answer.read()

    (model,) = json.loads(get("/v1/models"))["data"]
    assert model["max_model_len"] > 0 and json.loads(get("/server_info"))["model"]["vocab_size"] > 0
    assert b"kvbench:num_requests_running" in get("/metrics")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get("/nothing")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        complete(mock_url, [1], "mock?fault=unheard_of")
    assert b'"prompt_tokens": 4' in complete(mock_url, "four words, four  tokens\n")
    whole = json.loads(complete(mock_url, [902], stream=False))
    assert whole["choices"][0]["text"].split() == [f"w{k}" for k in range(TOKENS)]
    assert whole["usage"]["completion_tokens"] == TOKENS


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--api-key-env", "KVBENCH_NO_SUCH_KEY"], "KVBENCH_NO_SUCH_KEY"), (["--tls-key", __file__], "--tls-cert"),
        (["--host", "192.0.2.1"], "--host"), (["--ttft-ms", "nan"], "nan"),
        (["--fail-rate", "0.7", "--drop-rate", "0.7"], "0.7"), (["--deltas", "thoughts:3"], "thoughts"),
    ],
)  # fmt: skip
def test_bad_options_are_a_sentence(capsys, flags: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["dev", "mock-server", "--port", "0", *flags])
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_sigterm_ends_it_with_streams_open() -> None:
    with own_mock() as (process, url):
        body = json.dumps({"model": "mock?fault=stall", "prompt": [1], "max_tokens": 8, "stream": True}).encode()
        with urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", body), timeout=5):
            process.terminate()
            assert process.wait(timeout=5) == 0


def test_as_many_streams_as_the_command_takes_all_have_their_stamps() -> None:
    """Of a request whose stamp the mock server had dropped, the calibration would say that the client lost it."""
    (streams,) = (option for option in calibrate_client.params if option.name == "streams")
    assert CalibrationSettings(streams.type.max).requests <= KEPT_STAMPS
