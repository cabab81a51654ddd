"""Cases that end their process in every way there is, beside some that are well. Imports nothing that takes time."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from ci.gpu.part import Planned, Report

LOST = (
    "CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call.\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
)
ORDER = ("well", "raises", "also well", "segfault", "exits", "hangs", "noisy", "last")


def innermost() -> None:
    raise ValueError("at 57:12:\n    acc = tl.dot(q, k)\n          ^\nAssertionError('first operand is 3-dimensional')")


class CASES:
    """``own``: names of cases to run; none: all. Those with "alone" in their name have a process of their own."""

    workers = 1

    def __init__(self, args: Any):
        self._names, self._lost = args.own or ORDER, False
        if "no start" in self._names:
            raise RuntimeError("cannot begin here")

    def plan(self) -> list[Planned]:
        return [Planned(name, None if "alone" in name else "main", 1.0 if name == "hangs" else 60.0)
                for name in self._names]  # fmt: skip

    def run(self, name: str, report: Report) -> None:
        report.row(case=name, status="passed", process=os.getpid())
        self._lost = self._lost or name == "loses the device"
        if self._lost:  # as an illegal memory access does it to a CUDA process: every later call fails
            raise RuntimeError(LOST)
        if name == "raises":
            innermost()
        elif name == "segfault":
            print("about to fall", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        elif name == "exits":
            os._exit(3)
        elif name == "hangs":
            time.sleep(600)
        elif name == "noisy":
            print('{"done": "not a message"}\n' * 3)
