"""Servers that die, hang, refuse or leak, and input that is wrong: a sentence, an exit code, nothing lost."""

from __future__ import annotations

import socket

import pytest

from tests.support.sweep_parts import Bench, alive, complaints, finished, manifest


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_a_server_that_dies_costs_its_load_only_and_resume_mends_it(bench):
    path = bench.write()
    spent = bench.folder / "spent"
    done = bench.sweep(str(path), "--no-report", FAKE_FAULT="die:2", FAKE_FAULT_ONCE=str(spent))
    run = bench.only_run()
    assert done.returncode == 4
    assert spent.exists() and len(bench.launches) == 4  # the other blocks were run
    assert len(finished(run)) == 3
    assert "fake engine: out of memory, dying" in done.stdout  # the server's last words
    found = manifest(run)
    assert found["status"] == "incomplete"
    (failure,) = found["failures"]
    assert "dying" in failure["reason"] and "--resume" in done.stdout
    before = finished(run)
    again = bench.sweep("--resume", str(run), "--no-report", FAKE_FAULT="die:2", FAKE_FAULT_ONCE=str(spent))
    assert again.returncode in (0, 4)
    after = finished(run)
    assert len(after) == 4 and {key: after[key] for key in before} == before
    assert manifest(run)["status"] == "complete" and manifest(run)["failures"] == [] and complaints(run) == []


def test_a_server_that_fails_to_start_once_does_not_end_the_sweep(bench):
    path = bench.write(load={"repeats": 1})
    done = bench.sweep(
        str(path), "--no-report", FAKE_FAULT="exit_at_start", FAKE_FAULT_ONCE=str(bench.folder / "spent")
    )
    assert done.returncode == 4
    assert "exit code 1 before it was ready" in done.stdout and "a library is missing" in done.stdout
    assert len(finished(bench.only_run())) == 1


def test_a_server_that_never_gets_ready_is_stopped_and_the_sweep_gives_up(bench):
    path = bench.write(load={"repeats": 5})
    done = bench.sweep(str(path), "--start-timeout", "1", FAKE_FAULT="never_ready")
    assert done.returncode == 4
    assert (
        "not ready after 1 s" in done.stdout
        and "still loading" in done.stdout
        and "nothing was measured" in done.stdout
    )
    assert 1 <= len(bench.launches) <= 2  # not five repeats of waiting
    assert not any(alive(launch["pid"]) for launch in bench.launches)


def test_a_server_that_refuses_its_settings_is_bad_input(bench):
    done = bench.sweep(str(bench.write()), FAKE_FAULT="refuse")
    assert done.returncode == 2
    assert done.stderr.strip() == "error: kv_budget 1 is too small for this fake engine: raise kv_budget"


def test_pages_that_stay_owned_make_a_load_invalid_but_keep_it(bench):
    path = bench.write(load={"repeats": 1})
    done = bench.sweep(str(path), "--only", "paged*", "--no-report", FAKE_FAULT="leak")
    assert done.returncode == 4
    assert "6 KV pages were still owned 5 s after the last request ended" in done.stdout
    assert len(finished(bench.only_run())) == 1


def test_a_port_in_use_is_said_before_anything_starts(bench):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = bench.sweep(str(bench.write()), "--port", str(port))
    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 cannot be used" in done.stderr and "--port" in done.stderr
    assert not bench.results.exists() and not bench.launches


def test_dry_run_launches_and_writes_nothing(bench):
    done = bench.sweep(str(bench.write()), "--dry-run")
    assert done.returncode == 0
    assert "2 configurations, 2 cells, 4 server launches, 4 loads" in done.stdout
    assert "paged-p16-c2" in done.stdout and "repeat 2: contiguous" in done.stdout
    assert not bench.results.exists() and not bench.launches


def test_a_target_that_does_not_answer(bench):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    done = bench.sweep(str(bench.write()), "--target", url, fake=False)
    assert done.returncode == 2 and url in done.stderr
