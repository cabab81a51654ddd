"""The load process: one load from SPEC.json to requests.parquet and load.json, alone or as master or worker of several.

python -m kvbench.load SPEC.json                                    spec.processes says how many share the load
python -m kvbench.load SPEC.json --master --expect-workers 2 --bind-host 0.0.0.0 --bind-port 5557
python -m kvbench.load --worker --master-host HOST --master-port 5557
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

import gevent
from locust.env import Environment

from kvbench.common.errors import EXIT_INVALID, EXIT_USAGE, storage_sentence
from kvbench.load import process
from kvbench.load.client import StreamFailure
from kvbench.load.client_figures import client_figures
from kvbench.load.multi.shards import useful_workers
from kvbench.load.outcome import DrivenLoad, write_outcome
from kvbench.load.session import LoadSession
from kvbench.load.spec import LoadSpec, parse, read_spec, requests_of
from kvbench.metrics.model import LocustTotals
from kvbench.requests.request import RequestList


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    options = parse(argv)
    if options.worker:
        from kvbench.load.multi.worker import run_worker

        return run_worker(options.master_host, options.master_port)
    try:
        spec = read_spec(options.spec)
        requests = requests_of(spec)
        Path(spec.out_dir).mkdir(parents=True, exist_ok=True)
        load = _load(spec, requests, options)
    except (ValueError, OSError) as error:
        print(f"kvbench load: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        return load.run()
    except OSError as error:
        return _not_stored(load, error)


def _not_stored(load: Any, error: OSError) -> int:
    """Returns the exit code for samples that cannot be written; says so on stdout, as stderr may share the disk."""
    sentence = storage_sentence(error, load.spec.out_dir)
    if sentence is None:
        raise error
    with contextlib.suppress(OSError):
        print(f"kvbench load: {sentence}", file=sys.stderr, flush=True)
    load.events.say("end", 0, 0, 0.0, exit_code=EXIT_INVALID, error=sentence)
    return EXIT_INVALID


def _load(spec: LoadSpec, requests: RequestList, options: argparse.Namespace) -> Any:
    if not options.master and useful_workers(spec, requests, spec.processes) == 1:
        return SingleLoad(spec, requests)
    from kvbench.load.multi.master import SharedLoad

    if not options.master:
        return SharedLoad(spec, requests, spec.processes)
    listen = (options.bind_host, options.bind_port)
    return SharedLoad(spec, requests, options.expect_workers, listen, options.arrive_timeout)


class SingleLoad:
    """One load of this process alone."""

    def __init__(self, spec: LoadSpec, requests: RequestList) -> None:
        self.spec, self.requests, self.session = spec, requests, LoadSession(spec, requests)
        self.events = process.LoadEvents(len(requests), on_stop=self.session.stop)
        self._all_sent = False  # and said so

    def run(self) -> int:
        """Returns the exit code; 128 + signal when it was stopped by one."""
        self.events.listen()
        process.allow_many_sockets()
        session, measuring = self.session, process.Measuring(self.session)
        env = Environment()
        runner = env.create_local_runner()
        try:
            process.line_up(runner, session)
            with process.undisturbed() as priority:
                measuring.clocked.priority = priority
                self._say("begin")
                measuring.begin()
                gone = process.watch(session, self._progress)
                measuring.end()
                self._say("measured")
        except StreamFailure as failure:
            print(f"kvbench load: {failure}; is the server running at {self.spec.base_url}?", file=sys.stderr)
            self._say("end", exit_code=EXIT_INVALID, error=str(failure))
            return EXIT_INVALID
        finally:
            process.end_users(runner)
            with gevent.Timeout(process.STOP_LIMIT_S, False):
                runner.quit()
        measuring.parse_rest(self._progress)
        session.close()
        if gone is not None:
            print(f"kvbench load: {gone}", file=sys.stderr)
        code = self.events.exit_code(gone)
        clocked, total = measuring.clocked, env.stats.total
        client = client_figures(session.samples, measuring.probe.lags, [clocked], self.spec.mode, clocked.wall_s)
        totals = LocustTotals(num_requests=total.num_requests, num_failures=total.num_failures)
        driven = DrivenLoad(session.samples, session.zero, clocked, client, locust=totals)
        load = write_outcome(self.spec, self.requests, driven, ended_well=code == 0)
        self._say("end", exit_code=code, incomplete=load.incomplete, invalid_reasons=load.invalid_reasons)
        return code

    def _progress(self) -> None:
        if not self._all_sent and self.session.all_sent:
            self._all_sent = True
            self._say("drain")
        self._say("progress")

    def _say(self, event: str, **more: Any) -> None:
        session = self.session
        self.events.say(event, session.done, session.failed, session.elapsed(), **more)
