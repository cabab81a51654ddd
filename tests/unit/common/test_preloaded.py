"""A forked child is as one that was started plainly: what it is given, what it says, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvbench.common import processes
from kvbench.common.preloaded import ForkedChild, Preloaded
from kvbench.load import launch
from kvbench.load.launch import drive
from kvbench.load.spec import read_spec
from tests.support.loads import requests_of
from tests.support.sweep_parts import alive, wait_until

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux forks")

MODULE = "child_of_a_test"
CHILD = Preloaded((MODULE,), "json", reads_later=("PYTEST_",))


def child(folder, code, *arguments, plain=False, **options):
    """Launches ``code`` as a module, forked or plainly."""
    (folder / "child_of_a_test.py").write_text(code)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": folder} | options
    command = [sys.executable, "-m", MODULE, *arguments]
    process = processes.launch(command, preloaded=None if plain else CHILD, **options)
    assert isinstance(process, ForkedChild) is not plain
    return process


TELLS = """
import json, os, signal, sys
print(json.dumps({
    "argv": sys.argv[1:], "name": __name__, "file": os.path.basename(__file__), "stdin": sys.stdin.read(),
    "cwd": os.getcwd(), "path": sys.path[0], "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "nice": os.getpriority(os.PRIO_PROCESS, 0), "policy": os.sched_getscheduler(0),
    "files": os.listdir("/proc/self/fd"), "on_2": signal.getsignal(2).__name__, "raw": sys.stdout.write_through,
    "env": {name: value for name, value in os.environ.items() if name != "KVBENCH_LAUNCH"},
}))
"""


@pytest.mark.parametrize(
    ("env", "background"), [({"KVBENCH_A": "b"}, False), ({"PATH": None, "PYTHONUNBUFFERED": "1"}, True)]
)
def test_it_is_given_what_a_plain_one_is(tmp_path, env, background):
    told = []
    for plain in (True, False):
        process = child(tmp_path, TELLS, "a", "b c", plain=plain, env=env, background=background, stdin=subprocess.PIPE)
        process.stdin.write(b"read")
        process.stdin.close()
        told.append(json.loads(process.stdout.read()))
        assert process.wait(20) == 0 and not process.stderr.read()
    assert told[0] == told[1] and told[1]["argv"] == ["a", "b c"] and told[1]["stdin"] == "read"


def test_what_is_no_request_and_a_removed_folder_cost_the_other_children_nothing(tmp_path, monkeypatch):
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)  # the server's own folder
    own = Preloaded((MODULE,), "json", reads_later=("PYTEST_",))
    (tmp_path / "child_of_a_test.py").write_text("import sys; sys.stdin.read(); sys.exit(7)")
    command, pipes = [sys.executable, "-m", MODULE], {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with processes.launch(command, stderr=None, preloaded=own, cwd=tmp_path, **pipes) as first:
        gone.rmdir()
        with own._connected() as connection:
            socket.send_fds(connection, [b'{"module": 1}'], [1, 1, 1])
            assert "refused" in json.loads(connection.recv(1 << 16))
        with processes.launch(command, stderr=None, preloaded=own, cwd=tmp_path, **pipes) as second:
            assert first.forked and second.forked
            second.stdin.close()
        assert second.returncode == 7 and first.poll() is None
        first.stdin.close()
    assert first.returncode == 7


ENDS = {
    "as it should": "print('said')",
    "by its own code": "import atexit, sys; atexit.register(print, 'last'); sys.exit(3)",
    "with a message": "import sys; sys.exit('why')",
    "at once": "import os; print('lost'); os._exit(5)",
    "by a signal": "import os; os.kill(os.getpid(), 9)",
    "in a thread's time": "import threading, time; threading.Timer(0.2, print, ('late',)).start()",
    "by Ctrl-C": "import os; os.kill(os.getpid(), 2)",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_it_ends_as_a_plain_one_does(tmp_path, code):
    ended = []
    for plain in (True, False):
        with child(tmp_path, code, plain=plain) as process:
            words = process.stdout.read(), process.stderr.read().splitlines()[-1:]
        ended.append((process.wait(), *words))
    assert ended[0] == ended[1]


def test_an_error_is_told_with_its_place(tmp_path):
    with child(tmp_path, "1 / 0") as process:
        words = process.stderr.read().decode()
    assert process.returncode == 1 and "child_of_a_test.py" in words and words.endswith("division by zero\n")


SLEEPS = "import time; print('up', flush=True); time.sleep(60)"


def test_a_wait_has_a_limit_and_signals_arrive(tmp_path):
    for number in (signal.SIGTERM, signal.SIGKILL):
        with child(tmp_path, SLEEPS) as process:
            assert process.stdout.readline() == b"up\n" and process.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.05)
            process.send_signal(number)
            assert process.wait(20) == -number == process.poll()
        process.kill()  # does nothing any more


def test_many_are_launched_at_the_same_time(tmp_path):
    code = "import sys, time; time.sleep(0.1); print(sys.argv[1]); sys.exit(int(sys.argv[1]))"
    (tmp_path / "child_of_a_test.py").write_text(code)

    def ended(number):
        command = [sys.executable, "-m", MODULE, str(number)]
        with processes.launch(command, preloaded=CHILD, cwd=tmp_path, stdout=subprocess.PIPE, stderr=None) as process:
            assert isinstance(process, ForkedChild)
            return int(process.stdout.read()), process.wait(30)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ended, range(24))) == [(number, number) for number in range(24)]


FAMILY = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"]
silent = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
children = [subprocess.Popen(sleep, start_new_session=True, **silent)]  # it has the mark alone
if (forked := os.fork()) == 0:  # and so has this one, without an environment of its own
    os.setsid()
    if os.fork():
        os._exit(0)
    os.write(1, b"%d\\n" % os.getpid())  # in one piece: the other process writes, too
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    time.sleep(60)
os.waitpid(forked, 0)
os.write(1, b"%d %d\\n" % (os.getpid(), children[0].pid))
time.sleep(60)
"""


@pytest.mark.parametrize("dies_first", [False, True])
def test_its_family_is_stopped_with_it(tmp_path, dies_first):
    with child(tmp_path, FAMILY) as process:
        pids = {int(word) for _ in range(2) for word in process.stdout.readline().split()}
        assert len(pids) == 3 and process.pid in pids and all(map(alive, pids))
        if dies_first:
            process.kill()
            process.wait()
        assert pids - {process.pid} <= {member.pid for member in processes.family(process.pid, process.mark)}
        assert processes.stop(process, grace_s=0.5) == -(signal.SIGKILL if dies_first else signal.SIGTERM)
    wait_until(lambda: not any(map(alive, pids)), 20)


PARENT = """
import subprocess, sys, time
from kvbench.common import processes
from kvbench.common.preloaded import Preloaded
command = [sys.executable, "-m", "child_of_a_test"]
p = processes.launch(command, stdout=subprocess.PIPE, stderr=None, preloaded=Preloaded(("child_of_a_test",)))
pids = [int(word) for _ in range(2) for word in p.stdout.readline().split()]
print(*pids, type(p).__name__, flush=True)
p.watch()
p.remember()
print("watched", flush=True)
time.sleep(60)
"""


def test_a_parent_that_is_killed_outright_leaves_nothing(tmp_path):
    (tmp_path / "child_of_a_test.py").write_text(FAMILY)
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=tmp_path) as parent:
        *pids, kind = parent.stdout.readline().split()
        pids = [int(pid) for pid in pids]
        assert kind == b"ForkedChild" and parent.stdout.readline() == b"watched\n" and all(map(alive, pids))
        parent.kill()
    wait_until(lambda: not any(map(alive, pids)), 20)


@pytest.mark.parametrize(
    "options",
    [{"env": {"OMP_NUM_THREADS": "7"}}, {"env": {"KVBENCH_NO_FORK": "1"}}, {"preloaded": Preloaded(("x",))}],
    ids=["what modules read", "switched off", "another command"],
)
def test_the_plain_start_where_a_fork_would_differ(tmp_path, options, monkeypatch):
    monkeypatch.setenv("KVBENCH_NO_FORK", options.get("env", {}).get("KVBENCH_NO_FORK", "0"))
    (tmp_path / "child_of_a_test.py").write_text("import os; print(os.environ.get('OMP_NUM_THREADS'))")
    options = {"preloaded": CHILD} | options
    command = [sys.executable, "-m", MODULE]
    with processes.launch(command, stdout=subprocess.PIPE, stderr=None, cwd=tmp_path, **options) as process:
        assert not isinstance(process, ForkedChild)
        said = process.stdout.read().decode().strip()
    assert process.wait() == 0 and said == str(options.get("env", {}).get("OMP_NUM_THREADS"))


@pytest.mark.parametrize("plain", [False, True], ids=["forked", "plain"])
def test_a_load_runs_either_way(loads, monkeypatch, plain):
    monkeypatch.setenv("KVBENCH_NO_FORK", str(int(plain)))
    monkeypatch.delenv("KVBENCH_FORK_SERVERS", raising=False)  # a server of its own
    monkeypatch.setattr(launch, "LOAD_CLIENT", Preloaded(("kvbench.load",), "kvbench.load.__main__"))
    started, real = [], processes.launch
    monkeypatch.setattr(processes, "launch", lambda *a, **o: started.append(real(*a, **o)) or started[-1])
    spec, said = read_spec(loads.spec(requests_of(12, 7))), []
    drive(spec, total=12, limit_s=60, on_progress=lambda *a: None, on_phase=lambda phase, pid: said.append(phase))
    load = json.loads((loads.folder / "load" / "load.json").read_text())
    assert isinstance(started[0], ForkedChild) is not plain and started[0].returncode == 0
    assert load["num_requests"] == 12 and said[0] == "begin" and said[-1] == "measured"
