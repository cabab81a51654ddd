"""Children end, with all that they started, in a bounded time."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from kvbench.common import processes
from kvbench.common.watchdog import Watchdog

STUBBORN = (
    "import signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(60)\n"
)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pid, seconds=10):
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_a_child_that_ignores_term_is_killed_with_its_own_children():
    process = processes.launch([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    grandchild = int(process.stdout.readline())
    assert os.getpgid(grandchild) == process.pid  # one group, not ours
    code = processes.stop(process, grace_s=0.3)
    process.stdout.close()
    assert code == -9
    assert wait_gone(grandchild)


# A launcher as there are many: a worker in a process group of its own, one in a session of its own whose parent has
# ended, and one that was given another environment.
LAUNCHER = """
import os, subprocess, sys, time
SLEEP = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"]
grouped = subprocess.Popen(SLEEP, preexec_fn=os.setpgrp)
orphan = subprocess.run(
    [sys.executable, "-c", f"import subprocess; print(subprocess.Popen({SLEEP!r}, start_new_session=True, "
     "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"], capture_output=True, text=True).stdout.strip()
bare = subprocess.Popen(SLEEP, env={}, preexec_fn=os.setpgrp)
time.sleep(0.3)  # the handlers stand
print(grouped.pid, orphan, bare.pid, flush=True)
time.sleep(60)
"""


def launched_family():
    process = processes.launch([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return process, [int(word) for word in process.stdout.readline().split()]


def test_grandchildren_that_left_the_group_or_lost_their_parent_are_stopped_too():
    process, pids = launched_family()
    assert len(pids) == 3
    assert all(alive(pid) and os.getpgid(pid) != process.pid for pid in pids)
    processes.stop(process, grace_s=1.0)
    process.stdout.close()
    assert not [pid for pid in pids if not wait_gone(pid, 2)]


def test_grandchildren_of_a_leader_that_has_ended_by_itself_are_stopped_too():
    process, pids = launched_family()
    process.kill()
    process.wait()
    assert all(alive(pid) for pid in pids)
    assert processes.stop(process) == -9
    process.stdout.close()
    assert not [pid for pid in pids if not wait_gone(pid, 2)]


# A daemon that sheds parent, session and environment, as container runtimes and `env -i` wrappers do.
DAEMON = """
import os, sys, time
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if (pid := os.fork()) == 0:
        os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"], {})
    os.write(writing, str(pid).encode())
    os._exit(0)
os.wait()
print(os.read(reading, 20).decode(), flush=True)
time.sleep(60)
"""
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="adopting orphans is Linux's PR_SET_CHILD_SUBREAPER")


def launched_daemon():
    process = processes.launch([sys.executable, "-c", DAEMON], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return process, int(process.stdout.readline())


@linux_only
@pytest.mark.parametrize("dies_first", [False, True])
def test_a_daemon_that_has_shed_all_it_could_is_stopped_too(dies_first):
    process, daemon = launched_daemon()
    if dies_first:
        assert daemon in {each.pid for each in process.remember()}
        process.kill()
        process.wait()
    assert alive(daemon)
    processes.stop(process, grace_s=1.0)
    process.stdout.close()
    assert wait_gone(daemon, 2)


@linux_only
def test_the_watchdog_ends_daemons_that_it_was_told_of():
    code = (
        "import subprocess, sys, time\nfrom kvbench.common import processes\n"
        "from kvbench.common.watchdog import Watchdog\n"
        f"p = processes.launch([sys.executable, '-c', {DAEMON!r}], stdout=subprocess.PIPE, stderr=None)\n"
        "w = Watchdog(p.pid, p.mark)\nline = p.stdout.readline().decode()\nw.watch(p.remember())\n"
        "print(line, flush=True)\ntime.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    daemon = int(parent.stdout.readline())
    assert alive(daemon)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_gone(daemon)


def test_nobody_elses_processes_are_touched():
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    process, _ = launched_family()
    processes.stop(process, grace_s=1.0)
    process.stdout.close()
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_the_watchdog_ends_the_family_and_removes_the_folder_of_a_kvbench_that_was_killed(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_text("x")
    code = (
        "import subprocess, sys, time\nfrom pathlib import Path\nfrom kvbench.common import processes\n"
        "from kvbench.common.watchdog import Watchdog\n"
        f"p = processes.launch([sys.executable, '-c', {LAUNCHER!r}], stdout=subprocess.PIPE, stderr=None)\n"
        f"w = Watchdog(p.pid, p.mark, Path({str(folder)!r}))\n"
        "print(p.pid, p.stdout.readline().decode(), flush=True)\ntime.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 4
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert not [pid for pid in pids if not wait_gone(pid)]
    deadline = time.monotonic() + 5
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()


def test_a_watchdog_that_is_released_leaves_everything_alone(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    watchdog = Watchdog(process.pid, "no such mark", tmp_path)
    watchdog.release()
    assert process.poll() is None
    assert tmp_path.exists()
    process.kill()
    process.wait()


def test_a_polite_child_ends_by_term():
    process = processes.launch(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, background=True,
    )  # fmt: skip
    process.stdout.readline()
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)
    assert processes.stop(process) == -15
    process.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_children_do_not_outlive_a_parent_that_is_killed_outright():
    parent = subprocess.Popen(
        [
            sys.executable, "-c",
            "import subprocess, sys, time; from kvbench.common import processes\n"
            "p = processes.launch([sys.executable, '-c', 'import time; time.sleep(60)'], stdout=subprocess.DEVNULL,"
            " stderr=subprocess.DEVNULL)\nprint(p.pid, flush=True)\ntime.sleep(60)",
        ],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_gone(child)


def test_last_lines_of_a_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {i}" for i in range(5000)) + "\n\n")
    assert processes.last_lines(log, 2) == "line 4998\nline 4999"
    assert processes.last_lines(tmp_path / "none") == ""
    whole = log.stat().st_size
    assert processes.last_lines(log, 8, after=whole) == ""
    assert processes.last_lines(log, 8, after=whole - 12) == "line 4999"
