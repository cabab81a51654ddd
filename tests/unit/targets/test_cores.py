"""Which cores a server is given, and which its threads are found on, whatever it was told."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvbench.runs.results import Capacity
from kvbench.targets import cores, launched
from kvbench.targets.base import ModelFacts, Target
from kvbench.targets.launch_plan import Launcher
from kvbench.targets.preset import Context
from kvbench.targets.presets import PRESETS
from tests.support.scripted_http import scripted_server

USABLE = sorted(os.sched_getaffinity(0))
BIND = "VLLM_CPU_OMP_THREADS_BIND"
# A server whose worker, a process of its own, binds one thread to a core; it says so and waits.
WORKER = """
import os, subprocess, sys, threading
if sys.argv[1:] == ["worker"]:
    def bound():
        os.sched_setaffinity(threading.get_native_id(), {min(os.sched_getaffinity(0))})
        print("bound", flush=True)
        sys.stdin.read()
    threading.Thread(target=bound).start()
else:
    subprocess.run([sys.executable, "-c", os.environ["CODE"], "worker"])
"""


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Sets which cores there are, as siblings of a physical core, and which may be used."""

    def is_of(siblings, usable):
        for core in usable:
            (pair,) = (each for each in siblings if core in each)
            (folder := tmp_path / f"cpu{core}" / "topology").mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(f"{','.join(map(str, pair))}\n")
        monkeypatch.setattr(cores, "_CPUS", tmp_path)
        monkeypatch.setattr(cores, "_NODES", tmp_path)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(usable))

    return is_of


@pytest.mark.parametrize(
    ("siblings", "usable", "threads", "given"),
    [
        ([(0,), (1,)], [0, 1], None, [0, 1]),
        ([(0,), (1,)], [0, 1], 1, [0]),
        ([(0,), (1,)], [0, 1], 3, [0, 1]),  # there are no more
        ([(0,), (1,), (2,), (3,)], [2, 3], 1, [2]),  # taskset, or a container
        ([(0, 1), (2, 3)], [0, 1, 2, 3], 2, [0, 2]),
        ([(0, 2), (1, 3)], [0, 1, 2, 3], 3, [0, 1, 2]),
        ([(0, 1), (2, 3)], [0, 1, 2, 3], None, [0, 2]),
        ([(0, 1), (2, 3)], [0, 1], 2, [0, 1]),
    ],
)
def test_a_thread_has_a_physical_core_of_its_own_while_there_are_any(machine, siblings, usable, threads, given):
    machine(siblings, usable)
    assert cores.cores_for(threads) == given


def test_with_several_memory_nodes_only_a_number_of_threads_is_bound(machine, monkeypatch, tmp_path):
    machine([(0,), (1,)], [0, 1])
    monkeypatch.delenv(BIND, raising=False)
    for node in ("node0", "node1"):
        (tmp_path / node).mkdir()
    environment = PRESETS["vllm"].launch_environment
    assert environment(Context({"device": "cpu"})).get(BIND) is None
    assert environment(Context({"device": "cpu", "num_threads": 1}))[BIND] == "0"


def test_vllm_is_bound_to_as_many_cores_as_the_workload_has_threads(machine, monkeypatch):
    machine([(0, 4), (1, 5), (2, 6)], [0, 1, 2, 4, 5, 6])
    monkeypatch.delenv(BIND, raising=False)

    def launched_with(**settings):
        given = PRESETS["vllm"].launch_environment(Context({"device": "cpu", **settings}))
        return given.get(BIND), given.get("OMP_NUM_THREADS")

    assert launched_with() == ("0,1,2", "3")
    assert launched_with(num_threads=2) == ("0,1", "2")
    assert launched_with(device="cuda") == (None, None)
    monkeypatch.setenv(BIND, "2")  # a user's own choice is kept, and recorded
    assert launched_with(num_threads=2)[0] == "2"


@pytest.mark.skipif(len(USABLE) < 2, reason="on one core nothing is bound to fewer")
def test_the_cores_of_bound_threads_are_found_in_any_process_of_the_server():
    command, env = [sys.executable, "-c", WORKER], os.environ | {"CODE": WORKER}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == "bound\n"
        assert cores.bound_cores(server.pid) == USABLE[:1]
        server.stdin.close()
    assert cores.bound_cores(server.pid) == []  # it has ended
    for prefix, bound in (([], []), (["taskset", "-c", str(USABLE[-1])], USABLE[-1:])):
        command = [*prefix, sys.executable, "-c", "print(1, flush=True); input()"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout.readline()
            assert cores.bound_cores(server.pid) == bound
            server.stdin.close()


def test_a_thread_that_may_run_everywhere_or_has_ended_is_not_bound(monkeypatch):
    def allowed(thread: int) -> set[int]:
        if thread == 0:
            return set(range(16))
        raise ProcessLookupError

    for of_thread, found in ((allowed, []), (lambda thread: {0, 1, 7} if thread else set(range(16)), [0, 1, 7])):
        monkeypatch.setattr(os, "sched_getaffinity", of_thread)
        assert cores.bound_cores(os.getpid()) == found


BOUND = "vLLM has bound its threads to {}, and was asked for {} threads"


@pytest.mark.parametrize(
    ("found", "asked", "threads", "said"),
    [
        ([0, 1], {"num_threads": 2}, 2, []),
        ([0], {"num_threads": 2}, 1, [BOUND.format("core 0", 2)]),
        ([0, 1, 2, 7], {"num_threads": 2}, 2, []),  # a mask: each thread may run on any of them
        ([0, 1, 2, 7], {"num_threads": 8}, 4, [BOUND.format("cores 0-2 and 7", 8)]),
        ([], {"num_threads": 2}, 2, []),  # free: as many as it was given
    ],
)
def test_what_was_bound_is_recorded_and_said_where_it_is_not_what_was_asked(monkeypatch, found, asked, threads, said):
    monkeypatch.setattr(launched, "bound_cores", lambda pid: found)
    with scripted_server({}) as server:
        target = launched.LaunchedTarget(Launcher(PRESETS["vllm"], "", lambda settings: Capacity()), SimpleNamespace())
        Target.__init__(target, server.url, preset=PRESETS["vllm"])
        target._settings, target._process = {"device": "cpu", **asked}, SimpleNamespace(pid=1)
        target.model = ModelFacts("m", 8, 8)
        info = target.server_info()
    assert info.resolved.num_threads == threads and list(info.resolved.bound_cores or ()) == found
    assert list(info.server.notes) == said
