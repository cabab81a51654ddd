"""Whole loads of several processes on loopback: undisturbed, with another clock, and with processes lost."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from kvbench.requests.request import RequestSpec
from tests.support.loads import (
    ROOT,
    SUPPORT,
    LoadProcess,
    LoadRunner,
    ended,
    free_port,
    requests_of,
    stamps_of,
    start_load,
    wait_for,
)
from tests.support.raw_worker import RawWorker

LIMIT_S = 120  # far beyond what each needs, so that a busy machine passes


def requests(count: int, tag: int, **fields: Any) -> list[RequestSpec]:
    """The last 8 are two sessions of four turns."""
    rows = requests_of(count, tag, **fields)
    for k, row in enumerate(rows[-8:]):
        arrival = None if k > 1 else row.arrival_s
        rows[count - 8 + k] = dataclasses.replace(row, session=k % 2, turn=k // 2, arrival_s=arrival)
    return rows


def endless(loads: LoadRunner, tag: int, **fields: Any) -> Path:
    """The spec of a load that takes a minute and more: whatever a test does to it happens in its middle."""
    return loads.spec(requests(1000, tag, max_tokens=20), model="mock?itl_ms=20", **fields)


def master_of(spec: Path, workers: int, arrive_s: float = 60.0, **variables: str) -> tuple[LoadProcess, str]:
    """A master on a free port, and that port as it says it."""
    place = ("--bind-port", "0", "--arrive-timeout", str(arrive_s))
    process = start_load(str(spec), "--master", "--expect-workers", str(workers), *place, **variables)
    return process, str(json.loads(process.stdout.readline())["port"])


def worker_of(port: str, **more: str) -> LoadProcess:
    return start_load("--worker", "--master-port", port, **more)


def said_by(worker: LoadProcess) -> tuple[int, str]:
    """Exit code, and the last line of stderr."""
    _, err = worker.communicate(timeout=LIMIT_S)
    return worker.returncode, err.splitlines()[-1] if err else ""


def none_left(found: list[psutil.Process]) -> bool:
    """Whether they end."""
    return not psutil.wait_procs(found, timeout=LIMIT_S)[1]


def test_a_master_and_three_workers_make_the_schedule_of_one_process(loads: LoadRunner) -> None:
    """The workers get spec and requests over the wire, start at one moment, and every sample comes back."""
    sent = requests(45, tag=7000, spacing_s=0.03)
    free = {"concurrency": None, "request_rate": 33.0, "max_concurrency": 60}  # a cap that is never reached
    spec = loads.spec(sent, mode="open", model="mock?ttft_ms=300&itl_ms=5", **free)
    master, port = master_of(spec, 3)
    workers = [worker_of(port) for _ in range(3)]
    result = ended(master, spec.parent)
    assert result.code == 0, result.stderr
    assert [w.wait(LIMIT_S) for w in workers] == [0, 0, 0]
    samples, load = result.samples, result.load
    assert samples["index"].tolist() == list(range(45))
    assert samples["ok"].all(), samples["error"].tolist()
    # Intended starts are those of the schedule to the microsecond, on one time axis.
    first_turns = [r.index for r in sent if r.arrival_s is not None]
    assert samples["t0"].to_numpy()[first_turns] == pytest.approx([sent[i].arrival_s for i in first_turns], abs=1e-6)
    assert (samples["ts"] >= samples["t0"]).all()
    stamps = stamps_of(loads.url)
    received = np.array([stamps[(7000, i)]["received"] - load["zero_perf_counter"] for i in range(45)])
    assert (samples["ts"].to_numpy() <= received).all() and (received <= samples["first"].to_numpy()).all()
    own = load["client"]["processes"]
    assert sum(p["requests"] for p in own) == 45 and min(p["requests"] for p in own) >= 11
    assert load["locust"] == {"num_requests": 45, "num_failures": 0}
    assert not load["incomplete"]
    assert "max_concurrency" in load["notes"] and "wall_clock" not in load["notes"]
    moments = sorted([(t, 1) for t in samples["ts"]] + [(t, -1) for t in samples["end"]])
    assert load["max_in_flight"] == max(np.cumsum([step for _, step in moments])) > 5
    assert all(p["clock"]["same_clock"] and p["clock"]["error_ms"] == 0 for p in own)
    assert load["client"]["workers_here"]


@pytest.mark.full
def test_a_worker_with_another_clock_is_put_on_the_masters(loads: LoadRunner) -> None:
    """One of two workers lives in a time namespace whose CLOCK_MONOTONIC is 500 s ahead: as on another machine."""
    elsewhere = "unshare --time --monotonic 500 --fork"
    if subprocess.run([*elsewhere.split(), "true"], check=False, capture_output=True).returncode:
        pytest.skip("this system does not let us make a time namespace")
    sent = requests(40, tag=7100, spacing_s=0.03)
    spec = loads.spec(sent, mode="open", concurrency=None, request_rate=33.0, model="mock?ttft_ms=30")
    master, port = master_of(spec, 2)
    workers = [worker_of(port), worker_of(port, wrapper=elsewhere)]
    result = ended(master, spec.parent)
    assert result.code == 0, result.stderr
    assert [w.wait(LIMIT_S) for w in workers] == [0, 0]
    clocks = sorted((p["clock"] for p in result.load["client"]["processes"]), key=lambda c: c["same_clock"])
    assert [c["same_clock"] for c in clocks] == [False, True]
    assert clocks[0]["offset_ms"] == pytest.approx(500_000, abs=clocks[0]["error_ms"])
    samples, stamps, zero = result.samples, stamps_of(loads.url), result.load["zero_perf_counter"]
    assert samples["ok"].all()
    # The server's clock is the master's: sent before received before the first chunk, to the error that is told.
    received = np.array([stamps[(7100, i)]["received"] - zero for i in range(40)])
    slack = clocks[0]["error_ms"] / 1000
    assert (received >= samples["ts"].to_numpy() - slack).all()
    assert (received <= samples["first"].to_numpy() + slack).all()


@pytest.mark.parametrize(
    ("remote", "number", "why"),
    [
        (False, signal.SIGKILL, "its process ended (signal 9)"),
        pytest.param(True, signal.SIGKILL, "its heartbeats stopped", marks=pytest.mark.full),
        pytest.param(True, signal.SIGINT, "was stopped by SIGINT", marks=pytest.mark.full),
    ],
)
def test_a_worker_lost_in_the_middle_ends_the_load_as_invalid(
    loads: LoadRunner, remote: bool, number: int, why: str
) -> None:
    spec = endless(loads, 7200 + remote + number, processes=1 if remote else 3, concurrency=6)
    if remote:
        master, port = master_of(spec, 3)
        started = [worker_of(port) for _ in range(3)]
        wait_for(master)
        workers = [psutil.Process(process.pid) for process in started]
    else:
        master = loads.start(spec)
        wait_for(master)
        workers = psutil.Process(master.pid).children()
    assert len(workers) == 3
    workers[1].send_signal(number)
    result, killed = ended(master, spec.parent), number == signal.SIGKILL
    assert result.code == 4 and f"(pid {workers[1].pid} on" in result.stderr and why in result.stderr
    assert result.events[-1]["event"] == "end" and result.events[-1]["incomplete"]
    load, samples = result.load, result.samples
    missing = 1000 - (samples["error_kind"] != "interrupted").sum()
    assert load["incomplete"] and 0 < missing < 1000  # the other two kept what they had measured
    assert f"{missing} requests were never finished" in " ".join(load["invalid_reasons"])
    assert why in " ".join(load["invalid_reasons"])
    assert len(load["client"]["processes"]) == (2 if killed else 3)  # what a stopped one had measured came back, too
    if remote:
        codes, last_words = zip(*map(said_by, started), strict=True)
        assert codes == (4, -9 if killed else 130, 4) and why in last_words[0]  # a survivor's load has failed, too
    assert none_left(workers)


@pytest.mark.parametrize("whole_group", [True, pytest.param(False, marks=pytest.mark.full)])
def test_no_worker_outlives_its_master(loads: LoadRunner, whole_group: bool) -> None:
    """The master alone is killed; or all are stopped by SIGTERM, as kvbench stops its load process."""
    spec = endless(loads, 7400 + whole_group, processes=2)
    master = start_load(str(spec))
    wait_for(master)
    workers = psutil.Process(master.pid).children()
    assert len(workers) == 2
    os.killpg(master.pid, signal.SIGTERM) if whole_group else master.kill()
    assert none_left(workers)
    result = ended(master, spec.parent)
    assert (spec.parent / "load.json").exists() is whole_group
    if whole_group:
        assert result.code == 143, result.stderr
        assert result.load["incomplete"] and 8 <= result.load["completed"] < 1000
        assert len(result.load["client"]["processes"]) == 2


@pytest.mark.parametrize(("stop", "code"), [(False, 4), pytest.param(True, 143, marks=pytest.mark.full)])
def test_workers_that_do_not_come_are_not_waited_for_without_end(loads: LoadRunner, stop: bool, code: int) -> None:
    spec = loads.spec(requests(20, tag=7650), model="mock")
    master, _ = master_of(spec, 2, arrive_s=60.0 if stop else 0.5)
    if stop:
        master.terminate()
    result = ended(master, spec.parent)
    assert result.code == code and (stop or "0 of 2 workers came within 0.5 s" in result.stderr)
    assert "Traceback" not in result.stderr and not (spec.parent / "load.json").exists()


def test_more_workers_than_users_is_a_sentence(loads: LoadRunner) -> None:
    spec = loads.spec(requests(20, tag=7700), model="mock", concurrency=2)
    code, said = said_by(start_load(str(spec), "--master", "--expect-workers", "3", "--bind-port", "0"))
    assert code == 2 and "3 workers are too many" in said and "at most 2" in said


@pytest.mark.full
def test_a_worker_that_waits_for_its_master_can_be_stopped() -> None:
    port = str(free_port())
    worker = worker_of(port)
    assert any(f"127.0.0.1:{port}" in line for line in worker.stdout)
    worker.send_signal(signal.SIGTERM)
    code, said = said_by(worker)
    assert code == 130 and "stopped by SIGTERM" in said and port in said


def test_a_master_whose_name_nobody_knows_is_not_waited_for() -> None:
    code, said = said_by(start_load("--worker", "--master-host", "a..b"))
    assert code == 2 and "--master-host 'a..b'" in said and "Traceback" not in said


@pytest.mark.full
def test_a_worker_whose_measuring_dies_ends_the_load_with_its_error(loads: LoadRunner) -> None:
    """Its heartbeats go on: only what it says of the load tells that it is over."""
    spec = loads.spec(requests(20, tag=8950), model="mock")
    master, port = master_of(spec, 1)
    command = [sys.executable, str(SUPPORT / "mutant_load.py"), "dying", "--worker", "--master-port", port]
    worker = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    result = ended(master, spec.parent)
    assert worker.wait(LIMIT_S) == 4
    assert result.code == 4 and result.load["incomplete"]
    why = "OSError(24, 'Too many open files')"
    assert why in result.stderr and why in " ".join(result.load["invalid_reasons"])


def scripted(raw: RawWorker) -> None:
    """A worker that measures nothing: it answers what comes before its samples, and says that its streams ended."""
    answers = {
        "kvbench_clock": {"t2": 1.0, "t3": 1.0},
        "kvbench_shard": {},
        "kvbench_start": {"left_s": 1.0},
    }
    for kind, _ in raw.heard(LIMIT_S):
        if kind in answers:
            raw.say(kind, answers[kind])
        if kind == "kvbench_start":
            raw.say("kvbench_ended", {"done": 10, "failed": 0, "gone": None, "signal": 0, "error": None})
            return


@pytest.mark.full
def test_a_worker_lost_between_its_last_stream_and_its_samples_is_told(loads: LoadRunner) -> None:
    spec = loads.spec(requests(20, tag=8700), model="mock")
    master, port = master_of(spec, 2)
    real = worker_of(port)
    with RawWorker(port) as raw:
        raw.join()
        scripted(raw)
        result = ended(master, spec.parent)
    assert result.code == 4 and "on raw) was lost: " in result.stderr
    load = result.load
    assert load["incomplete"] and len(load["client"]["processes"]) == 1
    assert load["completed"] == len(result.samples) == 10
    assert "10 requests were never finished" in " ".join(load["invalid_reasons"])
    assert said_by(real)[0] == 4


TOKEN = {"KVBENCH_LOAD_TOKEN": "right"}


def disturb(raw: RawWorker) -> None:
    """No messages; then a stranger's own statistics, an exception, a stop, all without having been let in."""
    for frame in (b"\xc1", b"\x90", b"", b"\x93\xa4spam\xc0\x01"):
        raw.send_bytes(frame)
    raw.say("kvbench_join", [1, 2])
    raw.say("kvbench_join", {"proof": 7, "version": {}})
    entry = {"name": "x", "method": "POST", "num_requests": 1000}
    raw.say("stats", {"stats": [], "stats_total": entry, "errors": {}, "user_classes_count": {}})
    for kind in ("spawning", "spawning_complete", "heartbeat", "client_stopped", "exception", "quit", "kvbench_ended"):
        raw.say(kind, {"state": "ready", "current_cpu_usage": 0.0, "user_classes_count": {"ClosedLoopUser": 3}})


@pytest.mark.full
def test_strangers_before_and_during_the_load_do_it_no_harm(loads: LoadRunner) -> None:
    """Two wanted workers; beside them one with another token, one that leaves again, one too many, and garbage."""
    spec = loads.spec(requests(80, tag=8000), model="mock?ttft_ms=100")
    master, port = master_of(spec, 2, **TOKEN)
    stranger = worker_of(port, KVBENCH_LOAD_TOKEN="wrong")
    with RawWorker(port, "wrong") as before, RawWorker(port, "right") as leaving, RawWorker(port, "right") as surplus:
        disturb(before)
        assert "KVBENCH_LOAD_TOKEN" in before.join()["error"]
        assert leaving.join().keys() == {"proof"}
        leaving.say("quit")
        code, said = said_by(stranger)
        assert code == 4 and "another KVBENCH_LOAD_TOKEN" in said
        workers = [worker_of(port, **TOKEN) for _ in range(2)]
        wait_for(master, done=4)
        assert "all its workers" in surplus.join()["error"]
        disturb(surplus)
        result = ended(master, spec.parent)
    assert result.code == 0, result.stderr
    assert [w.wait(LIMIT_S) for w in workers] == [0, 0]
    assert result.samples["ok"].all() and len(result.samples) == 80
    assert result.load["locust"] == {"num_requests": 80, "num_failures": 0}
    assert sorted(p["name"][:13] for p in result.load["client"]["processes"]) == ["worker 1 of 2", "worker 2 of 2"]
    written = "".join(path.read_text(errors="ignore") for path in spec.parent.iterdir())
    assert "right" not in written + result.stderr + result.stdout + said and "Traceback" not in result.stderr


@pytest.mark.full
def test_nobody_speaks_for_another(loads: LoadRunner) -> None:
    """A stranger that knows a worker's name says that it has stopped, and answers in its place."""
    spec = loads.spec(requests(8, tag=8400), model="mock")
    master, port = master_of(spec, 1, **TOKEN)
    with RawWorker(port, "right") as member, RawWorker(port, "wrong") as liar:
        assert "error" not in member.join()
        assert next(kind for kind, _ in member.heard(LIMIT_S) if kind != "heartbeat") == "kvbench_clock"
        liar.say("quit", None, node=member.node)
        liar.say("kvbench_clock", {"t2": 0.0, "t3": 0.0}, node=member.node)
        assert list(liar.heard(0.5)) == []
        member.say("kvbench_clock", {"error": "this is the member's own word"})
        result = ended(master, spec.parent)
    assert result.code == 4 and "this is the member's own word" in result.stderr
