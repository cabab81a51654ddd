"""``kvbench simulate``: its figures are exact, its bytes do not change, its memory is that of what runs."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from kvbench.cli.main import cli
from kvbench.common.errors import UsageError
from kvbench.metrics.latency import distribution, summarise, weighted_distribution
from kvbench.requests.build import PIECE, LoadDraw, build_requests, stream_requests
from kvbench.simulation.run import sustainable_rate
from kvbench.workload.load_section import LoadConfig

MACHINE = ("--device", "H200", "--model", "llama-3.1-8b")
CLASSES = [
    {"name": "one", "share": 0.7, "prompt_tokens": [10, 80], "output_tokens": [2, 30]},
    {"name": "several", "share": 0.2, "prompt_tokens": 40, "output_tokens": 12, "n": 3},
    {"name": "chosen", "share": 0.1, "prompt_tokens": 40, "output_tokens": 8, "best_of": 2},
]
LOAD = {
    "mode": "open",
    "temperature": 1.0,
    "request_rate": [2000],
    "num_requests": [120],
    "prompts": {"kind": "synthetic", "classes": CLASSES},
}
SHORT = ("--input-len", "9", "--output-len", "9", "--concurrency", "2")
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")


def simulated(*arguments: object, code: int = 0) -> None:
    assert (cli.main([*map(str, arguments)], standalone_mode=False) or 0) == code


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("simulate") / "mixed.yaml"
    engine = {"max_model_len": 512, "max_num_seqs": 24, "kv_budget": "96MiB", "enable_prefix_caching": True}
    data = {
        "name": "mixed",
        "model": {"config": "llama-3.1-8b"},
        "engine": engine,
        "load": LOAD | {"slo": {"ttfo_ms": 100, "tpot_ms": 50}},
    }
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.fixture(scope="module")
def folder(workload: Path) -> Path:
    out = workload.parent / "out"
    simulated("simulate", workload, "--device", "H200", "-o", "engine.kv_budget=96MiB", "--output-dir", out)
    return out


def test_figures_gathered_on_the_way_are_those_of_all_rows(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    rows = pd.read_parquet(folder / "requests.parquet")
    expected = summarise(rows, {"mode": "open"}, {"ttfo_ms": 100.0, "tpot_ms": 50.0})
    assert summary["simulated"] is True and len(rows) == 120
    assert summary["num_preemptions"] > 0 and 0 < summary["goodput"] < summary["request_throughput"]
    for name in ("completed", "failed", "duration_s", "request_throughput", "output_throughput", "goodput",
                 "total_token_throughput", "total_input_tokens", "total_output_tokens"):  # fmt: skip
        assert summary[name] == pytest.approx(expected.value(name), rel=1e-9), name
    for name in LATENCIES:
        assert summary[name]["n"] == expected.distribution(name).n
        for which in ("mean", "std", "p50", "p90", "p95", "p99", "min", "max"):
            path = f"{name}.{which}"
            assert summary[name][which] == pytest.approx(expected.value(path), rel=1e-9, abs=1e-9), path


def test_the_steady_window_is_that_of_all_rows(tmp_path: Path) -> None:
    out = tmp_path / "out"
    simulated("simulate", *MACHINE, "--input-len", "20:60", "--output-len", "2:20", "--concurrency", 6,
              "--num-prompts", 60, "--output-dir", out)  # fmt: skip
    summary = json.loads((out / "summary.json").read_text())
    expected = summarise(pd.read_parquet(out / "requests.parquet"), {"mode": "closed", "concurrency": 6})
    actual, reference = summary["steady_latency"]["e2el_ms"], expected.steady_latency.e2el_ms
    assert 30 < actual["n"] == reference.n and actual["mean"] == pytest.approx(reference.mean)
    assert summary["steady_end_s"] == pytest.approx(expected.steady_end_s)


def test_a_distribution_of_counted_values_is_that_of_all_values() -> None:
    rng = np.random.default_rng(3)
    for many in (1, 2, 3, 50, 1000):
        values, counts = np.unique(rng.integers(0, 40, many) / 7, return_counts=True)
        whole = distribution(np.repeat(values, counts)).to_json()
        actual = weighted_distribution(values, counts).to_json()
        assert actual["uncertain"] == whole["uncertain"]
        assert {k: v for k, v in actual.items() if k != "uncertain"} == pytest.approx(
            {k: v for k, v in whole.items() if k != "uncertain"}
        )


@pytest.mark.full
def test_the_same_options_give_the_same_bytes_in_any_process(workload: Path) -> None:
    def command(out: Path) -> list[str]:
        return ["simulate", str(workload), "--device", "H200", "--replicas", "3", "--router", "prefix-aware",
                "--router", "least-loaded", "--processes", "1", "--output-dir", str(out)]  # fmt: skip

    here, there = workload.parent / "here", workload.parent / "there"
    assert os.environ.get("PYTHONHASHSEED") != "77"
    code = "from kvbench.cli.main import main; main()"
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    subprocess.run([sys.executable, "-c", code, *command(there)], env=environment, check=True, timeout=60,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    simulated(*command(here))
    actual = [{str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
             for out in (here, there)]  # fmt: skip
    assert len(actual[0]) == 4 and actual[0] == actual[1]


def test_a_fleet_is_told_apart_and_together(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulated("simulate", workload, "--device", "H200", "--replicas", 3, "--router", "round-robin", "--json")
    result = json.loads(capsys.readouterr().out)
    item = result["replicas"]
    assert [one["completed"] for one in item] == [40, 40, 40] and result["completed"] == 120
    assert sum(one["itl_ms"]["n"] for one in item) == result["itl_ms"]["n"]
    most = max(one["total_output_tokens"] for one in item)
    assert result["imbalance"]["total_output_tokens"] == pytest.approx(most / (result["total_output_tokens"] / 3))


def test_a_replica_that_gets_no_request_has_empty_figures(capsys: pytest.CaptureFixture[str]) -> None:
    simulated("simulate", *MACHINE, *SHORT, "--num-prompts", 2, "--replicas", 3, "--router", "least-loaded", "--json")
    idle = json.loads(capsys.readouterr().out)["replicas"][2]
    assert idle["completed"] == idle["itl_ms"]["n"] == idle["ttft_ms"]["n"] == 0 and idle["ttft_ms"]["p95"] is None
    assert idle["request_throughput"] is None and idle["running"] == {"peak": 0.0, "mean": None}


def test_a_trace_is_played_at_its_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"timestamp": 500 * i, "input_length": 1024 + 200, "output_length": 3, "hash_ids": [0, 1 + i % 2, 50 + i]}
            for i in range(8)]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    simulated(
        "simulate", *MACHINE, "--dataset-path", path, "-o", "engine.enable_prefix_caching=true", "--output-dir", out
    )
    actual = pd.read_parquet(out / "requests.parquet")
    assert actual["t0"].tolist() == [0.5 * i for i in range(8)] and set(actual["prompt_tokens"]) == {1224}
    assert actual["cached_tokens"].tolist() == [0, 512] + [1024] * 6
    assert "TTFT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--device", "H2000", "--model", "llama-3.1-8b", *SHORT], ["H2000", "H200"]),
        (["--device", "L4", "--model", "llama-3.1-70b", *SHORT], ["fit", "GiB"]),
        ([*MACHINE, *SHORT, "--router", "round-robin"], ["--replicas"]),
        ([*MACHINE, *SHORT, "--run-seconds", "3"], ["--find-max-rate"]),
        ([*MACHINE, *SHORT[:4], "--request-rate", "2,4", "--find-max-rate", "p95_ttft<=1s"], ["--request-rate"]),
    ],
)  # fmt: skip
def test_bad_input_is_said_before_anything_runs(arguments: list[str], named: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        simulated("simulate", *arguments)
    assert all(word in str(caught.value) for word in named)


def test_a_load_that_is_too_long_for_the_model_is_refused_before_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.requests.draw.random_tokens", None)
    with pytest.raises(UsageError, match=r"200000 [+] 9 = 200009 tokens, more than max_model_len 131072"):
        simulated("simulate", *MACHINE, "--input-len", 200_000, "--output-len", 9, "--concurrency", 2)


def test_the_highest_rate_that_meets_a_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tried: list[float] = []

    def meets(rate: float) -> bool:
        tried.append(rate)
        return rate <= 13.7

    assert 13.7 / 1.01 <= sustainable_rate(meets, 1.0, 0.01) <= 13.7 and len(tried) == len(set(tried)) < 20
    assert sustainable_rate(lambda rate: False, 1.0) == 0.0
    prompts = {"kind": "synthetic", "classes": [{"name": "a", "share": 1, "prompt_tokens": 1000, "output_tokens": 2}]}
    closed = {"name": "closed", "model": {"config": "llama-3.1-8b"}, "load": {"concurrency": [2], "num_requests": [4]}}
    path = tmp_path / "closed.yaml"
    path.write_text(yaml.safe_dump(closed | {"load": closed["load"] | {"prompts": prompts}}))
    simulated("simulate", path, "--device", "L4", "--find-max-rate", "p95_ttfo<=2000ms", "--run-seconds", 1,
              "--tolerance", 0.4, "--json")  # fmt: skip
    answer = json.loads(capsys.readouterr().out)
    missed = min(trial["rate"] for trial in answer["trials"] if not trial["met"])
    assert 0 < answer["max_rate"] < missed <= answer["max_rate"] * 1.4


@pytest.mark.parametrize("more", [{}, {"sessions": {"turns": [2, 3], "num_sessions": None, "think_s": [1, 2]}}])
def test_a_load_in_pieces_begins_with_the_one_that_is_really_sent_and_goes_on(more: dict) -> None:
    prefix = {"tokens": 24, "share": 0.5}
    one = [{"name": "one", "share": 1, "prompt_tokens": [4, 12], "output_tokens": [1, 3]}]
    prompts = {"kind": "synthetic", "classes": one, "shared_prefix": prefix}

    def load(count: int) -> LoadConfig:
        data = {"mode": "open", "request_rate": [5], "prompts": prompts}
        counted = {"sessions": {**more["sessions"], "num_sessions": [count]}} if more else {"num_requests": [count]}
        return LoadConfig.model_validate(data | counted)

    piece = PIECE // 3 if more else PIECE
    how = {"vocab_size": 1000, "max_model_len": 200, "seed": 4, "rate": 5.0}
    actual = list(stream_requests(LoadDraw(load(2 * piece + 100), **how)).conversations)
    flat = [request for turns in actual for request in turns]
    assert len(actual) == 2 * piece + 100 and [r.index for r in flat] == list(range(len(flat)))
    begin = build_requests(LoadDraw(load(piece), **how))
    assert flat[: len(begin)] == list(begin)
    arrivals = [turns[0].arrival_s or 0.0 for turns in actual]
    assert np.all(np.diff(arrivals) > 0) and np.diff(arrivals).mean() == pytest.approx(0.2, rel=0.06)
    shared = {(r.prompt_token_ids or ())[: r.prefix_tokens] for r in flat if r.prefix_tokens}
    assert len(shared) == 1 and len({r.prompt_token_ids for r in flat}) == len(flat)
    assert not more or [turns[0].session for turns in actual] == list(range(len(actual)))


def test_a_streamed_trace_has_the_requests_of_the_whole_one(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 100 * i, "input_length": 700 + i, "output_length": 3, "hash_ids": [i % 3, 10 + i]}
        for i in range(30)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = {"kind": "trace", "path": str(path), "sessions": False}
    load = LoadConfig.model_validate({"mode": "open", "arrivals": "trace", "prompts": prompts})
    how = {"vocab_size": 5000, "max_model_len": 2000, "seed": 4}
    streamed = [r for turns in stream_requests(LoadDraw(load, **how)).conversations for r in turns]
    assert streamed == [dataclasses.replace(r, prefix_tokens=0) for r in build_requests(LoadDraw(load, **how))]
