"""Children end, with all that they started, in a bounded time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.common import processes
from tests.support.sweep_parts import alive, wait_until

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_CHILD_SUBREAPER and PDEATHSIG are Linux's")
SLEEPER = "import signal, sys, time\nprint(1, flush=True)\ntime.sleep(60)"
STUBBORN = f"import signal\nsignal.signal(15, signal.SIG_IGN)\n{SLEEPER}"
# A launcher as there are many: a worker in a process group of its own, one in a session of its own whose parent has
# ended, one with another environment, and a daemon that has shed parent, session and environment, as container
# runtimes do. Prints their process ids.
FAMILY = f"""
import os, subprocess, sys, time
SLEEP = [sys.executable, "-c", {STUBBORN!r}]
SILENT = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
grouped = subprocess.Popen(SLEEP, preexec_fn=os.setpgrp, **SILENT)
orphan = subprocess.run(
    [sys.executable, "-c", f"import subprocess; print(subprocess.Popen({{SLEEP!r}}, start_new_session=True, "
     "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"], capture_output=True, text=True).stdout.strip()
bare = subprocess.Popen(SLEEP, env={{}}, preexec_fn=os.setpgrp, **SILENT)
reading, writing = os.pipe()
if (first := os.fork()) == 0:
    os.setsid()
    if (pid := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.execve(sys.executable, SLEEP, {{}})
    os.write(writing, str(pid).encode())
    os._exit(0)
os.waitpid(first, 0)
print(grouped.pid, orphan, bare.pid, os.read(reading, 20).decode(), flush=True)
time.sleep(60)
"""


def launched(code, **options):
    return processes.launch(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **options
    )  # fmt: skip


def wait_gone(pids):
    wait_until(lambda: not any(map(alive, pids)), 20)


def test_a_child_that_ignores_term_is_killed_and_one_that_does_not_is_not():
    for code, ended in ((STUBBORN, -9), (SLEEPER, -15)):
        with launched(code, background=True) as process:
            process.stdout.readline()
            assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)
            assert processes.stop(process, grace_s=0.3 if code is STUBBORN else 20.0) == ended


@linux_only
@pytest.mark.parametrize("dies_first", [False, True])
def test_a_family_is_stopped_whatever_its_members_have_shed_and_nobody_else_is(dies_first):
    stranger = subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True, stdout=subprocess.DEVNULL)
    with launched(FAMILY) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 4 and all(alive(pid) and os.getpgid(pid) != process.pid for pid in pids)
        if dies_first:  # nothing but memory leads to the daemon then
            process.known = frozenset(each for each in process.remember() if each.pid == pids[3])
            process.kill()
            process.wait()
        processes.stop(process, grace_s=0.3)
    wait_gone(pids)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


PARENT = """
import subprocess, sys, time
from pathlib import Path
from kvbench.common import processes
p = processes.launch([sys.executable, "-c", {code!r}], stdout=subprocess.PIPE, stderr=None)
line = p.stdout.readline().decode()
if {folder!r}:
    p.watch(Path({folder!r}))
    p.remember()
print(p.pid, line, flush=True)
time.sleep(60)
"""


@linux_only
@pytest.mark.parametrize("watched", [True, False], ids=["watched family", "one child"])
def test_a_parent_that_is_killed_outright_leaves_nothing(tmp_path: Path, watched):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_text("x")
    code = PARENT.format(code=FAMILY if watched else SLEEPER, folder=str(folder) if watched else "")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()][: 5 if watched else 1]
        assert all(map(alive, pids))
        parent.kill()
    wait_gone(pids)
    wait_until(lambda: folder.exists() is not watched, 20)


def test_a_watchdog_that_is_released_leaves_everything_alone(tmp_path):
    with launched(SLEEPER) as process:
        process.stdout.readline()
        process.watch(tmp_path)
        watchdog = process._watchdog
        process.release_watchdog()
        assert watchdog.returncode == 0 and alive(process.pid) and tmp_path.exists()
        processes.stop(process)


def test_last_lines_of_a_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {i}" for i in range(5000)) + "\n\n")
    assert processes.last_lines(log, 2) == "line 4998\nline 4999"
    assert processes.last_lines(tmp_path / "none") == ""
    whole = log.stat().st_size
    assert processes.last_lines(log, 8, after=whole) == ""
    assert processes.last_lines(log, 8, after=whole - 12) == "line 4999"
