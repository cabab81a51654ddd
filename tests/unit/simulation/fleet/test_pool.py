"""Simulations side by side in processes: order, failures, interrupts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import psutil
import pytest

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.simulation.fleet import pool
from kvbench.simulation.fleet.pool import RayOptions, map_simulations
from tests.support.fake_ray import FakeCluster, node


def work(job: float | str) -> float:
    if isinstance(job, str):
        if job == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise UsageError(job) if job == "bad input" else KeyError(job)
    time.sleep(job)
    return job


def test_results_are_in_the_order_of_the_jobs() -> None:
    assert map_simulations(work, {"slow": 0.2, "fast": 0.0, "other": 0.01}, processes=2) == [0.2, 0.0, 0.01]
    assert map_simulations(work, {"slow": 0.01, "fast": 0.0}, processes=1) == [0.01, 0.0]


@pytest.mark.parametrize(
    ("processes", "what", "kind"), [(1, "unexpected", MeasurementError), (2, "bad input", UsageError)]
)
def test_a_failed_job_is_named_and_keeps_its_kind(processes: int, what: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=rf"second.*{what}"):
        map_simulations(work, {"first": 0.0, "second": what, "third": 0.0}, processes)


def test_a_process_that_dies_ends_the_wait() -> None:
    with pytest.raises(MeasurementError, match="died"):
        map_simulations(work, {"first": 30.0, "second": "die"}, 2)


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_an_interrupt(how: signal.Signals) -> None:
    code = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "from tests.unit.simulation.fleet.test_pool import work\n"
        "from kvbench.simulation.fleet.pool import map_simulations\n"
        "if __name__ == '__main__':\n"
        "    map_simulations(work, {'a': 60.0, 'b': 60.0}, 2)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 20
        workers: list[psutil.Process] = []
        while len(workers) < 2 and time.monotonic() < end:
            actual = psutil.Process(parent.pid).children(recursive=True)
            workers = [one for one in actual if "spawn_main" in " ".join(one.cmdline())]
            time.sleep(0.05)
        assert len(workers) == 2
        time.sleep(0.3)  # the workers have begun
        parent.send_signal(how)
        parent.wait(30)
        _, alive = psutil.wait_procs(workers, 10)
        assert not alive
    finally:
        parent.kill()
        parent.wait(30)


@pytest.fixture
def on_cluster(monkeypatch):
    """``map_simulations`` on machines with these names, of which some die after so many values of their tasks."""
    monkeypatch.setattr("kvbench.ray.cluster._ray", lambda: SimpleNamespace(__version__="2.60.0"))

    def run(jobs, names, dies=None):
        cluster = FakeCluster([node(name, CPU=2.0) for name in names], dies=dies or {})
        monkeypatch.setattr(pool, "cluster_at", lambda address: nullcontext(cluster))
        return map_simulations(work, jobs, ray=RayOptions(None, 1.0)), cluster.started

    return run


def test_the_jobs_of_a_lost_machine_run_again_on_another(on_cluster):
    jobs = {str(n): n / 1000 for n in range(6)}
    results, where = on_cluster(jobs, ("aa", "bb"))
    assert results == [n / 1000 for n in range(6)] and set(where) == {"aaaaaaaa", "bbbbbbbb"}
    results, where = on_cluster(jobs, ("aa", "bb"), {"aaaaaaaa": 3})
    assert results == [n / 1000 for n in range(6)] and where[-1] == "bbbbbbbb"
    with pytest.raises(MeasurementError, match="no machine"):
        on_cluster({"only": 0.0}, ("aa",), {"aaaaaaaa": 2})


@pytest.mark.parametrize(("what", "kind"), [("unexpected", MeasurementError), ("bad input", UsageError)])
def test_a_job_that_fails_on_a_cluster_is_named(on_cluster, what, kind):
    with pytest.raises(kind, match=rf"second.*{what}"):
        on_cluster({"first": 0.0, "second": what}, ("aa",))
