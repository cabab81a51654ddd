"""What a live line says of a running server, from the readings of its /metrics."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvbench.sweep.progress import WINDOW_S, LiveServer
from kvbench.targets.prometheus import MetricsSample

BUSY = {"num_requests_running": 18.0, "num_requests_waiting": 14.0, "kv_cache_usage_perc": 0.934}


def reading(ago_s: float, tokens: float | None = None, gauges: Any = None) -> MetricsSample:
    counters = {} if tokens is None else {"generation_tokens_total": tokens}
    return MetricsSample(time.perf_counter() - ago_s, BUSY if gauges is None else gauges, counters)


def shown(*readings: MetricsSample, width: int = 80) -> list[str]:
    server = LiveServer()
    for each in readings:
        server.take(each)
    return list(server.rows(width))


def test_tokens_are_those_of_the_last_seconds_and_the_gauges_of_the_last_reading() -> None:
    idle = {"num_requests_running": 1.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.02}
    readings = [reading(100.0, 0.0, idle), reading(WINDOW_S - 1, 50_000.0, idle), reading(0.0, 51_648.0)]
    assert shown(*readings) == ["412 tok/s, 18 running, 14 waiting, KV 93 %"]  # 1,648 tokens in 4 s


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (42, "412 tok/s, 18 running, 14 waiting, KV 93 %"),
        (41, "412 tok/s, 18 running, KV 93 %"),
        (20, "412 tok/s, KV 93 %"),
        (10, "412 tok/s"),
    ],
)
def test_what_does_not_fit_a_narrow_terminal_is_left_out(width: int, line: str) -> None:
    assert shown(reading(4.0, 0.0), reading(0.0, 1_648.0), width=width) == [line]


def test_what_a_server_does_not_tell_is_not_shown() -> None:
    assert shown() == []
    assert shown(reading(0.0, gauges={})) == []
    assert shown(reading(1.0), reading(0.0, gauges={"num_requests_running": 2.0})) == ["2 running"]
    assert shown(reading(0.0, 7.0)) == ["18 running, 14 waiting, KV 93 %"]  # one reading is no rate


def test_a_server_that_is_read_no_more_is_not_shown_as_it_was() -> None:
    assert shown(reading(WINDOW_S + 2, 0.0), reading(WINDOW_S + 1, 400.0)) == []
