"""The cores that a server computes on: which ones it is given, and which ones its threads are bound to (Linux)."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

from kvbench.common.text import listing

_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")


def cores_for(threads: int | None) -> list[int]:
    """A core for each of a server's ``threads``, among those this process may run on: fewer if there are not so many.

    Hardware threads of one physical core are both given only if each physical core has one already. None: one hardware
    thread of each physical core. Empty on a machine with several memory nodes, where the server knows better, and
    where a process cannot be bound (macOS).
    """
    if not hasattr(os, "sched_getaffinity") or (threads is None and len(list(_NODES.glob("node[0-9]*"))) > 1):
        return []
    place, seen = {}, Counter[str]()
    for core in sorted(os.sched_getaffinity(0)):
        siblings = _CPUS / f"cpu{core}" / "topology" / "thread_siblings_list"  # the same of one physical core
        physical = siblings.read_text().strip() if siblings.is_file() else str(core)
        place[core] = seen[physical]
        seen[physical] += 1
    return sorted(sorted(place, key=lambda core: place[core])[: threads or len(seen)])


def bound_cores(pid: int) -> list[int]:
    """The cores that a process's and its descendants' threads are bound to; empty if none is bound.

    A thread is bound if it may run on fewer cores than this process.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    everywhere = os.sched_getaffinity(0)
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return []
    bound = set[int]()
    for thread in (path.name for process in family for path in Path(f"/proc/{process.pid}/task").glob("*")):
        with contextlib.suppress(OSError):  # it has ended
            cores = os.sched_getaffinity(int(thread))
            bound |= cores if cores < everywhere else set()
    return sorted(bound)


def core_words(cores: Sequence[int]) -> str:
    """Writes cores in order as ``core 0`` or ``cores 0-2 and 7``."""
    ends: list[list[int]] = []
    for core in cores:
        if ends and core == ends[-1][1] + 1:
            ends[-1][1] = core
        else:
            ends.append([core, core])
    ranges = [f"{first}-{last}" if last > first else str(first) for first, last in ends]
    return f"core{'' if len(cores) == 1 else 's'} {listing(ranges)}"
