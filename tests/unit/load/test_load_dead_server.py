"""Servers that die, hang or are too slow while a load runs: what is recorded, and how it ends."""

from __future__ import annotations

import json
import signal

import pytest

from kvbench.requests.request import RequestSpec
from tests.support.loads import LoadRunner, Result, own_mock


def requests(count: int, tag: int, max_tokens: int, rate: float | None = None) -> list[RequestSpec]:
    return [RequestSpec(i, "a", (tag, i), None, max_tokens, i / rate if rate else None) for i in range(count)]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_server_that_dies_takes_no_answer_and_no_failure_with_it(loads: LoadRunner, processes: int) -> None:
    """Requests are handed out in order, so every one that was must have its row, without a gap."""
    with own_mock("--ttft-ms", "5", "--itl-ms", "1") as (server, loads.url):
        sent = requests(5000, 4000, max_tokens=4)
        process = loads.start(loads.spec(sent, concurrency=16, processes=processes))
        for line in process.stdout:
            if json.loads(line)["done"] >= 200:
                break
        server.kill()
        out, err = process.communicate(timeout=120)
    result = Result(process.returncode, out, err, loads.folder / "load")
    assert result.code == 4 and "stopped answering" in result.stderr
    samples = result.samples
    if processes == 1:
        assert samples["index"].tolist() == list(range(len(samples)))
    kinds = samples["error_kind"].value_counts().to_dict()
    assert samples["ok"].sum() >= 200
    assert kinds["refused"] >= 16
    load = result.load
    assert load["failed"] == sum(kinds.values()) == load["locust"]["num_failures"]
    assert load["incomplete"] and result.events[-1]["done"] == len(samples)


def test_a_hung_server_ends_arrivals_too(loads: LoadRunner) -> None:
    """Stopped, it still has the kernel accept connections; nothing, not even /health, is ever answered."""
    with own_mock("--ttft-ms", "5", "--itl-ms", "1") as (server, loads.url):
        sent = requests(4000, 4001, max_tokens=2, rate=100.0)
        process = loads.start(loads.spec(sent, mode="open", concurrency=None, request_rate=100.0, timeout_s=0.3))
        for line in process.stdout:
            if json.loads(line)["done"] >= 20:
                break
        server.send_signal(signal.SIGSTOP)
        out, err = process.communicate(timeout=120)
    result = Result(process.returncode, out, err, loads.folder / "load")
    assert result.code == 4 and "stopped answering" in result.stderr
    assert (result.samples["error_kind"] == "timeout").sum() >= 8 and len(result.samples) < 4000
    assert result.load["incomplete"]


def test_streams_that_are_too_slow_for_their_timeout_are_no_dead_server(loads: LoadRunner) -> None:
    """Each is cut after 0.5 s, in the middle; eight and more in a row say nothing as long as bytes come."""
    result = loads.run(requests(12, 4002, 1000), model="mock?ttft_ms=20&itl_ms=20", concurrency=6, timeout_s=0.5)
    assert result.code == 0, result.stderr
    assert result.samples["error_kind"].tolist() == ["timeout"] * 12
    assert (result.samples["chunk_times"].map(len) > 0).all()
