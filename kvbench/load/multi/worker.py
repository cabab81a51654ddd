"""One worker: is given its shard, runs it from the common time zero, hands its samples back.

Spec and requests come as messages, samples go back the same way. It ends when the master says so, and by itself when
the master has not been heard of for ``MASTER_LIMIT_S``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from typing import Any

import gevent
import numpy as np
from gevent.event import Event
from locust.env import Environment
from locust.rpc import Message
from locust.runners import WorkerRunner

from kvbench import __version__
from kvbench.common.errors import EXIT_INTERRUPTED
from kvbench.common.machine import boot_id
from kvbench.load.client import StreamFailure
from kvbench.load.loop_lag import LagProbe
from kvbench.load.multi.calibration import calibrate_here
from kvbench.load.multi.machines import OwnMachine
from kvbench.load.multi.merge import in_slices, samples_to_bytes
from kvbench.load.multi.wire import (
    CALL,
    CALL_LIMIT_S,
    EVENT,
    HELLO,
    PIECE_BYTES,
    REPLY,
    proof,
    proven,
    send_statistics,
)
from kvbench.load.process import (
    EXIT_NOT_DRIVEN,
    STOP_LIMIT_S,
    Measuring,
    allow_many_sockets,
    check_server,
    end_users,
    session_of,
    undisturbed,
    user_class,
    user_count,
    wait_ready,
    watch,
)
from kvbench.load.session import LoadSession
from kvbench.load.spec import LoadSpec
from kvbench.load.validity import client_report
from kvbench.requests.request import RequestList, RequestSpec

MASTER_LIMIT_S = 10.0  # Locust's master answers a heartbeat every second
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 0.25
_OPEN_LEAD_S = 0.05
_PARSE_TURN_S = 5.0


class Worker:
    """Answers the master's calls (``kvbench_call``: one method ``_do_<op>`` each)."""

    def __init__(self, env: Environment, runner: WorkerRunner) -> None:
        self.env, self.runner = env, runner
        self.session: LoadSession | None = None
        self.probe = LagProbe()
        self.over = Event()
        self.stopped = False
        self._in_haste = False  # whoever stopped the load does not wait for long
        self.code: int | None = None  # until the master says how the load ended
        self._parent = os.getppid()
        self._signal = 0
        self._silent_s, self._looked = 0.0, time.monotonic()
        self._patience_s = MASTER_LIMIT_S
        self._rows: list[bytes] = []
        self._results: dict[str, bytes] = {}
        self._spec: LoadSpec | None = None
        self._measuring: Measuring | None = None
        self._machine: OwnMachine | None = None
        self._measured: gevent.Greenlet | None = None
        for number in STOP_SIGNALS:
            gevent.signal_handler(number, self._on_signal, number)

    def run(self) -> int:
        """Until the master says quit or is gone."""
        allow_many_sockets()
        self.env.events.heartbeat_received.add_listener(self._on_heartbeat)
        self.runner.register_message(CALL, self._on_call)
        self.runner.send_message(
            HELLO,
            {
                "boot": boot_id(),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "proof": proof(self.runner.client_id),
                "version": __version__,
            },
        )
        ended = gevent.spawn(self.runner.greenlet.join)  # Locust's greenlets end with the master's quit
        while not ended.ready() and not self.over.wait(_LOOK_S):
            self._look_for_master()
        gevent.sleep(0)  # the master's goodbye came right before Locust's, and may not have been read yet
        if self.code is None:
            self._give_up("the master has gone without a word")
        self.probe.stop()
        with gevent.Timeout(STOP_LIMIT_S, False):
            self.runner.send_message("quit")  # Locust's: another may have this one's place
            self.runner.quit()
        return self.code

    def _look_for_master(self) -> None:
        now = time.monotonic()
        self._silent_s += min(now - self._looked, 2 * _LOOK_S)  # while we stood still ourselves we heard nobody
        self._looked = now
        if self._silent_s > self._patience_s:
            self._give_up(f"the master has been silent for {self._silent_s:.0f} s")

    def _on_heartbeat(self, **_: Any) -> None:
        self._silent_s = 0.0
        # Locust compares this with the wall clock, and would end the load when somebody sets that clock forward.
        self.runner.last_heartbeat_timestamp = None

    def _on_signal(self, number: int) -> None:
        """A stop of the whole group: the master still wants what was measured. Without a master this is the end."""
        self.stopped, self._in_haste, self._signal = True, True, number
        if self.session is not None:
            self.session.stopping = True
        if os.getppid() != self._parent or self.session is None:
            self._give_up(f"stopped by {signal.Signals(number).name}", EXIT_INTERRUPTED)

    def _give_up(self, why: str, code: int = EXIT_NOT_DRIVEN) -> None:
        print(f"kvbench load: this worker ends: {why}", file=sys.stderr)
        self.stopped, self._in_haste, self.code = True, True, code
        if self.session is not None:
            self.session.stopping = True
        self.over.set()

    def _on_call(self, msg: Message, **_: Any) -> None:
        received = time.perf_counter()
        self._silent_s = 0.0
        if msg.data["op"] == "clock":  # at once: what it measures is the way there and back
            self.runner.send_message(REPLY, {"id": msg.data["id"], "t2": received, "t3": time.perf_counter()})
            return
        gevent.spawn(self._answer, dict(msg.data))

    def _answer(self, data: dict[str, Any]) -> None:
        number, op = data.pop("id"), data.pop("op")
        try:
            reply = getattr(self, f"_do_{op}")(**data) or {}
        except Exception as error:  # whatever it was, the master must hear of it and end the load
            reply = {"error": str(error) if isinstance(error, StreamFailure | ValueError) else repr(error)}
        self.runner.send_message(REPLY, {"id": number, **reply})

    def _tell(self, event: str, **more: Any) -> None:
        session = self.session
        self.runner.send_message(EVENT, {"event": event, "done": session.done, "failed": session.failed, **more})

    def _do_refused(self, why: str) -> None:
        self._give_up(f"the master turned it away, {why}")

    def _do_calibrate(self, streams: int, tls: bool, proof_of_master: str) -> dict[str, Any]:
        self._check_master(proof_of_master)
        return {"found": json.dumps(calibrate_here(streams, tls))}

    def _check_master(self, proof_of_master: str) -> None:
        if not proven("master " + self.runner.client_id, proof_of_master):
            raise ValueError("the master has another KVBENCH_LOAD_TOKEN; give both the same")

    def _do_spec(self, spec: str, proof_of_master: str) -> None:
        self._check_master(proof_of_master)
        self._spec = LoadSpec.model_validate_json(spec)
        self._rows.clear()

    def _do_rows(self, piece: bytes) -> None:
        self._rows.append(piece)

    def _do_prepare(self) -> dict[str, Any]:
        """The requests are complete: make them ready to send, see that the server is there."""
        lines = b"".join(self._rows).splitlines()
        requests = [RequestSpec.from_row(json.loads(line)) for line in in_slices(lines)]
        self._rows.clear()
        self._machine = OwnMachine(self._spec.base_url)
        self.session = session_of(self._spec, RequestList(requests))
        self.session.fire = self.env.events.request.fire
        self.env.user_classes = [user_class(self._spec, self.session)]
        try:
            check_server(self.session)
        except StreamFailure as failure:
            raise ValueError(f"{failure}; is the server running at {self._spec.base_url}?") from failure
        return {"users": user_count(self._spec)}

    def _do_line_up(self) -> None:
        """Locust has been told to spawn the users: wait until each stands at the line."""
        wait_ready(self.session, user_count(self._spec), lambda: self.stopped)

    def _do_start(self, zero: float) -> dict[str, Any]:
        """Arms the load for ``zero`` [s, this clock]; how much time was left then."""
        armed = Event()
        self._measured = gevent.spawn(self._measure, zero, armed)
        armed.wait()
        return {"left_s": zero - time.perf_counter()}

    def _measure(self, zero: float, armed: Event) -> None:
        try:
            gone = self._measured_from(zero, armed)
        except Exception as error:  # whatever it was: the load ends now, and its user is told why
            self.session.stopping = True
            self._tell("ended", gone=None, signal=self._signal, error=repr(error))
        else:
            self._tell("ended", gone=gone, signal=self._signal)
        finally:
            armed.set()

    def _measured_from(self, zero: float, armed: Event) -> str | None:
        """Why the server is gone, None when all streams have returned or the load was stopped."""
        with undisturbed(self._spec) as priority:
            armed.set()
            self._machine.begin()
            early = _OPEN_LEAD_S if self._spec.mode == "open" else 0.0  # arrivals are due at their own times after zero
            gevent.sleep(max(0.0, zero - early - time.perf_counter()))
            measuring = Measuring(self.session, self.probe)
            measuring.clocked.priority = priority
            measuring.begin(zero)
            gone = watch(self.session, lambda: self.stopped, lambda: self._tell("progress"))
            measuring.end()
            self._machine.end()
            self._measuring = measuring
        return gone

    def _do_stop(self, in_haste: bool) -> None:
        self.stopped, self._in_haste = True, in_haste
        if self.session is not None:
            self.session.stopping = True

    def _do_finish(self) -> dict[str, Any]:
        """Ends the users and makes the results ready; sizes in bytes of what can be fetched.

        ``left``: how many answers are not yet parsed; the master asks again while there are any.
        """
        self.probe.stop()
        self._patience_s = CALL_LIMIT_S  # the master puts everybody's samples together, and writes them
        if self._measured is not None:
            self._measured.join(timeout=STOP_LIMIT_S)
        end_users(self.runner)
        if self._measuring is not None:
            with gevent.Timeout(_PARSE_TURN_S, False):
                self._measuring.parse_rest(lambda: self._in_haste, lambda: self._tell("progress"))
            if self.session.unparsed and not self._in_haste:
                return {"left": self.session.unparsed}
            self._results["clocked"] = json.dumps(vars(self._measuring.clocked)).encode()
        self.session.close()
        self._tell("progress")
        send_statistics(self.runner)  # before the answer, so that the master has them when it has that
        self._results["samples"] = samples_to_bytes(self.session.samples, self.session.zero)
        self._results["lags"] = np.asarray(self.probe.lags, dtype=np.float64).tobytes()
        wrong = client_report(self.session.samples, [], 0.0, 0.0, self._spec.mode)["prompt_token_mismatches"]
        return {
            "zero": self.session.zero,
            "mismatches": wrong,
            "machine": self._machine.report,
            "sizes": {name: len(data) for name, data in self._results.items()},
        }

    def _do_fetch(self, what: str, start: int) -> dict[str, Any]:
        return {"piece": self._results[what][start : start + PIECE_BYTES]}

    def _do_quit(self, code: int, why: str) -> None:
        """The load has ended with exit code ``code``; ``why``: what the user is told of it."""
        self.code = EXIT_INTERRUPTED if self._signal else code
        if why:
            print(f"kvbench load: this worker ends: {why}", file=sys.stderr)
        gevent.spawn_later(0.05, self.over.set)
