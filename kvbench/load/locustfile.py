"""kvbench's users under Locust's own command line, for its web UI, its CSV and its own distribution.

    locust -f kvbench/load/locustfile.py --host http://127.0.0.1:8000
    locust -f kvbench/load/locustfile.py --host http://127.0.0.1:8000 --headless --csv out --kvbench-at c32
    locust -f kvbench/load/locustfile.py --host http://127.0.0.1:8000 --headless --processes 4

Beside each request (POST) there are rows TTFT, ITL and TPOT for each class; the row Aggregated is that of the requests
alone. In closed loop ``--users`` is the concurrency; the test ends when the workload's requests are used up. With
``--headless`` it ends ``--run-time`` after its first request, if that is sooner. ``kvbench load`` remains the way to
measure: it also raises its priority, keeps the garbage collector out and checks clocks.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gevent
import numpy as np
from gevent.event import Event
from locust import User, events
from locust.dispatch import UsersDispatcher
from locust.env import Environment
from locust.rpc import Message
from locust.runners import STATE_MISSING, LocalRunner, MasterRunner, WorkerNode, WorkerRunner
from locust.stats import CSV_STATS_INTERVAL_SEC, RequestStats

from kvbench.common.errors import EXIT_INVALID, EXIT_USAGE, MeasurementError
from kvbench.load import process
from kvbench.load.client import StreamFailure
from kvbench.load.locust_options import add_arguments, arguments_of, chosen_load
from kvbench.load.multi.messages import send_statistics
from kvbench.load.multi.shards import make_shards
from kvbench.load.samples import Sample
from kvbench.load.session import ClosedLoopUser, LoadSession, OpenLoopUser
from kvbench.load.spec import LoadSpec, read_spec, requests_of
from kvbench.metrics.rows import gaps_within, sequence_tpots
from kvbench.requests.request import RequestList
from kvbench.workload.load_section import LoadPoint

_SHARD, _BEGUN, _ENDED = "kvbench_shard", "kvbench_begun", "kvbench_ended"
_MISTAKES = (ValueError, OSError, MeasurementError)


@dataclass
class Node:
    """The state of the test in this Locust process. ``shard``: its number and how many share the load; on a worker None
    until the master has said it.

    ``test``: how many tests were started, this one included; each has requests of its own. ``run_time``: --run-time [s]
    without a web UI, counted from the first request; Locust would count from before the requests are drawn.
    """

    point: LoadPoint | None = None
    session: LoadSession | None = None
    shard: tuple[int, int] | None = (0, 1)
    test: int = 0
    driver: gevent.Greenlet | None = None
    run_time: float | None = None
    timer: gevent.Greenlet | None = None
    time_is_over: bool = False
    ended: set[str] = field(default_factory=set)  # on the master: workers that have nothing more to do


NODE = Node()


class _Prepared:
    """Users of this process's session; if it could not be made they wait until Locust ends."""

    def on_start(self) -> None:
        if NODE.session is None:
            Event().wait()  # Locust reports an exception in here with a traceback
        self.session = NODE.session
        super().on_start()  # type: ignore[misc]

    def on_stop(self) -> None:
        if hasattr(self, "session"):
            super().on_stop()  # type: ignore[misc]


class ClosedLoop(_Prepared, ClosedLoopUser):
    """Sends its next request when its last one has ended."""


class OpenLoop(_Prepared, OpenLoopUser):
    """Sends every request at its own time; one such user drives all arrivals of its process."""


class DealtOnce(UsersDispatcher):
    """Locust's dispatcher, for the workers at the start of a test only: they share all its requests.

    Locust itself would spawn and move users when a worker comes, goes or comes back.
    """

    @property
    def dispatch_in_progress(self) -> bool:
        """Returns True, so that Locust dispatches no users on its own."""
        return True

    def add_worker(self, worker_node: WorkerNode) -> None: ...

    def remove_worker(self, worker_node: WorkerNode) -> None: ...


class OneEach(DealtOnce):
    """Spawns one open-loop user for each worker, whatever --users says: each has arrivals of its own to make."""

    def __init__(self, worker_nodes: list[WorkerNode], user_classes: list[type[User]]) -> None:
        super().__init__(worker_nodes, user_classes)
        self._shares = {node.id: {user_classes[0].__name__: 1} for node in worker_nodes}

    def new_dispatch(self, target_user_count: int, spawn_rate: float, user_classes: Any = None) -> None:
        self._rounds = iter([self._shares])

    def __next__(self) -> dict[str, dict[str, int]]:
        return next(self._rounds)


events.init_command_line_parser.add_listener(add_arguments)


@events.init.add_listener
def _on_init(environment: Environment, runner: Any, **_: Any) -> None:
    options = environment.parsed_options
    try:
        _, point = chosen_load(options)
        NODE.point = point
    except _MISTAKES as error:
        print(f"kvbench: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    if isinstance(runner, WorkerRunner):
        NODE.shard = None
        runner.register_message(_SHARD, _on_shard)
        return  # the master says which users, and how many
    if options.headless and options.run_time:
        NODE.run_time, options.run_time = options.run_time, None
    environment.user_classes = [ClosedLoop if point.mode == "closed" else OpenLoop]
    if isinstance(runner, MasterRunner):
        runner.register_message(_BEGUN, lambda msg, **_: _start_clock(environment))
        runner.register_message(_ENDED, lambda msg, **_: _on_ended(environment, msg))
        environment.dispatcher_class = DealtOnce if point.mode == "closed" else OneEach
    options.num_users = options.num_users or point.concurrency or 1
    options.spawn_rate = options.spawn_rate or options.num_users


def _on_shard(msg: Message, **_: Any) -> None:
    NODE.shard, NODE.test = (msg.data["number"], msg.data["of"]), msg.data["test"]


def _start_clock(environment: Environment) -> None:
    """Ends Locust ``--run-time`` after the first request of the first node; a worker tells the master."""
    if isinstance(environment.runner, WorkerRunner):
        environment.runner.send_message(_BEGUN)
    elif NODE.run_time is not None and NODE.timer is None:
        print(f"kvbench: the first request is sent; --run-time, {NODE.run_time} s, counts from now.", file=sys.stderr)
        NODE.timer = gevent.spawn_later(NODE.run_time, _end_in_time, environment)


def _end_in_time(environment: Environment) -> None:
    NODE.time_is_over = True
    environment.runner.quit()


def _on_ended(environment: Environment, msg: Message) -> None:
    NODE.ended.add(msg.node_id)
    if msg.data:
        _not_driven(environment, str(msg.data))


def _not_driven(environment: Environment, why: str) -> None:
    print(f"kvbench: {why}", file=sys.stderr)
    environment.process_exit_code = EXIT_INVALID


@events.test_start.add_listener
def _on_start(environment: Environment, **_: Any) -> None:
    runner = environment.runner
    if not isinstance(runner, WorkerRunner):
        NODE.test += 1
    if isinstance(runner, MasterRunner):
        _deal_out(environment, runner)
        return
    if NODE.shard is None:
        print("kvbench: this worker came when the requests had been dealt out; it takes no part", file=sys.stderr)
        gevent.spawn(_leave, environment)
        return
    options = environment.parsed_options
    users = runner.target_user_count or options.num_users or NODE.point.concurrency or 1
    try:
        session = _session(environment, users)
    except _MISTAKES as error:
        if options.headless and isinstance(runner, LocalRunner):  # Locust need not spawn users that have nothing to do
            print(f"kvbench: {error}", file=sys.stderr)
            sys.exit(EXIT_USAGE)
        gevent.spawn(_leave, environment, str(error))
        return
    NODE.session = session
    fire = environment.events.request.fire
    session.fire = lambda **event: (fire(**event), _add_rows(environment.stats, event["context"]["sample"]))
    if isinstance(runner, WorkerRunner):
        NODE.shard = None  # the next test's is not known
    NODE.driver = gevent.spawn(_drive, environment)


def _session(environment: Environment, users: int) -> LoadSession:
    """Makes what this process's users share, for its part of the test. See ``_MISTAKES``."""
    number, processes = NODE.shard
    spec, requests = _drawn(environment)
    if spec.mode == "closed":
        spec = spec.model_copy(update={"concurrency": users})
    if processes > 1:
        part = make_shards(spec.model_copy(update={"concurrency": max(users, processes)}), requests, processes)[number]
        spec, requests = part.spec, part.requests
    return LoadSession(spec, requests)


def _drawn(environment: Environment) -> tuple[LoadSpec, RequestList]:
    """The spec and requests of the whole test, from a process that knows servers. ValueError with its last sentence."""
    with tempfile.TemporaryDirectory(prefix="kvbench-locust-") as folder:
        path = Path(folder) / "spec.json"
        given = ["--host", environment.host or "", "--test", str(NODE.test), *arguments_of(environment.parsed_options)]
        command = [sys.executable, "-m", "kvbench.measure.locust_job", *given, str(path)]
        drawn = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        messages = drawn.stderr.strip().splitlines()
        if drawn.returncode:
            raise ValueError(messages[-1].removeprefix("kvbench: ") if messages else "no requests could be drawn.")
        for note in messages:
            print(note, file=sys.stderr)
        spec = read_spec(path)
        return spec, requests_of(spec)


def _add_rows(stats: RequestStats, sample: Sample) -> None:
    """TTFT, TPOT and every ITL of a successful request as rows of Locust's statistics [ms], under the request's class.

    They bypass Locust's request event, so that its Aggregated row counts requests only. Locust rounds percentiles to
    two digits; kvbench's own come from raw samples.
    """
    done, times, cls = sample.completion, sample.completion.chunk_times, sample.request.cls
    if not done.ok or done.first is None:
        return
    tpots = sequence_tpots(times, done.chunk_choices, done.chunk_tokens, done.streamed_tokens)
    rows = [("TTFT", done.first - sample.t0), *(("TPOT", tpot) for tpot in tpots[~np.isnan(tpots)].tolist())]
    rows += [("ITL", gap) for gap in gaps_within(times, done.chunk_choices).tolist()]
    for kind, seconds in rows:
        stats.get(cls, kind).log(seconds * 1000.0, 0)


def _deal_out(environment: Environment, master: MasterRunner) -> None:
    """Tells each worker its shard, before Locust tells it to spawn users."""
    nodes, users = sorted(master.clients, key=master.get_worker_index), master.target_user_count
    if NODE.point.mode == "closed" and users < len(nodes):
        print(f"kvbench: {users} users cannot be shared by {len(nodes)} workers; give each one.", file=sys.stderr)
        environment.process_exit_code = EXIT_USAGE
        gevent.spawn(_end, environment)
        return
    NODE.ended.clear()
    for number, node in enumerate(nodes):
        master.send_message(_SHARD, {"number": number, "of": len(nodes), "test": NODE.test}, client_id=node)
    gevent.spawn(_await_workers, environment, master, set(nodes))


def _await_workers(environment: Environment, master: MasterRunner, nodes: set[str]) -> None:
    """Ends the test when every one of ``nodes`` that is still there has nothing more to do."""
    while {node.id for node in master.clients.all if node.state != STATE_MISSING} & nodes - NODE.ended:
        gevent.sleep(0.25)
    _say_used_up(environment)
    _end(environment)


def _drive(environment: Environment) -> None:
    """Starts the load when the first user is connected, and ends Locust's test when the load has ended."""
    session = NODE.session
    if not session.total:  # more workers than conversations
        _leave(environment)
        return
    problem = None
    try:
        process.wait_ready(session, 1)  # who stops the test ends this greenlet
        session.begin()
        _start_clock(environment)
        problem = process.watch(session)
        process.parse_rest(session)
    except StreamFailure as failure:
        problem = str(failure)
    except Exception as error:  # whatever it was: a node that says nothing would be waited for without end
        problem = f"this node could not go on measuring: {error!r}"
    if problem is None and not isinstance(environment.runner, WorkerRunner):
        _say_used_up(environment)
    _leave(environment, problem)


def _leave(environment: Environment, problem: str | None = None) -> None:
    """Ends this node's part of the test; ``problem``: why it could not do it."""
    if problem is not None:
        _not_driven(environment, problem)
    if isinstance(environment.runner, WorkerRunner):
        send_statistics(environment.runner)
        environment.runner.send_message(_ENDED, problem)
    else:
        _end(environment)


def _say_used_up(environment: Environment) -> None:
    """Says why the test ends: one that ends before its --run-time looks cut short."""
    if environment.process_exit_code is None and not NODE.time_is_over:
        cap = " before --run-time is over" if NODE.run_time else ""
        print(f"kvbench: the workload's requests are used up, so the test ends{cap}.", file=sys.stderr)


def _end(environment: Environment) -> None:
    """Ends Locust without a web UI; with one it gets ready for the next test."""
    if environment.parsed_options.csv_prefix:  # Locust writes its CSV once a second, and not when it ends
        gevent.sleep(2 * CSV_STATS_INTERVAL_SEC)
    if environment.parsed_options.headless:
        environment.runner.quit()
    else:
        environment.runner.stop()


@events.test_stop.add_listener
def _on_stop(environment: Environment, **_: Any) -> None:
    session = NODE.session
    if session is None:
        return
    NODE.session, session.stopping = None, True
    if NODE.driver is not gevent.getcurrent():  # from outside
        session.stop()
        NODE.driver.kill(block=False)  # it must not end the next test
    if session.go.is_set():
        process.parse_rest(session)
    session.close()
