"""Whole loads of several processes on loopback: undisturbed, with another clock, and with processes killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from kvbench.requests.request import RequestSpec
from tests.support.loads import ROOT, LoadRunner, Result, stamps_of

LIMIT_S = 40  # far beyond what each needs, so that a busy machine passes


def requests(count: int, tag: int, max_tokens: int = 5, spacing_s: float | None = None) -> list[RequestSpec]:
    """``count`` requests whose prompts [tag, i] nobody else sends; the last 8 are two sessions of four turns."""
    rows = []
    for i in range(count):
        alone = i < count - 8
        turn = 0 if alone else (i - count + 8) // 2
        arrival = None if spacing_s is None or turn else i * spacing_s
        name, session = "odd" if i % 2 else "even", None if alone else i % 2
        rows.append(RequestSpec(i, name, (tag, i), None, max_tokens, arrival, session=session, turn=turn))
    return rows


def start(*arguments: str, group: bool = False, **variables: str) -> subprocess.Popen:
    """A load process of its own; ``group``: and its process group."""
    return subprocess.Popen(
        [*variables.pop("wrapper", "").split(), sys.executable, "-m", "kvbench.load", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | variables,
        start_new_session=group,
    )


def master_of(spec: Path, workers: int, arrive_s: float = 30.0, **variables: str) -> tuple[subprocess.Popen, str]:
    """A master on a free port, and that port as it says it."""
    place = ("--bind-port", "0", "--arrive-timeout", str(arrive_s))
    process = start(str(spec), "--master", "--expect-workers", str(workers), *place, **variables)
    return process, str(json.loads(process.stdout.readline())["port"])


def ended(process: subprocess.Popen, folder: Path) -> Result:
    """Waits for the end of a load."""
    out, err = process.communicate(timeout=LIMIT_S)
    return Result(process.returncode, out, err, folder)


def children_of(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children()


def wait_for(process: subprocess.Popen, elapsed_s: float) -> None:
    """Until the load has run so long."""
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "progress" and event["elapsed_s"] > elapsed_s:
            return
    raise AssertionError("the load ended before it was disturbed")


def none_left(found: list[psutil.Process]) -> bool:
    """Whether they are gone, within 10 s."""
    _, alive = psutil.wait_procs(found, timeout=10)
    return not alive


def test_a_master_and_three_workers_make_the_schedule_of_one_process(loads: LoadRunner) -> None:
    """The workers get spec and requests over the wire, start at one moment, and every sample comes back."""
    sent = requests(45, tag=7000, spacing_s=0.03)
    free = {"concurrency": None, "request_rate": 33.0, "max_concurrency": 60}  # a cap that is never reached
    spec = loads.spec(sent, mode="open", model="mock?ttft_ms=300&itl_ms=5", **free)
    master, port = master_of(spec, 3)
    workers = [start("--worker", "--master-port", port) for _ in range(3)]
    result = ended(master, spec.parent)
    assert result.code == 0, result.stderr
    assert [w.wait(timeout=10) for w in workers] == [0, 0, 0]
    samples, load = result.samples, result.load
    assert samples["index"].tolist() == list(range(45))
    assert samples["ok"].all(), samples["error"].tolist()
    # Intended starts are those of the schedule to the microsecond, on one time axis.
    first_turns = [r.index for r in sent if r.arrival_s is not None]
    assert samples["t0"].to_numpy()[first_turns] == pytest.approx([sent[i].arrival_s for i in first_turns], abs=1e-6)
    assert (samples["ts"] >= samples["t0"]).all()
    # The server saw them in that order as a whole, from its own clock, each within its slip.
    stamps = stamps_of(loads.url)
    zero = load["zero_perf_counter"]
    received = np.array([stamps[(7000, i)]["received"] - zero for i in range(45)])
    assert (received >= samples["ts"].to_numpy()).all()
    assert (received <= samples["first"].to_numpy()).all()
    sizes = [p["requests"] for p in load["client"]["processes"]]
    assert sum(sizes) == 45 and min(sizes) >= 11  # every worker had its share, and a session stayed whole
    assert load["locust"] == {"num_requests": 45, "num_failures": 0}
    assert not load["incomplete"]
    assert "cap of 60 is shared by 3 load processes" in load["notes"]["max_concurrency"]
    assert abs(load["wall_clock_step_s"]) < 0.05 and "wall_clock" not in load["notes"]
    moments = sorted([(t, 1) for t in samples["ts"]] + [(t, -1) for t in samples["end"]])
    assert load["max_in_flight"] == max(np.cumsum([step for _, step in moments])) > 5
    assert all(p["clock"]["same_clock"] and p["clock"]["error_ms"] == 0 for p in load["client"]["processes"])


def _time_namespaces() -> bool:
    try:
        return (
            subprocess.run(["unshare", "--time", "--monotonic", "500", "--fork", "true"], check=False).returncode == 0
        )
    except OSError:
        return False


def test_a_worker_with_another_clock_is_put_on_the_masters(loads: LoadRunner) -> None:
    """One of two workers lives in a time namespace whose CLOCK_MONOTONIC is 500 s ahead: as on another machine."""
    if not _time_namespaces():
        pytest.skip("this system does not let us make a time namespace")
    sent = requests(40, tag=7100, spacing_s=0.03)
    spec = loads.spec(sent, mode="open", concurrency=None, request_rate=33.0, model="mock?ttft_ms=30")
    master, port = master_of(spec, 2)
    here = start("--worker", "--master-port", port)
    there = start("--worker", "--master-port", port, wrapper="unshare --time --monotonic 500 --fork")
    result = ended(master, spec.parent)
    assert result.code == 0, result.stderr
    assert [w.wait(timeout=10) for w in (here, there)] == [0, 0]
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


@pytest.mark.parametrize("remote", [False, True])
def test_a_worker_killed_in_the_middle_ends_the_load_as_invalid(loads: LoadRunner, remote: bool) -> None:
    """One that the master started it sees end; of one that came by itself, as from another machine, it hears no more.

    300 requests at 6 users take over 19 s: far longer than the master needs for either.
    """
    sent = requests(300, tag=7250 if remote else 7200, max_tokens=20)
    spec = loads.spec(sent, model="mock?itl_ms=20", processes=1 if remote else 3, concurrency=6)
    if remote:
        master, port = master_of(spec, 3)
        started = [start("--worker", "--master-port", port) for _ in range(3)]
        workers = [psutil.Process(process.pid) for process in started]
        why = "its heartbeats stopped"
    else:
        master, why = loads.start(spec), "its process ended (signal 9)"
    wait_for(master, 0.6)
    if not remote:
        workers = children_of(master)
    assert len(workers) == 3
    workers[1].kill()
    asked = time.monotonic()
    result = ended(master, spec.parent)
    assert time.monotonic() - asked < 20
    assert result.code == 4
    assert f"was lost: {why}" in result.stderr
    assert result.events[-1]["event"] == "end" and result.events[-1]["incomplete"]
    load, samples = result.load, result.samples
    assert load["incomplete"]
    missing = 300 - (samples["error_kind"] != "interrupted").sum()
    assert 30 < missing < 300  # the other two kept what they had measured
    assert f"{missing} requests were never finished" in " ".join(load["invalid_reasons"])
    assert "was lost" in " ".join(load["invalid_reasons"])
    assert len(load["client"]["processes"]) == 2
    if remote:
        said = [process.communicate(timeout=LIMIT_S)[1] for process in started]
        assert [process.returncode for process in started] == [4, -9, 4]  # a survivor's load has failed, too
        assert "the load failed: worker" in said[0] and "its heartbeats stopped" in said[2]
    assert none_left(workers)


def test_a_hung_worker_is_noticed_by_its_heartbeats(loads: LoadRunner) -> None:
    spec = loads.spec(requests(300, tag=7300, max_tokens=20), model="mock?itl_ms=20", processes=2, concurrency=4)
    master = loads.start(spec)
    wait_for(master, 0.3)
    workers = children_of(master)
    workers[0].suspend()
    result = ended(master, spec.parent)
    assert result.code == 4
    assert "its heartbeats stopped" in result.stderr
    assert none_left(workers)


def test_a_killed_master_leaves_no_worker_behind(loads: LoadRunner) -> None:
    spec = loads.spec(requests(300, tag=7400, max_tokens=20), model="mock?itl_ms=20", processes=2, concurrency=6)
    master = loads.start(spec)
    wait_for(master, 0.2)
    workers = children_of(master)
    master.kill()
    assert none_left(workers)
    master.communicate(timeout=LIMIT_S)
    assert not (spec.parent / "load.json").exists()


def test_a_stop_of_the_whole_group_keeps_what_was_measured(loads: LoadRunner) -> None:
    """As kvbench stops its load process: SIGTERM to the group, so to master and workers at once."""
    spec = loads.spec(requests(300, tag=7500, max_tokens=10), model="mock?itl_ms=10", processes=2, concurrency=4)
    master = start(str(spec), group=True)
    wait_for(master, 0.6)
    workers = children_of(master)
    os.killpg(master.pid, signal.SIGTERM)
    result = ended(master, spec.parent)
    assert result.code == 143, result.stderr
    assert result.load["incomplete"]
    assert 4 <= result.load["completed"] < 300
    assert len(result.load["client"]["processes"]) == 2
    assert none_left(workers)


def test_a_worker_without_the_token_is_turned_away_and_the_load_does_not_begin(loads: LoadRunner) -> None:
    spec = loads.spec(requests(20, tag=7600), model="mock")
    master, port = master_of(spec, 1, KVBENCH_LOAD_TOKEN="right")
    stranger = start("--worker", "--master-port", port, KVBENCH_LOAD_TOKEN="wrong")
    _, err = stranger.communicate(timeout=LIMIT_S)
    assert stranger.returncode == 4
    assert "turned it away, it has another KVBENCH_LOAD_TOKEN" in err
    master.send_signal(signal.SIGTERM)
    result = ended(master, spec.parent)
    assert result.code == 143
    assert not (spec.parent / "load.json").exists()
    assert (7600, 0) not in stamps_of(loads.url)


def test_workers_that_do_not_come_are_not_waited_for_without_end(loads: LoadRunner) -> None:
    spec = loads.spec(requests(20, tag=7650), model="mock")
    result = ended(master_of(spec, 2, arrive_s=0.5)[0], spec.parent)
    assert result.code == 4
    assert "0 of 2 workers came within 0.5 s" in result.stderr
    assert "Traceback" not in result.stderr


def test_more_workers_than_users_is_a_sentence(loads: LoadRunner) -> None:
    spec = loads.spec(requests(20, tag=7700), model="mock", concurrency=2)
    done = start(str(spec), "--master", "--expect-workers", "3", "--bind-port", "0")
    _, err = done.communicate(timeout=LIMIT_S)
    assert done.returncode == 2
    assert "3 workers are too many" in err and "at most 2" in err
