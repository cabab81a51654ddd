"""Children end, with all that they started, in a bounded time."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from kvbench import processes

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
            "import subprocess, sys, time; from kvbench import processes\n"
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
