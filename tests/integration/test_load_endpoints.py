"""``kvbench load`` over each endpoint: a server that has only one needs no option, and the built-in one takes chats."""

from __future__ import annotations

import json

import httpx
import pandas as pd
import pytest
import yaml

from kvbench.cli.main import cli
from kvbench.common import foreign_cpu as contention
from kvbench.common.errors import UsageError
from kvbench.load.endpoints import PATHS
from tests.support.fake_engine import fake_engine
from tests.support.http_server import running_server, shipped_tokenizer
from tests.support.loads import own_mock

LOAD = ("--input-len", 20, "--output-len", 8, "--concurrency", 3, "--num-prompts", 9)  # the options of README's command


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch):
    """Other work on the test machine is not what is tested here."""
    monkeypatch.setattr(contention, "MIN_FOREIGN_CORES", 1000.0)
    monkeypatch.setattr(contention, "MAX_STEAL_SHARE", 1.0)


def load(*words):
    return cli.main(["load", *map(str, words), "--no-calibration"], standalone_mode=False)


def measured(folder):
    kept = json.loads((folder / "metrics.json").read_text())
    return kept, pd.read_parquet(folder / "requests.parquet")


@pytest.mark.parametrize(
    "endpoint", ["completions", "chat", *(pytest.param(e, marks=pytest.mark.full) for e in ("responses", "messages"))]
)
def test_a_server_that_has_one_endpoint_only_is_measured_without_an_option(endpoint, tmp_path, capsys):
    thinks = endpoint != "completions"
    deltas = ("--deltas", "reasoning_content:3,text") if thinks else ()
    flags = ("--endpoint", endpoint, "--ttft-ms", 20, "--itl-ms", 5, "--template-tokens", 6 * thinks, *deltas)
    with own_mock(*map(str, flags)) as (_, url):
        load("--url", url, *LOAD, "--output-dir", tmp_path / "out")
    kept, requests = measured(tmp_path / "out")
    shown = capsys.readouterr().out
    assert kept["endpoint"] == endpoint and kept["completed"] == 9, shown
    assert (f"requests go to {PATHS[endpoint]}" in shown) == thinks
    assert set(requests.prompt_tokens) == {20 + 6 * thinks} and set(requests.output_tokens) == {8}
    assert kept["prompt_tokens_added"] == ([6, 6, 6] if thinks else None)
    assert ("the server counts 6 tokens more than were drawn, 6 of them by its chat template" in shown) == thinks
    if thinks:
        assert set(requests.reasoning_tokens) == {3}
        assert [times[0] for times in requests.chunk_times] == [*requests.first_reasoning]
        assert [times[3] for times in requests.chunk_times] == [*requests.first_output]
        assert "first output (TTFO)" in shown


WORKLOAD = {
    "name": "chats", "model": {"config": "llama-32m", "load_format": "dummy"},
    "load": {"endpoint": "chat", "concurrency": [2], "prompts": {"kind": "synthetic", "classes": [
        {"name": "a", "share": 1.0, "prompt_tokens": 24, "output_tokens": 4}]}},
}  # fmt: skip


def workload(tmp_path, **load_section):
    path = tmp_path / "chats.yaml"
    path.write_text(yaml.safe_dump(WORKLOAD | {"load": WORKLOAD["load"] | load_section}))
    return path


@pytest.mark.full
def test_the_built_in_server_takes_conversations_whose_cached_tokens_are_as_many_as_can_be(tmp_path):
    more = {"sessions": {"num_sessions": [4], "turns": 3, "history": "actual"}}
    engine = fake_engine(page_size=4, enable_prefix_caching=True, step_s=0.005)
    with running_server(engine, shipped_tokenizer()) as server:
        url = server.base_url
        load(workload(tmp_path, **more), "--url", url, "--output-dir", tmp_path / "turns")
        load(workload(tmp_path, num_requests=8), "--url", url, "--output-dir", tmp_path / "alone")
    kept, requests = measured(tmp_path / "turns")
    assert kept["completed"] == 12 and kept["prefix_cache"]["hits"] > 0
    for _, turns in requests.sort_values("turn").groupby("session"):
        first, second, third = turns.prompt_tokens
        assert first == 26 and second > first + 24 and third > second + 24  # 2 by the template, the answers' own texts
        assert list(turns.cached_tokens)[1:] >= [24, second // 4 * 4 - 4]
    kept, requests = measured(tmp_path / "alone")
    bounds = kept["prefix_cache_bounds"]  # known, though prompts are texts: the template's tokens are
    assert bounds["low"] == 0 and kept["prefix_cache"]["hits"] <= bounds["high"] < sum(requests.prompt_tokens) / 4
    assert set(requests.prompt_tokens) == {26} and kept["template_tokens"] == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--extra-body", "[1]"), r"is no JSON object"),
        (("--extra-body", '{"max_completion_tokens": 3}'), "extra_body cannot set"),
        (("-o", "load.extra_body={a: .nan}"), "JSON cannot hold"),
        (("--canaries", "0.1"), "chat template"),
        (("-o", "load.endpoint=voice"), "'voice'"),
    ],
)
def test_what_no_endpoint_takes_is_refused_before_anything_is_sent(words, sentence, tmp_path):
    with pytest.raises(UsageError, match=sentence):
        load(workload(tmp_path, num_requests=8), "--url", "http://127.0.0.1:1", *words)


def test_further_fields_reach_the_server_and_answers_that_end_early_are_told(tmp_path, capsys):
    with own_mock("--endpoint", "chat", "--ttft-ms", "5", "--itl-ms", "1", "--deltas", "text:3") as (_, url):
        words = ("--extra-body", '{"reasoning_effort": "low"}', "--endpoint-type", "chat")
        load("--url", url, *LOAD, *words, "--output-dir", tmp_path / "out")
        stamps = httpx.get(f"{url}/stamps").json()
    assert len(stamps) >= 9 and {stamp["body"]["reasoning_effort"] for stamp in stamps} == {"low"}
    assert "answers had 3.0 tokens on average, and 8.0 were asked for" in capsys.readouterr().out
