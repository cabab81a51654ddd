"""A side of ``ci.gpu.turns`` for its tests, which behaves as the first folder of its import path is called."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ci.gpu.part import Planned, Report


class CASES:
    """A base of 100 tokens/s and step times, or another of 50 tokens/s that dies, warns, hangs or refuses to load."""

    workers = 1

    def __init__(self, args: Any):
        self.scratch, self.jobs = args.scratch, 0
        self.kind = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).name

    def plan(self) -> list[Planned]:
        names = ("load", "job", "steps") if self.kind == "base" else ("load", "own", "job")
        return [Planned(name) for name in names]

    def run(self, name: str, report: Report) -> None:
        if name == "load":
            (self.scratch / f"{self.kind}-{os.getpid()}").touch()
            if self.kind == "refuses":
                raise ValueError("no memory for the KV cache")
            if self.kind == "warns":
                report.fail("engine.x", "decode without CUDA graphs")
            if self.kind == "hangs":
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
                (self.scratch / f"child-{child.pid}").touch()
                time.sleep(600)
            report.put(loaded_at=time.monotonic(), imports_from=Path(sys.path[0]).name)
            return
        self.jobs += 1
        if self.kind == "dies" and self.jobs == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        rate = (100.0 if self.kind == "base" else 50.0) * self.jobs
        report.row(output_tokens_per_s=rate, at=time.monotonic(), process=os.getpid())
