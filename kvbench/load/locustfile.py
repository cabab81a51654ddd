"""The same load under Locust's own command line, for its web UI and charts.

    KVBENCH_LOAD_SPEC=SPEC.json locust -f kvbench/load/locustfile.py --headless --users 8 --spawn-rate 8

``--users`` is the concurrency (closed loop) or 1 (open loop). SPEC.json is that of ``python -m kvbench.load``, which
remains the way to measure: it also raises its priority, keeps the garbage collector out and stops on its own terms.
The outcome is written when the test stops.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gevent
from locust import events
from locust.env import Environment

from kvbench.load.lag import LagProbe
from kvbench.load.outcome import Measured, write_outcome
from kvbench.load.run import prepare
from kvbench.load.users import ClosedLoopUser, OpenLoopUser

SPEC, REQUESTS, SESSION = prepare(os.environ.get("KVBENCH_LOAD_SPEC", ""))
Path(SPEC.out_dir).mkdir(parents=True, exist_ok=True)
_probe = LagProbe()
_start: dict[str, float] = {}
_runner: list[Any] = []


class KvbenchUser(ClosedLoopUser if SPEC.mode == "closed" else OpenLoopUser):  # type: ignore[misc]
    """Closed or open loop, as the spec says."""

    session = SESSION


@events.init.add_listener
def _on_init(environment: Environment, **_: Any) -> None:
    SESSION.fire = environment.events.request.fire


@events.test_start.add_listener
def _on_start(environment: Environment, **_: Any) -> None:
    _runner[:] = [environment.runner]


@events.spawning_complete.add_listener
def _on_spawned(**_: Any) -> None:
    if not SESSION.go.is_set():
        gevent.spawn(_begin)


def _begin() -> None:
    """Starts the load once all users stand at the line, and ends Locust's test when the load has ended."""
    users = SPEC.concurrency or 1
    while SESSION.ready < (users if SPEC.mode == "closed" else 1) and SESSION.start_failure is None:
        gevent.sleep(0.01)
    _start.update(unix=time.time(), cpu=time.process_time())
    _probe.start()
    SESSION.begin()
    SESSION.ended.wait()
    _start["wall"] = SESSION.elapsed()
    _runner[0].quit()


@events.quitting.add_listener
def _on_quitting(environment: Environment, **_: Any) -> None:
    _probe.stop()
    if not _start:
        return
    with gevent.Timeout(5, False):
        SESSION.drain()
    measured = Measured(
        _start["unix"],
        time.process_time() - _start["cpu"],
        _start.get("wall", SESSION.elapsed()),
        "normal",
        _probe.lags,
    )
    total = environment.stats.total
    write_outcome(SPEC, REQUESTS, SESSION, measured, (total.num_requests, total.num_failures))
