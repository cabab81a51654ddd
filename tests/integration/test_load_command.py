"""``kvbench load`` against running servers: what it keeps, refuses, resumes, and the rates that it finds."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time

import pandas as pd
import psutil
import pytest
import yaml

from kvbench.cli.main import cli
from kvbench.common import foreign_cpu as contention
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.files import write_json
from kvbench.measure import single_request
from kvbench.sweep.rate_search import CLIENT_LIMIT, INVALID
from tests.support.loads import fake_server, free_port, own_mock, start_load
from tests.support.sweep_parts import BUSY_MACHINE, ROOT, TINY, wait_until

CACHING = ("--enable-prefix-caching", "--page-size", "4", "--max-model-len", "256")


@pytest.fixture(scope="module")
def url():
    with fake_server(*CACHING) as (_, url):
        yield url


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, "sweep": {}}))
    return path


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch):
    """Other work on the test machine is not what is tested here."""
    monkeypatch.setattr(contention, "MIN_FOREIGN_CORES", 1000.0)
    monkeypatch.setattr(contention, "MAX_STEAL_SHARE", 1.0)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(single_request, "_PAUSE_S", 0.01)  # before a request that failed is sent again


def load(*words):
    return cli.main(["load", *map(str, words), "--no-calibration"], standalone_mode=False)


def stored(folder, name="manifest.json"):
    return json.loads((folder / name).read_text())


def complaints(kept):
    return [r for r in kept["invalid_reasons"] if not any(words in r for words in BUSY_MACHINE)]


def test_a_load_needs_no_file_and_takes_the_names_of_vllm_bench_serve(url, tmp_path):
    ours = ("--url", url, "--input-len", 20, "--output-len", 8, "--concurrency", 3, "--num-prompts", 6)
    theirs = ("--base-url", url, "--random-input-len", 20, "--random-output-len", 8, "--max-concurrency", 3)
    for name, words in (("ours", ours), ("theirs", (*theirs, "--num-prompts", 6))):
        load(*words, "--output-dir", tmp_path / name)
        kept = stored(tmp_path / name, "metrics.json")
        assert (kept["completed"], kept["total_input_tokens"], kept["total_output_tokens"]) == (6, 120, 48)
        assert kept["max_concurrency"] == 3 and not complaints(kept)
    assert stored(tmp_path / "ours")["workload"] == stored(tmp_path / "theirs")["workload"]
    load(*ours[:-4], "--request-rate", 50, "--num-prompts", 4, "--output-dir", tmp_path / "open")
    assert stored(tmp_path / "open", "metrics.json")["request_rate"] == 50


def test_a_server_that_nobody_declared_is_measured_as_it_is_found(tmp_path, capsys):
    words = ("--input-len", 20, "--output-len", 8, "--concurrency", 3, "--num-prompts", 6)
    with fake_server(*CACHING, fire=[{"path": "/reset_prefix_cache", "do": "status", "status": 404}]) as (_, url):
        for name, more in (("found", ()), ("cold", ("-o", "load.cache_state=cold"))):
            load("--url", url, *words, *more, "--output-dir", tmp_path / name)
    found, cold = (stored(tmp_path / name, "metrics.json") for name in ("found", "cold"))
    assert found["cache_state"] == "steady" and not complaints(found)
    manifest = stored(tmp_path / "found")["workload"]["load"]
    assert manifest["cache_state"] == found["prefix_cache"]["state"] == "steady"
    assert any("no way to empty" in note for note in found["notes"]) and cold["notes"] == []
    (reason,) = complaints(cold)[:1]  # it was declared: that stays strict
    assert "state of the prefix cache is not known" in reason and "-o load.cache_state=steady" in reason
    told = capsys.readouterr().out
    assert told.count("note: the server has no way to empty its prefix cache") == 1
    assert cold["prefix_cache"]["hits"] and "from before this load" in " ".join(complaints(cold))  # the same seed


def test_a_load_is_kept_whole_with_vllms_field_names_and_without_the_key(url, workload, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVBENCH_TEST_KEY", "s3cr3t-value")
    out = tmp_path / "out"
    words = ("--url", url, "--goodput", "ttft:2000", "tpot:500", "--output-dir", out, "--seed", 9)
    load(workload, *words, "--api-key-env", "KVBENCH_TEST_KEY")
    manifest, kept = stored(out), stored(out, "metrics.json")
    assert (manifest["status"], manifest["kind"], manifest["seed"]) == ("complete", "load", 9)
    assert manifest["target"] == {
        "url": url, "preset": "openai", "version": None, "model": "fake", "vocab_size": 8192, "max_model_len": 256,
        "endpoint": "completions", "template_tokens": 0,
    }  # fmt: skip
    assert manifest["workload"]["load"]["slo"] == {"ttft_ms": 2000.0, "tpot_ms": 500.0}
    assert manifest["versions"]["kvbench"] and manifest["calibration"]["left_out"]
    assert complaints(kept) == [] and kept["completed"] == kept["num_prompts"] == 6
    assert kept["mean_ttft_ms"] == kept["metrics"]["ttft_ms"]["mean"] > 0 and kept["max_concurrency"] == 2
    assert kept["request_goodput"] == pytest.approx(6 / kept["duration"])
    assert kept["prefix_cache"]["queries"] == kept["total_input_tokens"]
    assert {p.name for p in out.iterdir()} >= {"requests.parquet", "load.json", "counters.json", "server.parquet"}
    assert not any(b"s3cr3t-value" in p.read_bytes() for p in out.rglob("*") if p.is_file())
    told = capsys.readouterr().out
    assert "100.0% of the requests sent) met ttft <= 2000 ms and tpot <= 500 ms" in told
    assert "CPU seconds per 1,000 output tokens" in told and "prefix cache, cold" in told
    with pytest.raises(UsageError, match="is not empty"):
        load(workload, *words)
    before = (out / "requests.parquet").stat().st_mtime_ns
    write_json(out / "manifest.json", manifest | {"valid": True})  # whatever else this machine did meanwhile
    load(workload, *words, "--resume")  # finished: shown again, not run again
    assert (out / "requests.parquet").stat().st_mtime_ns == before
    with pytest.raises(UsageError, match=r"differs in load.num_requests"):
        load(workload, *words, "--num-prompts", 7, "--resume")


def test_warm_ups_that_fail_are_sent_again_and_told_and_if_all_do_nothing_is_measured(workload, tmp_path, capsys):
    out = tmp_path / "out"
    with fake_server(*CACHING, fire=[{"path": "plain", "do": "status", "count": 2}]) as (_, url):
        load(workload, "--url", url, "--output-dir", out)
    kept = stored(out, "metrics.json")
    assert complaints(kept) == [] and kept["failed"] == 0
    assert (kept["warm_up"]["answered"], kept["warm_up"]["failures"], kept["warm_up"]["in_flight"]) == (6, 2, 2)
    assert "under fire" in kept["warm_up"]["last"] and stored(out)["warm_up"] == kept["warm_up"]
    assert "warm-up: 6 of 6 requests were answered, after 2 failed attempts" in capsys.readouterr().out
    with fake_server(*CACHING, fire=[{"path": "plain", "do": "status"}]) as (process, url):
        with pytest.raises(MeasurementError, match=r"\(3 attempts\): .*under fire"):
            load(workload, "--url", url)
        assert process.poll() is None


@pytest.mark.full
def test_a_search_whose_runs_are_invalid_says_how_to_go_on(url, workload, tmp_path, capsys, monkeypatch):
    words = ("--url", url, "--find-max-rate", "p95_ttft<=9s", "--request-rate", 20, "--max-rate", 20)
    monkeypatch.setattr(contention, "foreign_limit", lambda *args: -1000.0)  # nothing keeps that, however short it is
    assert load(workload, *words, "--num-prompts", 4, "--run-seconds", 0, "--output-dir", tmp_path / "out") == 4
    told = capsys.readouterr().out
    assert "Not known whether any rate meets p95_ttft<=9s" in told and "--resume" in told
    assert stored(tmp_path / "out")["status"] == "incomplete"


@pytest.mark.full
def test_a_server_that_says_nothing_of_itself_while_the_load_runs_is_not_measured(workload, tmp_path):
    out = tmp_path / "out"
    words = ("--max-concurrency", 8, "--num-prompts", 8, "--output-dir", out)
    with fake_server(*CACHING, FAKE_FAULT="mute", FAKE_TOKEN_S="0.1") as (_, url):
        assert load(workload, "--url", url, *words) == 4
    (reason,) = complaints(stored(out, "metrics.json"))
    assert "/metrics did not answer while the load ran" in reason
    counters = stored(out, "counters.json")
    assert counters["polls_failed"] > 0 and not any(name.endswith("_peak") for name in counters)


@pytest.mark.parametrize(
    ("users", "requests", "fatal"),
    [  # many requests are refused; too few to suspect it by; none
        (4, 40, 17), pytest.param(8, 12, 6, marks=pytest.mark.full), pytest.param(1, 5, 5, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_a_server_that_is_killed_amid_the_load_is_said_to_be_away_and_after_how_many(workload, users, requests, fatal):
    rule = {"path": "stream", "do": "mid_kill", "first": fatal + 1}  # one asks what the server takes
    words = ("--max-concurrency", users, "--num-prompts", requests, "--num-warmups", 0)
    with fake_server(*CACHING, fire=[rule], FAKE_TOKEN_S="0.02") as (_, url), pytest.raises(MeasurementError) as failed:
        load(workload, "--url", url, *words)
    said = re.fullmatch(rf"after (\d+) of {requests} requests: the server went away \(.*\)", str(failed.value))
    assert said and fatal - users <= int(said[1]) < fatal, str(failed.value)


def no_room(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("what", ["kvbench.measure.result.ServerReadings.store", "kvbench.sweep.one_load.write_record"])
def test_a_full_disk_does_not_take_the_figures_away(url, workload, tmp_path, monkeypatch, capsys, what):
    monkeypatch.setattr(what, no_room)
    with pytest.raises(MeasurementError, match="No space left") as failed:
        load(workload, "--url", url, "--output-dir", tmp_path / "out")
    told = capsys.readouterr().out
    assert failed.value.exit_code == 4 and told.count("TTFT") == 1 and "requests: 6 completed, 0 failed" in told
    assert stored(tmp_path / "out")["status"] == "incomplete"


FULL_FOR_THE_CLIENT = """
import atexit, errno, pathlib, sys
atexit.register(lambda: pathlib.Path({told!r}).write_text(" ".join(sys.modules)))
replace = pathlib.Path.replace
def refuse(path, target):
    if str(target).startswith({folder!r}):
        raise OSError(errno.ENOSPC, "No space left on device")
    return replace(path, target)
pathlib.Path.replace = refuse
"""


def test_a_client_without_room_in_the_folder_hands_its_samples_over_elsewhere(url, workload, tmp_path, monkeypatch):
    """In this process there is room: it puts them where they belong. What no load needs was not imported."""
    out, told = tmp_path / "out", tmp_path / "modules"
    (tmp_path / "site").mkdir()
    code = FULL_FOR_THE_CLIENT.format(folder=str(out), told=str(told))
    (tmp_path / "site" / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    load(workload, "--url", url, "--output-dir", out)
    assert complaints(stored(out, "metrics.json")) == [] and stored(out)["status"] == "complete"
    assert len(pd.read_parquet(out / "requests.parquet")) == 6 and stored(out, "load.json")["completed"] == 6
    imported = told.read_text().split()
    assert "pyarrow" in imported and not {"pandas", "flask", "kvbench.workload.load_section"} & set(imported)


def test_requests_that_the_server_cannot_take_are_refused_before_anything_is_sent_or_written(url, workload, tmp_path):
    for words in ((), ("--find-max-rate", "p95_ttft<=1s")):
        with pytest.raises(UsageError, match=r"no requests can be made: .* max_model_len 20"):
            load(workload, "--url", url, "--max-model-len", 20, "--output-dir", tmp_path / "out", *words)
    with pytest.raises(UsageError, match=r"--vocab-size 9000 is more than the 8192 that .* tells"):
        load(workload, "--url", url, "--vocab-size", 9000)
    assert not (tmp_path / "out").exists()


def test_a_server_that_refuses_requests_is_a_finding_and_not_measured_again(workload, tmp_path, capsys):
    out = tmp_path / "out"
    with own_mock("--ttft-ms", "5", "--itl-ms", "1", "--fail-rate", "0.5") as (_, url):
        words = ("--url", url, "-o", "load.cache_state=steady", "--num-prompts", 20, "--output-dir", out)
        code = load(workload, *words)
        kept, told = stored(out, "metrics.json"), capsys.readouterr().out
        assert code == (4 if kept["invalid_reasons"] else 0) and complaints(kept) == []
        assert kept["valid"] is False and kept["metrics"]["refused_by_server"] == 10
        assert kept["refused"].startswith('served 10 of 20 requests; 10 of 20: "HTTP 500')
        assert f"server {kept['refused']}" in told
        if code == 0:
            assert load(workload, *words, "--resume") == 0 and "is not run again" in capsys.readouterr().out


def test_a_server_that_fails_requests_is_to_be_mended_before_the_load_is_measured_again(workload, tmp_path, capsys):
    out = tmp_path / "out"
    with own_mock("--ttft-ms", "5", "--itl-ms", "1", "--truncate-rate", "0.5") as (_, url):
        words = ("--url", url, "-o", "load.cache_state=steady", "--num-prompts", 20, "--num-warmups", 0)
        assert load(workload, *words, "--output-dir", out) == 4
    kept, told = stored(out, "metrics.json"), capsys.readouterr().out
    (why,) = complaints(kept)
    assert kept["failed"] == 10 and why.startswith('10 of 20 requests failed: truncated: "') and kept["refused"] is None
    assert "most frequent failures: 10 of 20" in told and "the first failure" not in told  # it is the same
    assert told.index("the server failed requests") < told.index("--resume")
    assert stored(out)["sharing"] == {"processes": None, "workers": None}


@pytest.mark.full
def test_a_models_query_reaches_a_server_that_lists_the_name_before_it(workload, tmp_path):
    with own_mock("--ttft-ms", "5", "--itl-ms", "1") as (_, url):
        words = ("--url", url, "-o", "load.cache_state=steady", "--output-dir", tmp_path / "out")
        load(workload, *words, "--model", "mock?ttft_ms=300&itl_ms=10")
        found = stored(tmp_path / "out", "metrics.json")["metrics"]
        assert found["ttft_ms"]["p50"] > 250 and found["itl_ms"]["p50"] == pytest.approx(10, abs=7)
        with pytest.raises(UsageError, match="serves no model 'rock"):
            load(workload, *words, "--model", "rock?ttft_ms=30")


SENDING = "cells/target-c2/loads/running-1/spec.json"


@pytest.mark.full
@pytest.mark.parametrize(
    ("server", "words", "begun", "number"),
    [
        (lambda: fake_server(FAKE_TOKEN_S="1"), ("--num-warmups", "0"), SENDING, signal.SIGTERM),
        (lambda: fake_server(FAKE_TOKEN_S="100"), (), "manifest.json", signal.SIGINT),  # in the warm-up
    ],
)
def test_an_interrupted_load_says_how_to_go_on_and_leaves_no_process(workload, tmp_path, server, words, begun, number):
    """At once, though the server answers nothing."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "kvbench", "load", str(workload), "--no-calibration", "--output-dir", str(out)]
    with server() as (_, url):
        own = os.environ | {"KVBENCH_FORK_SERVERS": ""}  # its children, and not this session's
        command += ["--url", url, *words]
        process = subprocess.Popen(command, cwd=ROOT, env=own, stdout=subprocess.PIPE, text=True)
        wait_until((out / begun).exists)
        time.sleep(0.5)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        told, _ = process.communicate(timeout=15)  # the workload's own time-out is 20 s
    assert process.returncode == 130 and "--resume" in told
    assert stored(out)["status"] == "incomplete"
    assert len(children) >= bool(words) and not psutil.wait_procs(children, timeout=5)[1]


@pytest.mark.full
def test_samples_that_cannot_be_written_are_a_sentence_and_the_load_is_resumed(url, workload, tmp_path):
    out = tmp_path / "out"
    words = (workload, "--url", url, "--num-prompts", 8, "--output-dir", out)
    command = [sys.executable, "-m", "kvbench", "load", *map(str, words), "--no-calibration"]
    small_files = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (5 * 1024, 5 * 1024))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=small_files)
    assert done.returncode == 4 and "Traceback" not in done.stderr
    assert f"{out}" in done.stderr and "File too large" in done.stderr and "--resume" in done.stderr
    assert stored(out)["status"] == "incomplete" and not (out / "metrics.json").exists()
    load(*words, "--resume")
    assert stored(out)["status"] == "complete" and stored(out, "metrics.json")["completed"] == 8


@pytest.mark.full
def test_the_highest_rate_of_a_server_that_takes_one_request_at_a_time(workload, tmp_path, capsys):
    """Two tokens of 20 ms, one request in flight: at most 25 requests/s, whatever else the machine does."""
    out = tmp_path / "out"
    classes = [{"name": "a", "share": 1.0, "prompt_tokens": 8, "output_tokens": 2}]
    words = (
        "-o", f"load.prompts={json.dumps({'kind': 'synthetic', 'classes': classes})}", "-o", "load.arrivals=constant",
        "--find-max-rate", "p95_ttft<=150ms", "--request-rate", 20, "--max-concurrency", 1, "--num-prompts", 24,
        "--run-seconds", 0, "--tolerance", 0.5, "--output-dir", out,
    )  # fmt: skip
    with fake_server(*CACHING, FAKE_TOKEN_S="0.02") as (_, url):
        code = load(workload, "--url", url, *words)
        found = stored(out, "search.json")
        if found["outcome"] in (INVALID, CLIENT_LIMIT):
            assert any(words in found["reason"] for words in BUSY_MACHINE), found["reason"]
            pytest.skip(f"this machine is too busy to measure: {found['reason']}")
        known = found["interval"]
        assert code == 0 and found["outcome"] == "found" and known["low"] < found["max_rate"] < known["high"]
        assert known["low"] <= 25 * 1.1 and known["high"] <= 1.5 * known["low"]
        runs = sorted((out / "runs").iterdir())
        assert len(runs) == len(found["runs"]) and all((run / "requests.parquet").is_file() for run in runs)
        prompts = [path.name.rpartition("-")[2] for path in (out / "requests").glob("*.jsonl")]
        assert len(set(prompts)) == len(prompts)  # every run has requests of its own
        assert stored(out)["status"] == "complete"
        said = capsys.readouterr().out
        assert "Highest rate that meets p95_ttft<=150ms" in said
        load(workload, "--url", url, *words, "--resume")
        assert len(list((out / "runs").iterdir())) == len(runs)
        assert found["answer"] in capsys.readouterr().out


@pytest.mark.full
def test_workers_on_a_master_s_machine_are_not_foreign_to_it(workload, tmp_path, monkeypatch, capsys):
    """Any use of the machine by others would be too much, but the master cannot tell its workers from others."""
    monkeypatch.setattr(contention, "foreign_limit", lambda *args: -1000.0)
    port, out = str(free_port()), tmp_path / "out"
    with fake_server(*CACHING) as (_, url):
        worker = start_load("--worker", "--master-port", port)
        try:
            load(workload, "--url", url, "--master", "--bind-port", port, "--output-dir", out)
            assert worker.wait(timeout=20) == 0
        finally:
            worker.kill()
            worker.communicate()
    kept, said = stored(out, "metrics.json"), capsys.readouterr().out
    assert kept["metrics"]["client"]["workers_here"] and kept["machine"]["foreign_cpu_cores"] is None
    assert not [reason for reason in kept["invalid_reasons"] if reason.startswith("other processes used")]
    assert kept["calibration"] is None and "client: not calibrated" in said
