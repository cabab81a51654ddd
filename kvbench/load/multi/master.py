"""The master of a crew of workers: it deals out, starts all at one moment, watches, collects, and measures nothing.

The load ends as soon as one worker is lost: what the others measured is kept, and the load is incomplete and invalid.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import gevent
import numpy as np
from locust.env import Environment

from kvbench.common.machine import boot_id
from kvbench.load.multi.calibration import LIMIT_S as CALIBRATION_S
from kvbench.load.multi.clock import ClockMap, Exchange, clock_map, reading
from kvbench.load.multi.dispatch import fixed_shares
from kvbench.load.multi.members import LEFT_S, LoadStopped, Meeting, Members, ignoring_loss
from kvbench.load.multi.merge import WorkerResult, samples_from_bytes
from kvbench.load.multi.shards import Shard, make_shards, useful_workers
from kvbench.load.multi.wire import Link, WorkerLost, proof
from kvbench.load.outcome import Clocked
from kvbench.load.process import START_LIMIT_S, user_class, user_count
from kvbench.load.spec import LoadSpec
from kvbench.requests.request import RequestList, RequestSpec

_EXCHANGES = 16
_EXCHANGE_LIMIT_S = 5.0
_LEAD_S = 0.5
_STOP_S = 5.0


class Crew:
    """Everything that is said to the workers of one load. ``stopped``: whether somebody wants it to end."""

    def __init__(
        self, spec: LoadSpec, requests: RequestList, meeting: Meeting, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Opens the port and starts the local workers. ValueError for a port or a number that cannot be."""
        useful = useful_workers(spec, requests, meeting.workers)
        if useful < meeting.workers and not meeting.local:
            raise ValueError(
                f"{meeting.workers} workers are too many: with {len(requests)} requests and "
                f"{spec.concurrency or spec.max_concurrency or 'no'} users at most {useful} have anything to do."
            )
        self.spec, self.requests = spec, requests
        self.shards: list[Shard] = make_shards(spec, requests, useful)
        self.clocks: list[ClockMap] = []
        self.env = Environment(user_classes=[user_class(spec)])
        self._stopped = stopped
        self.members = Members(self.env, meeting, useful)

    @property
    def links(self) -> list[Link]:
        """The workers, in the order of their shards."""
        return self.members.links

    def gather(self) -> None:
        """Until all workers have come, and their clocks are known. WorkerLost; LoadStopped."""
        self.members.gather(self._stopped)
        boot = boot_id()
        self.clocks = [clock_map(reading(_exchange(link)), link.boot, boot) for link in self.links]

    def look_at_clocks(self) -> None:
        """One more reading of every worker's clock that still answers; one that does not counts as lost."""
        for k, link in enumerate(self.links):
            exchanges = ignoring_loss(lambda link=link: _exchange(link))
            if exchanges:
                self.clocks[k] = self.clocks[k].with_reading(reading(exchanges))

    def calibrate(self, streams: int) -> list[Any]:
        """Every worker measures how well its own client measures; what it found. WorkerLost; LoadStopped."""

        tls = self.spec.base_url.startswith("https:")

        def ask(link: Link, _: int) -> Any:
            told = proof("master " + link.node)
            reply = link.call("calibrate", CALIBRATION_S, streams=streams, tls=tls, proof_of_master=told)
            return json.loads(reply["found"])

        return self.members.with_each(ask, self._stopped, LEFT_S)

    def prepare(self) -> None:
        """Deals out the shards and lets Locust spawn the users; returns when all stand at the line.

        WorkerLost; LoadStopped.
        """
        members = self.members
        members.with_each(self._hand_over, self._stopped)
        due = time.monotonic() + START_LIMIT_S
        while members.ready < len(self.links):  # one whose heartbeat was late comes back
            if self._stopped():
                raise LoadStopped
            if time.monotonic() > due:
                raise WorkerLost(f"not all workers were ready in {START_LIMIT_S:g} s")
            gevent.sleep(0.02)
        shares = {link.node: user_count(shard.spec) for link, shard in zip(self.links, self.shards, strict=True)}
        self.env.dispatcher_class = fixed_shares(shares.__getitem__)
        members.runner.start(sum(shares.values()), spawn_rate=1)
        members.with_each(lambda link, _: link.call("line_up"), self._stopped)

    def _hand_over(self, link: Link, place: int) -> None:
        told, shard = proof("master " + link.node), self.shards[place]
        link.call("spec", spec=shard.spec.model_dump_json(), proof_of_master=told)
        rows = "\n".join(json.dumps(r.to_row(), separators=(",", ":")) for r in shard.requests)
        link.push("rows", rows.encode())
        link.call("prepare")

    def start(self) -> float:
        """Names the moment at which all begin, and makes sure that all know it; on our clock [s]. WorkerLost."""
        slowest = max(r.error for clock in self.clocks for r in clock.readings)
        zero = time.perf_counter() + _LEAD_S + 4 * slowest
        moments = [clock.from_master(zero) for clock in self.clocks]
        answers = self.members.with_each(lambda link, k: link.call("start", _EXCHANGE_LIMIT_S, zero=moments[k]))
        for link, answer in zip(self.links, answers, strict=True):
            if answer["left_s"] <= 0:
                raise WorkerLost(f"{link.name} was told the start {-answer['left_s']:.3f} s too late")
        return zero

    def first_problem(self) -> str | None:
        """Why a worker that answers ended before its last request."""
        for link in self.links:
            if link.error:
                return f"{link.name} could not go on measuring: {link.error}"
            if link.gone:
                return f"the server stopped answering: {link.gone}"
            if link.signal:
                return f"{link.name} was stopped by {signal.Signals(link.signal).name}"
        return None

    def stop(self, in_haste: bool) -> None:
        """Every worker that still answers ends its users; ``in_haste``: and soon what it has to read."""
        self.members.with_each(lambda link, _: ignoring_loss(lambda: link.call("stop", _STOP_S, in_haste=in_haste)))

    def collect(self) -> list[WorkerResult]:
        """What every worker that still answers has measured."""
        by_index = {r.index: r for r in self.requests}
        found = self.members.with_each(lambda link, k: fetch(link, self.shards[k], self.clocks[k], by_index))
        return [result for result in found if result is not None]


def _exchange(link: Link, count: int = _EXCHANGES) -> list[Exchange]:
    exchanges = []
    for _ in range(count):
        sent = time.perf_counter()
        answer = link.call("clock", _EXCHANGE_LIMIT_S)
        exchanges.append(Exchange(sent, answer["t2"], answer["t3"], answer["received"]))
    return exchanges


def fetch(link: Link, shard: Shard, clock: ClockMap, by_index: Mapping[int, RequestSpec]) -> WorkerResult | None:
    """What a worker measured, on the master's clock; None when it did not hand it back: then it counts as lost."""
    try:
        told = link.call("finish")
        while left := told.get("left"):  # answers that it has not parsed yet
            told = link.call("finish")
            if told.get("left", 0) >= left:
                raise WorkerLost(f"{link.name} left {left} answers unread")
        data = {name: link.pull(name, size) for name, size in told["sizes"].items()}
        link.machine = told["machine"]
        samples = samples_from_bytes(data["samples"], told["zero"], clock, by_index, shard.first_user)
    except (WorkerLost, ValueError, KeyError) as error:
        link.lose(f"its samples did not come back ({error})")
        return None
    lags = np.frombuffer(data["lags"], dtype=np.float64)
    clocked = Clocked(**json.loads(data["clocked"])) if "clocked" in data else Clocked()
    return WorkerResult(
        link.name, link.host, link.pid, len(shard.requests), samples, lags, clocked, clock, told["mismatches"]
    )
