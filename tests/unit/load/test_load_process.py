"""Whole loads: what they write, how they stop, and what a server that dies, hangs or is too slow does to them."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from kvbench.load.spec import read_spec
from kvbench.load.spec import requests_of as requests_of_spec
from kvbench.requests.request import RequestSpec, conversations
from tests.support.loads import LoadRunner, Result, ended, own_mock, requests_of, stamps_of, wait_for

PROCESSES = pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.full)])


def most_at_once(stamps: list[dict]) -> int:
    """The most requests that the server had between receipt and its last send."""
    moments = [(s["received"], 1) for s in stamps] + [(s["sends"][-1], -1) for s in stamps]
    return int(np.cumsum([step for _, step in sorted(moments)]).max())


def test_closed_loop_delivers_and_never_exceeds_its_concurrency(loads: LoadRunner) -> None:
    result = loads.run(requests_of(17, tag=1000), model="mock?ttft_ms=15&itl_ms=3", concurrency=4)
    assert result.code == 0, result.stderr
    samples = result.samples
    assert samples["index"].tolist() == list(range(17))  # each request once, none lost
    assert samples["ok"].all(), samples["error"].tolist()
    assert set(samples["user"]) == {0, 1, 2, 3}
    mine = [s for prompt, s in stamps_of(loads.url).items() if prompt[0] == 1000]
    assert len(mine) == 17
    assert most_at_once(mine) == 4
    for _, rows in samples.groupby("user"):  # one request at a time
        ordered = rows.sort_values("ts")
        assert (ordered["ts"].to_numpy()[1:] >= ordered["end"].to_numpy()[:-1]).all()
    assert result.load["max_in_flight"] == 4
    assert result.load["locust"] == {"num_requests": 17, "num_failures": 0}
    assert 0 < result.load["target_start_s"] < result.load["target_end_s"] <= result.load["duration_s"]


def test_the_client_says_once_when_all_is_sent(loads: LoadRunner) -> None:
    result = loads.run(requests_of(8, 651), model="mock?ttft_ms=500&itl_ms=1")
    names = [event["event"] for event in result.events]
    assert names.count("drain") == 1 and names.index("begin") < names.index("drain") < names.index("measured")
    (drain,) = (event for event in result.events if event["event"] == "drain")
    assert drain["done"] < 8 and drain["elapsed_s"] > 0.5  # the last four go out when the first four have ended


def test_stopped_load_writes_what_it_has(loads: LoadRunner) -> None:
    sent = requests_of(1000, tag=1003, max_tokens=20)
    spec = loads.spec(sent, model="mock?itl_ms=20", concurrency=4)
    process = loads.start(spec)
    wait_for(process, 4)
    process.send_signal(signal.SIGINT)
    result = ended(process, spec.parent)
    assert result.code == 130, result.stderr
    load = result.load
    assert result.events[-1]["incomplete"] and load["incomplete"]
    assert 4 <= load["completed"] < 1000
    assert "never finished" in " ".join(load["invalid_reasons"])


def test_a_suspended_client_makes_a_load_of_few_chunks_invalid(loads: LoadRunner) -> None:
    spec = loads.spec(requests_of(16, tag=1004, max_tokens=4), model="mock?ttft_ms=100&itl_ms=100", concurrency=4)
    process = loads.start(spec)
    wait_for(process, 1)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1)
    process.send_signal(signal.SIGCONT)
    load = ended(process, spec.parent).load
    assert load["client"]["chunks"] == 64 and load["client"]["loop_lag_max_ms"] > 900
    assert "the client stood still" in " ".join(load["invalid_reasons"])


def test_unreachable_server_is_exit_4_with_a_sentence(loads: LoadRunner) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        loads.url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        result = loads.run(requests_of(3, tag=1))
    assert result.code == 4
    assert "refused" in result.stderr
    assert "Traceback" not in result.stderr


def test_server_that_never_answers_ends_the_load(loads: LoadRunner) -> None:
    """40 requests at 0.3 s each over 2 users would take 6 s; after 8 in a row it is clear that nobody is served."""
    result = loads.run(requests_of(40, tag=2), model="mock?fault=silent", concurrency=2, timeout_s=0.3)
    assert result.code == 4
    assert "stopped answering" in result.stderr
    assert 8 <= len(result.samples) < 40
    assert result.load["incomplete"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "sideways"}, "sideways"),
        ({"concurrency": 0}, "concurrency"),
        ({"timeout_s": "long"}, "'long' is not a number"),
        ({"colour": "blue"}, "colour"),
        ({"concurrency": None}, "mode closed needs concurrency"),
    ],
)
def test_bad_spec_is_a_sentence(loads: LoadRunner, change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_spec(loads.spec(requests_of(1, tag=3), **change))


@pytest.mark.parametrize(
    ("sent", "change", "words"),
    [
        ([RequestSpec(0, "a", (1,), None, 1)], {"mode": "open"}, "arrival_s"),
        ([RequestSpec(k, "a", (1,), None, 1, session=0, turn=2 * k) for k in (0, 1)], {}, r"has the turns \[0, 2\]"),
    ],
)
def test_requests_that_do_not_fit_the_load_are_a_sentence(loads: LoadRunner, sent, change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        conversations(requests_of_spec(read_spec(loads.spec(sent, **change))))


def test_the_load_is_over_with_its_last_stream_not_with_its_last_parse(loads: LoadRunner) -> None:
    """600 answers of two tokens come within half a second; a parser that takes 4 ms for each would need more."""
    result = loads.run(requests_of(600, tag=1901, max_tokens=2), model="mock?ttft_ms=1&itl_ms=0", concurrency=32)
    assert result.code == 0, result.stderr
    load, last = result.load, result.samples["end"].max()
    (measured,) = [e for e in result.events if e["event"] == "measured"]
    assert last <= load["duration_s"] <= measured["elapsed_s"] + 0.001 and measured["done"] < 600
    client = load["client"]
    assert client["cpu_fraction"] == pytest.approx(client["cpu_s"] / load["duration_s"])
    assert client["cpu_us_per_chunk"] == pytest.approx((client["cpu_s"] + client["parse_cpu_s"]) / 1200 * 1e6)
    assert client["cpu_s"] > 0.02  # 600 requests at 30 us at least


@PROCESSES
def test_a_server_that_dies_takes_no_answer_and_no_failure_with_it(loads: LoadRunner, processes: int) -> None:
    """Requests are handed out in order, so every one that was must have its row, without a gap."""
    with own_mock("--ttft-ms", "5", "--itl-ms", "1") as (server, loads.url):
        sent = requests_of(5000, 4000, max_tokens=4)
        process = loads.start(loads.spec(sent, concurrency=16, processes=processes))
        wait_for(process, 200)
        server.kill()
        result = ended(process, loads.folder / "load")
    assert result.code == 4 and "went away" in result.stderr
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
        sent = requests_of(4000, 4001, max_tokens=2, spacing_s=0.01)
        process = loads.start(loads.spec(sent, mode="open", concurrency=None, request_rate=100.0, timeout_s=0.3))
        wait_for(process, 20)
        server.send_signal(signal.SIGSTOP)
        result = ended(process, loads.folder / "load")
    assert result.code == 4 and "stopped answering" in result.stderr
    assert (result.samples["error_kind"] == "timeout").sum() >= 8 and len(result.samples) < 4000
    assert result.load["incomplete"]


def test_streams_that_are_too_slow_for_their_timeout_are_no_dead_server(loads: LoadRunner) -> None:
    """Each is cut after 0.5 s, in the middle; eight and more in a row say nothing as long as bytes come."""
    result = loads.run(requests_of(12, 4002, 1000), model="mock?ttft_ms=20&itl_ms=20", concurrency=6, timeout_s=0.5)
    assert result.code == 0, result.stderr
    assert result.samples["error_kind"].tolist() == ["timeout"] * 12
    assert (result.samples["chunk_times"].map(len) > 0).all()


STEP_S = 7200
# Runs in every process below: from the moment that the file is there, the wall clock is ahead, and with it the moments
# of arrival that the kernel notes of packets.
SITE = f"""
import os, socket, struct, time
_real, _flag, _receive, _stamp = time.time, os.environ["STEP_FLAG"], socket.socket.recvmsg, struct.Struct("ll")
def step(): return {STEP_S} if os.path.exists(_flag) else 0
def receive(self, *arguments):
    data, notes, flags, sender = _receive(self, *arguments)
    notes = [(level, kind, _moved(note) if len(note) == _stamp.size else note) for level, kind, note in notes]
    return data, notes, flags, sender
def _moved(note):
    seconds, nanoseconds = _stamp.unpack(note)
    return _stamp.pack(seconds + step(), nanoseconds)
time.time = lambda: _real() + step()
socket.socket.recvmsg = receive
"""


@PROCESSES
def test_a_stepped_wall_clock_spoils_nothing_and_is_told(loads: LoadRunner, tmp_path: Path, processes: int) -> None:
    """Two hours: more than any time-out of ours or of Locust's, whose heartbeats are compared by the wall clock."""
    site, flag, tag, count = tmp_path / "site", tmp_path / "flag", 7900 + processes, 48
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    spec = loads.spec(requests_of(count, tag, 20), model="mock?itl_ms=10", concurrency=4, processes=processes)
    process = loads.start(spec, PYTHONPATH=str(site), STEP_FLAG=str(flag))
    lines = []
    for line in process.stdout:
        lines.append(line)
        if json.loads(line)["event"] == "progress":
            flag.touch()
    _, errors = process.communicate()
    result = Result(process.returncode, "".join(lines), errors, spec.parent)
    assert result.code == 0, result.stderr
    load, samples = result.load, result.samples
    assert not load["incomplete"] and samples["ok"].all()
    assert load["wall_clock_step_s"] == pytest.approx(STEP_S, abs=0.5)
    assert "was set by +7200" in load["notes"]["wall_clock"]
    assert 0 < samples["end"].max() <= load["duration_s"] + 0.1 < STEP_S / 10
    stamps, zero = stamps_of(loads.url), load["zero_perf_counter"]
    for i in range(count):
        assert samples["ts"][i] <= stamps[(tag, i)]["received"] - zero <= samples["first"][i]
