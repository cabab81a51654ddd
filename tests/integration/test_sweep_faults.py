"""Servers that hang, refuse or leak, and input that is wrong: a sentence, an exit code, nothing lost."""

from __future__ import annotations

import socket

import pytest

from tests.support.sweep_parts import Bench, alive, finished


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_a_server_that_fails_to_start_once_does_not_end_the_sweep(bench):
    spent = str(bench.folder / "spent")
    path = bench.write(load={"repeats": 1})
    done = bench.sweep(str(path), "--no-report", FAKE_FAULT="exit_at_start", FAKE_FAULT_ONCE=spent)
    assert done.returncode == 4
    assert "exit code 1 before it was ready" in done.stdout and "a library is missing" in done.stdout
    assert len(finished(bench.only_run())) == 1


def test_a_server_that_never_gets_ready_is_stopped_and_the_sweep_gives_up(bench):
    path = bench.write(load={"repeats": 5})
    done = bench.sweep(str(path), "--start-timeout", "1", FAKE_FAULT="never_ready")
    assert done.returncode == 4
    assert all(words in done.stdout for words in ("not ready after 1 s", "still loading", "nothing was measured"))
    assert 1 <= len(bench.launches) <= 2  # not five repeats of waiting
    assert not any(alive(launch["pid"]) for launch in bench.launches)


def test_a_server_that_refuses_its_settings_is_bad_input(bench):
    done = bench.sweep(str(bench.write()), FAKE_FAULT="refuse")
    assert done.returncode == 2
    assert done.stderr.strip() == "error: kv_budget 1 is too small for this fake engine: raise kv_budget"


def test_pages_that_stay_owned_make_a_load_invalid_but_keep_it(bench, monkeypatch):
    monkeypatch.setattr("kvbench.measure.server_state.RELEASE_BOUND_S", 0.5)
    path = bench.write(load={"repeats": 1})
    done = bench.sweep(str(path), "--only", "paged*", "--no-report", FAKE_FAULT="leak")
    assert done.returncode == 4
    assert "6 KV pages were still owned 0.5 s after the last request ended" in done.stdout
    assert len(finished(bench.only_run())) == 1


def test_what_cannot_be_used_is_said_before_anything_starts(bench):
    path = str(bench.write())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = bench.sweep(path, "--port", str(port))
    assert done.returncode == 2 and f"port {port} on 127.0.0.1" in done.stderr and "--port" in done.stderr
    url = f"http://127.0.0.1:{port}"  # where nothing listens any more
    done = bench.sweep(path, "--target", url, fake=False)
    assert done.returncode == 2 and url in done.stderr
    assert not bench.results.exists() and not bench.launches


def test_dry_run_launches_and_writes_nothing(bench):
    done = bench.sweep(str(bench.write()), "--dry-run")
    assert done.returncode == 0
    assert "2 configurations, 2 cells, 4 server launches, 4 loads" in done.stdout
    assert "paged-p16-c2" in done.stdout and "repeat 2: contiguous" in done.stdout
    assert not bench.results.exists() and not bench.launches
