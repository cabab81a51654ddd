"""Runs simulations side by side: in processes of this machine, or on the machines of a Ray cluster, one a core."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import TypeVar

from kvbench.common.child_setup import die_with
from kvbench.common.errors import MeasurementError, UsageError, say
from kvbench.common.machine import usable_cores
from kvbench.common.text import and_more
from kvbench.ray.cluster import (
    MAX_LOST,
    Cluster,
    ClusterNode,
    Lost,
    Raised,
    TaskEnded,
    TaskSlots,
    cluster_at,
    usable_nodes,
)
from kvbench.simulation.wording import sentence

_LOOK_S = 1.0  # a signal is seen after so long at the latest
_ENDED_S = 5.0  # a terminated process is gone by then, or killed

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True)
class RayOptions:
    """The cluster that runs simulations.

    address: HOST:PORT of its head; None: of the cluster that this machine is in
    wait_s: for a machine that has a core free, at most
    """

    address: str | None
    wait_s: float


def map_simulations(
    function: Callable[[Job], Result],
    jobs: Mapping[str, Job],
    processes: int | None = None,
    ray: RayOptions | None = None,
) -> list[Result]:
    """Calls ``function`` with each job, which is picklable; returns the results in the order of ``jobs``.

    processes: how many at once; None: one a core. A single one at a time runs in this process.
    ray: the cluster that runs them; None: this machine. A job whose process there is lost runs again.

    The first job that fails ends the others. Raises its UsageError, or MeasurementError for any other failure and for
    a process that died, with the job's name in front. An interrupt ends all processes.
    """
    if ray is not None:
        with cluster_at(ray.address) as cluster:
            return _on_cluster(cluster, function, jobs, processes, ray.wait_s)
    most = min(len(jobs), processes or usable_cores())
    if most <= 1:
        results = []
        for name, job in jobs.items():
            with _failures_named(name):
                results.append(function(job))
        return results
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(most, multiprocessing.get_context("spawn"), _begin, (os.getpid(),))
    try:
        running = {pool.submit(function, job): name for name, job in jobs.items()}
        _wait_for_all(running, set(multiprocessing.active_children()) - others)
        return [future.result(timeout=0) for future in running]
    finally:
        children = set(multiprocessing.active_children()) - others
        for child in children:  # they have ended their jobs, or their jobs are not wanted any more
            child.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.join(_ENDED_S)
            if child.is_alive():
                child.kill()


def _on_cluster(
    cluster: Cluster, function: Callable[[Job], Result], jobs: Mapping[str, Job], at_once: int | None, wait_s: float
) -> list[Result]:
    usable = usable_nodes(cluster, _one_core, "a core for a simulation", wait_s, say)
    for note in usable.left_out:
        say(sentence("pool.note", note=note))
    free = [node for node in usable.nodes for _ in range(int(node.resources["CPU"]))]
    places = TaskSlots(cluster, free[: at_once or len(free)], _one_core, wait_s)
    results: dict[str, Result] = {}
    waiting, lost = list(jobs), Counter[str]()
    try:
        while waiting or places.running:
            while waiting and places.free:
                places.submit(name := waiting.pop(0), places.free[0], _yield_result, function, jobs[name])
            if not places.left:
                raise MeasurementError(sentence("pool.no_machine", names=and_more(waiting)))
            name, came = places.next() or ("", TaskEnded())
            if isinstance(came, Raised):
                with _failures_named(name):
                    raise came.error
            elif isinstance(came, Lost) and name not in results:
                waiting.insert(0, name)
                lost[name] += came.began
                if lost[name] == MAX_LOST:
                    raise _died(name)
            elif not isinstance(came, TaskEnded | Lost):
                results[name] = came
    finally:
        places.close()
    return [results[name] for name in jobs]


def _yield_result(function: Callable[[Job], Result], job: Job) -> Iterator[Result]:
    yield function(job)


def _one_core(node: ClusterNode) -> dict[str, float] | None:
    return {"CPU": 1.0} if node.resources.get("CPU", 0.0) >= 1 else None


def _wait_for_all(running: Mapping[Future[Result], str], children: Collection[BaseProcess]) -> None:
    """Waits until all have ended well. Raises what the first failed one raised.

    The pool may miss the death of a process that it started after its thread began to wait (Python 3.11), so the
    ``children`` are looked at here too.
    """
    left = set(running)
    while left:
        died = any(child.exitcode is not None for child in children)
        done, left = wait(left, timeout=0 if died else _LOOK_S, return_when=FIRST_COMPLETED)
        for future in (job for job in running if job in done):
            with _failures_named(running[future]):
                future.result(timeout=0)
        if died and left:
            raise _died(and_more([running[future] for future in running if future in left]))


def _died(names: str) -> MeasurementError:
    return MeasurementError(sentence("pool.died", names=names))


@contextmanager
def _failures_named(name: str) -> Iterator[None]:
    """Gives a failure of the block the job's name."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error
    except BrokenProcessPool:
        raise _died(name) from None
    except MeasurementError as error:
        raise MeasurementError(f"{name}: {error}") from error
    except Exception as error:
        failed = sentence("pool.failed", name=name, kind=type(error).__name__, error=error)
        raise MeasurementError(failed) from error


def _begin(parent: int) -> None:
    """Leaves Ctrl-C to the parent, which ends this process; and ends with a parent that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with(parent)
