"""A single request is timed as the mock server sends it, and succeeds only as one of a load would."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from kvbench.common.errors import MeasurementError
from kvbench.measure.single_request import send_single
from kvbench.requests.request import RequestSpec
from kvbench.targets.presets import PRESETS
from kvbench.targets.running import OpenAITarget
from tests.support.loads import free_port


def send(url, model, timeout_s=20.0, tokens=4, other_url=None):
    target = OpenAITarget(url, model=model, vocab_size=100, max_model_len=100, preset=PRESETS["vllm"])
    target.start({}, Path())
    target.base_url = other_url or url
    return send_single(target, RequestSpec(0, "one", (1, 2, 3), None, tokens), timeout_s)


def test_times_are_those_of_what_the_server_sent(mock_url):
    found = send(mock_url, "mock?ttft_ms=50&itl_ms=20")
    with urllib.request.urlopen(mock_url + "/stamps", timeout=10) as answer:
        sent = json.load(answer)[-1]
    first, last = ((sent["sends"][i] - sent["received"]) * 1e3 for i in (0, -1))
    assert first >= 50 and last >= 110
    assert found.ttft_ms >= first and found.e2e_ms >= last and found.e2e_ms >= found.ttft_ms
    assert found.itl_ms * 3 <= found.e2e_ms - found.ttft_ms + 1e-6
    assert send(mock_url, "mock", tokens=1).itl_ms is None


@pytest.mark.parametrize("fault", ["truncate", "drop", "http500", "stall", "silent"])
def test_whatever_is_no_whole_answer_is_an_error_that_names_the_server(mock_url, fault):
    with pytest.raises(MeasurementError, match=mock_url):
        send(mock_url, f"mock?ttft_ms=5&itl_ms=5&fault={fault}", timeout_s=0.5)


def test_a_server_that_is_not_there_is_an_error(mock_url):
    with pytest.raises(MeasurementError):
        send(mock_url, "mock", 5.0, other_url=f"http://127.0.0.1:{free_port()}")
