"""metrics.json of one load and the lines that a person reads."""

from __future__ import annotations

import io
import math

import pandas as pd
import pytest
from rich.console import Console

from kvbench.loadtest.result import lengths_of, lines, show, stored
from kvbench.measure.load import client_cost
from kvbench.metrics.latency import goodput_share, summarise
from kvbench.requests.request import RequestList, RequestSpec
from kvbench.workload.design import LoadPoint
from kvbench.workload.load_section import LoadConfig

PROMPTS = {"kind": "synthetic", "classes": [{"name": "a", "share": 1.0, "prompt_tokens": 8, "output_tokens": 4}]}
TARGET = {"url": "u", "preset": "vllm", "model": "m"}


def result(ttfts, *, failed=0, slo=None, queued=0.0, **more):
    """Of requests of 3 tokens 0.1 s apart, sent a second apart."""
    rows = []
    for i, ttft in enumerate([*ttfts, *[0.1] * failed]):
        first = i + ttft
        rows.append(
            {
                "index": i, "class": "a", "prompt_tokens": 8, "output_tokens": 3, "t0": float(i), "ts": i + queued,
                "queued_s": queued, "first": first, "last": first + 0.2, "end": first + 0.2,
                "chunk_times": [first, first + 0.1, first + 0.2], "ok": i < len(ttfts),
                "error_kind": None if i < len(ttfts) else "truncated",
            }
        )  # fmt: skip
    metrics = summarise(pd.DataFrame(rows), {"mode": "open"}, slo)
    return {"valid": True, "invalid_reasons": [], "metrics": metrics, "started_at": "2026-01-01", "machine": {}} | more


def config(**load):
    given = {"num_requests": 4, "prompts": PROMPTS, **load}
    return LoadConfig.model_validate(given)


def test_a_closed_loop_in_vllms_fields():
    kept = stored(config(concurrency=2), LoadPoint("c2", "closed", 2, None, 4), TARGET, result([0.1, 0.3]))
    assert (kept["request_rate"], kept["burstiness"], kept["max_concurrency"]) == ("inf", None, 2)
    assert kept["mean_ttft_ms"] == pytest.approx(200) and kept["median_tpot_ms"] == pytest.approx(100)
    assert kept["std_ttft_ms"] == pytest.approx(100) and kept["mean_e2el_ms"] == pytest.approx(400)
    assert (kept["backend"], kept["model_id"], kept["completed"], kept["total_output_tokens"]) == ("vllm", "m", 2, 6)
    assert kept["output_throughput"] == pytest.approx(6 / 1.5)


def test_an_open_loop_in_vllms_fields():
    gamma = {"mode": "open", "request_rate": 4, "arrivals": "gamma", "burstiness": 0.5, "max_concurrency": 3}
    kept = stored(config(**gamma), LoadPoint("r4", "open", None, 4.0, 4, "gamma"), TARGET, result([0.1]))
    assert (kept["request_rate"], kept["burstiness"], kept["max_concurrency"]) == (4.0, 0.5, 3)
    at_once = config(mode="open", request_rate="inf")
    kept = stored(at_once, LoadPoint("rinf", "open", None, math.inf, 4), TARGET, result([0.1]))
    assert (kept["request_rate"], kept["burstiness"], kept["max_concurrency"]) == ("inf", 1.0, None)


def test_failed_requests_lower_the_share_that_met_the_slo():
    slo = {"ttft_ms": 250.0}
    told = result([0.1, 0.2, 0.3], failed=1, slo=slo)
    assert goodput_share(told["metrics"]) == pytest.approx(2 / 4)
    assert goodput_share(result([0.1])["metrics"]) is None
    kept = stored(config(concurrency=2, slo=slo), LoadPoint("c2", "closed", 2, None, 4), TARGET, told)
    text = "\n".join(lines(kept))
    assert "(50.0% of the requests sent) met ttft <= 250 ms" in text and "3 completed, 1 failed (truncated 1)" in text


def test_hits_stand_beside_what_was_possible():
    cache = {"prefix_cache": {"hits": 10.0, "queries": 80.0}, "prefix_cache_bounds": {"low": 0, "high": 20}}
    point = LoadPoint("c2", "closed", 2, None, 4)
    text = "\n".join(lines(stored(config(concurrency=2), point, TARGET, result([0.1], **cache))))
    assert "prefix cache, declared cold: 12.5% of 80 prompt tokens hit, possible 0.0% to 25.0%" in text
    why = "the server does not tell its hits"
    untold = {"prefix_cache": {"hits": None, "queries": None, "unverified": why}, "prefix_cache_bounds": None}
    text = "\n".join(lines(stored(config(concurrency=2), point, TARGET, result([0.1], **untold))))
    assert f"declared cold, not verified ({why}): hit rate not known" in text


def test_the_client_queue_has_a_row_where_requests_waited_and_reasons_are_last():
    load = config(concurrency=2)
    waited = shown(load, result([0.3, 0.4], queued=0.2, invalid_reasons=["other processes used 2 cores"], valid=False))
    row = next(line for line in waited.splitlines() if "queued in the client" in line)
    assert row.split()[4:6] == ["200.0", "200.0*"]
    assert waited.rstrip().endswith("INVALID: other processes used 2 cores")
    assert "queued" not in shown(load, result([0.3, 0.4]))


def test_the_clients_cost_counts_processes_on_other_machines():
    """The processes say 1 s of the streaming and 0.5 s of parsing after it; the kernel counts 2 s on this machine."""
    own = {"cpu_s": 1.0, "parse_cpu_s": 0.5, "cpu_fraction": 0.1}
    metrics = {"total_output_tokens": 500, "duration_s": 4.0, "client": own}
    here = {"client_cpu_cores": 0.2, "seconds": 10.0}
    assert client_cost(here, metrics) == pytest.approx(5.0)
    spread = metrics | {"client": own | {"cpu_s": 9.0}}  # on other machines
    assert client_cost(here, spread) == pytest.approx(19.0)
    assert client_cost({"client_cpu_cores": None, "seconds": None}, metrics) == pytest.approx(3.0)
    assert client_cost(here, metrics | {"total_output_tokens": 0}) is None


def test_what_a_closed_loops_client_took_between_requests_is_told():
    told = result([0.1])
    point = LoadPoint("c2", "closed", 2, None, 4)
    kept = stored(config(concurrency=2), point, TARGET, told)
    assert "next send" not in "\n".join(lines(kept))
    kept["metrics"]["client"] = {"turnaround_p50_ms": 0.2, "turnaround_p99_ms": 11.13, "turnaround_share": 0.0123}
    assert "a stream's end to the next send p50 0.20, p99 11.13 ms (1.2% of users' time)" in "\n".join(lines(kept))


@pytest.mark.parametrize(("count", "noted"), [(129, True), (200, True), (700, False)])
def test_the_star_is_explained_where_there_is_one(count, noted):
    told = result([0.1] * count)
    text = "\n".join(lines(stored(config(concurrency=2), LoadPoint("c2", "closed", 2, None, 4), TARGET, told)))
    assert ("* too few samples for this percentile" in text) == noted


def test_of_workers_on_other_machines_the_worst_calibration_is_told():
    def of(streams, lag):
        settings, figures = {"streams": streams, "itl_ms": 20.0}, {"lag_p99_ms": lag}
        return {"calibration": {"settings": settings, "figures": figures}}

    kept = stored(config(concurrency=2), LoadPoint("c2", "closed", 2, None, 4), TARGET, result([0.1]))
    assert "client: not calibrated" in lines(kept)
    kept["metrics"]["client"] = {"processes": [of(16, 0.2), of(16, 0.7), {}]}
    assert "calibration of the worst of 2 workers at 16 streams of 20 ms ITL: timestamp lag p99 0.70 ms" in lines(kept)
    kept |= of(64, 0.1)
    kept["metrics"]["client"] = {"processes": [{}]}
    assert "calibration at 64 streams of 20 ms ITL: timestamp lag p99 0.10 ms" in lines(kept)


def shown(load, told):
    console = Console(file=io.StringIO(), width=100)
    show(console, "r", stored(load, LoadPoint("r", "open", None, None, 4), TARGET, told))
    return console.file.getvalue()


def test_each_plateau_of_the_rate_has_a_row():
    told = result([0.1, 0.2])
    assert "each plateau" not in shown(config(concurrency=2), told)
    figures = {
        "start_s": 0.0,
        "end_s": 4.0,
        "steady_start_s": 1.0,
        "n": 18,
        "steady_request_throughput": 4.93,
        "ttft_ms": {"p95": 61.2},
    }
    later = {"start_s": 4.0, "end_s": 8.0, "request_rate": 20.0, "n": 77, "tpot_ms": {"p50": 5.1}}
    told["metrics"]["plateaus"] = [figures | {"request_rate": 5.0}, later]
    text = shown(config(concurrency=2), told).splitlines()
    head = next(i for i, line in enumerate(text) if "asked for" in line)
    first, second = (line.split() for line in text[head + 2 : head + 4])
    assert first[:4] == ["5/s", "0–4", "18", "4.93"] and second[:3] == ["20/s", "4–8", "77"]
    assert "61.2" in first and "5.1" in second
    why = "a plateau without figures had no steady part"
    assert why in "\n".join(text)
    told["metrics"]["plateaus"].pop()
    assert why not in shown(config(concurrency=2), told)


def test_turns_that_were_not_sent_stand_beside_the_failures_and_the_first_of_those_is_told():
    told = result([0.1, 0.2], failed=1)
    told["metrics"] |= {"not_sent": 31, "first_failure": "truncated: the stream was cut"}
    text = lines(stored(config(concurrency=2), LoadPoint("c2", "closed", 2, None, 4), TARGET, told))
    said = "requests: 2 completed, 1 failed (truncated 1); 31 later turns of their conversations were not sent"
    assert said in text and "the first failure: truncated: the stream was cut" in text


def test_a_server_with_prefix_caching_off_is_told():
    cache = {"prefix_cache": {"hits": 0.0, "queries": 0.0}, "prefix_caching": False}
    text = lines(stored(config(concurrency=2), LoadPoint("c2", "closed", 2, None, 4), TARGET, result([0.1], **cache)))
    assert "prefix cache, declared cold: none, the server has prefix caching off" in text


def trace_load(**prompts):
    given = {"kind": "trace", "path": "t.csv", **prompts}
    return LoadConfig.model_validate({"mode": "open", "arrivals": "trace", "prompts": given})


def of_lengths(*totals, **notes):
    return RequestList([RequestSpec(i, "a", (1,) * (n - 2), None, 2) for i, n in enumerate(totals)], notes)


def test_by_what_lengths_were_scaled_is_told_where_they_were_or_could_have_been():
    found = lengths_of(trace_load(), of_lengths(900, 7979, length_scale=1.0), 32768)
    told = result([0.1], lengths=found)
    text = lines(stored(config(concurrency=2), LoadPoint("c2", "closed", 2, None, 4), TARGET, told))
    auto = "lengths x 1 (length_scale: auto, for the server's max_model_len 32,768), longest prompt with its output: "
    assert auto + "7,979 tokens" in text
    half = lengths_of(trace_load(length_scale=0.5), of_lengths(50, length_scale=0.5), 256)
    assert (half["scale"], half["auto"], half["longest_total_tokens"]) == (0.5, False, 50)
    assert lengths_of(trace_load(), of_lengths(50), 256) is None  # texts, which are not cut
    assert lengths_of(config(concurrency=2), of_lengths(50), 256) is None
    fits = config(concurrency=2, prompts=PROMPTS | {"length_scale": "auto"})
    assert lengths_of(fits, of_lengths(50), 256)["scale"] == 1.0
