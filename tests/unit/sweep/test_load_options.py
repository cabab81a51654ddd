"""The options of ``kvbench load``: which go together, and what they make of a workload, in vllm bench serve's words."""

from __future__ import annotations

import math
import os
import socket
import sys

import click
import pytest
import yaml

from kvbench.cli.load import load
from kvbench.cli.main import cli
from kvbench.common.errors import UsageError
from kvbench.common.options import request_in
from kvbench.common.text import slo_words
from kvbench.load.spec import parse
from kvbench.sweep.load_options import (
    become_worker,
    choose_load,
    client_processes,
    parse_canaries,
    parse_goodput,
)
from kvbench.sweep.requests import LoadOptions, LoadRequest
from tests.support.loads import free_port

CLASSES = [{"name": "a", "share": 1.0, "prompt_tokens": 8, "output_tokens": 4}]
PROMPTS = {"kind": "synthetic", "classes": CLASSES}
CLOSED = {"concurrency": [2, 8], "num_requests": [20, 80], "prompts": PROMPTS}
OPEN = {"mode": "open", "request_rate": [4, 9], "num_requests": [30, 60], "prompts": PROMPTS}
RAMP = {
    "mode": "open", "num_requests": 30, "prompts": PROMPTS, "arrivals": "ramp", "ramp_up_strategy": "linear",
    "ramp_up_start_rps": 1, "ramp_up_end_rps": 9,
}  # fmt: skip
TALK = {"concurrency": [2, 8], "sessions": {"num_sessions": [3, 8], "turns": 2}, "prompts": PROMPTS}
SLO = ("--find-max-rate", "p95_ttft<=1s")


def write(folder, section):
    path = folder / "w.yaml"
    path.write_text(yaml.safe_dump({"name": "w", "model": {"config": "llama-32m"}, "load": section}))
    return path


@pytest.fixture
def run(tmp_path):
    """Runs the command; nothing listens at its URL, so what is not refused for its words ends with another sentence."""

    def run_load(*words, section=CLOSED):
        (tmp_path / "ca.pem").write_text("")
        words = [str(tmp_path / w) if w == "ca.pem" else w for w in words]
        command = ["load", str(write(tmp_path, section)), "--url", "http://127.0.0.1:9", *words]
        return cli.main(command, standalone_mode=False)

    return run_load


@pytest.fixture
def choose(tmp_path):
    def choose_from(section, overrides=(), seed=None, **chosen):
        return choose_load(write(tmp_path, section), LoadOptions(**chosen), overrides=overrides, seed=seed)

    return choose_from


@pytest.mark.parametrize(
    "case",
    [
        (("--max-runs", "40"), ("--max-runs", "--find-max-rate")),  # although it is the default
        (("--resume",), ("--resume", "--output-dir")),
        (("--bind-port", "5000"), ("--bind-port", "--master")),
        (("--master-port", "5000"), ("--master-port", "--worker")),
        (("--processes", "2", "--master"), ("--processes", "--master")),
        (("--master", *SLO), ("--find-max-rate", "--master")),
        (("--worker", "--master"), ("--worker", "--master")),
        (("--worker",), ("--worker", "the workload")),
        (("--tls-ca-file", "ca.pem", "--no-tls-verify"), ("--tls-ca-file", "--no-tls-verify")),
        (("--no-tls-verify",), ("--no-tls-verify", "https://", "--url")),
        (("--tokenizer", "ca.pem"), ("--tokenizer",)),
        (("--at", "c8", "--request-rate", "4"), ("--at c8", "8 users", "--request-rate is 4")),
        (("--at", "c8", *SLO), ("--at c8", "--find-max-rate")),
        (("--at", "r4",), ("'r4'", "c2, c8")),
        (("-o", "load.timeout_s=9", "-o", "sweep={}"), ("-o sweep={}",)),
        (("--request-rate", "inf", "--burstiness", "2"), ("--burstiness 2", "--request-rate inf")),
        (("--burstiness", "2"), ("--burstiness 2", "--request-rate")),
        (("--goodput", "speed:3"), ("'speed:3'", "ttft")),
        ((*SLO, "--request-rate", "inf"), ("--find-max-rate", "inf")),
        (("--find-max-rate", "p95"), ("--find-max-rate", "'p95'")),
        (("--find-max-rate", "goodput>=90%"), ("goodput", "--goodput")),
        (("--at", "r9", "--request-rate", "4"), ("--at r9", "--request-rate is 4"), OPEN),
        (SLO, ("arrivals are a ramp",), RAMP),
    ],
)
def test_options_that_contradict_each_other_are_refused_by_name(run, case):
    words, named, *section = case
    with pytest.raises(UsageError) as refused:
        run(*words, section=section[0] if section else CLOSED)
    assert all(name in str(refused.value) for name in named)


@pytest.mark.parametrize(
    ("words", "section"),
    [
        (("--at", "c8", "--max-concurrency", "8"), CLOSED),
        (("--request-rate", "4", "--max-concurrency", "4", "--burstiness", "2"), CLOSED),
        (("--at", "r9", "--request-rate", "9", "--max-concurrency", "4"), OPEN),
        (("--at", "r9", *SLO, "--max-runs", "3", "--min-rate", "1"), OPEN),
        (("--request-rate", "inf", "--max-concurrency", "3"), CLOSED),
    ],
)
def test_options_that_agree_get_as_far_as_the_server(run, words, section):
    with pytest.raises(UsageError, match=r"127\.0\.0\.1:9"):
        run(*words, section=section)


@pytest.mark.parametrize("words", ["--request-rate 0", "--request-rate nan", "--processes 0", "--bind-port 70000"])
def test_impossible_numbers_are_refused_by_the_parser(words):
    with pytest.raises(click.BadParameter) as refused:
        parsed("w.yaml", *words.split())
    assert words.split()[0] in refused.value.param.opts
    assert math.isinf(parsed("w.yaml", "--request-rate", "inf").request_rate)


def test_without_options_the_first_load_and_the_named_one_are_the_files_own(choose):
    workload, point = choose(CLOSED)
    assert (point.load_id, point.num_requests) == ("c2", 20) and len(workload.load_points) == 2
    assert choose(CLOSED, at="c8")[1].num_requests == 80


def test_a_rate_opens_the_loop_and_keeps_the_number_of_the_load_it_began_from(choose):
    workload, point = choose(CLOSED, at="c8", request_rate=3.5)
    assert (point.mode, point.request_rate, point.num_requests, point.concurrency) == ("open", 3.5, 80, None)
    assert workload.load.arrivals == "poisson" and workload.load.max_concurrency is None
    workload, point = choose(CLOSED, ("load.timeout_s=7",), 5, request_rate=3.5, max_concurrency=5, num_prompts=7,
                             burstiness=0.5)  # fmt: skip
    assert (workload.load.timeout_s, workload.seed) == (7, 5)  # overrides and seed hold beside the options
    assert (workload.load.max_concurrency, point.num_requests) == (5, 7)
    assert (workload.load.arrivals, workload.load.burstiness) == ("gamma", 0.5)
    workload, point = choose(CLOSED, request_rate=math.inf, max_concurrency=3)
    assert point.mode == "open" and math.isinf(point.request_rate) and workload.load.max_concurrency == 3


def test_concurrency_is_the_users_in_closed_loop_and_a_cap_in_open_loop(choose):
    workload, point = choose(CLOSED, max_concurrency=4)
    assert (point.mode, point.concurrency) == ("closed", 4) and workload.load.max_concurrency is None
    workload, point = choose(OPEN, at="r9", max_concurrency=4)
    assert (point.mode, point.request_rate, point.num_requests) == ("open", 9, 60)
    assert workload.load.max_concurrency == 4


def test_the_number_of_a_load_is_that_of_its_conversations_or_wins_over_its_duration(choose):
    assert choose(TALK, num_prompts=5)[0].load.sessions.num_sessions == (5,)
    assert choose(TALK, at="c8", goodput=("ttft:9",))[0].load.sessions.num_sessions == (8,)
    timed = {**{key: value for key, value in OPEN.items() if key != "num_requests"}, "duration_s": 20.0}
    assert choose(timed, at="r4", goodput=("ttft:9",))[0].load.duration_s == 20.0
    workload, point = choose(timed, num_prompts=11)
    assert workload.load.duration_s is None and point.num_requests == 11


@pytest.mark.parametrize(
    ("section", "chosen", "named"),
    [
        (TALK, {"at": "c8", "num_prompts": 5}, ("5 conversations", "--num-prompts 8", "--max-concurrency 5")),
        (CLOSED, {"num_prompts": 1}, ("1 request ", "--num-prompts 2")),
        (CLOSED, {"max_concurrency": 30}, ("20 requests", "30 users")),
    ],
)
def test_fewer_requests_than_users_are_refused(choose, section, chosen, named):
    with pytest.raises(UsageError) as refused:
        choose(section, **chosen)
    assert all(words in str(refused.value) for words in named)
    assert choose(CLOSED, num_prompts=1, max_concurrency=1)[1].num_requests == 1


def test_goodput_is_read_as_vllm_writes_it(choose):
    assert parse_goodput(("ttft:200 tpot:50",)) == {"ttft_ms": 200, "tpot_ms": 50}
    assert parse_goodput(("ttfo:200", "e2el:1.5")) == {"ttfo_ms": 200, "e2el_ms": 1.5}
    slo = choose(CLOSED, goodput=("ttft:200", "tpot:50"))[0].load.slo
    assert slo_words(slo.model_dump()) == "ttft <= 200 ms and tpot <= 50 ms" and slo_words(None) == ""


@pytest.mark.parametrize("words", ["", "ttft", "ttft:x", "ttft:0", "ttft:inf", ":3"])
def test_a_goodput_that_is_none_is_refused(words):
    with pytest.raises(UsageError, match="--goodput"):
        parse_goodput((words,))


def test_canaries_are_a_share_and_a_file_or_a_name(choose, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text("")
    assert parse_canaries("0.1") == {"share": 0.1, "file": None}
    assert parse_canaries("0.25:tiny") == {"share": 0.25, "file": "tiny"}
    assert parse_canaries("0.25:mine.jsonl") == {"share": 0.25, "file": str(tmp_path / "mine.jsonl")}
    loaded, point = choose(TALK, canaries="0.2")
    assert loaded.load.canaries.share == 0.2 and loaded.load.sessions and point.concurrency == 2
    assert choose(CLOSED, ("load.canaries.share=0.3",))[0].load.canaries.share == 0.3
    assert choose(CLOSED)[0].load.canaries is None


@pytest.mark.parametrize("words", ["", "x", ":tiny", "0.6", "0", "0.1,0.2"])
def test_canaries_that_are_none_are_refused(choose, words):
    with pytest.raises(UsageError, match="canaries"):
        choose(CLOSED, canaries=words)


def parsed(*words):
    return request_in(load.make_context("load", list(words)), LoadRequest)


def test_processes_of_this_machine_are_the_specs():
    assert client_processes(parsed("w.yaml"))[0].facts == {"processes": None, "workers": None}
    clients, _ = client_processes(parsed("w.yaml", "--processes", "4"))
    assert clients.spec == {"processes": 4} and clients.workers is None


def test_a_masters_arguments_are_those_that_the_load_process_reads():
    port = free_port()
    clients, notice = client_processes(parsed("w.yaml", "--master", "--expect-workers", "3", "--bind-port", str(port)))
    read = parse(["spec.json", *clients.arguments])
    assert (read.spec, read.master, read.expect_workers) == ("spec.json", True, 3)
    assert (read.bind_host, read.bind_port) == ("127.0.0.1", port)
    assert clients.facts == {"processes": None, "workers": 3}
    assert f"kvbench load --worker --master-host 127.0.0.1 --master-port {port}" in notice


def test_a_worker_becomes_the_load_process(monkeypatch):
    called = []
    monkeypatch.setattr(os, "execv", lambda path, words: called.append((path, words)))
    become_worker(parsed("--worker", "--master-host", "h", "--master-port", "7"))
    ((path, words),) = called
    assert path == words[0] == sys.executable and words[1:3] == ["-m", "kvbench.load"]
    read = parse(words[3:])
    assert (read.worker, read.master_host, read.master_port, read.spec) == (True, "h", 7, None)
    for words in ([], ["spec.json", "--worker"]):
        with pytest.raises(SystemExit, match="2"):
            parse(words)


def test_a_master_that_cannot_listen_is_refused_before_anything_is_waited_for():
    def bound(host, port):
        return client_processes(parsed("w.yaml", "--master", "--bind-host", host, "--bind-port", str(port)))

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"--bind-port {port} "):
            bound("127.0.0.1", port)
    assert bound("127.0.0.1", port)[0].workers == 1
    for host in ("192.0.2.1", "no-such-host.invalid"):  # TEST-NET-1: no machine has it
        with pytest.raises(UsageError, match=f"--bind-host {host} "):
            bound(host, port)
