"""Whole loads: closed and open loop, what they write, how they stop."""

from __future__ import annotations

import json
import signal
import socket

import numpy as np
import pytest

from kvbench.load.spec import read_spec
from kvbench.requests.request import RequestSpec
from tests.support.loads import LoadRunner, stamps_of


def requests(count: int, tag: int, max_tokens: int = 5, spacing_s: float | None = None) -> list[RequestSpec]:
    """``count`` requests whose prompts [tag, i] nobody else sends."""
    return [
        RequestSpec(
            i,
            "odd" if i % 2 else "even",
            (tag, i),
            None,
            max_tokens,
            None if spacing_s is None else i * spacing_s,
        )
        for i in range(count)
    ]


def most_at_once(stamps: list[dict]) -> int:
    """The most requests that the server had between receipt and its last send."""
    moments = [(s["received"], 1) for s in stamps] + [(s["sends"][-1], -1) for s in stamps]
    return int(np.cumsum([step for _, step in sorted(moments)]).max())


def test_closed_loop_delivers_and_never_exceeds_its_concurrency(loads: LoadRunner) -> None:
    result = loads.run(requests(17, tag=1000), model="mock?ttft_ms=15&itl_ms=3", concurrency=4)
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


def test_open_loop_keeps_its_schedule_while_the_server_is_slow(loads: LoadRunner) -> None:
    """Every answer takes 1.2 s, all 20 arrivals are due within 0.4 s: none may wait for an answer."""
    sent = requests(20, tag=1001, max_tokens=3, spacing_s=0.02)
    result = loads.run(sent, mode="open", concurrency=None, request_rate=50.0, model="mock?ttft_ms=1200")
    assert result.code == 0, result.stderr
    samples = result.samples
    assert samples["ok"].all(), samples["error"].tolist()
    assert samples["t0"].to_numpy() == pytest.approx([r.arrival_s for r in sent], abs=1e-6)
    assert samples["ts"].max() < samples["last"].min()  # the last was sent before the first was answered
    assert (samples["ts"] >= samples["t0"]).all()
    assert result.load["max_in_flight"] == 20
    slip = np.percentile((samples["ts"] - samples["t0"]) * 1000, 99)
    assert result.load["client"]["schedule_slip_p99_ms"] == pytest.approx(slip, abs=0.01)


def test_failures_are_counted_and_the_load_still_ends_well(loads: LoadRunner) -> None:
    result = loads.run(requests(6, tag=1002), model="mock?fault=truncate", concurrency=2)
    assert result.code == 0, result.stderr
    assert not result.samples["ok"].any()
    assert set(result.samples["error_kind"]) == {"truncated"}
    assert result.load["failed"] == 6
    assert result.events[-1]["event"] == "end"
    assert result.events[-1]["failed"] == 6
    assert result.load["locust"]["num_failures"] == 6


def test_stopped_load_writes_what_it_has(loads: LoadRunner) -> None:
    sent = requests(1000, tag=1003, max_tokens=20)
    spec = loads.spec(sent, model="mock?itl_ms=20", concurrency=4)
    process = loads.start(spec)
    for line in process.stdout:
        if json.loads(line)["done"] >= 4:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert json.loads(out.splitlines()[-1])["incomplete"]
    load = json.loads((spec.parent / "load.json").read_text())
    assert load["incomplete"]
    assert 4 <= load["completed"] < 1000
    assert "never finished" in " ".join(load["invalid_reasons"])


def test_unreachable_server_is_exit_4_with_a_sentence(loads: LoadRunner) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        loads.url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        result = loads.run(requests(3, tag=1))
    assert result.code == 4
    assert "refused" in result.stderr
    assert "Traceback" not in result.stderr


def test_server_that_never_answers_ends_the_load(loads: LoadRunner) -> None:
    """40 requests at 0.3 s each over 2 users would take 6 s; after 8 in a row it is clear that nobody is served."""
    result = loads.run(requests(40, tag=2), model="mock?fault=silent", concurrency=2, timeout_s=0.3)
    assert result.code == 4
    assert "stopped answering" in result.stderr
    assert 8 <= len(result.samples) < 40
    assert result.load["incomplete"]


BAD_SPECS = [
    ({"mode": "sideways"}, "sideways"),
    ({"concurrency": 0}, "concurrency"),
    ({"timeout_s": "long"}, "'long' is not a number"),
    ({"colour": "blue"}, "colour"),
    ({"concurrency": None}, "mode closed needs concurrency"),
]


@pytest.mark.parametrize(("change", "words"), BAD_SPECS)
def test_bad_spec_is_a_sentence(loads: LoadRunner, change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_spec(loads.spec(requests(1, tag=3), **change))


@pytest.mark.parametrize(
    ("change", "words"), [({"base_url": "ftp://127.0.0.1:1"}, "neither http"), ({"mode": "open"}, "arrival_s")]
)
def test_bad_input_is_exit_2_and_no_traceback(loads: LoadRunner, change: dict, words: str) -> None:
    result = loads.run(requests(1, tag=3), **change)
    assert result.code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_the_load_is_over_with_its_last_stream_not_with_its_last_parse(loads: LoadRunner) -> None:
    """1,500 answers of two tokens come within a second; a parser that takes 4 ms for each would need six."""
    result = loads.run(requests(1500, tag=1901, max_tokens=2), model="mock?ttft_ms=1&itl_ms=0", concurrency=32)
    assert result.code == 0, result.stderr
    load, last = result.load, result.samples["end"].max()
    (measured,) = [e for e in result.events if e["event"] == "measured"]
    assert last <= load["duration_s"] <= measured["elapsed_s"] + 0.001 and measured["done"] < 1500
    client = load["client"]
    assert client["cpu_fraction"] == pytest.approx(client["cpu_s"] / load["duration_s"])
    assert client["cpu_us_per_chunk"] == pytest.approx((client["cpu_s"] + client["parse_cpu_s"]) / 3000 * 1e6)
    assert client["cpu_s"] > 0.05  # 1,500 requests at 30 us at least
