"""CPU that others used while a load ran: measured, told apart from our own, and made a reason."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from kvbench.common import foreign_cpu
from kvbench.common.foreign_cpu import (
    CpuReading,
    ForeignWatch,
    ServerProcess,
    contention_reasons,
    machine_report,
    parse_stat,
    read_cpu,
    tree_cpu_s,
)
from tests.support.sweep_parts import wait_until

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc/stat is Linux's")
TICKS_A_S = os.sysconf("SC_CLK_TCK")
TICK = 1.0 / TICKS_A_S
STAT = """cpu  300 30 60 5000 7 2 1 50 9 0
cpu0 100 10 20 2500 3 1 0 20 9 0
cpu1 200 20 40 2500 4 1 1 30 0 0
intr 1 2 3
"""
START = CpuReading(wall=100.0, busy_s=50.0, steal_s=1.0, cores=2, own_s=3.0, client_s=1.0, server_s=10.0)
BURN = "import time\nprint(1, flush=True)\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"

IDLE = "import time\nprint(1, flush=True)\ntime.sleep(60)"


@contextmanager
def running(code):
    """A process of this code and the first word that it prints."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        yield process, int(process.stdout.readline())
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def after(seconds, **used):
    """A reading ``seconds`` later; ``used``: CPU seconds in between."""
    return replace(
        START, wall=START.wall + seconds, **{name: getattr(START, name) + value for name, value in used.items()}
    )


def test_busy_is_all_but_idle_waiting_and_stolen_time():
    assert parse_stat(STAT, None) == pytest.approx(((300 + 30 + 60 + 2 + 1) * TICK, 50 * TICK, 2))  # guest is in user
    assert parse_stat(STAT, {1}) == pytest.approx(((200 + 20 + 40 + 1 + 1) * TICK, 30 * TICK, 1))


def test_what_the_server_the_client_and_kvbench_use_is_not_foreign():
    end = after(10.0, busy_s=17.0, own_s=0.5, client_s=1.0, server_s=15.0, steal_s=0.4)
    report = machine_report(START, end, ServerProcess(1))
    assert report.foreign_cpu_cores == pytest.approx(0.05)
    assert report.server_cpu_cores == pytest.approx(1.5) and report.client_cpu_cores == pytest.approx(0.1)
    assert report.steal_share == pytest.approx(0.02) and report.cores == 2
    assert contention_reasons(report) == []


@pytest.mark.parametrize(
    ("seconds", "used", "said"),
    [
        (10.0, {"busy_s": 20.3, "client_s": 1.0, "server_s": 14.0}, ["0.53", "0.10"]),
        (10.0, {"busy_s": 1.0, "server_s": 1.0, "steal_s": 1.2}, ["6.0%", "steal"]),
        (0.5, {"busy_s": 0.14}, []),  # a short load is given the ticks' resolution
        (0.5, {"busy_s": 0.2}, ["0.40"]),
        (4.0, {"busy_s": 0.44}, ["0.11"]),
    ],
)
def test_another_process_or_stolen_time_makes_a_load_invalid(seconds, used, said):
    reasons = contention_reasons(machine_report(START, after(seconds, **used), ServerProcess(1)))
    assert len(reasons) == bool(said) and all(word in reasons[0] for word in said)


@pytest.mark.parametrize(("cores", "limit"), [(1, 0.1), (2, 0.1), (4, 0.2), (16, 0.8)])
def test_the_limit_is_a_share_of_the_cores_and_at_least_a_tenth_of_one(cores, limit):
    for foreign, disturbed in ((limit - 0.01, False), (limit + 0.01, True)):
        end = after(10.0, busy_s=10 * foreign)
        report = machine_report(replace(START, cores=cores), replace(end, cores=cores), ServerProcess(1))
        reasons = contention_reasons(report)
        assert bool(reasons) == disturbed and all(f"{limit:.2f}" in reason for reason in reasons)


def test_what_is_not_known_is_none_and_no_reason():
    unknown = machine_report(None, None, ServerProcess(1))
    assert unknown.foreign_cpu_cores is None and contention_reasons(unknown) == []
    nameless = replace(START, server_s=None)  # on this machine, but which process is not known
    end = replace(after(10.0, busy_s=9.0), server_s=None)
    assert machine_report(nameless, end, ServerProcess(None)).foreign_cpu_cores is None
    elsewhere = machine_report(nameless, end, ServerProcess(None, local=False))
    assert elsewhere.foreign_cpu_cores == pytest.approx(0.9)  # a server elsewhere uses nothing here


@linux
def test_a_burner_is_foreign_unless_it_is_the_server():
    with running(BURN) as (other, _), running(BURN) as (server, _), running(IDLE) as (client, _):
        start = [read_cpu(ServerProcess(each.pid), client.pid) for each in (server, other)]
        time.sleep(1.0)
        end = [read_cpu(ServerProcess(each.pid), client.pid) for each in (server, other)]
        used = (end[1].server_s - start[1].server_s) / (end[0].wall - start[0].wall)  # by the foreign one
        report = machine_report(start[0], end[0], ServerProcess(server.pid))
    assert used > 0.05 and report.server_cpu_cores > 0.05
    assert report.foreign_cpu_cores >= used / 2  # readings of a busy machine are taken some time apart


@linux
def test_children_count_also_when_they_have_ended():
    work = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    code = (
        f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {work!r}])\n"
        f"subprocess.Popen([sys.executable, '-c', {work + chr(10) + 'time.sleep(60)'!r}])\n"
        "print(1, flush=True)\ntime.sleep(60)"
    )
    with running(code) as (parent, _):
        wait_until(lambda: tree_cpu_s(parent.pid) >= 0.4)
    assert tree_cpu_s(parent.pid) is None


@linux
def test_the_server_at_a_url_is_found_by_its_port():
    code = (
        "import socket, time\ns = socket.socket()\ns.bind(('127.0.0.1', 0))\ns.listen()\n"
        "print(s.getsockname()[1], flush=True)\ntime.sleep(60)"
    )
    with running(code) as (process, port):
        assert foreign_cpu.server_at(f"http://127.0.0.1:{port}/v1") == ServerProcess(process.pid)
        assert foreign_cpu.server_at(f"http://localhost:{port}") == ServerProcess(process.pid)
        assert foreign_cpu.server_at(f"http://192.0.2.1:{port}") == ServerProcess(None, local=False)
    assert foreign_cpu.server_at(f"http://127.0.0.1:{port}") == ServerProcess(None)


def test_the_notice_of_a_busy_machine(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.9, 9.0, 9.0))
    assert foreign_cpu.busy_notice() is None
    monkeypatch.setattr(os, "getloadavg", lambda: (2.6, 0.0, 0.0))
    assert "2.6 on 4 cores" in foreign_cpu.busy_notice()


def write_stat(path, busy_ticks):
    """/proc/stat with ``busy_ticks`` of user time on the first core that we may use."""
    core = min(psutil.Process().cpu_affinity())
    path.write_text(f"cpu  1 2 3\ncpu{core} {busy_ticks} 0 0 5 0 0 0 0 0 0\nintr 1\n")


def test_busy_time_is_foreign_unless_it_is_our_own(tmp_path, monkeypatch):
    stat, own = tmp_path / "stat", iter([5.0, 7.0, 7.0])  # CPU seconds of this process and its children
    monkeypatch.setattr(foreign_cpu, "tree_cpu_s", lambda pid: next(own))
    write_stat(stat, 0)
    watch = ForeignWatch(stat)
    time.sleep(0.05)
    write_stat(stat, 2 * TICKS_A_S)
    assert watch.report() == {"foreign_cpu_cores": 0.0, "disturbed": False}
    write_stat(stat, 100_000)
    told = watch.report()
    assert told["disturbed"] and told["foreign_cpu_cores"] > 10


@pytest.mark.parametrize(("busy_looks", "limit_s", "quiet"), [(0, 60.0, True), (2, 60.0, True), (1000, 0.05, False)])
def test_waiting_for_a_quiet_machine_ends_when_it_is_quiet_or_the_time_is_over(monkeypatch, busy_looks, limit_s, quiet):
    looks = iter([{"disturbed": True, "foreign_cpu_cores": 0.5}] * busy_looks + [{"disturbed": False}])
    monkeypatch.setattr(ForeignWatch, "report", lambda watch: next(looks))
    monkeypatch.setattr(foreign_cpu, "_LONG_ENOUGH_S", 0.01)
    checked, told = [], []
    assert foreign_cpu.waits_for_quiet(limit_s, lambda: checked.append(1), told.append) is quiet
    assert len(checked) >= busy_looks or not quiet
    assert len(told) == busy_looks or not quiet


def test_a_busy_machine_is_told_with_the_programs_that_keep_it_busy(monkeypatch):
    """The one with most CPU first, a script instead of its interpreter, nothing idle, and not this process."""

    def process(pid, name, words, seconds):
        info = {"name": name, "cmdline": words, "cpu_times": (seconds, 0.0), "create_time": 1.0}
        return SimpleNamespace(pid=pid, info=info)

    def processes(used):
        return [
            process(os.getpid(), "pytest", ["pytest"], 9 * used),
            process(2**22 + 1, "firefox", ["/usr/bin/firefox", "-x"], 5.0 + used),
            process(2**22 + 2, "python3.12", ["/usr/bin/python3.12", "-u", "/home/me/train.py", "secret"], 3 * used),
            process(2**22 + 3, "idle", [], 7.0),
        ]

    looks = iter([processes(0.0), processes(0.01)])
    monkeypatch.setattr(psutil, "process_iter", lambda attrs: next(looks))
    monkeypatch.setattr(ForeignWatch, "report", lambda watch: {"disturbed": True, "foreign_cpu_cores": 0.52})
    monkeypatch.setattr(foreign_cpu, "_LONG_ENOUGH_S", 0.01)
    told = []
    assert not foreign_cpu.waits_for_quiet(0.0, lambda: None, told.append)
    assert re.fullmatch(r"0\.52 of a core: python3\.12 train\.py [\d.]+, firefox [\d.]+", told[0])


def test_waiting_for_a_quiet_machine_can_be_interrupted(monkeypatch):
    monkeypatch.setattr(ForeignWatch, "report", lambda watch: {"disturbed": True})
    with pytest.raises(ZeroDivisionError):
        foreign_cpu.waits_for_quiet(60.0, lambda: 1 / 0, lambda words: None)


def test_a_system_that_does_not_tell(tmp_path):
    (tmp_path / "empty").write_text("intr 1\n")
    assert ForeignWatch(tmp_path / "missing").report() == ForeignWatch(tmp_path / "empty").report() == {}
