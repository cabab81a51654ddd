"""Whether the machine was ours while a benchmark ran: CPU time of processes that are neither it nor its children."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil

from kvbench.common.foreign_cpu import MAX_FOREIGN_CORES, parse_stat, tree_cpu_s

_RESOLUTION_S = 0.10  # the kernel counts in ticks of 10 ms, on every core and for every process


class ForeignWatch:
    """From its making to ``report``: this process and its children are ours, ended and waited-for ones too."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._start = self._read()

    def _read(self) -> tuple[float, float, float] | None:
        """(moment, busy seconds of the cores that we may use, our own seconds); None where the system does not tell."""
        own = tree_cpu_s(os.getpid())
        try:
            busy, _, cores = parse_stat(self._stat.read_text(), set(psutil.Process().cpu_affinity()))
        except (OSError, psutil.Error, AttributeError):
            return None
        return (time.monotonic(), busy, own) if own is not None and cores else None

    def report(self) -> dict[str, Any]:
        """``foreign_cpu_cores``: cores that others used on average; ``disturbed``: too many to trust the timing.

        Empty where the system does not tell. What lasts under 2 s is given the ticks' resolution on top of the limit.
        """
        end = self._read()
        if self._start is None or end is None or end[0] <= self._start[0]:
            return {}
        wall = end[0] - self._start[0]
        foreign = max(0.0, (end[1] - self._start[1] - (end[2] - self._start[2])) / wall)
        limit = MAX_FOREIGN_CORES + (_RESOLUTION_S / wall if wall < 2.0 else 0.0)
        return {"foreign_cpu_cores": round(foreign, 3), "disturbed": foreign > limit}
