"""What ``kvbench load``'s options say of sharing a load, and what becomes of it."""

from __future__ import annotations

import os
import socket
import sys

import pytest
from click.testing import CliRunner

from kvbench.calibration.cache import ClientLoad
from kvbench.cli.load import load
from kvbench.common.errors import UsageError
from kvbench.load.spec import parse
from kvbench.loadtest.shared import be_worker, require_free, sharing


def options(*words: str) -> dict:
    """As click parses them."""
    return load.make_context("load", list(words)).params


def test_alone_nothing_is_said() -> None:
    shared = sharing(options("w.yaml"))
    assert (shared.client, shared.arguments, shared.notice, shared.streams_here) == ({}, (), None, True)
    assert shared.calibrate(ClientLoad(64, 3), None, lambda *given: given) == (ClientLoad(64, 3), None)


def test_processes_are_the_specs() -> None:
    assert sharing(options("w.yaml", "--processes", "4")).client == {"processes": 4}


def test_a_masters_arguments_are_those_that_the_load_process_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBENCH_NO_CALIBRATION", raising=False)
    words = ("--master", "--expect-workers", "3", "--bind-host", "10.0.0.2", "--bind-port", "6000")
    shared = sharing(options("w.yaml", *words))
    read = parse(["spec.json", *shared.arguments])
    assert (read.spec, read.master, read.expect_workers) == ("spec.json", True, 3)
    assert (read.bind_host, read.bind_port) == ("10.0.0.2", 6000)
    assert shared.client == {"calibrate_workers": True}
    assert sharing(options("w.yaml", *words, "--no-calibration")).client == {"calibrate_workers": False}
    assert "kvbench load --worker --master-host 10.0.0.2 --master-port 6000" in shared.notice
    assert not shared.streams_here, "workers calibrate themselves: this machine's client tells nothing of theirs"
    assert shared.calibrate(ClientLoad(64), None, lambda demand, before: pytest.fail("calibrated")) is None


def test_a_worker_becomes_the_load_process(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(os, "execv", lambda path, words: called.append((path, words)))
    be_worker(options("--worker", "--master-host", "h", "--master-port", "7"))
    ((path, words),) = called
    assert path == words[0] == sys.executable and words[1:3] == ["-m", "kvbench.load"]
    read = parse(words[3:])
    assert (read.worker, read.master_host, read.master_port, read.spec) == (True, "h", 7, None)


@pytest.mark.parametrize("words", [["--processes", "0"], ["--bind-port", "70000"], ["--expect-workers", "x"]])
def test_impossible_numbers_are_refused_by_the_parser(words: list[str]) -> None:
    assert CliRunner().invoke(load, ["w.yaml", *words]).exit_code == 2


def test_the_load_process_wants_a_spec_or_to_be_a_worker() -> None:
    for wrong in ([], ["spec.json", "--worker"]):
        with pytest.raises(SystemExit) as ended:
            parse(wrong)
        assert ended.value.code == 2


def test_a_master_that_cannot_listen_is_refused_before_anything_is_waited_for():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError, match=f"--bind-port {port} cannot be used at 127.0.0.1 .*give a free --bind-port"
        ):
            require_free("127.0.0.1", port)
    require_free("127.0.0.1", port)
    for host in ("192.0.2.1", "no-such-host.invalid"):  # TEST-NET-1: no machine has it
        with pytest.raises(UsageError, match=f"--bind-host {host} cannot be used .*an address of this machine"):
            require_free(host, port)
