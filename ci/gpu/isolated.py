"""Runs the cases of a module in child processes, so that one that breaks its process costs the others nothing.

A process that has met a CUDA error answers every later call with the same error. It is ended then, as one that died or
hangs is, and the cases that are left go on in a new one. Cases of a group of their own begin with a new process.
Standard library only: this process never touches the device.

``python -m ci.gpu.isolated MODULE --out ... [--wrapper COMMAND]``; ``MODULE.CASES(args)``: see part.PartCases.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.gpu import tables
from ci.gpu.part import PartReport, Planned, part_parser
from ci.gpu.worker import MARK

START_SECONDS = 120.0  # limit of imports from a cold disk
PLAN_SECONDS = 60.0  # limit of a plan's preparations
OVERTIME_S = 10.0  # a case may overrun the part's time by this; the runner stops the part a little later
STOP_SECONDS = 10.0  # compute-sanitizer writes its summary then
TOOL_FOLDERS = ("/usr/local/cuda/bin",)  # searched after PATH
TAIL_LINES = 12
WRAPPER_ERROR = 86  # exit code of a wrapper that has found an error


class ProcessEnded(Exception):
    """The process is gone, or was stopped because it took too long; the message says which."""


class CaseProcess:
    """One child process, with the environment ``env`` (None: ours). Lines that are no answers go to our log."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None):
        self.group: str | None = None
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=1,
            encoding="utf-8", errors="replace", env=env,
        )  # fmt: skip
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        streams = (self._process.stdout, self._process.stderr)
        self._readers = [threading.Thread(target=self._read, args=(stream,), daemon=True) for stream in streams]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any) -> None:
        for line in stream:
            if line.startswith(MARK):
                self._answers.put(json.loads(line[len(MARK) :]))
            else:
                self._tail.append(line.strip())
                sys.stdout.write(line)
                sys.stdout.flush()
        if stream is self._process.stdout:
            self._answers.put(None)

    @property
    def last_lines(self) -> str:
        """Returns the last lines of the process's output."""
        lines = [line for line in self._tail if line]
        return " / ".join(lines[-3:])[:600] or "it printed nothing"

    def ask(self, request: dict[str, Any], seconds: float, latest: float) -> Iterator[dict[str, Any]]:
        """Yields answers up to the last one, which has ``plan`` or ``done``.

        ``seconds``: for the request, once the process has begun with it; ``latest``: when all of it must be over, by
        time.monotonic.

        Raises:
            ProcessEnded: there was none in time, or the process ended.
        """
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        asked = time.monotonic()
        ends = min(asked + START_SECONDS, latest)
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                raise ProcessEnded(f"stopped after {time.monotonic() - asked:.0f} s") from None
            if answer is None:
                code = self.stop()
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
                raise ProcessEnded(f"its process ended with {how}: {self.last_lines}")
            if "begin" in answer:
                ends = min(time.monotonic() + seconds, latest)
                continue
            yield answer
            if "plan" in answer or "done" in answer:
                return

    def stop(self, ask: bool = True) -> int:
        """End the process and its children, gently with ``ask``; its exit code."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if ask:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        family = list(_descendants(self._process.pid))
        self._process.kill()
        code = self._process.wait()
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for reader in self._readers:
            reader.join(1.0)
        return code


def _descendants(pid: int) -> Iterator[int]:
    """The processes that ``pid`` and its descendants have started and that still run."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # its thread has ended
            for child in map(int, path.read_text().split()):
                yield child
                yield from _descendants(child)


class CaseRunner:
    """Runs ``plan`` in ``workers`` processes at once and adds to ``report`` what they tell."""

    def __init__(self, command: Sequence[str], report: PartReport):
        self._command, self._report = list(command), report
        self._lock = threading.Lock()
        self._left: collections.deque[Planned] = collections.deque()
        self._alive: list[CaseProcess] = []

    def run(self, in_one_group: bool = False) -> None:
        """Runs all cases of the plan that the first process tells. ``in_one_group``: whatever groups they have."""
        first = self._start()
        try:
            (answer,) = first.ask({}, PLAN_SECONDS, self._latest())
        except ProcessEnded as ended:
            self._report.fail("the list of cases", str(ended))
            first.stop(ask=False)
            return
        plan = [Planned(**case) for case in answer["plan"]]
        self._left.extend(Planned(c.name, "main", c.seconds) if in_one_group else c for c in plan)
        self._report.put(cases=len(plan))
        workers = [first, *[None] * (min(answer["workers"], len(plan)) - 1)]
        threads = [threading.Thread(target=self._work, args=(worker,), daemon=True) for worker in workers]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:  # all are done, or we are interrupted
            with self._lock:
                self._left.clear()
            for worker in list(self._alive):
                worker.stop(ask=False)

    def _latest(self) -> float:
        """Returns when the last case must be over, by time.monotonic."""
        return time.monotonic() + self._report.time_left + OVERTIME_S

    def _start(self) -> CaseProcess:
        worker = CaseProcess(self._command)
        self._alive.append(worker)
        return worker

    def _end(self, worker: CaseProcess | None, ask: bool) -> None:
        if worker is not None:
            self._alive.remove(worker)
            if worker.stop(ask) == WRAPPER_ERROR:
                self._add("failures", {"what": "the wrapped process", "reason": worker.last_lines})

    def _add(self, kind: str, value: dict[str, Any]) -> None:
        with self._lock:
            self._report.add(kind, value)

    def _work(self, worker: CaseProcess | None) -> None:
        """Take cases until there are none."""
        while True:
            with self._lock:
                if not self._left:
                    break
                case = self._left.popleft()
            if self._report.time_left <= 0:
                self._add("skipped", {"what": case.name, "reason": "no time left"})
                continue
            if worker is not None and worker.group is not None and worker.group != case.group:
                self._end(worker, ask=True)
                worker = None
            if worker is None:
                worker = self._start()
            worker.group = case.group or case.name  # nobody else's
            if not self._run_case(worker, case):
                self._end(worker, ask=False)
                worker = None
        self._end(worker, ask=True)

    def _run_case(self, worker: CaseProcess, case: Planned) -> bool:
        """Runs a case; returns whether the process is good for more."""
        request = {"case": case.name, "ends": self._latest() - OVERTIME_S}
        try:
            for answer in worker.ask(request, case.seconds, self._latest()):
                if "add" in answer:
                    self._add(answer["add"], answer["value"])
        except ProcessEnded as ended:
            if self._report.time_left <= 0:
                self._add("skipped", {"what": case.name, "reason": f"the part's time was over: {ended}"})
            else:
                self._add("failures", {"what": case.name, "reason": str(ended)})
            return False
        return answer["lost"] is None


def main() -> int:
    """Runs the part; 1 if a case failed."""
    parser = part_parser(__doc__)
    parser.add_argument("module")
    parser.add_argument("--wrapper", default="", help="a command that runs the processes, such as compute-sanitizer")
    args, _ = parser.parse_known_args()
    report = PartReport(args.out, args.seconds)
    wrapper = shlex.split(args.wrapper)
    if wrapper:
        paths = (shutil.which(wrapper[0], path=folder) for folder in (None, *TOOL_FOLDERS))  # on PATH, or of CUDA
        if (tool := next(filter(None, paths), None)) is None:
            report.put(not_run=f"{wrapper[0]} is not on this machine: it comes with the CUDA toolkit")
            return 0
        wrapper[0] = tool
    given = sys.argv[1:]
    if args.wrapper:
        at = given.index("--wrapper")
        del given[at : at + 2]
    CaseRunner([*wrapper, sys.executable, "-m", "ci.gpu.worker", *given], report).run(in_one_group=args.tiny)
    tables.conclude(args.module.rpartition(".")[2], report, args)
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
