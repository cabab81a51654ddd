"""The master of a load of several processes: gives each its part, starts all at one moment, watches and collects.

Its lines on stdout and its files are those of a load of one process. The load ends as soon as one worker is lost: what
the others measured is kept, and the load is incomplete and invalid. Local workers are started by the master and end
with it; workers on other machines are started there by ``kvbench load --worker``.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import gevent
import numpy as np
from gevent.event import Event
from locust.env import Environment
from locust.rpc import Message
from locust.runners import HEARTBEAT_LIVENESS, MasterRunner

from kvbench import __version__
from kvbench.common import processes
from kvbench.common.errors import EXIT_INVALID, EXIT_OK
from kvbench.common.machine import boot_id
from kvbench.common.parsing import json_at
from kvbench.load.client_figures import Clocked
from kvbench.load.multi import messages
from kvbench.load.multi.merge import (
    Data,
    Member,
    WorkerEnd,
    best_of,
    clock_map,
    exchange,
    in_slices,
    merged_client,
    samples_from_bytes,
)
from kvbench.load.multi.messages import TOKEN_VARIABLE, proof, proven
from kvbench.load.multi.shards import cap_note, make_shards, useful_workers
from kvbench.load.outcome import DrivenLoad, write_outcome
from kvbench.load.process import PROGRESS_S, LoadEvents
from kvbench.load.spec import LoadSpec
from kvbench.metrics.model import LocustTotals
from kvbench.requests.request import RequestList

LOCAL_ARRIVAL_S = 60.0
LOST_S = 4.0  # without a heartbeat during the load
_IDLE_LOST_S = 10.0  # the same while workers are still awaited
_ANSWER_S = 60.0  # the same before and after it, when a worker is busy; and its limit for most answers
_QUICK_S = 5.0
_LOOK_S = 0.25
_EXCHANGES, _CHECK_CLOCKS_S = 16, 5.0
_LEAD_S = 0.5
_DISMISS_S = 5.0
_STOPPED = "stopped before the load began"


class LoadNotBegun(Exception):
    """A worker was lost or failed before the load began, or somebody stopped it. The text says why."""


class GuardedMaster(MasterRunner):
    """Locust's master, which ignores messages of senders that have not proven that they know the token.

    ``members``: the workers that were admitted, by Locust's name.
    """

    def __init__(self, environment: Environment, host: str, port: int) -> None:
        self.members: dict[str, Member] = {}
        super().__init__(environment, host, port)

    def client_listener(self) -> NoReturn:
        """Receives as Locust does, but goes on at bytes that are no message, such as a port scanner's."""
        while True:
            try:
                super().client_listener()
            except Exception as error:
                logging.getLogger(__name__).debug("a message that cannot be read was dropped: %r", error)

    def handle_message(self, client_id: str, msg: Message) -> None:
        """Takes a message of ``client_id`` (as the socket knows it) that says it is of ``msg.node_id``."""
        if client_id == msg.node_id and (client_id in self.members or msg.type in ("client_ready", messages.JOIN)):
            super().handle_message(client_id, msg)


class SharedLoad:
    """One load that several workers send.

    ``listen``: host and port to which workers of other machines connect (None: the master starts local ones);
    ``arrive_s``: how long it waits for them.
    """

    def __init__(
        self,
        spec: LoadSpec,
        requests: RequestList,
        workers: int,
        listen: tuple[str, int] | None = None,
        arrive_s: float = LOCAL_ARRIVAL_S,
    ) -> None:
        """Opens the port and starts local workers. ValueError for a port in use, or more workers than users."""
        useful = useful_workers(spec, requests, workers)
        if useful < workers and listen:
            raise ValueError(
                f"{workers} workers are too many: with {len(requests)} requests and "
                f"{spec.concurrency or spec.max_concurrency or 'no'} users at most {useful} have anything to do."
            )
        self.spec, self.local, self.arrive_s = spec, listen is None, arrive_s
        self.host, port = listen or ("127.0.0.1", 0)
        self.requests = RequestList(requests, requests.notes | cap_note(spec, useful))
        self.events = LoadEvents(len(requests))
        self.env = Environment()
        self._shards = make_shards(spec, requests, useful)
        self._news = Event()  # a worker has answered, or its streams have ended
        self._refusal = ""  # why the last worker that was turned away was
        self._zero: float | None = None
        self._problem: str | None = None  # why the load could not be driven to its end
        try:
            self.runner = self.env.runner = GuardedMaster(self.env, self.host, port)
        except (Exception, SystemExit) as error:  # Locust ends the process when the port is taken
            where = f"{self.host}:{port} ({error})"
            raise ValueError(f"no worker can connect to {where}: give a free --bind-port.") from None
        self.port = self.runner.master_bind_port = self.runner.server.port
        acts = {messages.JOIN: self._on_join, messages.PROGRESS: self._on_progress, messages.ENDED: self._on_ended}
        acts |= dict.fromkeys((messages.CLOCK, messages.SHARD, messages.START, messages.SAMPLES), self._on_answer)
        for name, act in acts.items():
            self.runner.register_message(name, act)
        self._children = [self._launch() for _ in range(useful)] if self.local else []

    def _launch(self) -> processes.Child:
        place = ("--master-host", self.host, "--master-port", str(self.port))
        command = [sys.executable, "-m", "kvbench.load", "--worker", *place]
        # In our own process group, so that whoever stops us stops them; they also end when we do (PDEATHSIG).
        return processes.launch(command, stdout=subprocess.DEVNULL, stderr=None, own_session=False)

    @property
    def members(self) -> list[Member]:
        """The workers, in the order in which they came."""
        return list(self.runner.members.values())

    def run(self) -> int:
        """Returns the exit code; 128 + signal when it was stopped by one. Every wait in here is bounded."""
        self.events.listen()
        if not self.local:
            self._say("waiting", workers=len(self._shards), host=self.host, port=self.port)
        code = EXIT_INVALID
        try:
            code = self._drive()
        except LoadNotBegun as reason:
            self._problem, code = str(reason), self.events.exit_code(str(reason))
            print(f"kvbench load: {reason}", file=sys.stderr)
            self._say("end", exit_code=code, error=str(reason))
        finally:
            self._dismiss(code)
        return code

    def _drive(self) -> int:
        self._gather()
        self._ask(messages.SHARD, self._shard_of)
        self._start()
        started = time.time() + (self._zero - time.perf_counter())
        gevent.sleep(max(0.0, self._zero - time.perf_counter()))
        self._say("begin")
        problem = self._watch()
        wall_s = time.perf_counter() - self._zero
        step_s = time.time() - started - wall_s
        self._say("measured")
        if problem is not None or self.events.stopped:
            self._send(messages.STOP, lambda member: {})
        self._read_clocks(needed=False)
        measured = self._collect()
        self._problem = problem = problem or self._first_loss()
        if problem is not None:
            print(f"kvbench load: {problem}", file=sys.stderr)
        code = self.events.exit_code(problem)
        driven = self._driven(measured, Clocked(started, sum(m.clocked.cpu_s for m in measured), wall_s, step_s))
        load = write_outcome(self.spec, self.requests, driven, ended_well=code == 0)
        self._say("end", exit_code=code, incomplete=load.incomplete, invalid_reasons=load.invalid_reasons)
        return code

    # Messages from workers:

    def _on_join(self, msg: Message, **_: Any) -> None:
        data, node = msg.data, msg.node_id
        why, version = None, json_at(data, "version")
        if not proven(node, json_at(data, "proof")):
            why = f"it has another {TOKEN_VARIABLE} than the master"
        elif version != __version__:
            why = f"it is kvbench {version}, the master is {__version__}"
        elif len(self.members) == len(self._shards):
            why = "the load has all its workers"
        if why is None:
            host, pid = str(data["host"]), int(data["pid"])
            boot = json_at(data, "boot")
            self.runner.members[node] = Member(node, f"a worker (pid {pid} on {host})", host, pid, boot)
        else:
            self._refusal = f" (turned away: {why})"
        answer = {"proof": proof(f"master {node}")} if why is None else {"error": why}
        self.runner.send_message(messages.JOIN, answer, client_id=node)

    def _on_progress(self, msg: Message, **_: Any) -> None:
        member = self.runner.members[msg.node_id]
        member.done, member.failed = int(msg.data["done"]), int(msg.data["failed"])

    def _on_ended(self, msg: Message, **_: Any) -> None:
        member, ended = self.runner.members[msg.node_id], WorkerEnd(**msg.data)
        member.done, member.failed, member.ended = ended.done, ended.failed, ended
        self._news.set()

    def _on_answer(self, msg: Message, **_: Any) -> None:
        self.runner.members[msg.node_id].answers[msg.type] = {**msg.data, "received": time.perf_counter()}
        self._news.set()

    # Messages to workers:

    def _send(self, name: str, data: Callable[[Member], Data], to: Sequence[Member] | None = None) -> None:
        for member in self.members if to is None else to:
            if member.lost is None:
                member.answers.pop(name, None)
                self.runner.send_message(name, data(member), client_id=member.node)

    def _ask(
        self,
        name: str,
        data: Callable[[Member], Data] = lambda member: {},
        *,
        to: Sequence[Member] | None = None,
        limit_s: float = _ANSWER_S,
        needed: bool = True,
    ) -> None:
        """Sends a message ``to`` some (None: all workers) and waits for their answers; one without an answer is lost.

        ``needed``: raises LoadNotBegun for the first that is lost or answers with an error, and when the load is
        stopped.
        """
        members = [m for m in (self.members if to is None else to) if m.lost is None]
        self._send(name, data, members)
        due = time.monotonic() + limit_s
        while waiting := [m for m in members if m.lost is None and name not in m.answers]:
            self._news.clear()
            self._news.wait(_LOOK_S)
            if needed and self.events.stopped:
                raise LoadNotBegun(_STOPPED)
            self._find_lost(min(limit_s, _ANSWER_S))
            if time.monotonic() > due:
                for member in waiting:
                    member.lose(f"it did not answer ({name.removeprefix('kvbench_')}) within {limit_s:g} s")
            if needed and self._first_loss():
                break
        for member in members:
            if name in member.answers and "error" in member.answers[name]:
                member.lost = member.lost or f"{member.name}: {member.answers[name]['error']}"
        if needed and (loss := self._first_loss()):
            raise LoadNotBegun(loss)

    def _gather(self) -> None:
        """Waits until all workers have joined, and reads their clocks. A worker that leaves may be replaced."""
        due, wanted = time.monotonic() + self.arrive_s, len(self._shards)
        while len(self.members) < wanted:
            if self.events.stopped:
                raise LoadNotBegun(_STOPPED)
            for number, child in enumerate(self._children, 1):
                if child.poll() is not None:
                    raise LoadNotBegun(f"worker process {number} ended with code {child.returncode} before the load")
            for member in self.members:
                if self._silent(member, _IDLE_LOST_S):
                    del self.runner.members[member.node]
            if time.monotonic() > due:
                came = f"{len(self.members)} of {wanted} workers came within {self.arrive_s:g} s"
                raise LoadNotBegun(came + self._refusal)
            gevent.sleep(0.02)
        for number, (member, shard) in enumerate(zip(self.members, self._shards, strict=True), 1):
            member.name = f"worker {number} of {wanted} (pid {member.pid} on {member.host})"
            member.shard = shard
        self._read_clocks()

    def _read_clocks(self, needed: bool = True) -> None:
        for member in self.members:
            readings = []
            while member.lost is None and len(readings) < _EXCHANGES:
                sent = time.perf_counter()
                self._ask(messages.CLOCK, to=[member], limit_s=_QUICK_S, needed=needed)
                if member.lost is None:
                    answer = member.answers[messages.CLOCK]
                    readings.append(exchange(sent, answer["t2"], answer["t3"], answer["received"]))
            if member.lost is None:
                reading = best_of(readings)
                if member.clock is None:
                    member.clock = clock_map(reading, member.boot, boot_id())
                else:
                    member.clock = member.clock.with_reading(reading)

    def _shard_of(self, member: Member) -> Data:
        rows = [json.dumps(r.to_row(), separators=(",", ":")) for r in in_slices(member.shard.requests)]
        return {"spec": member.shard.spec.model_dump_json(), "rows": "\n".join(rows).encode()}

    def _start(self) -> None:
        """Tells all workers the moment at which the load begins. LoadNotBegun if one hears of it too late."""
        slowest = max(r.error for member in self.members for r in member.clock.readings)
        self._zero = zero = time.perf_counter() + _LEAD_S + 4 * slowest
        self._ask(messages.START, lambda member: {"zero": member.clock.from_master(zero)}, limit_s=_QUICK_S)
        for member in self.members:
            left_s = member.answers[messages.START]["left_s"]
            if left_s <= 0:
                raise LoadNotBegun(f"{member.name} received the start {-left_s:.3f} s too late")

    def _watch(self) -> str | None:
        """Waits for the end: None when all workers ended or the load was stopped, else why one cannot go on."""
        checked = time.monotonic()
        while not all(member.ended for member in self.members):
            self._news.clear()
            self._news.wait(PROGRESS_S)
            if self.events.stopped:
                return None
            self._find_lost(LOST_S)
            if problem := self._first_loss() or self._first_problem():
                return problem
            if time.monotonic() - checked > _CHECK_CLOCKS_S and not all(m.clock.same_clock for m in self.members):
                self._read_clocks(needed=False)
                checked = time.monotonic()
            self._say("progress")
        return None if self.events.stopped else self._first_problem()

    def _first_problem(self) -> str | None:
        """Says why a worker that answers ended before its last request."""
        for member in self.members:
            if (end := member.ended) is None:
                continue
            if end.error:
                return f"{member.name} could not go on measuring: {end.error}"
            if end.gone:
                return end.gone
            if end.signal:
                return f"{member.name} was stopped by {signal.Signals(end.signal).name}"
        return None

    def _silent(self, member: Member, limit_s: float) -> bool:
        node = self.runner.clients.get(member.node)
        return node is None or node.heartbeat < HEARTBEAT_LIVENESS - limit_s  # Locust counts down once a second

    def _find_lost(self, silent_s: float) -> None:
        """Marks workers as lost whose local process ended, or that sent no heartbeat for ``silent_s``."""
        ended = {child.pid: child.returncode for child in self._children if child.poll() is not None}
        for member in self.members:
            if member.pid in ended:
                code = ended[member.pid]
                member.lose(f"its process ended ({f'signal {-code}' if code < 0 else f'exit code {code}'})")
            elif member.node not in self.runner.clients:
                member.lose("it went away")
            elif self._silent(member, silent_s):
                member.lose("its heartbeats stopped")

    def _first_loss(self) -> str | None:
        return next((member.lost for member in self.members if member.lost is not None), None)

    def _collect(self) -> list[Member]:
        """Fetches the measurements of every worker that still answers; returns those workers."""
        self._ask(messages.SAMPLES, limit_s=math.inf, needed=False)  # a worker parses what is left first
        by_index = {r.index: r for r in self.requests}
        for member in self.members:
            if member.lost is not None:
                continue
            answer, first_user = member.answers.pop(messages.SAMPLES), member.shard.first_user
            member.samples = samples_from_bytes(answer["samples"], member.clock, by_index, first_user)
            member.lags = np.frombuffer(answer["lags"], dtype=np.float64)
            member.clocked = Clocked(**answer["clocked"])
        return [member for member in self.members if member.lost is None]

    def _driven(self, members: list[Member], clocked: Clocked) -> DrivenLoad:
        client, reasons = merged_client(members, self.spec.mode, clocked.wall_s)
        client = client.model_copy(update={"workers_here": boot_id() in [member.boot for member in members]})
        if self._problem:
            reasons.append(f"{self._problem.rstrip('.')}.")
        samples, total = [s for m in members for s in m.samples], self.env.stats.total
        totals = LocustTotals(num_requests=total.num_requests, num_failures=total.num_failures)
        return DrivenLoad(samples, self._zero, clocked, client, reasons, totals)

    def _dismiss(self, code: int) -> None:
        """Tells all workers the load's exit code; kills local ones that do not end. At most about 10 s."""
        why = ""
        if code != EXIT_OK and not self.local:  # the local ones' stderr is ours
            failed = f"the load failed: {self._problem or 'the master could not go on'}"
            why = "the load was stopped at the master" if self.events.stopped else failed
        self._send(messages.END, lambda member: {"code": code, "why": why})
        gevent.sleep(0.1)
        with gevent.Timeout(_DISMISS_S, False):
            self.runner.quit()
        due = time.monotonic() + _DISMISS_S
        lost = {member.pid for member in self.members if member.lost is not None}
        for child in self._children:
            while child.pid not in lost and child.poll() is None and time.monotonic() < due:
                gevent.sleep(0.02)
            if child.poll() is None:
                child.kill()
                child.wait()

    def _say(self, event: str, **more: Any) -> None:
        elapsed = 0.0 if self._zero is None else max(0.0, time.perf_counter() - self._zero)
        done, failed = sum(m.done for m in self.members), sum(m.failed for m in self.members)
        self.events.say(event, done, failed, elapsed, **more)
