"""Runs kvbench under fire: a sweep or a load against ``tests.support.fire_server``, and what is left afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.sweep_parts import ROOT, Bench, finished, manifest

FIRE = [sys.executable, "-m", "tests.support.fire_server"]
QUIET = ["--no-report", "--no-calibration"]
EITHER = (0, 4)  # a load may be invalid only because the test machine is busy


@dataclass
class Ended:
    """A command that ended. ``seconds``: how long it took; ``left``: processes of its family that still live."""

    code: int
    output: str
    seconds: float
    left: list[str]


class FireBench(Bench):
    """One configuration, two repeats on a fresh server each; time-outs of a second."""

    def workload(self, **load: Any) -> str:
        """The workload's path."""
        return str(self.write(sweep={}, load={"timeout_s": 1.0, "num_requests": 6, **load}))

    def command(self, *arguments: str, fake: bool = True) -> list[str]:
        serve = ["--serve-cmd", " ".join(FIRE)] if fake else []
        return [sys.executable, "-m", "kvbench", "sweep", *arguments, "--output-dir", str(self.results), *serve]

    def fire(self, *arguments: str, rules: list[dict[str, Any]] | None = None, fake: bool = True, **env: str) -> Ended:
        """``kvbench sweep`` with the server's ``rules``."""
        return self.end([*self.command(*arguments, fake=fake), *QUIET], FIRE=json.dumps(rules or []), **env)

    def resume(self) -> Ended:
        """Goes on with the only run, with nothing under fire."""
        again = [sys.executable, "-m", "kvbench", "sweep", "--resume", str(self.only_run()), *QUIET]
        return self.end(again, FIRE="[]")

    def end(self, command: list[str], **env: str) -> Ended:
        """Runs it to its end."""
        began = time.monotonic()
        done = self.run(command, **env)
        return Ended(done.returncode, done.stdout + done.stderr, time.monotonic() - began, self.left())

    def left(self, seconds: float = 5.0) -> list[str]:
        """Command lines of this bench's processes that are still there after ``seconds``."""
        deadline = time.monotonic() + seconds
        while (found := list(self._family())) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _family(self) -> Iterator[str]:
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("FAKE_LAUNCHES") == str(self.folder / "launches.jsonl")
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    yield " ".join(process.cmdline())
            except psutil.Error:
                continue

    @contextmanager
    def server(self, rules: list[dict[str, Any]], **env: str) -> Iterator[str]:
        """The URL of a server under fire that runs already, as for ``--target``."""
        process = subprocess.Popen(
            [*FIRE, "--max-model-len", "256"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
            env={**self.environment(**env), "FIRE": json.dumps(rules), "FAKE_LAUNCHES": str(self.folder / "served")},
        )  # fmt: skip
        try:
            yield process.stdout.readline().split()[1]
        finally:
            process.kill()
            process.wait(10)
            process.stdout.close()


def kinds(run: Path) -> dict[str, dict[str, int]]:
    """Failure kinds of every finished load, by repeat."""
    done = {path.parent.name: json.loads(path.read_text()) for path in run.glob("cells/*/loads/*/done.json")}
    return {repeat: each["metrics"]["failure_kinds"] for repeat, each in done.items()}


def resumed_as_it_should(bench: FireBench, loads: int) -> None:
    """``--resume`` measures what is left, and nothing that was measured before."""
    run = bench.only_run()
    before = finished(run)
    again = bench.resume()
    after = finished(run)
    assert again.code in EITHER, again.output
    assert manifest(run)["status"] == "complete" and manifest(run)["failures"] == []
    assert len(after) == loads and {key: after[key] for key in before} == before
    assert not again.left
