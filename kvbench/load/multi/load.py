"""One load of several processes, as the master sees it: the lines on stdout and the files are those of one process."""

from __future__ import annotations

import sys
import time
from typing import Any

import gevent

from kvbench.common.machine import boot_id
from kvbench.load.multi.calibration import calibration_reasons, streams_of
from kvbench.load.multi.machines import Seen, machine_reasons, without_ours, worst_machine
from kvbench.load.multi.master import Crew
from kvbench.load.multi.members import LEFT_S, LoadStopped, Meeting
from kvbench.load.multi.merge import WorkerResult, merged_client, most_in_flight
from kvbench.load.multi.shards import TOKEN_VARIABLE, cap_note
from kvbench.load.multi.wire import WorkerLost
from kvbench.load.outcome import Clocked, Outcome, write_outcome
from kvbench.load.process import EXIT_NOT_DRIVEN, EXIT_OK, PROGRESS_S, Voice
from kvbench.load.spec import LoadSpec
from kvbench.requests.request import RequestList

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_CHECK_CLOCKS_S = 5.0


class SharedLoad:
    """Leads a crew of workers through one load."""

    def __init__(self, spec: LoadSpec, requests: RequestList, meeting: Meeting) -> None:
        """Opens the port and starts local workers. ValueError for what cannot be."""
        self.spec, self.meeting = spec, meeting
        self.voice = Voice(len(requests))
        self.crew = Crew(spec, requests, meeting, lambda: self.voice.stopped)
        self.requests = RequestList(requests, requests.notes | cap_note(spec, len(self.crew.shards)))
        self.zero: float | None = None
        self.cpu_s = 0.0  # what this process itself used while the workers streamed
        self.problem: str | None = None  # why the load could not be driven to its end
        self.calibrations: dict[str, dict[str, Any]] = {}  # by the worker's name

    def run(self) -> int:
        """Returns the exit code; 128 + signal when it was stopped by one. Every wait in here is bounded."""
        self.voice.listen()
        if not self.meeting.local:
            self._announce()
        code = EXIT_NOT_DRIVEN
        try:
            code = self._drive()
        except WorkerLost as loss:
            self.problem = str(loss)
            print(f"kvbench load: {loss}", file=sys.stderr)
            self._say("end", exit_code=EXIT_NOT_DRIVEN, error=str(loss))
        except LoadStopped:
            code = self.voice.exit_code(None)
            self._say("end", exit_code=code, error="stopped before the load began")
        finally:
            self.crew.members.dismiss(code, self._farewell(code))
        return code

    def _farewell(self, code: int) -> str:
        """What workers tell their users when the load did not end well."""
        if code == EXIT_OK:
            return ""
        if self.voice.stopped:
            return "the load was stopped at the master"
        return f"the load failed: {self.problem or 'the master could not go on'}"

    def _announce(self) -> None:
        place, port = self.meeting, self.crew.members.port
        self._say("waiting", workers=place.workers, host=place.host, port=port)
        if place.host not in _LOOPBACK:
            print(
                f"kvbench load: whoever reaches {place.host}:{port} sees the prompts in clear text; use a network of "
                f"your own, and set {TOKEN_VARIABLE} to the same value on every machine, so that no stranger can "
                "take part.",
                file=sys.stderr,
            )

    def _drive(self) -> int:
        crew, voice = self.crew, self.voice
        crew.gather()
        if self.spec.calibrate_workers and not self.meeting.local:
            self._calibrate()
        crew.prepare()
        if voice.stopped:
            raise LoadStopped
        self.zero = crew.start()
        used_s = time.process_time()
        started = time.time() + (self.zero - time.perf_counter())
        gevent.sleep(max(0.0, self.zero - time.perf_counter()))
        self._say("begin")
        problem = self._watch()
        wall_s = time.perf_counter() - self.zero
        self.cpu_s = time.process_time() - used_s
        step_s = time.time() - started - wall_s
        self._say("measured")
        if problem is not None or voice.stopped:
            crew.stop(in_haste=voice.stopped)
        crew.members.find_lost(LEFT_S)  # they are not asked any more
        crew.look_at_clocks()
        results = crew.collect()
        self.problem = problem = problem or crew.members.first_loss()
        if problem is not None:
            print(f"kvbench load: {problem}", file=sys.stderr)
        code = voice.exit_code(problem)
        load = write_outcome(
            self.spec,
            self.requests,
            self._outcome(results, Clocked(started, 0.0, wall_s, step_s), problem),
            ended_well=code == 0,
        )
        self._say("end", exit_code=code, incomplete=load["incomplete"], invalid_reasons=load["invalid_reasons"])
        return code

    def _calibrate(self) -> None:
        self._say("calibrating")
        found = self.crew.calibrate(streams_of(self.spec, len(self.crew.links)))
        self.calibrations = {link.name: told for link, told in zip(self.crew.links, found, strict=True)}

    def _watch(self) -> str | None:
        """Until all workers have ended (None), the load is stopped (None), or one cannot go on (why)."""
        crew, members = self.crew, self.crew.members
        looked = waited = time.monotonic()
        while not all(link.ended for link in crew.links):
            members.news.wait(PROGRESS_S)
            members.news.clear()
            if self.voice.stopped:
                return None
            before, waited = waited, time.monotonic()
            passed_s = min(waited - before, 2 * PROGRESS_S)  # while we stood still ourselves we heard nobody
            if lost := members.find_lost() or members.find_mute(passed_s):
                return lost
            if problem := crew.first_problem():
                return problem
            if waited - looked > _CHECK_CLOCKS_S and not all(c.same_clock for c in crew.clocks):
                crew.look_at_clocks()
                looked = time.monotonic()
            self._say("progress")
        return None if self.voice.stopped else crew.first_problem()

    def _outcome(self, results: list[WorkerResult], clocked: Clocked, problem: str | None) -> Outcome:
        clocked.cpu_s = sum(r.clocked.cpu_s for r in results)
        client, reasons = merged_client(results, self.spec.mode, clocked.wall_s)
        if results and not self.meeting.local:
            reasons += self._judge_workers(results, client, clocked.wall_s)
        samples = [s for r in results for s in r.samples]
        total = self.crew.env.stats.total
        return Outcome(
            samples,
            self.zero,
            most_in_flight(samples),
            clocked,
            client,
            reasons + ([f"{problem.rstrip('.')}."] if problem else []),
            (total.num_requests, total.num_failures),
        )

    def _judge_workers(self, results: list[WorkerResult], client: dict[str, Any], wall_s: float) -> list[str]:
        """Of the workers' machines, and how well each measures there: adds both to ``client``; what speaks against."""
        names, reasons = [r.name for r in results], []
        if self.calibrations:
            found = [self.calibrations[name] for name in names]
            reasons += calibration_reasons(found, results, wall_s)
            for process, each in zip(client["processes"], found, strict=True):
                process["calibration"] = each
        seen = [Seen(link.name, link.boot, link.machine) for link in self.crew.links if link.name in names]
        seen = [each for each in seen if each.report is not None]  # not of one that was stopped before its end
        if seen:
            told, here = [each.name for each in seen], boot_id()
            reports = without_ours(seen, here, self.cpu_s / wall_s if wall_s > 0 else 0.0)
            reasons += machine_reasons(told, reports)
            for process in client["processes"]:
                process["machine"] = dict(zip(told, reports, strict=True)).get(process["name"])
            with_leader = here is not None and here in [each.boot for each in seen]
            client["machine"] = worst_machine(told, reports) | {"with_leader": with_leader}
        return reasons

    def _say(self, event: str, **more: Any) -> None:
        elapsed = 0.0 if self.zero is None else max(0.0, time.perf_counter() - self.zero)
        done = sum(link.done for link in self.crew.links)
        self.voice.say(event, done, sum(link.failed for link in self.crew.links), elapsed, **more)
