"""A single request is timed as the mock server sends it, and succeeds only as one of a load would."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from kvbench.common.errors import MeasurementError
from kvbench.measure.single_request import send_single
from kvbench.requests.request import RequestSpec
from kvbench.targets.running import OpenAITarget
from tests.support.loads import free_port, own_mock


@pytest.fixture(scope="module")
def url():
    with own_mock() as (_, url):
        yield url


def send(url, model, timeout_s=20.0, tokens=4):
    target = OpenAITarget(url, model=model, vocab_size=100, max_model_len=100)
    target.start({}, Path())
    try:
        return send_single(target, RequestSpec(0, "one", (1, 2, 3), None, tokens), timeout_s)
    finally:
        target.stop()


def test_times_are_those_of_what_the_server_sent(url):
    found = send(url, "mock?ttft_ms=50&itl_ms=20")
    with urllib.request.urlopen(url + "/stamps", timeout=10) as answer:
        sent = json.load(answer)[-1]
    first, last = ((sent["sends"][i] - sent["received"]) * 1e3 for i in (0, -1))
    assert first >= 50 and last >= 110
    assert found.ttft_ms >= first and found.e2e_ms >= last and found.e2e_ms >= found.ttft_ms
    assert found.itl_ms * 3 <= found.e2e_ms - found.ttft_ms + 1e-6
    assert send(url, "mock", tokens=1).itl_ms is None


@pytest.mark.parametrize("fault", ["truncate", "drop", "http500", "stall", "silent"])
def test_whatever_is_no_whole_answer_is_an_error_that_names_the_server(url, fault):
    with pytest.raises(MeasurementError, match=url):
        send(url, f"mock?ttft_ms=5&itl_ms=5&fault={fault}", timeout_s=0.5)


def test_a_server_that_is_not_there_is_an_error(url):
    target = OpenAITarget(url, model="mock", vocab_size=100, max_model_len=100)
    target.start({}, Path())
    target.base_url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(MeasurementError):
        send_single(target, RequestSpec(0, "one", (1,), None, 1), 5.0)
    target.stop()
