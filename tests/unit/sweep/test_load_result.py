"""metrics.json of one load and the lines that a person reads."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pandas as pd
import pytest
from rich.console import Console

from kvbench.common.foreign_cpu import MachineReport
from kvbench.measure.result import client_cost
from kvbench.metrics.latency import distribution, summarise
from kvbench.metrics.model import LoadMetrics
from kvbench.requests.request import RequestList, RequestSpec
from kvbench.runs.results import LoadResult
from kvbench.runs.server_info import ServerInfo
from kvbench.sweep.show_load import StoredLoad, lengths_of, lines, show, stored_load
from kvbench.targets.presets import PRESETS
from kvbench.workload.design import LoadPoint
from kvbench.workload.load_section import LoadConfig

PROMPTS = {"kind": "synthetic", "classes": [{"name": "a", "share": 1.0, "prompt_tokens": 8, "output_tokens": 4}]}
CLOSED = LoadPoint("c2", "closed", 2, None, 4)


def result(ttfts=(0.1,), *, failed=0, slo=None, queued=0.0, **more):
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
    metrics = summarise(pd.DataFrame(rows), {"mode": "open"}, slo).to_json()
    return {"valid": True, "invalid_reasons": [], "metrics": metrics, "started_at": "2026-01-01", "machine": {}} | more


def config(**load):
    return LoadConfig.model_validate({"num_requests": 4, "prompts": PROMPTS, "concurrency": 2, **load})


def kept(measured, load=None, point=CLOSED, **more):
    """metrics.json, with ``more`` in it."""
    load = load or config()
    info = ServerInfo.read({"engine": {"enable_prefix_caching": None}})
    target = SimpleNamespace(model=SimpleNamespace(name="m", max_model_len=256), preset=PRESETS["vllm"], notes=())
    server = SimpleNamespace(load=load, info=info, target=target)
    done = LoadResult.parse({key: value for key, value in measured.items() if key in LoadResult.model_fields})
    made = stored_load(SimpleNamespace(server=server, requests=RequestList(())), point, done)
    return StoredLoad.parse(made.to_json() | more)


def shown(measured):
    console = Console(file=io.StringIO(), width=100)
    show(console, "r", kept(measured))
    return console.file.getvalue()


def test_a_closed_loop_in_vllms_fields():
    data = kept(result([0.1, 0.3])).to_json()
    assert (data["request_rate"], data["burstiness"], data["max_concurrency"]) == ("inf", None, 2)
    assert data["mean_ttft_ms"] == pytest.approx(200) and data["median_tpot_ms"] == pytest.approx(100)
    assert data["std_ttft_ms"] == pytest.approx(100) and data["mean_e2el_ms"] == pytest.approx(400)
    assert (data["backend"], data["model_id"], data["completed"], data["total_output_tokens"]) == ("vllm", "m", 2, 6)
    assert data["output_throughput"] == pytest.approx(6 / 1.5)


def calibrated(streams, lag):
    settings, figures = {"streams": streams, "itl_ms": 20.0}, {"lag_p99_ms": lag}
    return {"calibration": {"settings": settings, "figures": figures}}


CACHE = {"prefix_cache": {"hits": 10.0, "queries": 80.0}, "prefix_cache_bounds": {"low": 0, "high": 20}}
NO_HITS = {"prefix_cache": {"hits": None, "queries": None, "unverified": "no counter"}, "prefix_cache_bounds": None}
TWO_COUNTS = {"prefix_cache": {"hits": 10, "queries": 80, "counted": 0.0, "told": 10, "disagree": True}}
STEADY = {"cache_state": "steady"}
REMEMBERED = {"prefix_cache": {"hits": 10, "queries": 80, "from_before": 10}}
LATE = {"completed": 1, "failed": 4, "failure_messages": {"timeout": {"message": "late", "requests": 4}}}
TURNAROUND = {"turnaround_p50_ms": 0.2, "turnaround_p99_ms": 11.13, "turnaround_share": 0.0123}


@pytest.mark.parametrize(
    ("more", "metrics", "shows"),
    [
        (CACHE, {}, ("prefix cache, cold", "12.5%", "0.0% to 25.0%")),
        (NO_HITS, {}, ("prefix cache, cold", "no counter", "not known")),
        (TWO_COUNTS, {}, ("12.5%", "/metrics count 0 tokens", "answers 10", "the larger")),
        (STEADY | REMEMBERED, {}, ("12.5%", "10 tokens are hits only because", "--seed")),
        (STEADY | {"prefix_cache": {"hits": None, "queries": None}}, {}, ("not known", "sent these prompts", "--seed")),
        ({"prefix_cache": {"hits": 0.0, "queries": 0.0}, "prefix_caching": False}, {}, ("prefix caching off",)),
        ({}, {"client": TURNAROUND}, ("0.20 ms", "11.13 ms", "1.2%")),
        ({}, {"client": {"lag_source": "kernel stamps", "loop_lag_p99_ms": 0.5, "lag_judged": False}}, ("0.50 ms",)),
        ({}, {"client": {"short_outputs": 7}}, ("7 outputs",)),
        ({}, {"unstreamed_tokens": 2}, ("2 of 3 output tokens", "was not streamed")),
        ({}, {"not_sent": 31}, ("31 later turns",)),
        ({}, {"first_failure": "truncated: it was cut"}, ("truncated: it was cut",)),
        ({}, LATE, ('4 of 5: timeout: "late"',)),
        ({}, {}, ("client: not calibrated",)),
        (calibrated(64, 0.1), {}, ("64 streams", "0.10 ms")),
        ({}, {"tokens_per_chunk": 1.1}, ("1.1 tokens a chunk: ITL is between chunks",)),
        ({}, {"open_after_last_share": 0.031, "open_after_last_p50_ms": 3000.0}, ("stayed open for 3000 ms", "3.1%")),
        ({}, {"steady_start_s": 0.0}, ("latencies are of the whole run", "0 of 1 requests")),
        ({"machine": {"foreign_cpu_cores": 1.25}}, {}, ("this machine", "1.25")),
        ({"warm_up": {"answered": 4, "requests": 4, "failures": 6, "last": "HTTP 500"}}, {}, ("6 failed", "HTTP 500")),
    ],
)  # fmt: skip
def test_each_further_matter_has_a_line_where_there_is_something_to_say(more, metrics, shows):
    measured = result(**{key: value for key, value in more.items() if key != "warm_up"})
    measured["metrics"] |= metrics
    data = kept(measured, **more)
    assert any(all(words in line for words in shows) for line in lines(data))
    quiet = result()  # a token a chunk and a stream that ends at once are not worth a line
    quiet["metrics"] |= {"tokens_per_chunk": 1.09, "open_after_last_share": 0.03, "open_after_last_p50_ms": 90.0}
    assert more == metrics == {} or not any(all(words in line for words in shows) for line in lines(kept(quiet)))


def test_the_steady_window_comes_first_and_the_whole_run_says_what_it_is():
    measured = result()
    window = {"steady_output_throughput": 7.5, "steady_start_s": 1.0, "steady_end_s": 3.0, "output_throughput": 5.5}
    measured["metrics"] |= window
    (line,) = (line for line in lines(kept(measured)) if line.startswith("output tokens/s"))
    assert line.index("7.5 over the steady window (2.0 s)") < line.index("5.5 over the whole run")
    assert kept(measured).to_json()["output_throughput"] == 5.5  # vLLM's field, of the whole run
    measured["metrics"] |= {"steady_output_throughput": None, "steady_note": "it was short"}
    del measured["metrics"]["unstreamed_tokens"]  # as in a file of an earlier version
    (line,) = (line for line in lines(kept(measured)) if line.startswith("output tokens/s"))
    assert line.startswith("output tokens/s: 5.5 over the whole run") and "no steady window: it was short" in line


def test_latencies_of_the_steady_window_lead_and_vllms_fields_are_of_the_whole_run():
    measured = result([0.5, *[0.1] * 9])
    whole = shown(measured)
    assert "load r · whole run · ms" in whole and not any(
        line.split()[:2] == ["whole", "run"] for line in whole.splitlines()
    )
    measured["metrics"] |= {"steady_start_s": 0.5, "steady_end_s": 10.0}
    measured["metrics"]["steady_latency"] = result([0.1] * 9)["metrics"]
    rows = [line.split() for line in shown(measured).splitlines()]
    at = next(i for i, row in enumerate(rows) if row[:1] == ["TTFT"])
    assert (rows[at][:2], rows[at + 1][:3]) == (["TTFT", "100.0"], ["whole", "run", "140.0"])
    assert ["load", "r", "·", "steady", "window", "·", "ms"] in rows
    assert kept(measured).to_json()["mean_ttft_ms"] == pytest.approx(140)


@pytest.mark.parametrize(("count", "noted"), [(129, True), (200, True), (700, False)])
def test_the_star_is_explained_where_there_is_one(count, noted):
    assert any(line.startswith("*") for line in lines(kept(result([0.1] * count)))) == noted


REASONING = {"reasoning_ms": distribution([250.0]).to_json(), "non_reasoning_output_throughput": 4.0}
COUNTS = {"sent": 9, "answered": 8, "wrong": 0, "distinct": 5}
WRONG = COUNTS | {"wrong": 1, "first_wrong": "a (request 3), differs"}


@pytest.mark.parametrize(
    ("metrics", "more", "row", "shows"),
    [
        ({"ttfo_ms": distribution([160.0]).to_json()}, {}, "TTFO", []),
        (REASONING, {}, "reasoning time", ["250.0*", "without reasoning: 4.0 over the whole run"]),
        ({}, {"queued": 0.2}, "queued in the client", ["200.0*"]),
        ({}, {"invalid_reasons": ["others used 2 cores"], "valid": False}, "INVALID", ["others used 2 cores"]),
        ({}, {"refused": "served 1 of 3 requests", "valid": False}, "REFUSED", ["the server served 1 of 3"]),
        ({"canaries": COUNTS}, {}, "canaries", ["9 sent, 8 answered, 0 wrongly"]),
        ({"canaries": WRONG}, {"wrong_answers": "1 of 8", "valid": False}, "WRONG ANSWERS", ["1 of 8"]),
    ],
)
def test_a_row_or_line_stands_where_there_is_something_to_say(metrics, more, row, shows):
    measured = result([0.1], **more)
    measured["metrics"] |= metrics
    text = shown(measured)
    assert row in text and all(words in text for words in shows)
    assert row not in shown(result([0.1])) and ("INVALID" in text) == (row == "INVALID")


def test_a_first_output_as_early_as_the_first_token_has_no_row():
    measured = result([0.1])
    measured["metrics"]["ttfo_ms"] = distribution([100.04]).to_json()
    assert "TTFO" not in shown(measured) and "TTFO" not in shown(result([], failed=2))


def test_each_plateau_of_the_rate_has_a_row():
    measured = result([0.1, 0.2])
    assert "each plateau" not in shown(measured)
    first = {"start_s": 0.0, "end_s": 4.0, "steady_start_s": 1.0, "n": 18, "steady_request_throughput": 4.93,
             "ttft_ms": {"p95": 61.2}, "request_rate": 5.0}  # fmt: skip
    later = {"start_s": 4.0, "end_s": 8.0, "request_rate": 20.0, "n": 77, "tpot_ms": {"p50": 5.1}}
    measured["metrics"]["plateaus"] = [first, later]
    text = shown(measured)
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["5/s"], ["20/s"])]
    assert rows[0][:4] == ["5/s", "0–4", "18", "4.93"] and rows[1][:3] == ["20/s", "4–8", "77"]
    assert "61.2" in rows[0] and "5.1" in rows[1] and "a plateau without figures" in text


def test_the_clients_cost_counts_processes_on_other_machines():
    """The processes say 1 s of the streaming and 0.5 s of parsing after it; the kernel counts 2 s on this machine."""
    own = {"cpu_s": 1.0, "parse_cpu_s": 0.5, "cpu_fraction": 0.1}
    metrics = {"total_output_tokens": 500, "duration_s": 4.0, "client": own}

    def cost(machine, **more):
        return client_cost(machine, LoadMetrics.model_validate(metrics | more))

    here = MachineReport(client_cpu_cores=0.2, seconds=10.0)
    assert cost(here) == pytest.approx(5.0)
    assert cost(here, client=own | {"cpu_s": 9.0}) == pytest.approx(19.0)  # on other machines
    assert cost(MachineReport()) == pytest.approx(3.0)
    assert cost(here, total_output_tokens=0) is None


def trace_load(**prompts):
    given = {"kind": "trace", "path": "t.csv", **prompts}
    return LoadConfig.model_validate({"mode": "open", "arrivals": "trace", "prompts": given})


def of_lengths(*totals, **notes):
    return RequestList([RequestSpec(i, "a", (1,) * (n - 2), None, 2) for i, n in enumerate(totals)], notes)


def test_by_what_lengths_were_scaled_is_shown_where_they_were_or_could_have_been():
    found = lengths_of(trace_load(), of_lengths(900, 7979, length_scale=1.0), 32768)
    said = lines(kept(result(), lengths=found.to_json()))
    assert any("x 1 " in line and "32,768" in line and "7,979" in line for line in said)
    half = lengths_of(trace_load(length_scale=0.5), of_lengths(50, length_scale=0.5), 256)
    assert (half.scale, half.auto, half.longest_total_tokens) == (0.5, False, 50)
    assert lengths_of(trace_load(), of_lengths(50), 256) is None  # texts, which are not cut
    assert lengths_of(config(), of_lengths(50), 256) is None
    fits = config(prompts=PROMPTS | {"length_scale": "auto"})
    assert lengths_of(fits, of_lengths(50), 256).scale == 1.0
