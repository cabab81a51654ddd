"""The master's crew of workers: it deals out, starts all at one moment, watches, collects, and measures nothing.

Local workers are started by the master and end with it; workers on other machines are started there by
``kvbench load --worker``. The load ends as soon as one worker is lost: what the others measured is kept, and the load
is incomplete and invalid.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gevent
import numpy as np
from gevent.event import Event
from gevent.pool import Group
from locust.env import Environment
from locust.rpc import Message
from locust.runners import STATE_MISSING

from engine.boot import boot_id
from kvbench import __version__, processes
from kvbench.load.distributed import TOKEN_VARIABLE, Shard, make_shards, useful_workers
from kvbench.load.distributed_calibration import LIMIT_S as CALIBRATION_S
from kvbench.load.distributed_clock import ClockMap, Exchange, clock_map, reading
from kvbench.load.distributed_wire import CALL, EVENT, HELLO, REPLY, Link, WorkerLost, proof, proven
from kvbench.load.locust_shares import fixed_shares
from kvbench.load.merge import WorkerResult, samples_from_bytes
from kvbench.load.outcome import Clocked
from kvbench.load.process import START_LIMIT_S, user_class, user_count
from kvbench.load.requests import RequestList, RequestSpec
from kvbench.load.spec import LoadSpec

LOCAL_ARRIVAL_S = 60.0
_EXCHANGES = 16
_EXCHANGE_LIMIT_S = 5.0
_LEAD_S = 0.5
_STOP_S = 5.0


@dataclass(frozen=True)
class Meeting:
    """Where workers come to, and how many. ``local``: the master starts them itself."""

    workers: int
    local: bool = True
    host: str = "127.0.0.1"
    port: int = 0
    arrive_s: float = LOCAL_ARRIVAL_S


class Crew:
    """The workers of one load, and everything that is said to them."""

    def __init__(self, spec: LoadSpec, requests: RequestList, meeting: Meeting) -> None:
        """Opens the port and starts the local workers. ValueError for a port or a number that cannot be."""
        useful = useful_workers(spec, requests, meeting.workers)
        if useful < meeting.workers and not meeting.local:
            raise ValueError(
                f"{meeting.workers} workers are too many: with {len(requests)} requests and "
                f"{spec.concurrency or spec.max_concurrency or 'no'} users at most {useful} have anything to do."
            )
        self.spec, self.requests, self.meeting = spec, requests, meeting
        self.shards: list[Shard] = make_shards(spec, requests, useful)
        self.links: list[Link] = []
        self.clocks: list[ClockMap] = []
        self.refused: list[str] = []
        self.news = Event()  # a worker has ended
        self._children: list[subprocess.Popen[bytes]] = []
        self.env = Environment(user_classes=[user_class(spec)])
        try:
            self.runner = self.env.create_master_runner(meeting.host, meeting.port)
        except (Exception, SystemExit) as error:  # Locust ends the process when the port is taken
            raise ValueError(
                f"no workers can be awaited at {meeting.host}:{meeting.port} ({error}); give a free --bind-port."
            ) from error
        self.port = self.runner.master_bind_port = self.runner.server.port
        for kind, listener in ((HELLO, self._on_hello), (REPLY, self._on_reply), (EVENT, self._on_event)):
            self.runner.register_message(kind, listener)
        if meeting.local:
            self._children = [self._launch() for _ in self.shards]

    def _launch(self) -> subprocess.Popen[bytes]:
        place = ("--master-host", self.meeting.host, "--master-port", str(self.port))
        command = [sys.executable, "-m", "kvbench.load", "--worker", *place]
        # In our own process group, so that whoever stops us stops them; they also end when we do (PDEATHSIG).
        return processes.launch(command, stdout=subprocess.DEVNULL, stderr=None, own_session=False)

    def _on_hello(self, msg: Message, **_: Any) -> None:
        data, node = msg.data, msg.node_id
        if why := self._unwanted(data, node):
            self.refused.append(f"{data.get('host')}: {why}")
            self.runner.send_message(CALL, {"id": -1, "op": "refused", "why": why}, client_id=node)
            return
        number = len(self.links) + 1
        link = Link(
            node,
            f"worker {number} of {len(self.shards)} (pid {data['pid']} on {data['host']})",
            str(data["host"]),
            int(data["pid"]),
            data.get("boot"),
            send=lambda call: self.runner.send_message(CALL, call, client_id=node),
        )
        self.links.append(link)

    def _unwanted(self, data: Mapping[str, Any], node: str) -> str | None:
        if not proven(node, data.get("proof")):
            return f"it has another {TOKEN_VARIABLE} than the master"
        if data.get("version") != __version__:
            return f"it is kvbench {data.get('version')}, the master is {__version__}"
        return "the load has all its workers" if len(self.links) == len(self.shards) else None

    def _link_of(self, node: str) -> Link | None:
        return next((link for link in self.links if link.node == node), None)

    def _on_reply(self, msg: Message, **_: Any) -> None:
        if link := self._link_of(msg.node_id):
            link.on_reply(msg.data)

    def _on_event(self, msg: Message, **_: Any) -> None:
        if link := self._link_of(msg.node_id):
            link.done, link.failed = int(msg.data["done"]), int(msg.data["failed"])
            if msg.data["event"] == "ended":
                link.ended, link.gone, link.signal = True, msg.data["gone"], msg.data["signal"]
                self.news.set()

    def gather(self, stopped: Callable[[], bool]) -> None:
        """Until all workers have come. WorkerLost when they do not in time."""
        due = time.monotonic() + self.meeting.arrive_s
        while len(self.links) < len(self.shards) or len(self.runner.clients.ready) < len(self.shards):
            for number, child in enumerate(self._children, 1):
                if child.poll() is not None:
                    raise WorkerLost(f"worker process {number} ended with exit code {child.returncode} before the load")
            if stopped():
                return
            if time.monotonic() > due:
                refused = f" (turned away: {'; '.join(self.refused)})" if self.refused else ""
                raise WorkerLost(
                    f"{len(self.links)} of {len(self.shards)} workers came within {self.meeting.arrive_s:g} s{refused}"
                )
            gevent.sleep(0.02)
        boot = boot_id()
        self.clocks = [clock_map(reading(self._exchange(link)), link.boot, boot) for link in self.links]

    def _exchange(self, link: Link, count: int = _EXCHANGES) -> list[Exchange]:
        exchanges = []
        for _ in range(count):
            sent = time.perf_counter()
            answer = link.call("clock", _EXCHANGE_LIMIT_S)
            exchanges.append(Exchange(sent, answer["t2"], answer["t3"], answer["received"]))
        return exchanges

    def look_at_clocks(self) -> None:
        """One more reading of every worker's clock that still answers; one that does not counts as lost."""
        for k, link in enumerate(self.links):
            exchanges = _ignoring_loss(lambda link=link: self._exchange(link))
            if exchanges:
                self.clocks[k] = self.clocks[k].with_reading(reading(exchanges))

    def calibrate(self, settings: Mapping[str, Any]) -> list[Any]:
        """Every worker measures how well its own client measures; what it found. WorkerLost."""

        def ask(link: Link, shard: Shard) -> Any:
            told = proof("master " + link.node)
            reply = link.call("calibrate", CALIBRATION_S, settings=dict(settings), proof_of_master=told)
            return json.loads(reply["found"])

        return self._with_each(ask)

    def prepare(self) -> None:
        """Deals out the shards and lets Locust spawn the users; returns when all stand at the line. WorkerLost."""
        self._with_each(self._hand_over)
        due = time.monotonic() + START_LIMIT_S
        while len(self.runner.clients.ready) < len(self.links):  # one whose heartbeat was late comes back
            if time.monotonic() > due:
                raise WorkerLost(f"not all workers were ready in {START_LIMIT_S:g} s")
            gevent.sleep(0.02)
        shares = {link.node: user_count(shard.spec) for link, shard in zip(self.links, self.shards, strict=True)}
        self.env.dispatcher_class = fixed_shares(shares.__getitem__)
        self.runner.start(sum(shares.values()), spawn_rate=1)
        self._with_each(lambda link, shard: link.call("line_up"))

    def _hand_over(self, link: Link, shard: Shard) -> None:
        told = proof("master " + link.node)
        link.call("spec", spec=shard.spec.model_dump_json(), proof_of_master=told)
        rows = "\n".join(json.dumps(r.to_row(), separators=(",", ":")) for r in shard.requests)
        link.push("rows", rows.encode())
        link.call("prepare")

    def _with_each(self, work: Callable[[Link, Shard], Any]) -> list[Any]:
        """``work`` for all workers at once; the first failure is raised when all have ended."""
        group = Group()
        jobs = [group.spawn(_caught, work, link, shard) for link, shard in zip(self.links, self.shards, strict=True)]
        group.join()
        for job in jobs:
            if isinstance(job.value, Exception):
                raise job.value
        return [job.value for job in jobs]

    def start(self) -> float:
        """Names the moment at which all begin, and makes sure that all know it; on our clock [s]. WorkerLost."""
        slowest = max(r.error for clock in self.clocks for r in clock.readings)
        zero = time.perf_counter() + _LEAD_S + 4 * slowest
        moments = {link.name: clock.from_master(zero) for link, clock in zip(self.links, self.clocks, strict=True)}
        answers = self._with_each(lambda link, shard: link.call("start", _EXCHANGE_LIMIT_S, zero=moments[link.name]))
        for link, answer in zip(self.links, answers, strict=True):
            if answer["left_s"] <= 0:
                raise WorkerLost(f"{link.name} was told the start {-answer['left_s']:.3f} s too late")
        return zero

    def find_lost(self) -> str | None:
        """Why a worker is gone, if one is: its process ended (local), or its heartbeats did (Locust's check)."""
        for link in self.links:
            child = next((c for c in self._children if c.pid == link.pid), None)
            node = self.runner.clients.get(link.node)
            if child is not None and child.poll() is not None:
                link.lose(f"its process ended ({_how(child.returncode)})")
            elif node is None or node.state == STATE_MISSING:
                link.lose("its heartbeats stopped")
        return self.first_loss()

    def first_loss(self) -> str | None:
        """Why the first worker that counts as lost does."""
        return next((link.lost for link in self.links if link.lost is not None), None)

    def first_problem(self) -> str | None:
        """Why a worker that answers ended before its last request."""
        for link in self.links:
            if link.gone:
                return f"the server stopped answering: {link.gone}"
            if link.signal:
                return f"{link.name} was stopped by {signal.Signals(link.signal).name}"
        return None

    def stop(self, in_haste: bool) -> None:
        """Every worker that still answers ends its users; ``in_haste``: and soon what it has to read."""
        self._with_each(lambda link, shard: _ignoring_loss(lambda: link.call("stop", _STOP_S, in_haste=in_haste)))

    def collect(self) -> list[WorkerResult]:
        """What every worker that still answers has measured."""
        by_index = {r.index: r for r in self.requests}
        found = self._with_each(lambda link, shard: self._fetch(link, shard, by_index))
        return [result for result in found if result is not None]

    def _fetch(self, link: Link, shard: Shard, by_index: Mapping[int, RequestSpec]) -> WorkerResult | None:
        """None when it did not hand its samples back; then it counts as lost."""
        clock = self.clocks[self.links.index(link)]
        try:
            told = link.call("finish")
            while left := told.get("left"):  # answers that it has not parsed yet
                told = link.call("finish")
                if told.get("left", 0) >= left:
                    raise WorkerLost(f"{link.name} left {left} answers unread")
            data = {name: link.pull(name, size) for name, size in told["sizes"].items()}
            samples = samples_from_bytes(data["samples"], told["zero"], clock, by_index, shard.first_user)
        except (WorkerLost, ValueError, KeyError) as error:
            link.lose(f"its samples did not come back ({error})")
            return None
        lags = np.frombuffer(data["lags"], dtype=np.float64)
        clocked = Clocked(**json.loads(data["clocked"])) if "clocked" in data else Clocked()
        return WorkerResult(
            link.name, link.host, link.pid, len(shard.requests), samples, lags, clocked, clock, told["mismatches"]
        )

    def dismiss(self) -> None:
        """Sends all home; the local ones are waited for, and killed when they do not go. At most about 5 s."""
        for link in self.links:
            if link.lost is None:
                gevent.spawn(_ignoring_loss, lambda link=link: link.call("quit", 1.0))
        gevent.sleep(0.1)
        with gevent.Timeout(_STOP_S, False):
            self.runner.quit()
        due = time.monotonic() + _STOP_S
        lost = {link.pid for link in self.links if link.lost is not None}
        for child in self._children:
            if child.pid in lost:
                child.kill()
            while child.poll() is None and time.monotonic() < due:
                gevent.sleep(0.02)
            if child.poll() is None:
                child.kill()
                child.wait()


def _caught(work: Callable[..., Any], *args: Any) -> Any:
    try:
        return work(*args)
    except Exception as error:
        return error


def _ignoring_loss(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except WorkerLost:
        return None


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
